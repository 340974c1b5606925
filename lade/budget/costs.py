"""Costs of forwards by size on this machine, measured during decoding."""

from collections.abc import Mapping

import numpy as np

from lade.budget import _kernels
from lade.budget._kernels import (
    FIRST_PROBE,
    KNOTS,
    LEAST_COUNTED,
    NUM_KNOTS,
    NUM_SCALING,
    PATIENCE,
    TRIAL,
    Floats,
)

# Until a size is measured, each further token, of any row, is assumed to cost this fraction of a
# one-token step. Optimistic on purpose: a size that looks better than it is gets tried, measured
# and abandoned.
PRIOR_SLOPE = 0.01
_NUM_SCALING = 4  # measurements that correct costs of another time, all by the same factor


class Costs:
    """Seconds of a forward by its size in tokens per row, for batches of about one size.

    Args:
        guess: costs of the sizes `KNOTS`, up to a factor.
    """

    def __init__(self, guess: Floats) -> None:
        # `_kernels.py` describes the arrays.
        self.curve = guess.copy()
        self.num = np.zeros(NUM_KNOTS)
        self.counts = np.zeros(7, np.int64)
        self.counts[PATIENCE], self.counts[TRIAL] = FIRST_PROBE, -1
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

    def record(self, size: float, sec: float) -> None:
        """Learn from one measurement."""
        _kernels.record_cost(
            self._guess,
            self._known,
            self.num,
            self.curve,
            self._is_seen,
            self.counts,
            float(size),
            sec,
        )


def interpolated(sizes: Floats, known_sizes: Floats, costs: Floats) -> Floats:
    """Interpolate the costs of sizes, extrapolating from the last two known sizes.

    Where the larger of those two costs less, the cost beyond stays constant.
    """
    slope = max(0.0, (costs[-1] - costs[-2]) / (known_sizes[-1] - known_sizes[-2]))
    beyond = np.maximum(0.0, sizes - known_sizes[-1])
    result: Floats = np.interp(sizes, known_sizes, costs) + slope * beyond
    return result
