"""Small asynchronous transfers between a device and the host."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def is_asynchronous(device: torch.device) -> bool:
    """Return whether a device runs beside the host, so that reading a result waits for it."""
    return device.type != "cpu"


class HostCopy:
    """Tensors of one device on their way to the host, through pinned memory.

    On devices other than CUDA, nothing is sent before `get`.
    """

    def __init__(self, *parts: Tensor) -> None:
        self._parts = parts
        self._launched: Launched | None = None
        if parts[0].is_cuda:
            self._parts = tuple(_pinned(part).copy_(part, non_blocking=True) for part in parts)
            self._launched = Launched(parts[0])

    def get(self) -> list[Tensor]:
        """Wait and return the tensors on the host."""
        if self._launched is not None:
            self._launched.wait()
        return [*map(Tensor.cpu, self._parts)]


class Launched:
    """The work launched on a device so far, to wait for.

    Args:
        last: the last result, on the device.
    """

    def __init__(self, last: Tensor) -> None:
        self._last = last
        self._event: Any = None
        if last.device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(last.device))

    def wait(self) -> None:
        """Wait until the device has done this work."""
        if self._event is None:
            self._last[(0,) * self._last.dim()].item()
        else:
            self._event.synchronize()


def arrays_on(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """Return arrays on a device, each in its own dtype.

    On CUDA they go through pinned memory: otherwise torch would wait for an idle device at each
    array. Elsewhere they may share the arrays' memory.
    """
    tensors = map(torch.from_numpy, arrays)
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    return [_pinned(tensor).copy_(tensor).to(device, non_blocking=True) for tensor in tensors]


def integers_on(device: torch.device, values: Sequence[int]) -> Tensor:
    """Return integers on a device, int64 [n]."""
    return arrays_on(device, np.array(values, np.int64))[0]


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
