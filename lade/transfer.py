"""Small asynchronous transfers between a device and the host."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 8  # bytes, of the parts of a copy; the largest item there is


class HostCopy:
    """Tensors sent to the host in one copy, through pinned memory.

    On devices other than CUDA, nothing is sent before `get`.

    Args:
        parts: tensors on one device whose values fit 32 bits: int64 values must fit int32.
    """

    def __init__(self, *parts: Tensor) -> None:
        self._parts = parts
        self._event: Any = None
        if parts[0].device.type == "cuda":
            self._send()

    def get(self) -> list[Tensor]:
        """Wait and return the tensors on the host; from CUDA as int32, bool or float32."""
        if self._event is None:
            return [part.cpu() for part in self._parts]
        self._event.synchronize()
        sizes = [part.numel() for part in self._parts]
        return [
            _unpacked(packed, part).view(part.shape)
            for packed, part in zip(torch.split(self._on_host, sizes), self._parts, strict=True)
        ]

    def _send(self) -> None:
        packed = torch.cat([_packed(part) for part in self._parts])
        self._on_host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        self._on_host.copy_(packed, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(packed.device))


class Launched:
    """What a device has been given to do so far, which can be waited for.

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
        """Wait until the device has done it."""
        if self._event is None:
            self._last[(0,) * self._last.dim()].item()
        else:
            self._event.synchronize()


def arrays_on(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """Return arrays on a device, each in its own dtype.

    On CUDA they go in one copy, through pinned memory: otherwise torch would wait until the device
    is idle, for each of them. Elsewhere they may share the arrays' memory.
    """
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    on_host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    packed, start = on_host.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        packed[start : start + array.nbytes] = (
            np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        )
        start += size
    parts = torch.split(on_host.to(device, non_blocking=True), sizes)
    return [
        part[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]


def integers_on(device: torch.device, values: Sequence[int]) -> Tensor:
    """Return integers on a device, int64 [n].

    On CUDA they go through pinned memory: otherwise torch would wait until the device is idle.
    """
    is_cuda = device.type == "cuda"
    on_host = torch.tensor(values, dtype=torch.int64, pin_memory=is_cuda)
    return on_host.to(device, non_blocking=is_cuda)


def _packed(part: Tensor) -> Tensor:
    """Return a tensor as int32 [n]; floats keep their bit patterns, as float32."""
    if part.dtype.is_floating_point:
        return part.float().contiguous().view(torch.int32).flatten()
    return part.to(torch.int32).flatten()


def _unpacked(packed: Tensor, like: Tensor) -> Tensor:
    if like.dtype.is_floating_point:
        return packed.view(torch.float32)
    return packed.bool() if like.dtype == torch.bool else packed
