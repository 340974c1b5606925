"""Attention of several calls in one row: the tokens of each see the keys and values of that call.

On a CPU a kernel (`_kernels.py`) writes what is new for all calls, and another attends for all, on
torch's own threads; what these do not know is done call by call. SmolLM2, eight calls of 300 keys,
two cores, per layer: 0.16 ms instead of 0.40 for a token each, 0.27 instead of 0.53 for three.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lade.openmp import runner
from lade.products.linear import FORMATS, has_vectors

# Torch is faster from more tokens of a call on.
_MOST_TOKENS = 16


def attends_alone(num_tokens: int) -> bool:
    """Return whether a call of so many tokens attends by torch's attention."""
    return num_tokens > _MOST_TOKENS


class CallKeys(NamedTuple):
    """Where a call's keys and values are in a layer: [heads, num_keys, numbers of each]."""

    keys: int  # address
    key_step: int  # bytes from one head to the next
    values: int
    value_step: int
    num_keys: int  # those included that are to be written


class Calls:
    """Which tokens of a forward are of which call, and what they see.

    Args:
        sizes: number of tokens of each call, in the order of their tokens.
        masks: bool [1, 1, num_tokens, num_keys] of each, or additive; None for one token that sees
            all keys, or for many that attend alone, each to itself and those before it.

    Attributes:
        alone: which calls attend alone.
    """

    def __init__(self, sizes: Sequence[int], masks: Sequence[Tensor | None]) -> None:
        stops = [*accumulate(sizes)]
        self.nodes = [*map(slice, [0, *stops[:-1]], stops)]
        self.masks = masks
        self.num_tokens = stops[-1]
        # Without a mask, as many as there are.
        self._widths = [None if mask is None else mask.shape[3] for mask in masks]
        self._are_plain = all(
            (mask.dtype, mask.device.type, mask.shape[2], mask.stride(3))
            == (torch.bool, "cpu", size, 1)
            for mask, size in zip(masks, sizes, strict=True)
            if mask is not None
        )
        self.alone = [call for call, size in enumerate(sizes) if attends_alone(size)]
        parts = []
        for nodes, size, mask in zip(self.nodes, sizes, masks, strict=True):
            of_mask = (0, 0) if mask is None else (mask.data_ptr(), mask.stride(2))
            parts.append((nodes.start, size, *of_mask))
        self._all = _numbers(parts)
        for call in self.alone:
            parts[call] = 0, 0, 0, 0
        self._attending = _numbers(parts)

    def __len__(self) -> int:
        """Return the number of calls."""
        return len(self.masks)

    def fit(self, places: Sequence[CallKeys]) -> bool:
        """Return whether a kernel can take the masks, and they are of the keys of these places."""
        if not self._are_plain or len(places) != len(self.masks):
            return False
        num_keys = [place.num_keys for place in places]
        return all(width in (None, num) for width, num in zip(self._widths, num_keys, strict=True))

    @property
    def address(self) -> int:
        """Of what a kernel takes as parts."""
        return ctypes.addressof(self._all)

    @property
    def attending(self) -> int:
        """The same for the kernel that attends; calls that attend alone have no tokens there."""
        return ctypes.addressof(self._attending)


class Held:
    """The keys and values of several calls in a layer.

    Args:
        tensors: makes those of each call, [1, heads, num_keys, numbers of each].
        places: where they are, if a kernel has written them.
    """

    def __init__(
        self,
        tensors: Callable[[], Sequence[tuple[Tensor, Tensor]]],
        places: Sequence[CallKeys] = (),
    ) -> None:
        self.tensors = tensors
        self.places = places
        self._places = _numbers(places)

    @property
    def address(self) -> int:
        """Of what a kernel takes as places."""
        return ctypes.addressof(self._places)


def _numbers(rows: Sequence[tuple[int, ...]]) -> ctypes.Array[ctypes.c_int64]:
    flat = [number for row in rows for number in row]
    return (ctypes.c_int64 * len(flat))(*flat)


@functools.cache
def kernels() -> ModuleType | None:
    """Return the compiled kernels, or None where they cannot run.

    The first time on a machine, they are compiled, for some seconds.
    """
    if runner() is None or not has_vectors():
        return None
    from lade.attention import _kernels  # compiled as it is imported

    return _kernels


def can_write(calls: Calls, states: Tensor) -> bool:
    """Return whether new keys or values [1, heads, num_tokens, numbers of each] can be copied."""
    is_one_row = states.shape[:3:2] == (1, calls.num_tokens)
    return kernels() is not None and states.is_cpu and is_one_row and states.stride(3) == 1


def write(calls: Calls, held: Held, keys: Tensor, values: Tensor) -> None:
    """Write new keys and values, [1, heads, num_tokens, numbers of each], where they are held."""
    found = kernels()
    assert found is not None
    width, job = keys.element_size(), (ctypes.c_int64 * found.WRITE_SIZE)()
    job[:4] = calls.address, held.address, len(calls), keys.shape[1]
    job[found.KEY_SIZE : found.NEW] = keys.shape[3] * width, values.shape[3] * width
    for start, states in ((found.NEW, keys), (found.NEW + 3, values)):
        _, head_step, token_step, _ = states.stride()
        job[start : start + 3] = states.data_ptr(), head_step * width, token_step * width
    found.write_job.ctypes(ctypes.addressof(job))


def attend(
    calls: Calls, held: Held, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor | None:
    """Attend for all calls at once but those that attend alone; None where that is impossible.

    Args:
        calls, held: as the mask, and the keys and values carry them.
        query: [1, num_heads, num_tokens, head_dim].
        key, value: what was written last, [1, num_key_heads, num_tokens, head_dim of each].
        scaling: factor on the products of queries and keys; None for that of `sdpa`.

    Returns:
        [1, num_tokens, num_heads, head_dim of values], in the dtype of the queries; of calls that
        attend alone, nothing.
    """
    found, dtype = kernels(), query.dtype
    size, value_size, num_key_heads = query.shape[3], value.shape[3], key.shape[1]
    if (
        found is None
        or not calls.fit(held.places)
        or query.shape[:3:2] != (1, calls.num_tokens)
        or dtype not in FORMATS
        or key.dtype is not dtype
        or value.dtype is not dtype
        or key.shape[3] != size
        or value_size % found.LANES
    ):
        return None
    num_heads, num_tokens, num_threads = query.shape[1], query.shape[2], torch.get_num_threads()
    # Each of these lives until the job is done.
    wide = query.float()
    if wide.stride(3) != 1:
        wide = wide.contiguous()
    results = query.new_empty((1, num_tokens, num_heads, value_size), dtype=torch.float32)
    num_numbers = num_threads * found.scratch_size(size, value_size)
    scratch = query.new_empty(num_numbers, dtype=torch.float32)
    scale = np.float32(size**-0.5 if scaling is None else scaling)
    job = (ctypes.c_int64 * found.JOB_SIZE)(
        calls.attending,
        held.address,
        len(calls),
        num_key_heads,
        num_heads // num_key_heads,
        size,
        value_size,
        FORMATS[dtype],
        wide.data_ptr(),
        4 * wide.stride(1),
        4 * wide.stride(2),
        results.data_ptr(),
        int(scale.view(np.int32)),
        scratch.data_ptr(),
    )
    run = runner()
    assert run is not None
    run(found.attend_job.address, ctypes.addressof(job), num_threads)
    return results.to(dtype)


def with_calls(mask: Tensor, calls: Calls) -> Tensor:
    """Attach what calls see to a mask for `packed_rows`; return the mask."""
    mask._lade_calls = calls  # type: ignore[attr-defined]
    return mask


def with_held(states: Tensor, held: Held) -> Tensor:
    """Return new keys or values that carry what is held, for `packed_rows`."""
    carrying = states[:]  # a tensor of our own
    carrying._lade_held = held  # type: ignore[attr-defined]
    return carrying
