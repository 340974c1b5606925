"""What a CUDA graph does, on a CPU: operations are recorded, with the tensors they were given."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lade.gpu.capture import NoWaiting, WaitError
from lade.gpu.graphs import CudaRecorder, Recording, StepCall
from lade.gpu.policy import DevicePolicy


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notes: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.notes.append((func, args, kwargs or {}, output))
        return output

    def play(self) -> None:
        """Do it all again; results go where they went the first time."""
        for func, args, kwargs, output in self.notes:
            before, after = (tree_flatten(o)[0] for o in (output, func(*args, **kwargs)))
            for old, new in zip(before, after, strict=True):
                # What is a view of an input, or is one, is there already.
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class _NoReading(TorchFunctionMode):
    """Refuses what reads a tensor on the host without an operation, as only a CPU can."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.item, Tensor.__array__):
            raise WaitError(f"{func.__name__} waits for the device")
        return func(*args, **(kwargs or {}))


class CpuRecorder(CudaRecorder):
    """Records forwards on a CPU.

    Args:
        max_bytes: of all recordings; every recording counts as one byte.
        failures: what the next recordings raise, in order; None for nothing.

    Attributes:
        bends: whether replays give other numbers.
    """

    def __init__(
        self, max_bytes: int = 10**9, failures: list[BaseException | None] | None = None
    ) -> None:
        self.max_bytes = max_bytes
        self.failures = failures if failures is not None else []
        self.num_recorded = 0
        self.num_replayed = 0
        self.num_forgotten = 0
        self.bends = False

    def record(self, run: StepCall) -> Recording:
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        with _NoReading(), NoWaiting():
            run(True)
        tape = _Tape()
        with tape:
            output = run(True)
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            tape.play()
            if self.bends:
                output.neg_()

        return Recording(replay, output)

    def num_bytes(self) -> int:
        return self.num_recorded

    def begin_anew(self) -> None:
        self.num_forgotten += 1


class Overlapping(DevicePolicy):
    """Treats the CPU as a device that has to be waited for."""

    def overlaps(self, device: torch.device) -> bool:
        return True


class RecordingPolicy(DevicePolicy):
    """Records on the CPU."""

    def __init__(self, recorder: "CpuRecorder") -> None:
        self._recorder = recorder

    def can_record(self, device: torch.device) -> bool:
        return True

    def recorder(self, device: torch.device) -> "CpuRecorder":
        return self._recorder
