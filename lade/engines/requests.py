"""`Requests`: which request a row of a batch is, told by its text alone; `Prefixes`, what is known.

Engines move rows when requests end, and tell a proposer no ids. Next file: `vllm.py`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lade.engines import _kernels
from ngram_pool._kernels import NONE, Int32Array, Int64Array
from ngram_pool.compiling import compile_by

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
        max_length: of a text.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        self._texts = np.zeros((num_slots, max_length), np.int32)  # takes memory as it is written
        self.lengths = np.zeros(num_slots, np.int64)
        self._seen = np.zeros(num_slots, np.int64)
        self._last_slots = np.full(num_slots, NONE, np.int64)  # by row
        self._step = 0
        compile_by(self._run_kernels, _kernels)

    def find(self, token_ids: Int32Array, lengths: Int64Array, known_lengths: Int64Array) -> Found:
        """Find each row's slot, or give it one; the slot then has the row's text.

        Args:
            token_ids: int32 [num_rows, width], of which the first `lengths[i]` are row i's text.
            lengths: int64 [num_rows], none of them above `max_length`.
            known_lengths: int64 [num_rows], how much of it may have been seen before; 0 to pass
                over a row.
        """
        self._step += 1
        is_taken = np.zeros(len(self.lengths), np.bool_)
        slots = self._last_slots[: len(token_ids)]
        _kernels.recognise(token_ids, known_lengths, slots, self._texts, self.lengths, is_taken)
        is_in = known_lengths > 0
        new = np.flatnonzero(is_in & (slots == NONE))
        # Those not seen for longest.
        order = np.where(is_taken, self._step, self._seen)
        given = np.argsort(order, kind="stable")[: len(new)]
        dropped = given[self.lengths[given] > 0]
        slots[new], self.lengths[given] = given, 0
        found = np.where(is_in, slots, NONE)
        _kernels.keep(token_ids, lengths, found, self._texts, self.lengths)
        self._seen[slots[is_in]] = self._step
        return Found(found, new.tolist(), dropped.tolist())

    def _run_kernels(self) -> None:
        """Run every kernel once, so that the first step does not wait for a compiler."""
        ids, one, none = np.zeros((1, 1), np.int32), np.ones(1, np.int64), np.zeros(1, np.int64)
        _kernels.recognise(ids, one, none - 1, ids, none, np.zeros(1, np.bool_))
        _kernels.keep(ids, one, none, ids, none)


class Prefixes:
    """Which beginnings of prompts a shared pool holds, by blocks of 64 tokens from the first one.

    Many requests begin with the same tokens, such as a system prompt or the turns before; these
    are observed once, for as long as they are not forgotten.

    Args:
        max_age: how many tokens are observed before one is forgotten.
    """

    def __init__(self, max_age: int) -> None:
        self._max_age = max_age
        # By hash of all up to the end of a block: how many tokens were observed before it.
        self._ages: dict[int, int] = {}

    def num_held(self, text: Int32Array, num_observed: int) -> int:
        """Return how many of a text's first tokens are held, after so many were observed."""
        num_held = 0
        for end, block in _blocks_of(text):
            age = self._ages.get(block)
            if age is None or age < num_observed - self._max_age:
                break
            num_held = end
        return num_held

    def add(self, text: Int32Array, begin: int, end: int, num_observed: int) -> None:
        """Know the blocks that end in `text[begin:end]`, observed after so many other tokens."""
        for last, block in _blocks_of(text[:end]):
            if last > begin:
                self._ages.pop(block, None)  # so that the oldest comes first
                self._ages[block] = num_observed
        while self._ages and next(iter(self._ages.values())) < num_observed - self._max_age:
            del self._ages[next(iter(self._ages))]


def _blocks_of(text: Int32Array) -> Iterator[tuple[int, int]]:
    """Yield where each whole block of a text ends, and a hash of all up to there."""
    total = 0
    for end in range(_BLOCK, len(text) + 1, _BLOCK):
        total = hash((total, text[end - _BLOCK : end].tobytes()))
        yield end, total
