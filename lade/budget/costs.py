"""Costs of forwards by size on this machine, measured during decoding."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Sizes of a forward, in tokens per row, that are chosen from and measured: few, so that each is
# soon known. Sizes beyond `_MAX_DRAFT_TOKENS` occur with pending tokens; larger ones count as 256.
SIZES = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64),
    *(80, 96, 128, 192, 256),
)
KNOTS = np.array(SIZES, np.float64)

# Steps until drafting, or not drafting, is tried again where the other has won throughout: doubled
# each time, from the first to the last of these. A try every 128 steps costs 0.5 % where a second
# token makes a step 1.6 times as long, as in float32 on some CPUs.
_FIRST_PROBE, _LAST_PROBE = 16, 128

# Until a size is measured, each further token, of any row, is assumed to cost this fraction of a
# one-token step. Optimistic on purpose: a size that looks better than it is gets tried, measured
# and abandoned.
PRIOR_SLOPE = 0.01
_PATIENCE_AT_FIRST = 4  # steps; the first one of a size does not count, and two must
# Weights of a new measurement: on all sizes, because a longer text or a busy machine slows all of
# them, and on its own size, where the first few are averaged.
_SHARED_WEIGHT = 0.1
_OWN_WEIGHT = 0.1
_OUTLIER = 1.3  # a measurement is clipped to within this factor of the expected cost
_FIRST_OUTLIER = 2.0  # the same until there have been two
# A cost may be lower than measured: by this fraction after one measurement, and by this over the
# square of their number after more. Measurements are gradually forgotten, down to two. The size
# that looks best at its lowest cost is measured again, so a bad start or a load that has ended is
# noticed.
_DOUBT_OF_ONE = 0.2
_MOST_COUNTED = 10.0
_LEAST_COUNTED = 2.0
_MEMORY_OF_COSTS = 0.997  # per step

# Costs up to this factor apart are taken for equal: about the noise of a curve that is known.
_FLAT = 1.015


class Costs:
    """Seconds of a forward by its size in tokens per row, for batches of about one size.

    Args:
        guess: costs of the sizes `KNOTS`, up to a factor.
    """

    def __init__(self, guess: Floats) -> None:
        self._guess = guess
        self._sec = np.zeros(len(KNOTS))  # smoothed measurements
        self._num = np.zeros(len(KNOTS))  # of measurements; one between two knots is split
        self._curve = guess  # seconds, also where nothing was measured
        self._seen: set[int] = set()
        self._num_asked = self._num_steps = 0
        self._last_tried = {True: 0, False: 0}  # the step that drafted, or did not
        self._patience = _FIRST_PROBE

    @property
    def are_unknown(self) -> bool:
        """Whether there are fewer than two measurements; a single one may be anything."""
        return float(self._num.sum()) < 1.5

    def must_begin(self) -> bool:
        """Return whether to measure steps without a draft first.

        After a few calls without a measurement the guess has to do: where finished rows stay in the
        forward, only the others are asked about, and what is measured counts for a larger batch.
        """
        self._num_asked += 1
        return self.are_unknown and self._num_asked <= _PATIENCE_AT_FIRST

    def of_sizes(self, sizes: Floats) -> Floats:
        """Return the estimated costs of forwards of these sizes."""
        return interpolated(sizes, KNOTS, self._curve)

    def hoped_for(self, sizes: Sequence[int]) -> Floats:
        """Return the lowest costs that forwards of these sizes may have."""
        doubt = _DOUBT_OF_ONE / np.maximum(1.0, self._num) ** 2
        # The guess for a size never measured is optimistic already.
        lowest = self._curve * (1 - doubt * (self._num > 0))
        return np.interp(sizes, KNOTS, lowest)

    def flat_end(self, size: int) -> int:
        """Return the largest measured size up to which forwards cost no more than at this one.

        It is `size` itself where the cost there has hardly been measured.
        """
        is_known = self._num >= _LEAST_COUNTED
        if np.interp(size, KNOTS, self._num) < _LEAST_COUNTED:
            return size
        # Sizes between two measured ones cost no more than the dearer: only those are asked about.
        ends = np.array([size, *KNOTS[is_known & (size < KNOTS)].tolist()])
        return int(ends[num_flat(self.of_sizes(ends)) - 1])

    def must_try_other(self, is_drafting: bool) -> bool:
        """Note whether the next step would draft; return whether to do the opposite for once."""
        other_is_due = self._num_steps - self._last_tried[not is_drafting] >= self._patience
        if other_is_due:
            self._patience = min(2 * self._patience, _LAST_PROBE)
        self._last_tried[is_drafting != other_is_due] = self._num_steps
        return other_is_due

    def record(self, size: int, sec: float) -> None:
        """Learn from one measurement."""
        self._num_steps += 1
        size, sec = min(size, SIZES[-1]), max(sec, 1e-9)  # a coarse clock may not have advanced
        if size not in self._seen:
            # The first forward of a size does not count: libraries prepare kernels for it.
            self._seen.add(size)
            return
        right = min(bisect_right(SIZES, size), len(SIZES) - 1)
        share = (size - SIZES[right - 1]) / (SIZES[right] - SIZES[right - 1])
        of_knots = [(right - 1, 1 - share), (right, share)]
        self._smooth_in([(knot, part) for knot, part in of_knots if part > 0], sec)
        self._update_curve()

    def _smooth_in(self, of_knots: Sequence[tuple[int, float]], sec: float) -> None:
        """Move the knots next to the size, and slightly all others, towards a measurement."""
        if not self._num.any():
            self._curve = self._guess * (sec / sum(p * self._guess[knot] for knot, p in of_knots))
        num = min(self._num[knot] for knot, _ in of_knots)
        ratio = sec / sum(part * self._curve[knot] for knot, part in of_knots)
        # Forwards are often slower than they should be and hardly ever faster: while there are few
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


def num_flat(costs: Floats) -> int:
    """Return how many of the first costs are no higher than the very first, within the noise."""
    return int(np.append(costs > _FLAT * costs[0], True).argmax())


def interpolated(sizes: Floats, known_sizes: Floats, costs: Floats) -> Floats:
    """Interpolate the costs of sizes, extrapolating from the last two known sizes.

    Where the larger of those two costs less, the cost beyond stays constant.
    """
    slope = max(0.0, (costs[-1] - costs[-2]) / (known_sizes[-1] - known_sizes[-2]))
    beyond = np.maximum(0.0, sizes - known_sizes[-1])
    result: Floats = np.interp(sizes, known_sizes, costs) + slope * beyond
    return result
