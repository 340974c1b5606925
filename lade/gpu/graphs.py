"""CUDA graphs: forwards recorded once and replayed, one recording for each shape of a step.

A step of a large model on a GPU waits longer for Python and for kernel launches than for memory; a
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
    """A forward on buffers that stay in place."""

    def __call__(self, is_recorded: bool) -> Tensor:
        """Run the forward; `is_recorded` says that its operations will be replayed."""


# Recording takes about four forwards, not worth it for a shape that occurs only once.
_USES_BEFORE = 1
# Share of the device's memory for all recordings of a model. They share their scratch memory, so
# only their outputs add up: logits of 64 nodes and 128 256 tokens take 16 MiB.
_MAX_SHARE = 0.05
_MAX_RECORDINGS = 64  # each also takes memory that torch does not see, and not little


class Recording(NamedTuple):
    """A forward that can be run again, on the current contents of its input buffers."""

    replay: Callable[[], Any]
    output: Tensor  # overwritten by every replay


class Recorder(Protocol):
    """A recorder of forwards on a device."""

    max_bytes: int  # of all recordings together

    def record(self, run: Run) -> Recording:
        """Run a forward and record the operations that it launches."""

    def num_bytes(self) -> int:
        """Return the bytes in use on the device, recordings included."""

    def begin_anew(self) -> None:
        """Start over, all recordings having been dropped."""


class WaitError(RuntimeError):
    """A forward waits for its device, or moves tensors between it and the host."""


# Names of the operations whose result the host must wait for.
_WAITING = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "_is_all_true", "_is_any_true"),
    *("nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount"),
}


class NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that refuses operations a recording must not have, before a capture is spoiled.

    A failed capture leaves torch's streams, memory pools and random state inconsistent, each
    release in its own way.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, or refuse it.

        Raises:
            WaitError: the operation would wait for the device.
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
    """Recorder of CUDA graphs, which share one scratch pool: only one runs at a time."""

    # A capture begins with a wait that must not fall into another thread's capture.
    _one_at_a_time = Lock()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self.max_bytes = int(_MAX_SHARE * torch.cuda.get_device_properties(device).total_memory)

    def record(self, run: Run) -> Recording:
        """Rehearse on the recording's stream, so that libraries allocate memory, then record."""
        current = torch.cuda.current_stream(self._device)
        with self._one_at_a_time, torch.cuda.device(self._device):
            try:
                self._stream.wait_stream(current)
                with torch.cuda.stream(self._stream):
                    with NoWaiting():
                        run(is_recorded=True)
                    run(is_recorded=True)  # again, since that mode does not reach compiled code
                current.wait_stream(self._stream)
                graph = torch.cuda.CUDAGraph()
                # Other threads may keep using the device meanwhile.
                mode = "thread_local"
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
                    output = run(is_recorded=True)
            finally:
                torch.cuda.set_stream(current)  # torch does not restore it after a failed capture
        self._pool = graph.pool()
        return Recording(graph.replay, output)

    def num_bytes(self) -> int:
        """Return the bytes in use on the device, by any process."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def begin_anew(self) -> None:
        """Give the next recordings a new scratch pool; no earlier recording is in use any more."""
        self._pool = None


class Graphs:
    """The recorded forwards of one model on one set of buffers.

    A shape first runs eagerly; then it is recorded, and the recording is compared with the eager
    forward before it is trusted. After a failure nothing more is recorded.

    Args:
        recorder: records forwards on the model's device.
        limit: largest allowed difference between recorded and eager logits, in units of the
            latter's standard deviation.
    """

    def __init__(self, recorder: Recorder, limit: float) -> None:
        self._recorder = recorder
        self._limit = limit
        self._recordings: dict[Hashable, Recording] = {}
        self._num_uses: dict[Hashable, int] = {}
        self._num_bytes = 0
        self._failure: str | None = None
        self.is_timing_valid = True  # whether the last run took as long as later ones will

    def __len__(self) -> int:
        """Return the number of recorded shapes."""
        return len(self._recordings)

    @property
    def reason(self) -> str | None:
        """Why nothing more is recorded, or None."""
        num = len(self._recordings)
        if self._num_bytes > self._recorder.max_bytes or num >= _MAX_RECORDINGS:
            return f"{num} recorded steps take {self._num_bytes / 2**20:.0f} MiB"
        return self._failure

    def run(self, key: Hashable, run: Run) -> Tensor:
        """Return the output of a forward, from its recording if there is one.

        Args:
            key: everything that decides which operations `run` launches, tensor contents aside.
            run: the forward, which reads its inputs from fixed buffers.

        Returns:
            Logits, valid until the next run.
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
        """Drop all recordings; the memory they refer to may have moved."""
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
            self.forget()  # the missing memory may be theirs
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

    Reasons that the rehearsal finds by itself, such as a wait for the device, are not looked for.
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
    """Return what a model's recordings depend on besides their inputs and their workspace.

    Above all the addresses of the weights: after a model is moved or loaded again, its recordings
    would read memory that is no longer its own.
    """
    weights = [*model.parameters(), *model.buffers()]
    return (
        hash(tuple(weight.data_ptr() for weight in weights)),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )
