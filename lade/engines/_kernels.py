"""Every Numba function of the engines, and nothing else; `ngram_pool/_kernels.py` says why."""

import numpy as np
from numpy.typing import NDArray

from ngram_pool._kernels import NONE, Int32Array, Int64Array, kernel


@kernel
def goes_on(row: Int32Array, known_length: int, length: int, kept: Int32Array) -> bool:
    """Return whether a row's known tokens begin with a text, as far as that is kept.

    Args:
        length: of the text.
        kept: int32 [window], its last tokens, that of place i at i modulo the window.
    """
    if not 0 < length <= known_length:
        return False
    begin = max(0, length - kept.shape[0])
    at = begin % kept.shape[0]
    for i in range(begin, length):
        if row[i] != kept[at]:
            return False
        at = 0 if at + 1 == kept.shape[0] else at + 1
    return True


@kernel
def recognise(
    token_ids: Int32Array,
    known_lengths: Int64Array,
    slots: Int64Array,
    slot_lengths: Int64Array,
    kept: Int32Array,
    is_taken: NDArray[np.bool_],
) -> None:
    """Find the slot whose text each row goes on from.

    Args:
        token_ids: int32 [num_rows, width].
        known_lengths: int64 [num_rows], how many of a row's tokens may be known; 0 to pass over it.
        slots: int64 [at least num_rows], by row, where each was last found, NONE where nowhere;
            filled with the slots found, NONE where there is none.
        slot_lengths: int64 [num_slots], of their texts, 0 where free.
        kept: int32 [num_slots, window], as for `goes_on`.
        is_taken: bool [num_slots], False; set where a slot was found.
    """
    num_rows = token_ids.shape[0]
    for i in range(num_rows):  # nearly always a row is where it was
        slot = slots[i]
        if known_lengths[i] == 0:
            continue
        if (
            slot != NONE
            and not is_taken[slot]
            and goes_on(token_ids[i], known_lengths[i], slot_lengths[slot], kept[slot])
        ):
            is_taken[slot] = True
        else:
            slots[i] = NONE
    for i in range(num_rows):
        if known_lengths[i] == 0 or slots[i] != NONE:
            continue
        longest = 0
        for slot in range(slot_lengths.shape[0]):
            if (
                slot_lengths[slot] > longest
                and not is_taken[slot]
                and goes_on(token_ids[i], known_lengths[i], slot_lengths[slot], kept[slot])
            ):
                slots[i], longest = slot, slot_lengths[slot]
        if slots[i] != NONE:
            is_taken[slots[i]] = True


@kernel
def keep(
    token_ids: Int32Array,
    lengths: Int64Array,
    slots: Int64Array,
    slot_lengths: Int64Array,
    kept: Int32Array,
) -> None:
    """Let slots have the texts of rows that go on from theirs; of slots NONE, do nothing."""
    window = kept.shape[1]
    for row in range(token_ids.shape[0]):
        slot, length = slots[row], lengths[row]
        if slot == NONE:
            continue
        for i in range(max(slot_lengths[slot], length - window), length):
            kept[slot, i % window] = token_ids[row, i]
        slot_lengths[slot] = length
