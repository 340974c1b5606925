"""Costs of forwards by size on this machine, measured during decoding.

They are all that a call leaves to later ones: what depends on texts is of `budget.py`.
"""

from collections.abc import Mapping
from itertools import count

import numpy as np

from lade.budget import _kernels
from lade.budget._kernels import KNOTS, LAST_PROBE, Floats
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
        self._costs = np.zeros((4, len(KNOTS)))
        self._costs[_kernels.GUESS] = self._costs[_kernels.CURVE] = guess
        self._is_seen = np.zeros(int(KNOTS[-1]) + 1, np.bool_)
        self._counts = np.zeros(2, np.int64)

    @classmethod
    def of(cls, seconds: Mapping[int, float]) -> "Costs":
        """Return costs that were measured before, of at least two sizes, as a first guess."""
        costs = cls(interpolated(KNOTS, *arrays_of(seconds)))
        is_known = np.isin(KNOTS, [*seconds])
        costs._costs[_kernels.KNOWN, is_known] = costs._costs[_kernels.GUESS, is_known]
        costs._costs[_kernels.NUM, is_known] = _kernels.LEAST_COUNTED
        costs._counts[_kernels.NUM_SCALING] = _NUM_SCALING
        return costs

    @property
    def curve(self) -> Floats:
        """Seconds of the sizes `KNOTS`."""
        curve: Floats = self._costs[_kernels.CURVE]
        return curve

    @property
    def are_unknown(self) -> bool:
        """Whether there are fewer than two measurements; a single one may be anything."""
        return float(self._costs[_kernels.NUM].sum()) < 1.5

    def turns(self, patience: int) -> Int64Array:
        """Return the `turns` of a call that is to try the other way after so many steps."""
        first, patience = patience - LAST_PROBE, LAST_PROBE
        if self.are_unknown or self._counts[_kernels.NUM_SCALING] > 0:  # of this process
            first, patience = 0, _FIRST_PROBE
        return np.array([0, first, first, patience, -1])  # STEPS, DRAFTED, PLAIN, PATIENCE, TRIAL

    def record(self, turns: Int64Array, size: float, sec: float) -> None:
        """Learn from one measurement, in a call of these `turns`."""
        _kernels.record_cost(self._costs, self._is_seen, self._counts, turns, float(size), sec)

    def choose(self, turns: Int64Array, sizes: Floats, gains: Floats) -> int:
        """Return the index of the best size, in a call of these `turns`; see the kernel."""
        return _kernels.choose_size(self._costs, self._counts, turns, sizes, gains)


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
        return LAST_PROBE if next(self._calls) % _CALLS_BETWEEN_PROBES else _SHORT_PROBE

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
                sizes = KNOTS * 2.0 ** (num_bits - nearest)
                guess = interpolated(sizes, KNOTS, self._costs[nearest].curve)
            self._costs.setdefault(num_bits, Costs(guess))
        return self._costs[num_bits]


def arrays_of(costs: Mapping[int, float]) -> tuple[Floats, Floats]:
    """Return the sizes of some costs, in order, and their costs."""
    sizes = np.array(sorted(costs), np.float64)
    return sizes, np.array([costs[size] for size in sorted(costs)], np.float64)


def interpolated(sizes: Floats, known_sizes: Floats, costs: Floats) -> Floats:
    """Interpolate the costs of sizes, extrapolating from the last two known sizes.

    Where the larger of those two costs less, the cost beyond stays constant.
    """
    slope = max(0.0, (costs[-1] - costs[-2]) / (known_sizes[-1] - known_sizes[-2]))
    beyond = np.maximum(0.0, sizes - known_sizes[-1])
    result: Floats = np.interp(sizes, known_sizes, costs) + slope * beyond
    return result
