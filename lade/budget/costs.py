"""Costs of forwards by size on this machine, measured during decoding.

They are all that a call leaves to later ones: what depends on texts is of `budget.py`.
"""

from collections.abc import Mapping
from itertools import count

import numpy as np

from lade.budget import _kernels
from lade.budget._kernels import (
    DRAFTED,
    KNOTS,
    LAST_PROBE,
    LEAST_COUNTED,
    NUM_KNOTS,
    NUM_SCALING,
    PATIENCE,
    PLAIN,
    TRIAL,
    Floats,
)
from ngram_pool._kernels import Int64Array

# Until a size is measured, each further token, of any row, is assumed to cost this fraction of a
# one-token step. Optimistic on purpose: a size that looks better than it is gets tried, measured
# and abandoned.
PRIOR_SLOPE = 0.01
_NUM_SCALING = 4  # measurements that correct costs of another time, all by the same factor
# Steps of a call until drafting, or not drafting, is tried though the other has won throughout:
# where the costs were not measured yet, and in every so many calls, whatever their texts are.
_FIRST_PROBE, _SHORT_PROBE = 16, 4
_CALLS_BETWEEN_PROBES = 8


class Costs:
    """Seconds of a forward by its size in tokens per row, for batches of about one size.

    Args:
        guess: costs of the sizes `KNOTS`, up to a factor.
    """

    def __init__(self, guess: Floats) -> None:
        # `_kernels.py` describes the arrays.
        self.curve = guess.copy()
        self.num = np.zeros(NUM_KNOTS)
        self.counts = np.zeros(2, np.int64)
        self._guess = guess
        self._known = np.zeros(NUM_KNOTS)
        self._is_seen = np.zeros(int(KNOTS[-1]) + 1, np.bool_)

    @classmethod
    def of(cls, seconds: Mapping[int, float]) -> "Costs":
        """Return costs that were measured before, of at least two sizes, as a first guess."""
        sizes = sorted(seconds)
        guess = interpolated(
            KNOTS, np.array(sizes, np.float64), np.array([seconds[size] for size in sizes])
        )
        costs = cls(guess)
        for size in sizes:
            knot = _kernels.knot_before(size)
            if KNOTS[knot] == size:
                costs._known[knot], costs.num[knot] = guess[knot], LEAST_COUNTED
        costs.counts[NUM_SCALING] = _NUM_SCALING
        return costs

    @property
    def are_unknown(self) -> bool:
        """Whether there are fewer than two measurements; a single one may be anything."""
        return float(self.num.sum()) < 1.5

    def of_sizes(self, sizes: Floats) -> Floats:
        """Return the estimated costs of forwards of these sizes."""
        return interpolated(sizes, KNOTS, self.curve)

    def turns(self, patience: int) -> Int64Array:
        """Return the `turns` of a call that is to try the other way after so many steps."""
        turns = np.zeros(5, np.int64)
        turns[PATIENCE], turns[TRIAL] = LAST_PROBE, -1
        if self.are_unknown or self.counts[NUM_SCALING] > 0:  # of this process
            turns[PATIENCE] = _FIRST_PROBE
        else:
            turns[DRAFTED] = turns[PLAIN] = patience - LAST_PROBE
        return turns

    def record(self, turns: Int64Array, size: float, sec: float) -> None:
        """Learn from one measurement, in a call of these `turns`."""
        _kernels.record_cost(
            self._guess,
            self._known,
            self.num,
            self.curve,
            self._is_seen,
            self.counts,
            turns,
            float(size),
            sec,
        )


class ForwardCosts:
    """Seconds of a model's forwards; all that calls leave to later ones, and may share.

    Args:
        first: seconds of forwards of one row by their tokens, as measured before, or empty.
    """

    def __init__(self, first: Mapping[int, float] | None = None) -> None:
        self._costs: dict[int, Costs] = {}  # by the bit length of the batch size
        if first:
            self._costs[1] = Costs.of(first)
        self._calls = count(1)

    def begin_call(self) -> int:
        """Return the patience of a call: how many steps it goes before it tries the other way."""
        is_to_try = next(self._calls) % _CALLS_BETWEEN_PROBES == 0
        return _SHORT_PROBE if is_to_try else LAST_PROBE

    def of(self, num_rows: int) -> Costs:
        """Return the costs of batches of about this size."""
        num_bits = num_rows.bit_length()
        if num_bits not in self._costs:
            # Start from the nearest batch size: costs depend mostly on the tokens of all rows.
            known = [bits for bits, costs in dict(self._costs).items() if not costs.are_unknown]
            nearest = min(known, key=lambda bits: abs(bits - num_bits), default=None)
            if nearest is None:
                guess = 1 + PRIOR_SLOPE * num_rows * (KNOTS - 1)
            else:
                guess = self._costs[nearest].of_sizes(KNOTS * 2.0 ** (num_bits - nearest))
            self._costs.setdefault(num_bits, Costs(guess))
        return self._costs[num_bits]


def interpolated(sizes: Floats, known_sizes: Floats, costs: Floats) -> Floats:
    """Interpolate the costs of sizes, extrapolating from the last two known sizes.

    Where the larger of those two costs less, the cost beyond stays constant.
    """
    slope = max(0.0, (costs[-1] - costs[-2]) / (known_sizes[-1] - known_sizes[-2]))
    beyond = np.maximum(0.0, sizes - known_sizes[-1])
    result: Floats = np.interp(sizes, known_sizes, costs) + slope * beyond
    return result
