"""The one model of time: seconds by size in tokens.

It serves steps, forwards of several calls, prefill chunks and sources of drafts. A forward reads
the weights, then computes: its seconds grow with its tokens, slowly at first. Peculiarities of a
machine, such as a jump from the first token to the second, are learned as deviations:

    log seconds(n) = level + log(1 + slope * (n - 1)) + deviation(n)

All of it is one normal distribution that each measurement corrects (an extended Kalman filter). So
a few measurements inform about all sizes, a temporary load moves the level, and doubt grows about
sizes that were not measured recently. Nothing is drawn at random.
"""

import math
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Sizes at which seconds are estimated, with linear interpolation in between. Steps have one of
# these sizes where they can: otherwise each size would be measured too rarely. With twice as many
# sizes, first steps lost 2 % more on simulated machines.
SIZES = (
    *(1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64),
    *(96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
)
KNOTS = np.array(SIZES, np.float64)
_PLACES = np.arange(len(KNOTS), dtype=np.float64)

# Share of the time that trials may lose, and how many steps, or drafts, it may be at once.
SHARE_OF_TRIALS, MOST_TRIALS = 0.005, 4.0

# These were chosen on simulated machines (`tests/lade/budget/machines.py`) with drafts of recorded
# texts. The slope before any measurement, and standard deviations of logarithms: of the level, of
# the slope, and both of the deviation from a size to one e times as large and of a measurement at
# first.
_SLOPE = 0.04
_LEVEL_SD, _SLOPE_SD, _SD = 2.0, 1.1, 0.12
_FORGOTTEN = 0.001  # share of the knowledge that each measurement forgets
# Later the deviation of measurements is measured, and the newest one has this weight. By the same
# share of the squared excess, the variance of a time that is too long grows: otherwise one such
# time among the first ones kept one of eight simulated batches from drafting forever.
_NEWEST = 0.02
_LEAST_SD = 0.02  # of measurements
_OUTLIER = 2.5  # standard deviations; a larger surprise counts as this
# A size is tried if it would be the best when this many standard deviations better than expected.
_HOPE = 0.7
_REACH = 6  # the largest size to try, times the largest measured


def _prior() -> Floats:
    """Return the covariance before any measurement: deviations of near sizes are alike."""
    # The second token has a deviation of its own: other kernels run from there on.
    apart = np.log(KNOTS) + (KNOTS > 1)
    steps = _SD**2 * apart
    covariance = np.zeros((2 + len(KNOTS), 2 + len(KNOTS)))
    covariance[0, 0], covariance[1, 1] = _LEVEL_SD**2, _SLOPE_SD**2
    covariance[2:, 2:] = np.minimum.outer(steps, steps)
    return covariance


_PRIOR = _prior()


class _Belief(NamedTuple):
    """The estimate; replaced as a whole, because other threads read it."""

    mean: Floats  # level, logarithm of the slope, deviation of each size
    covariance: Floats
    noise: float  # variance of measurements
    curve: Floats  # seconds of the sizes `KNOTS`, never less for more

    @classmethod
    def of(cls, mean: Floats, covariance: Floats, noise: float) -> "_Belief":
        """Return a belief with its curve."""
        logs = mean[0] + np.log1p(math.exp(mean[1]) * (KNOTS - 1.0)) + mean[2:]
        # If a larger size seems to take less time, the smaller one was measured under load.
        return cls(mean, covariance, noise, np.exp(np.minimum.accumulate(logs[::-1])[::-1]))

    def gradients(self, sizes: Floats) -> Floats:
        """Return the gradients of the log seconds of sizes by `mean` [num_sizes, len(mean)]."""
        rows = np.empty((len(sizes), len(self.mean)))
        grown = math.exp(self.mean[1]) * (sizes - 1.0)
        rows[:, 0], rows[:, 1] = 1.0, grown / (1.0 + grown)
        places = np.interp(sizes, KNOTS, _PLACES)  # interpolation between knots
        rows[:, 2:] = np.maximum(0.0, 1.0 - np.abs(places[:, None] - _PLACES))
        return rows


class Seconds:
    """Seconds by size in tokens, learned from measurements.

    Args:
        num_alike: number of tokens that each token of a size stands for, as rows of a batch.
    """

    def __init__(self, num_alike: int = 1) -> None:
        self._unknown = np.zeros(2 + len(KNOTS))
        self._unknown[1] = math.log(_SLOPE * num_alike)
        self._belief = _Belief.of(self._unknown, _PRIOR, _SD**2)
        self._seen: set[int] = set()  # indices of sizes that have run
        self._largest = 1.0  # measured
        self._num_asked = 0
        self._left = 0.0  # seconds that trials may lose
        #: Whether there is a measurement.
        self.is_known = False

    def at(self, sizes: Floats | float) -> Floats:
        """Return the seconds of sizes; before any measurement, up to an unknown factor."""
        return np.asarray(np.interp(sizes, KNOTS, self._belief.curve))

    def largest_within(self, sec: float) -> int:
        """Return the largest size that takes at most `sec` seconds, at least 1."""
        return int(np.interp(sec, self._belief.curve, KNOTS))

    def marginal_cost(self, size: float) -> float:
        """Return the seconds that one more token adds to a size, as a share of its seconds."""
        few, many = size / 2, size * 2
        before, here, after = self.at(np.array([few, size, many]))
        return float((after - before) / (many - max(few, 1.0)) / here)

    def choose(self, sizes: Floats, gains: Floats) -> int:
        """Return the index of the size with the best ratio of gain to seconds.

        It may also be a size that is possibly better, and costs little to try.

        Args:
            sizes: ascending, in tokens; the first is the least that must run.
            gains: expected tokens of each size.
        """
        self._num_asked += 1
        # The first size is measured first. After a few requests without a measurement, the prior
        # must do: if finished rows stay in the forward, measurements count for a larger batch.
        must_begin = not self.is_known and self._num_asked <= _REACH
        if must_begin or sizes[-1] == sizes[0]:
            return 0
        most = _REACH * max(self._largest, sizes.item(0))
        num = max(1, int(sizes.searchsorted(most, "right")))
        sizes, gains = sizes[:num], gains[:num]
        sec = self.at(sizes)
        best = int((gains / sec).argmax())
        rate = gains.item(best) / sec.item(best)
        rows = self._belief.gradients(sizes)
        rows -= rows[best]
        doubts = np.sqrt(np.maximum(0.0, (rows @ self._belief.covariance * rows).sum(axis=1)))
        tried = int((gains - rate * sec * np.exp(-_HOPE * doubts)).argmax())
        lost = sec.item(tried) - gains.item(tried) / rate
        if lost > self._left:
            return best
        self._left -= lost
        return tried

    def record(self, size: float, sec: float) -> None:
        """Learn from a measurement."""
        mean, covariance, noise, _ = self._belief
        (row,) = self._belief.gradients(np.array([size], np.float64))
        log_sec = math.log(max(sec, 1e-9))  # a coarse clock may not have advanced
        grown = math.exp(mean[1]) * (size - 1.0)
        surprise = log_sec - (mean.item(0) + math.log1p(grown) + float(row[2:] @ mean[2:]))
        index = bisect_left(SIZES, size)
        is_first = index not in self._seen
        self._seen.add(index)
        if not self.is_known:
            mean = mean.copy()
            mean[0] += surprise
            surprise = 0.0
        # The first run of a size may include allocation and compilation.
        if is_first and surprise >= 0.0:
            self._belief = _Belief.of(mean, covariance, noise)
            return
        self._largest = max(self._largest, size)
        of_row = covariance @ row
        variance = float(row @ of_row) + noise
        most = _OUTLIER * math.sqrt(variance)
        surprise = min(surprise, most)  # a time may be too long, but hardly too short
        noise = max(_LEAST_SD**2, noise + _NEWEST * (max(surprise, -most) ** 2 - variance))
        variance += _NEWEST * max(0.0, surprise) ** 2
        gain = of_row / variance
        mean = mean + surprise * gain
        mean[1:] += _FORGOTTEN * (self._unknown - mean)[1:]  # the level is not forgotten
        covariance = covariance - gain[:, None] * of_row
        covariance += _FORGOTTEN * (_PRIOR - covariance)
        self._belief = _Belief.of(mean, covariance, noise)
        saved = self._left + SHARE_OF_TRIALS * sec if self.is_known else math.inf
        self._left = min(saved, MOST_TRIALS * self._belief.curve.item(0))
        self.is_known = True
