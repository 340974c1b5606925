"""Every Numba function of the engines, and nothing else; `ngram_pool/_kernels.py` says why."""

import numpy as np
from numpy.typing import NDArray

from ngram_pool._kernels import NONE, Int32Array, Int64Array, kernel


@kernel
def goes_on(row: Int32Array, known_length: int, text: Int32Array, length: int) -> bool:
    """Return whether a row's known tokens begin with the first `length` tokens of a text."""
    if not 0 < length <= known_length:
        return False
    for i in range(length):  # noqa: SIM110 - Numba has no `all` of a generator
        if row[i] != text[i]:
            return False
    return True


@kernel
def recognise(
    token_ids: Int32Array,
    known_lengths: Int64Array,
    slots: Int64Array,
    texts: Int32Array,
    text_lengths: Int64Array,
    is_taken: NDArray[np.bool_],
) -> None:
    """Find the slot whose text each row continues.

    Args:
        token_ids: int32 [num_rows, width].
        known_lengths: int64 [num_rows], how many of a row's tokens may be known; 0 to skip it.
        slots: int64 [at least num_rows], the last slot of each row or NONE; filled with the slots
            found, or NONE.
        texts, text_lengths: int32 [num_slots, at least width] and int64 [num_slots], the texts of
            the slots; free slots have length 0.
        is_taken: bool [num_slots], False; set for the slots found.
    """
    num_rows = token_ids.shape[0]
    for i in range(num_rows):  # nearly always a row keeps its slot
        slot = slots[i]
        if known_lengths[i] == 0:
            continue
        if (
            slot != NONE
            and not is_taken[slot]
            and goes_on(token_ids[i], known_lengths[i], texts[slot], text_lengths[slot])
        ):
            is_taken[slot] = True
        else:
            slots[i] = NONE
    for i in range(num_rows):
        if known_lengths[i] == 0 or slots[i] != NONE:
            continue
        longest = 0
        for slot in range(text_lengths.shape[0]):
            if (
                text_lengths[slot] > longest
                and not is_taken[slot]
                and goes_on(token_ids[i], known_lengths[i], texts[slot], text_lengths[slot])
            ):
                slots[i], longest = slot, text_lengths[slot]
        if slots[i] != NONE:
            is_taken[slots[i]] = True


@kernel
def keep(
    token_ids: Int32Array,
    lengths: Int64Array,
    slots: Int64Array,
    texts: Int32Array,
    text_lengths: Int64Array,
) -> None:
    """Extend the texts of slots by the rows that continue them; skip rows with slot NONE."""
    for row in range(token_ids.shape[0]):
        slot, length = slots[row], lengths[row]
        if slot != NONE:
            for i in range(text_lengths[slot], length):
                texts[slot, i] = token_ids[row, i]
            text_lengths[slot] = length
