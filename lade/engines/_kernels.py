"""Every Numba function of the engines, and nothing else; `ngram_pool/_kernels.py` says why."""

import numpy as np
from numpy.typing import NDArray

from ngram_pool._kernels import NONE, Int32Array, Int64Array, kernel

_MIX = 0x5851F42D4C957F2D  # of blocks of the multipliers
_MASK = 2**62 - 1  # of hashes, so that they are the same where integers do not wrap around


@kernel
def hash_between(row: Int32Array, begin: int, end: int, multipliers: Int32Array) -> int:
    """Return a hash of a row's tokens from `begin` to before `end`; neighbours' hashes add up.

    Args:
        multipliers: int32 [a power of two], of positions; compilers turn the sum of their products
            into vector instructions.
    """
    block_size = multipliers.shape[0]
    total = 0
    while begin < end:
        block = begin // block_size
        offset = begin - block * block_size
        size = min(end - begin, block_size - offset)
        tokens, factors = row[begin : begin + size], multipliers[offset : offset + size]
        part = 0
        for i in range(size):
            part += int(tokens[i]) * int(factors[i])
        total += part * (2 * int(block) + 1) * _MIX
        begin += size
    return total & _MASK


@kernel
def is_same(
    row: Int32Array,
    length: int,
    slot: int,
    slot_lengths: Int64Array,
    slot_prints: Int64Array,
    window: int,
    multipliers: Int32Array,
) -> bool:
    """Return whether a row's first tokens are the text of a slot."""
    end = slot_lengths[slot]
    if not 0 < end <= length:
        return False
    begin = max(0, end - window)
    return bool(hash_between(row, begin, end, multipliers) == slot_prints[slot])


@kernel
def recognise(
    token_ids: Int32Array,
    lengths: Int64Array,
    known_lengths: Int64Array,
    slots: Int64Array,
    slot_lengths: Int64Array,
    slot_prints: Int64Array,
    is_taken: NDArray[np.bool_],
    window: int,
    multipliers: Int32Array,
) -> None:
    """Find the slot whose text each row goes on from, and let it have the row's text.

    Args:
        token_ids: int32 [num_rows, width], of which the first `lengths[i]` are row i's text.
        known_lengths: int64 [num_rows], how many of them may be known; 0 to pass over a row.
        slots: int64 [at least num_rows], by row, where each was last found, NONE where nowhere;
            filled with the slots found, NONE where there is none.
        slot_lengths, slot_prints: int64 [num_slots], the lengths of their texts, 0 where free, and
            the hashes of the last `window` tokens; those of slots found are filled anew.
        is_taken: bool [num_slots], False; set where a slot was found.
    """
    num_rows = token_ids.shape[0]
    for i in range(num_rows):  # nearly always a row is where it was
        slot = slots[i]
        if known_lengths[i] == 0:
            continue
        if (
            slot == NONE
            or is_taken[slot]
            or not is_same(
                token_ids[i], known_lengths[i], slot, slot_lengths, slot_prints, window, multipliers
            )
        ):
            slots[i] = NONE
        else:
            is_taken[slot] = True
    for i in range(num_rows):
        if known_lengths[i] == 0 or slots[i] != NONE:
            continue
        for slot in range(slot_lengths.shape[0]):
            is_better = slots[i] == NONE or slot_lengths[slot] > slot_lengths[slots[i]]
            if (
                is_better
                and not is_taken[slot]
                and is_same(
                    token_ids[i],
                    known_lengths[i],
                    slot,
                    slot_lengths,
                    slot_prints,
                    window,
                    multipliers,
                )
            ):
                slots[i] = slot
        if slots[i] != NONE:
            is_taken[slots[i]] = True
    for i in range(num_rows):
        if known_lengths[i] > 0 and slots[i] != NONE:
            write_print(
                token_ids[i], lengths[i], slots[i], slot_lengths, slot_prints, window, multipliers
            )


@kernel
def write_print(
    row: Int32Array,
    length: int,
    slot: int,
    slot_lengths: Int64Array,
    slot_prints: Int64Array,
    window: int,
    multipliers: Int32Array,
) -> None:
    """Let a slot have the text of a row."""
    old = slot_lengths[slot]
    if 0 < old <= length <= window:  # only the new tokens need to be read
        more = hash_between(row, old, length, multipliers)
        slot_prints[slot] = (int(slot_prints[slot]) + more) & _MASK
    else:
        slot_prints[slot] = hash_between(row, max(0, length - window), length, multipliers)
    slot_lengths[slot] = length
