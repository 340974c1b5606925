"""`Requests`: recognises the request of a row by its text; `Prefixes`: known prompt beginnings.

Engines move rows when requests end, and give a proposer no ids. Next file: `vllm.py`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lade.engines import _kernels
from ngram_pool._kernels import NONE, Int32Array, Int64Array

_BLOCK = 64  # prompt tokens that are known or unknown together


class Found(NamedTuple):
    """The slots of a step's rows."""

    slots: Int64Array  # [num_rows], NONE for skipped rows
    new: list[int]  # rows whose text was not known
    dropped: list[int]  # slots whose text was dropped; `slots` may contain them again


class Requests:
    """The texts of a bounded number of requests, by slot: current ones and earlier ones.

    A row continues the slot whose whole text is the beginning of the row's text. That is the slot
    of its request, or of an ended one, such as an earlier turn of the same conversation. Requests
    that return after preemption are found again. If no slot is free, the least recently seen one is
    dropped.

    Args:
        num_slots: maximum number of requests to remember; more than rows in a batch.
        max_length: maximum number of tokens of a text.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        self._texts = np.zeros((num_slots, max_length), np.int32)  # uses memory as it is written
        self.lengths = np.zeros(num_slots, np.int64)
        self._seen = np.zeros(num_slots, np.int64)
        self._last_slots = np.full(num_slots, NONE, np.int64)  # by row
        self._step = 0
        self._run_kernels()

    def find(self, token_ids: Int32Array, lengths: Int64Array, known_lengths: Int64Array) -> Found:
        """Find each row's slot, or assign one; the slot then has the row's text.

        Args:
            token_ids: int32 [num_rows, width]; the first `lengths[i]` tokens are row i's text.
            lengths: int64 [num_rows], at most `max_length`.
            known_lengths: int64 [num_rows], how many of a row's tokens may have been seen before; 0
                to skip a row.
        """
        self._step += 1
        is_taken = np.zeros(len(self.lengths), np.bool_)
        slots = self._last_slots[: len(token_ids)]
        _kernels.recognise(token_ids, known_lengths, slots, self._texts, self.lengths, is_taken)
        is_in = known_lengths > 0
        new = np.flatnonzero(is_in & (slots == NONE))
        # The least recently seen slots.
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
    """The beginnings of prompts that a shared pool holds, in blocks of 64 tokens.

    Many requests begin with the same tokens, such as a system prompt or earlier turns. The pool
    observes these once, as long as it does not forget them.

    Args:
        max_age: number of observed tokens after which the pool forgets a token.
    """

    def __init__(self, max_age: int) -> None:
        self._max_age = max_age
        # The number of tokens observed before a block, by hash of the text up to the block's end.
        self._ages: dict[int, int] = {}

    def num_held(self, text: Int32Array, num_observed: int) -> int:
        """Return how many first tokens of a text are held after `num_observed` tokens."""
        num_held = 0
        for end, block in _blocks_of(text):
            age = self._ages.get(block)
            if age is None or age < num_observed - self._max_age:
                break
            num_held = end
        return num_held

    def add(self, text: Int32Array, begin: int, end: int, num_observed: int) -> None:
        """Add the blocks that end in `text[begin:end]`, observed after `num_observed` tokens."""
        for last, block in _blocks_of(text[:end]):
            if last > begin:
                self._ages.pop(block, None)  # so that the oldest comes first
                self._ages[block] = num_observed
        while self._ages and next(iter(self._ages.values())) < num_observed - self._max_age:
            del self._ages[next(iter(self._ages))]


def _blocks_of(text: Int32Array) -> Iterator[tuple[int, int]]:
    """Yield the end of each whole block of a text, and a hash of the text up to there."""
    total = 0
    for end in range(_BLOCK, len(text) + 1, _BLOCK):
        total = hash((total, text[end - _BLOCK : end].tobytes()))
        yield end, total
