"""What forwards of each size cost on this machine, measured as decoding goes."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Sizes of a forward, in tokens of one row, that are chosen from and measured: few, so that each is
# soon known. Those beyond `_MAX_DRAFT_TOKENS` come about with pending tokens; larger ones count as
# 256.
SIZES = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64),
    *(80, 96, 128, 192, 256),
)
KNOTS = np.array(SIZES, np.float64)

# Steps until the other of drafting and not drafting is tried again, where one has won throughout:
# twice as many each time, from the first to the last of these. Every 128 steps cost 0.5 % where
# the second token makes a step 1.6 times as long, as in float32 on some CPUs.
_FIRST_PROBE, _LAST_PROBE = 16, 128

# Until a size is measured, each token more, of any row, is taken to cost so much of a one-token
# step. Optimistic on purpose: a size that looks better than it is gets tried, measured and left.
PRIOR_SLOPE = 0.01
_PATIENCE_AT_FIRST = 4  # steps; the first of a size is not counted, and two are to be
# Weights of a new measurement: on all sizes, for a longer text or a busy machine slows all of them,
# and on its own, where the first few are averaged.
_SHARED_WEIGHT = 0.1
_OWN_WEIGHT = 0.1
_OUTLIER = 1.3  # a measurement counts as at most so many times what was expected, or as little
_FIRST_OUTLIER = 2.0  # until there have been two
# A cost may be lower than it was measured: by so much after one measurement, and by this over the
# square of their number after more. Measurements are forgotten by and by, down to two. What looks
# best at its lowest is measured again, so a bad start or a load that has gone is found out.
_DOUBT_OF_ONE = 0.2
_MOST_COUNTED = 10.0
_LEAST_COUNTED = 2.0
_MEMORY_OF_COSTS = 0.997  # per step


class Costs:
    """Seconds of a forward by its size, in tokens of one row, for batches of about one size.

    Args:
        guess: of what the sizes `KNOTS` cost, up to a factor.
    """

    def __init__(self, guess: Floats) -> None:
        self._guess = guess
        self._sec = np.zeros(len(KNOTS))  # smoothed measurements
        self._num = np.zeros(len(KNOTS))  # of them; one between two knots counts in part for each
        self._curve = guess  # seconds, also where there are no measurements
        self._seen: set[int] = set()
        self._num_asked = self._num_steps = 0
        self._last_tried = {True: 0, False: 0}  # the step that drafted, or did not
        self._patience = _FIRST_PROBE

    @property
    def are_unknown(self) -> bool:
        """Whether less than two measurements are there; a single one may be anything."""
        return float(self._num.sum()) < 1.5

    def must_begin(self) -> bool:
        """Tell whether to measure steps without a draft first.

        Asked in vain, go by the guess: where finished rows stay in the forward, only the others are
        asked about, and what is measured counts for a larger batch.
        """
        self._num_asked += 1
        return self.are_unknown and self._num_asked <= _PATIENCE_AT_FIRST

    def of_sizes(self, sizes: Floats) -> Floats:
        """Return what forwards of these sizes cost."""
        return interpolated(sizes, KNOTS, self._curve)

    def hoped_for(self, sizes: Sequence[int]) -> Floats:
        """Return what forwards of these sizes may cost at the lowest."""
        doubt = _DOUBT_OF_ONE / np.maximum(1.0, self._num) ** 2
        # What was never measured is a hopeful guess as it is.
        lowest = self._curve * (1 - doubt * (self._num > 0))
        return np.interp(sizes, KNOTS, lowest)

    def must_try_other(self, is_drafting: bool) -> bool:
        """Note what is about to be done, and tell whether to do the other thing for once."""
        other_is_due = self._num_steps - self._last_tried[not is_drafting] >= self._patience
        if other_is_due:
            self._patience = min(2 * self._patience, _LAST_PROBE)
        self._last_tried[is_drafting != other_is_due] = self._num_steps
        return other_is_due

    def record(self, size: int, sec: float) -> None:
        """Take in one measurement."""
        self._num_steps += 1
        size, sec = min(size, SIZES[-1]), max(sec, 1e-9)  # a clock may stand still
        if size not in self._seen:
            # The first forward of a size is not counted: libraries prepare kernels for it.
            self._seen.add(size)
            return
        right = min(bisect_right(SIZES, size), len(SIZES) - 1)
        share = (size - SIZES[right - 1]) / (SIZES[right] - SIZES[right - 1])
        of_knots = [(right - 1, 1 - share), (right, share)]
        self._smooth_in([(knot, part) for knot, part in of_knots if part > 0], sec)
        self._update_curve()

    def _smooth_in(self, of_knots: Sequence[tuple[int, float]], sec: float) -> None:
        """Move the knots beside the size, and a little all others, towards a measurement."""
        if not self._num.any():
            self._curve = self._guess * (sec / sum(p * self._guess[knot] for knot, p in of_knots))
        num = min(self._num[knot] for knot, _ in of_knots)
        ratio = sec / sum(part * self._curve[knot] for knot, part in of_knots)
        # Forwards are often slower than they should be and hardly ever faster: where there are few
        # measurements, a lower one is taken as it is.
        is_news = ratio < 1 and num <= _LEAST_COUNTED
        if not is_news:
            most = _OUTLIER if num >= _LEAST_COUNTED else _FIRST_OUTLIER
            ratio = min(max(ratio, 1 / most), most)
            if num > 0:  # a wrong guess says nothing about the others
                self._sec *= 1 + _SHARED_WEIGHT * (ratio - 1)
        faded = np.maximum(_LEAST_COUNTED, _MEMORY_OF_COSTS * self._num)
        self._num = np.where(self._num > _LEAST_COUNTED, faded, self._num)
        for knot, part in of_knots:
            if self._num[knot] == 0:
                self._sec[knot] = self._curve[knot]
            weight = 1.0 if is_news else max(1 / (1 + self._num[knot]), _OWN_WEIGHT)
            self._sec[knot] *= 1 + part * weight * (ratio - 1)
            self._num[knot] = min(_MOST_COUNTED, self._num[knot] + part)

    def _update_curve(self) -> None:
        known = self._num.nonzero()[0]
        self._curve = np.interp(KNOTS, KNOTS[known], self._sec[known])
        first, last = known[0], known[-1]
        self._curve[:first] *= self._guess[:first] / self._guess[first]
        self._curve[last + 1 :] *= self._guess[last + 1 :] / self._guess[last]


def interpolated(sizes: Floats, known_sizes: Floats, costs: Floats) -> Floats:
    """Return costs of sizes from those of some, going on beyond the last as between the last two.

    Where the last two say that more costs less, it costs the same.
    """
    slope = max(0.0, (costs[-1] - costs[-2]) / (known_sizes[-1] - known_sizes[-2]))
    beyond = np.maximum(0.0, sizes - known_sizes[-1])
    result: Floats = np.interp(sizes, known_sizes, costs) + slope * beyond
    return result
