"""`Requests`: which request a row of a batch is, told by its text alone; `Prefixes`, what is known.

Engines move rows when requests end, and tell a proposer no ids. Next file: `vllm.py`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lade.engines import _kernels
from ngram_pool._kernels import NONE, Int32Array, Int64Array
from ngram_pool.compiling import compile_by

_NUM_MULTIPLIERS = 4096  # of the hash; a power of two
_SEED = 20  # of the multipliers: any, but the same on all ranks
_BLOCK = 64  # tokens of a prompt that are known together, or not


class Found(NamedTuple):
    """Where the rows of a step are found."""

    slots: Int64Array  # [num_rows], NONE for rows passed over
    new: list[int]  # rows whose text was not known
    dropped: list[int]  # slots whose text is known no more; some of them are among `slots` again


class Requests:
    """The texts of a bounded number of requests, by slot: those in the batch and others before.

    A row goes on from the slot whose whole text its own text begins with: that of its request, or
    that of one which ended, such as an earlier turn of the same conversation. Requests that come
    back after preemption are found again. When no slot is free, the one not seen for longest is
    dropped.

    Args:
        num_slots: most requests to remember; more than rows in a batch.
        window: how many of a text's last tokens must be the same, besides its length. With the
            longest possible text, a slot is found by all of it: then a slot's text is always the
            beginning of the row's own, whoever's request it was.
    """

    def __init__(self, num_slots: int, window: int) -> None:
        self.window = window
        self.lengths = np.zeros(num_slots, np.int64)
        self._prints = np.zeros(num_slots, np.int64)
        self._seen = np.zeros(num_slots, np.int64)
        self._last_slots = np.full(num_slots, NONE, np.int64)  # by row
        self._step = 0
        self._multipliers = _some_multipliers()
        compile_by(self._run_kernels, _kernels)

    def find(self, token_ids: Int32Array, lengths: Int64Array, known_lengths: Int64Array) -> Found:
        """Find each row's slot, or give it one; the slot then has the row's text.

        Args:
            token_ids: int32 [num_rows, width], of which the first `lengths[i]` are row i's text.
            lengths: int64 [num_rows].
            known_lengths: int64 [num_rows], how much of it may have been seen before; 0 to pass
                over a row.
        """
        self._step += 1
        num_rows = len(token_ids)
        is_taken = np.zeros(len(self.lengths), np.bool_)
        slots = self._last_slots[:num_rows]
        self._recognise(token_ids, lengths, known_lengths, slots, is_taken)
        is_in = known_lengths > 0
        new = np.flatnonzero(is_in & (slots == NONE)).tolist()
        dropped = self._give_slots(token_ids, lengths, slots, new, is_taken) if new else []
        self._seen[slots[is_in]] = self._step
        return Found(np.where(is_in, slots, NONE), new, dropped)

    def _give_slots(
        self,
        token_ids: Int32Array,
        lengths: Int64Array,
        slots: Int64Array,
        new: list[int],
        is_taken: NDArray[np.bool_],
    ) -> list[int]:
        """Give new rows the slots not seen for longest; return those that were not free."""
        order = np.where(is_taken, self._step, self._seen)
        chosen = np.argsort(order, kind="stable")[: len(new)]
        dropped: list[int] = chosen[self.lengths[chosen] > 0].tolist()
        for row, slot in zip(new, chosen.tolist(), strict=True):
            self.lengths[slot] = 0
            slots[row] = slot
            _kernels.write_print(
                token_ids[row],
                int(lengths[row]),
                slot,
                self.lengths,
                self._prints,
                self.window,
                self._multipliers,
            )
        return dropped

    def _recognise(
        self,
        token_ids: Int32Array,
        lengths: Int64Array,
        known_lengths: Int64Array,
        slots: Int64Array,
        is_taken: NDArray[np.bool_],
    ) -> None:
        _kernels.recognise(
            token_ids,
            lengths,
            known_lengths,
            slots,
            self.lengths,
            self._prints,
            is_taken,
            self.window,
            self._multipliers,
        )

    def _run_kernels(self) -> None:
        """Run every kernel once, so that the first step does not wait for a compiler."""
        ids, one, none = np.zeros((1, 1), np.int32), np.ones(1, np.int64), np.zeros(1, np.int64)
        self._recognise(ids, one, one, none - 1, np.zeros(len(self.lengths), np.bool_))
        _kernels.write_print(ids[0], 1, 0, none, none, 1, self._multipliers)


class Prefixes:
    """Which beginnings of prompts a shared pool holds, by blocks of 64 tokens from the first one.

    Many requests begin with the same tokens, such as a system prompt or the turns before; these
    are observed once, for as long as they are not forgotten.

    Args:
        max_age: how many tokens are observed before one is forgotten.
    """

    def __init__(self, max_age: int) -> None:
        self._max_age = max_age
        #: By hash of all up to the end of a block: how many tokens were observed before it.
        self._ages: dict[int, int] = {}
        self._multipliers = _some_multipliers()

    def __len__(self) -> int:
        """Return how many blocks are known; each took 64 tokens of those that are not forgotten."""
        return len(self._ages)

    def num_held(self, text: Int32Array, num_observed: int) -> int:
        """Return how many of a text's first tokens are held, after so many were observed."""
        total = num_held = 0
        for end in range(_BLOCK, len(text) + 1, _BLOCK):
            total += _kernels.hash_between(text, num_held, end, self._multipliers)
            age = self._ages.get(total)
            if age is None or age < num_observed - self._max_age:
                break
            num_held = end
        return num_held

    def add(self, text: Int32Array, begin: int, end: int, num_observed: int) -> None:
        """Know the blocks that end in `text[begin:end]`, observed after so many other tokens."""
        first = begin // _BLOCK * _BLOCK
        total = _kernels.hash_between(text, 0, first, self._multipliers)
        for last in range(first + _BLOCK, end + 1, _BLOCK):
            total += _kernels.hash_between(text, last - _BLOCK, last, self._multipliers)
            self._ages.pop(total, None)  # so that the oldest comes first
            self._ages[total] = num_observed
        while self._ages and next(iter(self._ages.values())) < num_observed - self._max_age:
            del self._ages[next(iter(self._ages))]


def _some_multipliers() -> Int32Array:
    rng = np.random.default_rng(_SEED)
    return rng.integers(1, 2**31, _NUM_MULTIPLIERS, dtype=np.int32) | np.int32(1)
