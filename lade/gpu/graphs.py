"""CUDA graphs: forwards recorded once and replayed, one recording for each shape of a step.

A step of a large model on a GPU waits longer for Python and for kernel launches than for memory; a
replay is a single launch.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lade.compat import Model, device_of_inputs, experts_of, has_adapters, has_hook
from lade.compat.attempts import Attempt
from lade.compat.closeness import distance, float32_precision
from lade.gpu.capture import NoWaiting, refused_waits
from lade.machine.captures import CAPTURING, free_unused
from lade.machine.garbage import without_collection
from lade.targets.layout import rope_of

#: A forward on fixed buffers; the argument is whether its operations will be replayed.
StepCall = Callable[[bool], Tensor]

# Share of the device's memory for all recordings of a model. They share their scratch memory, so
# only their outputs add up: logits of 64 nodes and 128 256 tokens take 16 MiB.
_MAX_SHARE = 0.05
MAX_RECORDINGS = 64  # each also takes much memory that torch does not see


class Recording(NamedTuple):
    """A forward that can be run again, on the current contents of its input buffers."""

    replay: Callable[[], Any]
    output: Tensor  # overwritten by every replay


class CudaRecorder:
    """Recorder of CUDA graphs, which share one scratch pool: only one runs at a time.

    Attributes:
        max_bytes: maximum size of all recordings together.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.max_bytes = int(_MAX_SHARE * torch.cuda.get_device_properties(device).total_memory)
        self.begin_anew()

    def record(self, run: StepCall) -> Recording:
        """Rehearse on the recording's stream, so that libraries allocate memory, then record.

        Raises:
            WaitError: the forward waits for the device; nothing was captured.
        """
        with CAPTURING, torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            try:
                self._stream.wait_stream(current)
                try:
                    with torch.cuda.stream(self._stream):
                        with NoWaiting():
                            run(True)
                        # Once more, because that mode sees neither into kernels nor compiled code.
                        with refused_waits():
                            run(True)
                finally:  # a failed rehearsal has written keys and values, too
                    current.wait_stream(self._stream)
                return self._capture(run)
            finally:
                torch.cuda.set_stream(current)  # torch does not restore it after a failed capture

    def _capture(self, run: StepCall) -> Recording:
        graph = torch.cuda.CUDAGraph()
        # A capture must find no scratch memory of cuBLAS, so that it allocates some in the graph's
        # pool. Otherwise the graph keeps the address of shared memory, which torch frees when
        # another graph is destroyed or code is compiled.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            mode = "thread_local"  # other threads may keep using the device meanwhile
            with (
                without_collection(),  # it might destroy another graph, and spoil this capture
                torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode),
            ):
                output = run(True)
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        return Recording(graph.replay, output)

    def num_bytes(self) -> int:
        """Return the bytes in use on the device, by any process, recordings included."""
        free_unused(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def begin_anew(self) -> None:
        """Take another stream and scratch pool; no earlier recording may be in use.

        After a failed capture, its stream and pool may be unusable.
        """
        self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()


class Graphs:
    """The recorded forwards of one model on one set of buffers.

    A shape first runs eagerly, because recording takes about four forwards. When it comes again, it
    is recorded, and the recording is compared with the eager forward before its first use. Beyond
    the limits of memory and number, the least recently used recording is dropped. After a failure,
    no more shapes are recorded.

    Args:
        limit: largest allowed difference between recorded and eager logits, in units of the
            latter's standard deviation.
    """

    def __init__(self, recorder: CudaRecorder, limit: float) -> None:
        self._recorder = recorder
        self._limit = limit
        # The recordings and their bytes; the last used is at the end.
        self._kept: OrderedDict[Hashable, tuple[Recording, int]] = OrderedDict()
        self._met: set[Hashable] = set()  # shapes to record when they come again
        self.reason: str | None = None  # why no more shapes are recorded
        self.is_timing_valid = True  # whether the last run took as long as later ones will

    def run(self, key: Hashable, run: StepCall) -> Tensor:
        """Return the output of a forward, from its recording if there is one.

        Args:
            key: everything that decides which operations `run` launches, tensor contents aside.
            run: the forward, which reads its inputs from fixed buffers.

        Returns:
            Logits, valid until the next run.
        """
        known = self._kept.get(key)
        if known is not None:
            self.is_timing_valid = True
            self._kept.move_to_end(key)
            known[0].replay()
            return known[0].output
        output = run(False)
        self.is_timing_valid = self.reason is not None
        if self.reason is None and key in self._met:
            self.reason = self._failure_to_record(key, run, output)
            if self.reason is not None:
                self.forget()  # a failed capture may have spoiled them; or they fill the memory
        self._met.add(key)
        return output

    def forget(self) -> None:
        """Drop all recordings; the memory they refer to may have moved."""
        self._kept.clear()
        self._met.clear()
        self._recorder.begin_anew()

    def _failure_to_record(self, key: Hashable, run: StepCall, expected: Tensor) -> str | None:
        """Record a forward; return why that failed, or None."""
        try:
            with Attempt() as attempt:
                before = self._recorder.num_bytes()
                recording = self._recorder.record(run)
                recording.replay()
                error = distance(recording.output, expected)
                num_bytes = max(0, self._recorder.num_bytes() - before)
        except torch.OutOfMemoryError:
            return "no memory was left to record a step"
        except BaseException:  # interrupts need this, too
            self.forget()  # an interrupted capture may have spoiled shared memory
            raise
        if attempt.failure is not None:
            return f"a step cannot be recorded ({attempt.failure})"
        if not error <= self._limit:
            return f"a recorded step differs from the same step by {error:.2g}"
        if num_bytes > self._recorder.max_bytes:
            return f"a recorded step takes {num_bytes / 2**20:.0f} MiB"
        self._kept[key] = recording, num_bytes
        while len(self._kept) > MAX_RECORDINGS or (
            sum(size for _, size in self._kept.values()) > self._recorder.max_bytes
        ):
            oldest, _ = self._kept.popitem(last=False)
            self._met.discard(oldest)
        return None


def why_not_recorded(model: Model) -> str | None:
    """Return why forwards of a model must not be recorded, or None.

    Reasons that the rehearsal finds, such as a wait for the device, are left to it.
    """
    config = model.config.get_text_config(decoder=True)
    rope = rope_of(config)
    if rope is not None and rope[0] == "dynamic":
        return "its rotary embedding (dynamic) is changed by the host as texts grow"
    if "eager" in experts_of(model):
        return "its experts (eager) are chosen by the host"
    if 0 in _addresses_of(model.parameters()):
        return "its weights have no address, so a recording would not notice if they moved"
    if has_adapters(model):
        return "it has adapters, which can be switched without a trace"
    for name, module in model.named_modules():
        if has_hook(module):
            return f"{name or 'the model'} has a hook, which a recording would not call"
    return None


def dependencies_of(model: Model) -> tuple[Hashable, ...]:
    """Return what a model's recordings depend on besides their inputs and their workspace.

    The most important part is the addresses of the weights: after a model is moved or loaded again,
    recordings would read memory that may belong to something else.
    """
    weights = chain(model.parameters(), model.buffers())
    return (
        hash(tuple(_addresses_of(weights))),
        float32_precision(device_of_inputs(model).type),
        torch.are_deterministic_algorithms_enabled(),
    )


def _addresses_of(weights: Iterable[Any]) -> Iterator[int]:
    """Yield the addresses of weights that are not empty; 0 for a weight without an address.

    A quantized weight may be a wrapper without memory around tensors of integers and scales; their
    addresses count.
    """
    for weight in weights:
        names = weight.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(weight) else ()
        inner = [getattr(weight, name) for name in names]
        # A listed tensor may be None, such as the zero points of a symmetric format.
        if wrapped := [each for each in inner if isinstance(each, Tensor)]:
            yield from _addresses_of(wrapped)
        elif weight.numel():
            yield _address_of(weight)


def _address_of(weight: Tensor) -> int:
    try:
        return weight.data_ptr()
    except RuntimeError:  # some classes of tensors raise
        return 0
