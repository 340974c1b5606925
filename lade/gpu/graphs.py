"""Forwards recorded once and replayed: CUDA graphs, one for each shape of a step.

A step of a large model on a GPU waits for Python and for kernel launches longer than for memory; a
replay is a single launch.
"""

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lade.closeness import distance
from lade.compat import Model, has_adapters, has_hook, runs_experts_eagerly
from lade.targets.layout import rope_of


class Run(Protocol):
    """A forward on buffers that stay where they are."""

    def __call__(self, is_recorded: bool) -> Tensor:
        """Run it; `is_recorded` says that what it does now will be done again."""


# Recording takes about four forwards; a shape that comes but once is not worth it.
_USES_BEFORE = 1
# Of the device's memory, for all recordings of a model. They share their scratch memory, so what
# adds up is their results: logits of 64 nodes and 128 256 tokens take 16 MiB.
_MAX_SHARE = 0.05
_MAX_RECORDINGS = 64  # what each takes outside of torch's sight is not small either


class Recording(NamedTuple):
    """A forward that can be run again, on what its inputs hold by then."""

    replay: Callable[[], Any]
    output: Tensor  # overwritten by every replay


class Recorder(Protocol):
    """Records forwards on a device."""

    max_bytes: int  # of all recordings together

    def record(self, run: Run) -> Recording:
        """Run, and record what the device is told to do."""

    def num_bytes(self) -> int:
        """Return how much memory is taken on the device, recordings included."""

    def begin_anew(self) -> None:
        """Learn that all recordings were dropped."""


class WaitError(RuntimeError):
    """A forward waits for its device, or moves tensors between it and the host."""


# What tells the host something of the device, by the names of operations.
_WAITING = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "_is_all_true", "_is_any_true"),
    *("nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount"),
}


class NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that a recording must not have, before there is a recording to spoil.

    A capture that fails leaves torch's streams, memory pools and random state as they should not
    be, each release in its own way.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, or refuse it.

        Raises:
            WaitError: it would wait for the device.
        """
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        of_tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        kinds = {each.device.type for each in of_tensors}
        if name == "_to_copy":
            kinds.add(torch.device(kwargs.get("device") or of_tensors[0].device).type)
        is_moving = name in ("copy_", "_to_copy") and len(kinds) > 1
        if name in ("index", "index_put", "index_put_", "_unsafe_index"):
            masks = [each for each in args[1] if each is not None and each.dtype == torch.bool]
            is_moving = is_moving or bool(masks)
        if name in _WAITING or is_moving:
            raise WaitError(f"{name} waits for the device")
        return func(*args, **kwargs)


class CudaRecorder:
    """Records CUDA graphs. They share one pool of scratch memory, as only one runs at a time."""

    _one_at_a_time = Lock()  # a capture begins with a wait that another thread's must not meet

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self.max_bytes = int(_MAX_SHARE * torch.cuda.get_device_properties(device).total_memory)

    def record(self, run: Run) -> Recording:
        """Rehearse on the stream of the recording, for libraries to take their memory; record."""
        current = torch.cuda.current_stream(self._device)
        with self._one_at_a_time, torch.cuda.device(self._device):
            try:
                self._stream.wait_stream(current)
                with torch.cuda.stream(self._stream):
                    with NoWaiting():
                        run(is_recorded=True)
                    run(is_recorded=True)  # again, for what is compiled is not under that
                current.wait_stream(self._stream)
                graph = torch.cuda.CUDAGraph()
                # Other threads may go on using the device meanwhile.
                mode = "thread_local"
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
                    output = run(is_recorded=True)
            finally:
                torch.cuda.set_stream(current)  # torch's own way out of a failed capture has none
        self._pool = graph.pool()
        return Recording(graph.replay, output)

    def num_bytes(self) -> int:
        """Return how much of the device's memory is in use, by whomever."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def begin_anew(self) -> None:
        """Take other scratch memory for the next recordings; none before is in use any more."""
        self._pool = None


class Graphs:
    """The recorded forwards of one model on one set of buffers.

    A shape is run eagerly at first, then recorded, and the recording is held against the eager
    forward before it is trusted. Where recording fails, everything runs eagerly from then on.

    Args:
        recorder: of the device.
        limit: what logits of the same forward may differ by, in units of their standard deviation.
    """

    def __init__(self, recorder: Recorder, limit: float) -> None:
        self._recorder = recorder
        self._limit = limit
        self._recordings: dict[Hashable, Recording] = {}
        self._num_uses: dict[Hashable, int] = {}
        self._num_bytes = 0
        self._failure: str | None = None
        self.is_timing_valid = True  # whether the last run was as fast as others like it will be

    def __len__(self) -> int:
        """Return how many shapes are recorded."""
        return len(self._recordings)

    @property
    def reason(self) -> str | None:
        """Why nothing more is recorded."""
        num = len(self._recordings)
        if self._num_bytes > self._recorder.max_bytes or num >= _MAX_RECORDINGS:
            return f"{num} recorded steps take {self._num_bytes / 2**20:.0f} MiB"
        return self._failure

    def run(self, key: Hashable, run: Run) -> Tensor:
        """Return what `run` returns, by a recording if there is one.

        Args:
            key: all that decides what `run` tells the device, but for what tensors hold.
            run: reads its inputs from those buffers.

        Returns:
            Valid until the next run.
        """
        known = self._recordings.get(key)
        if known is not None:
            self.is_timing_valid = True
            known.replay()
            return known.output
        output = run(is_recorded=False)
        self._num_uses[key] = self._num_uses.get(key, 0) + 1
        self.is_timing_valid = self.reason is not None
        if self.reason is None and self._num_uses[key] > _USES_BEFORE:
            self._record(key, run, output)
        return output

    def forget(self) -> None:
        """Drop all recordings, because what they refer to has changed or moved."""
        self._recordings.clear()
        self._num_uses.clear()
        self._num_bytes = 0
        self._recorder.begin_anew()

    def _record(self, key: Hashable, run: Run, expected: Tensor) -> None:
        before = self._recorder.num_bytes()
        try:
            recording = self._recorder.record(run)
            recording.replay()
            error = distance(recording.output, expected)
        except torch.OutOfMemoryError:
            self.forget()  # what they held may be what is missing
            self._failure = "no memory was left to record a step"
        except Exception as failure:
            what = (str(failure).splitlines() or [""])[0][:200]
            self._failure = f"a step cannot be recorded ({type(failure).__name__}: {what})"
        else:
            if not error <= self._limit:
                self.forget()
                self._failure = f"a recorded step differs from the same step by {error:.2g}"
                return
            self._recordings[key] = recording
            self._num_bytes += max(0, self._recorder.num_bytes() - before)


def why_not_recorded(model: Model) -> str | None:
    """Return why forwards of a model must not be recorded, or None.

    What would be noticed in rehearsal, as a wait for the device, is left to that.
    """
    config = model.config.get_text_config(decoder=True)
    rope = rope_of(config)
    if rope is not None and rope[0] == "dynamic":
        return "its rotary embedding (dynamic) is changed by the host as texts grow"
    if runs_experts_eagerly(model):
        return "its experts (eager) are chosen by the host"
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if places & {"cpu", "disk"}:
        return "its weights are brought in for every forward"
    if any(weight.data_ptr() == 0 for weight in model.parameters() if weight.numel()):
        return "its weights do not tell where they lie, so nobody would know if they moved"
    if has_adapters(model):
        return "it has adapters, which can be switched without a trace"
    for name, module in model.named_modules():
        if has_hook(module):
            return f"{name or 'the model'} has a hook, which a recording would not call"
    return None


def dependencies_of(model: Model) -> tuple[Hashable, ...]:
    """Return what recordings of a model depend on besides their inputs and their workspace.

    Where its weights lie, above all: a model that is moved or loaded anew leaves its recordings
    reading memory that is not its own any more.
    """
    weights = [*model.parameters(), *model.buffers()]
    return (
        hash(tuple(weight.data_ptr() for weight in weights)),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )
