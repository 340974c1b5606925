"""`SuccessorTable` again: a plain dict in the order of the puts. Shares constants and the hash."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ngram_pool import _kernels

Context = tuple[int, int]  # the token before the last one or -1, and the last one


@dataclass
class Known:
    """What is known of a context: how often it was put, and (token id, cost) by likelihood."""

    count: int
    successors: list[tuple[int, int]]


class OracleTable:
    def __init__(self, capacity: int) -> None:
        self.num_rows = 64
        self.capacity = 64
        while self.capacity < capacity:
            self.capacity *= 2
        self.known: dict[Context, Known] = {}  # what was put longest ago stands first

    def put(
        self,
        contexts: Sequence[Sequence[int]],
        token_ids: Sequence[Sequence[int]],
        probs: Sequence[Sequence[float]],
        averages: bool = True,
    ) -> None:
        while 2 * (len(self.known) + len(contexts)) > self.num_rows < self.capacity:
            self.num_rows *= 2
        for (previous, last), ids, new in zip(contexts, token_ids, probs, strict=True):
            known = {t: p for t, p in zip(ids, new, strict=True) if t != -1}
            self.put_one((previous, last), known, averages)

    def put_one(self, context: Context, new: dict[int, float], averages: bool) -> None:
        old = self.known.pop(context, None)
        same_bucket = [c for c in self.known if self.bucket(c) == self.bucket(context)]
        if old is None and len(same_bucket) == _kernels.WAYS:
            del self.known[same_bucket[0]]
        count, merged = 1, new
        if old is not None and averages:
            count = min(old.count + 1, _kernels.MAX_COUNT)
            share = 1 / count
            merged = {t: (1 - share) * math.exp(-c / 4096) for t, c in old.successors}
            for token_id, prob in new.items():
                merged[token_id] = merged.get(token_id, 0.0) + share * prob
        likeliest = sorted(merged.items(), key=lambda item: -item[1])[: _kernels.MAX_OCCURRENCES]
        self.known[context] = Known(count, [(t, cost_of(p)) for t, p in likeliest])

    def bucket(self, context: Context) -> int:
        previous, last = context
        state = _kernels.hash_with(0, last, _kernels.HASH_MULTIPLIER)
        state = _kernels.hash_with(state, previous + 1, _kernels.HASH_MULTIPLIER)
        return state % (self.num_rows // _kernels.WAYS)

    def get(self, previous: int, last: int) -> list[tuple[int, int]] | None:
        """(token id, cost) of every successor, likeliest first; None for an unknown context."""
        known = self.known.get((previous, last))
        return None if known is None else known.successors


def cost_of(prob: float) -> int:
    """-ln(prob) in steps of 1/4096, rounded, in 16 bits."""
    return min(int(-math.log(max(prob, 1e-7)) * 4096 + 0.5), 65535)
