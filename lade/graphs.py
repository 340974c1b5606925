"""Forwards recorded once and replayed: CUDA graphs, one for each shape of a step.

A step of a large model on a GPU waits for Python and for kernel launches longer than for memory; a
replay is a single launch. Next file: `fixed.py`.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lade.internals import Model, has_adapters, has_hook, runs_experts_eagerly
from lade.rules import rope_of


class Run(Protocol):
    """A forward on buffers that stay where they are."""

    def __call__(self, is_recorded: bool) -> Tensor:
        """Run it; `is_recorded` says that what it does now will be done again."""


# Recording takes about three forwards; a shape that comes but once is not worth it.
_USES_BEFORE = 1
# Of the device's memory, for all recordings of a model. They share their scratch memory, so what
# adds up is their results: logits of 64 nodes and 128 256 tokens take 16 MiB.
_MAX_SHARE = 0.05


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


class CudaRecorder:
    """Records CUDA graphs. They share one pool of scratch memory, as only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self.max_bytes = int(_MAX_SHARE * torch.cuda.get_device_properties(device).total_memory)

    def record(self, run: Run) -> Recording:
        """Run once on the stream of the recording, for libraries to take their memory; record."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run(is_recorded=False)
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
            output = run(is_recorded=True)
        self._pool = graph.pool()
        return Recording(graph.replay, output)

    def num_bytes(self) -> int:
        """Return how much memory torch has reserved."""
        return torch.cuda.memory_reserved(self._device)


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
        self.reason: str | None = None  # why nothing more is recorded
        self.is_typical = True  # whether the last run was as fast as others like it will be

    def __len__(self) -> int:
        """Return how many shapes are recorded."""
        return len(self._recordings)

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
            self.is_typical = True
            known.replay()
            return known.output
        output = run(is_recorded=False)
        self._num_uses[key] = self._num_uses.get(key, 0) + 1
        self.is_typical = self.reason is not None
        if self.reason is None and self._num_uses[key] > _USES_BEFORE:
            self._record(key, run, output)
        return output

    def forget(self) -> None:
        """Drop all recordings, because what they refer to has changed or moved."""
        self._recordings.clear()
        self._num_uses.clear()
        self._num_bytes = 0

    def _record(self, key: Hashable, run: Run, expected: Tensor) -> None:
        before = self._recorder.num_bytes()
        try:
            recording = self._recorder.record(run)
            recording.replay()
            error = _difference(recording.output, expected)
        except torch.OutOfMemoryError:
            self.forget()  # what they held may be what is missing
            self.reason = "no memory was left to record a step"
        except Exception as failure:
            what = (str(failure).splitlines() or [""])[0][:200]
            self.reason = f"a step cannot be recorded ({type(failure).__name__}: {what})"
        else:
            if not error <= self._limit:
                self.forget()
                self.reason = f"a recorded step differs from the same step by {error:.2g}"
                return
            self._recordings[key] = recording
            self._num_bytes += max(0, self._recorder.num_bytes() - before)
            if self._num_bytes > self._recorder.max_bytes:
                self.reason = (
                    f"{len(self._recordings)} recorded steps take {self._num_bytes / 2**20:.0f} MiB"
                )


def _difference(output: Tensor, expected: Tensor) -> float:
    """Return the largest difference of logits in units of their standard deviation."""
    if not bool(expected.isfinite().all()):  # a model's own affair; NaN in the same places will do
        return float(not torch.equal(output.isfinite(), expected.isfinite()))
    return float((output.double() - expected.double()).abs().max() / expected.double().std())


def recorder_of(device: torch.device) -> Recorder | None:
    """Return what records forwards on a device, or None where nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None


def why_not_recorded(model: Model) -> str | None:
    """Return why forwards of a model must not be recorded, or None.

    What would be noticed in recording, as a wait for the device, is left to that.
    """
    config = model.config.get_text_config(decoder=True)
    rope = rope_of(config)
    if rope is not None and rope[0] == "dynamic":
        return "its rotary embedding (dynamic) is changed by the host as texts grow"
    if runs_experts_eagerly(model):
        return "its experts (eager) are chosen by the host"
    devices = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1 or devices & {"cpu", "disk"}:
        return "its layers are on several devices"
    if has_adapters(model):
        return "it has adapters, which can be switched without a trace"
    for name, module in model.named_modules():
        if has_hook(module):
            return f"{name or 'the model'} has a hook, which a recording would not call"
    return None


def surroundings_of(model: Model) -> tuple[Hashable, ...]:
    """Return what recordings of a model depend on besides their inputs.

    Where its weights lie, above all: a model that is moved or loaded anew leaves its recordings
    reading memory that is not its own any more.
    """
    kind = model.device.type
    weights = [*model.parameters(), *model.buffers()]
    return (
        hash(tuple(weight.data_ptr() for weight in weights)),
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )
