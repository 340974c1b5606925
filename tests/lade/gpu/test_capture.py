"""Captures on a device that is not there: what `CudaRecorder` calls, in which order."""

import gc
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lade.captures import CAPTURING, apart_from_captures, free_unused
from lade.gpu.capture import WaitError, clear_workspaces, end_failed_capture, refused_waits
from lade.gpu.graphs import CudaRecorder
from tests.lade.devices import needing_workspace

DEVICE = torch.device("cuda", 0)


class Cuda:
    """The part of `torch.cuda` that captures use; notes what is done."""

    def __init__(self, fails: bool = False) -> None:
        self.done: list[str] = []
        self.fails = fails
        self.debug_mode: Any = 0
        self.num_pools = 0
        self.CUDAGraph = lambda: SimpleNamespace(replay=lambda: self.done.append("replay"))

    def Stream(self, device: Any) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None)

    def current_stream(self, device: Any) -> Any:
        wait = lambda other: self.done.append("current waits")  # noqa: E731
        return SimpleNamespace(wait_stream=wait, name="current")

    def set_stream(self, stream: Any) -> None:
        self.done.append(f"back to {stream.name}")

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(total_memory=1000)

    def graph_pool_handle(self) -> tuple[int, int]:
        self.num_pools += 1
        return (0, self.num_pools)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    stream = device

    @contextmanager
    def graph(
        self, made: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = ""
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        assert CAPTURING._is_owned()  # type: ignore[attr-defined]
        self.done.append(f"capture in {pool}")
        yield
        if self.fails and pool is not None:
            raise RuntimeError("operation failed due to a previous error during capture")

    def get_sync_debug_mode(self) -> Any:
        return self.debug_mode

    def set_sync_debug_mode(self, mode: Any) -> None:
        self.debug_mode = mode
        if mode:
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    for name in [name for name in dir(made) if not name.startswith("_")]:
        monkeypatch.setattr(torch.cuda, name, getattr(made, name), raising=False)
    clear = lambda: made.done.append("clear workspaces")  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    end = lambda index, pool: made.done.append(f"end of {pool}")  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    zeros = lambda size, device: made.done.append("zeros")  # noqa: E731
    monkeypatch.setattr(torch, "zeros", zeros)
    return made


def test_a_capture_finds_no_workspace_and_leaves_none(cuda: Cuda) -> None:
    """Else the graph would keep the address of memory that others free."""
    runs: list[bool] = []

    def run(is_recorded: bool) -> torch.Tensor:
        runs.append(is_recorded)
        cuda.done.append("run")
        return torch.arange(3.0)

    recording = CudaRecorder(DEVICE).record(run)
    assert runs == [True, True, True]
    assert cuda.done == [
        *("run", "run", "current waits"),  # rehearsed twice
        *("clear workspaces", "capture in (0, 1)", "run", "clear workspaces"),
        "back to current",
    ]
    recording.replay()
    assert cuda.done[-1] == "replay"
    assert cuda.debug_mode == 0


def test_a_capture_that_fails_is_ended_and_nothing_of_it_is_used_again(cuda: Cuda) -> None:
    cuda.fails = True
    recorder = CudaRecorder(DEVICE)
    with pytest.raises(RuntimeError, match="during capture"):
        recorder.record(lambda is_recorded: torch.arange(3.0))
    assert cuda.done[-5:] == [
        *("end of (0, 1)", "capture in None", "zeros"),  # another, of which the generator learns
        *("clear workspaces", "back to current"),
    ]
    recorder.begin_anew()
    cuda.fails = False
    recorder.record(lambda is_recorded: torch.arange(3.0))
    assert "capture in (0, 2)" in cuda.done
    assert not CAPTURING._is_owned()  # type: ignore[attr-defined]


def test_what_a_failed_rehearsal_wrote_is_waited_for(cuda: Cuda) -> None:
    """Keys and values are moved afterwards, on the caller's stream."""

    def fail(is_recorded: bool) -> torch.Tensor:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        CudaRecorder(DEVICE).record(fail)
    assert cuda.done == ["current waits", "back to current"]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_garbage_is_collected_during_a_capture(
    cuda: Cuda, is_enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that goes with it would spoil the capture."""
    found: list[bool] = []

    def run(is_recorded: bool) -> torch.Tensor:
        found.append(gc.isenabled())
        return torch.arange(3.0)

    gc.enable() if is_enabled else gc.disable()
    try:
        CudaRecorder(DEVICE).record(run)
        assert found == [is_enabled, is_enabled, False]
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()


def test_the_allocator_is_told_by_the_name_that_torch_has_for_it(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before torch 2.8, another one."""
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
    end = lambda index, pool: cuda.done.append(f"old end of {pool}")  # noqa: E731
    name = "_cuda_endAllocateCurrentStreamToPool"
    monkeypatch.setattr(torch._C, name, end, raising=False)
    with CAPTURING:
        end_failed_capture(DEVICE, (0, 1))
    assert cuda.done == ["old end of (0, 1)", "capture in None", "zeros"]


def test_an_operation_that_waits_inside_is_found_before_the_capture(cuda: Cuda) -> None:
    """As `grouped_mm` does where it has no kernel: the dispatcher sees no copy."""
    recorder = CudaRecorder(DEVICE)

    def run(is_recorded: bool) -> torch.Tensor:
        if cuda.debug_mode == "warn":
            warnings.warn("called a synchronizing CUDA operation (from …)", stacklevel=1)
        return torch.arange(3.0)

    with pytest.raises(WaitError, match="waits for the device inside"):
        recorder.record(run)
    assert not any(done.startswith("capture") for done in cuda.done)
    assert cuda.debug_mode == 0


def test_waits_of_other_threads_are_none_of_ours(cuda: Cuda) -> None:
    def wait() -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    def wait_elsewhere() -> None:
        with refused_waits():
            other = threading.Thread(target=wait)
            other.start()
            other.join()

    wait_elsewhere()
    cuda.debug_mode = 1  # the user's
    with pytest.warns(UserWarning, match="synchronizing"):
        wait_elsewhere()
    assert cuda.debug_mode == 1
    with pytest.warns(UserWarning, match="mine"), refused_waits():
        warnings.warn("mine", stacklevel=1)


def test_what_would_spoil_a_capture_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty_cache"))
    with CAPTURING:
        other = threading.Thread(target=free_unused, args=(DEVICE,))
        other.start()
        other.join(0.1)
        assert done == []
    other.join()
    assert done == ["empty_cache"]
    with CAPTURING:  # of no concern to a CPU
        other = threading.Thread(target=free_unused, args=(torch.device("cpu"),))
        other.start()
        other.join()
        assert len(done) == 1
    with apart_from_captures(DEVICE):
        assert CAPTURING._is_owned()  # type: ignore[attr-defined]


@pytest.mark.cuda
def test_a_recording_outlives_workspaces_that_others_clear() -> None:
    """The memory that the graph reads must be its own."""
    x, weight = needing_workspace()
    recording = CudaRecorder(DEVICE).record(lambda is_recorded: x @ weight)
    expected = x @ weight
    for _ in range(3):
        clear_workspaces()
        torch.cuda.empty_cache()
        filled = torch.full((2**29,), torch.nan, device=DEVICE)  # 2 GiB
        recording.replay()
        torch.testing.assert_close(recording.output, expected)
        del filled
