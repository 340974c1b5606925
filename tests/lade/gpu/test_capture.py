"""Captures of CUDA graphs; without a GPU, only the private recorder shows what is called when."""

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lade.gpu.capture import WaitError
from lade.gpu.graphs import CudaRecorder
from lade.machine.captures import CAPTURING, free_unused
from tests.lade.devices import needing_workspace

DEVICE = torch.device("cuda", 0)


class Cuda:
    """The part of `torch.cuda` that captures use; notes what is done."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.fails = False
        self.debug_mode: Any = 0
        self.num_pools = 0
        self.CUDAGraph = lambda: SimpleNamespace(replay=lambda: self.done.append("replay"))
        self.Stream = lambda device: SimpleNamespace(wait_stream=lambda other: None)
        wait = lambda other: self.done.append("current waits")  # noqa: E731
        self.current_stream = lambda device: SimpleNamespace(wait_stream=wait, name="current")
        self.set_stream = lambda stream: self.done.append(f"back to {stream.name}")
        self.get_device_properties = lambda device: SimpleNamespace(total_memory=1000)
        self.get_sync_debug_mode = lambda: self.debug_mode
        self.empty_cache = lambda: None

    def graph_pool_handle(self) -> int:
        self.num_pools += 1
        return self.num_pools

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    stream = device

    @contextmanager
    def graph(
        self, made: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = ""
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.done.append(f"capture in {pool}")
        yield
        if self.fails and pool is not None:
            raise RuntimeError("operation failed due to a previous error during capture")

    def set_sync_debug_mode(self, mode: Any) -> None:
        self.debug_mode = mode
        if mode:
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    for name in [name for name in dir(made) if not name.startswith("_")]:
        monkeypatch.setattr(torch.cuda, name, getattr(made, name), raising=False)
    note = lambda: made.done.append("clear workspaces")  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", note, raising=False)
    return made


def test_a_capture_finds_no_workspace_no_garbage_and_leaves_none(cuda: Cuda) -> None:
    """Else the graph would keep the address of memory that others free."""
    collects: list[bool] = []

    def run(is_recorded: bool) -> Tensor:
        collects.append(gc.isenabled())
        cuda.done.append("run")
        return torch.arange(3.0)

    recording = CudaRecorder(DEVICE).record(run)
    assert collects == [True, True, False]
    assert gc.isenabled()
    assert cuda.done == [
        *("run", "run", "current waits"),  # rehearsed twice
        *("clear workspaces", "capture in 1", "run", "clear workspaces"),
        "back to current",
    ]
    recording.replay()
    assert cuda.done[-1] == "replay"
    assert cuda.debug_mode == 0


def test_of_a_capture_that_fails_nothing_is_used_again(cuda: Cuda) -> None:
    cuda.fails = True
    recorder = CudaRecorder(DEVICE)
    with pytest.raises(RuntimeError, match="during capture"):
        recorder.record(lambda is_recorded: torch.arange(3.0))
    assert cuda.done[-3:] == ["capture in 1", "clear workspaces", "back to current"]
    recorder.begin_anew()
    cuda.fails = False
    recorder.record(lambda is_recorded: torch.arange(3.0))
    assert "capture in 2" in cuda.done
    other = threading.Thread(target=free_unused, args=(DEVICE,))  # which waits for captures
    other.start()
    other.join(10)
    assert not other.is_alive()


@pytest.mark.parametrize("what", ["raises", "waits inside"])
def test_a_rehearsal_that_fails_is_waited_for_and_captures_nothing(what: str, cuda: Cuda) -> None:
    """Keys and values are moved afterwards, on the caller's stream."""

    def run(is_recorded: bool) -> Tensor:
        if what == "raises":
            raise RuntimeError("mine")
        if cuda.debug_mode == "warn":  # as `grouped_mm` where it has no kernel
            warnings.warn("called a synchronizing CUDA operation (from …)", stacklevel=1)
        return torch.arange(3.0)

    with pytest.raises(RuntimeError if what == "raises" else WaitError, match=r"mine|inside"):
        CudaRecorder(DEVICE).record(run)
    assert cuda.done == ["current waits", "back to current"]
    assert cuda.debug_mode == 0


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


# --- on a GPU -------------------------------------------------------------------------------------


def recorded_product(recorder: CudaRecorder) -> Callable[[], None]:
    """Record a product that needs a workspace; return a check of its replay."""
    x, weight = needing_workspace()
    expected = x @ weight
    recording = recorder.record(lambda is_recorded: x @ weight)

    def check(reads: tuple[Tensor, ...] = (x, weight)) -> None:
        """Replay with what it reads still there."""
        recording.output.fill_(torch.nan)
        recording.replay()
        torch.testing.assert_close(recording.output, expected)

    return check


def fill_free_memory() -> None:
    """Write NaN to memory that is not in use, and give it back."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.full((2**29,), torch.nan, device="cuda")  # 2 GiB
    torch.cuda.empty_cache()


@pytest.mark.cuda
@pytest.mark.parametrize("waits", [False, True])
def test_a_recording_outlives_others_and_captures_that_fail(waits: bool) -> None:
    """What raises ends a capture; what waits also makes it invalid."""
    recorder = CudaRecorder(DEVICE)
    first, second = recorded_product(recorder), recorded_product(recorder)
    del first
    fill_free_memory()
    second()
    num_runs = 0

    def run(is_recorded: bool) -> Tensor:
        nonlocal num_runs
        num_runs += 1
        drawn = torch.randn(8, 8, device="cuda").relu()
        if num_runs == 3:  # after two rehearsals
            torch.cuda.synchronize() if waits else None
            raise RuntimeError("mine")
        return drawn

    with pytest.raises(RuntimeError):
        recorder.record(run)
    torch.randn(8, device="cuda")  # the generator takes no capture for under way
    fill_free_memory()
    recorder.begin_anew()
    recorded_product(recorder)()
