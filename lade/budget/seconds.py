"""The one model of time: seconds by size in tokens.

It serves steps, forwards of several calls, prefill chunks and sources of drafts. A forward reads
the weights, then computes: its seconds grow with its tokens, slowly at first. Peculiarities of a
machine, such as a jump from the first token to the second, are learned as deviations:

    log seconds(n) = level + log(1 + slope * (n - 1)) + deviation(n)

Level, logarithm of the slope and deviations are normal beforehand, so the log seconds of all sizes
are about normal together, and each measurement corrects them (a Kalman filter). So a few
measurements inform about all sizes, a temporary load moves the level, and doubt grows about sizes
that were not measured recently. Nothing is drawn at random.
"""

import math
from bisect import bisect_left
from functools import lru_cache
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

# Share of the time that trials may lose, and how many steps, or drafts, it may be at once.
SHARE_OF_TRIALS, MOST_TRIALS = 0.005, 4.0

# These were chosen on simulated machines (`tests/lade/budget/machines.py`) with drafts of recorded
# texts. The slope before any measurement, and standard deviations of logarithms: of the level, of
# the slope, and both of the deviation from a size to one e times as large and of a measurement at
# first. Five running minima with interpolation, instead of a filter, lost 2 % there.
_SLOPE = 0.045
_LEVEL_SD, _SLOPE_SD, _SD = 2.0, 1.2, 0.14
_FORGOTTEN = 0.001  # share of the knowledge that each measurement forgets
# Later the deviation of measurements is measured, and the newest one has this weight. By the same
# share of the squared excess, the variance of a time that is too long grows: otherwise one such
# time among the first ones kept one of eight simulated batches from drafting forever.
_NEWEST = 0.02
_LEAST_SD = 0.02  # of measurements
_OUTLIER = 3.0  # standard deviations; a larger surprise counts as this
# A size is tried if it would be the best when this many standard deviations better than expected.
_HOPE = 0.7
_REACH = 6  # the largest size to try, times the largest measured


class _Belief(NamedTuple):
    """The estimate; replaced as a whole, because other threads read it."""

    logs: Floats  # seconds of the sizes `KNOTS`, logarithms
    covariance: Floats  # of these
    noise: float  # variance of measurements
    curve: Floats  # seconds of the sizes, never less for more


class Seconds:
    """Seconds by size in tokens, learned from measurements.

    Args:
        num_alike: number of tokens that each token of a size stands for, as rows of a batch.
    """

    def __init__(self, num_alike: int = 1) -> None:
        grown = _SLOPE * num_alike * (KNOTS - 1)
        by_slope = _SLOPE_SD * grown / (1 + grown)
        # The second token has a deviation of its own: other kernels run from there on.
        apart = np.log(KNOTS) + (KNOTS > 1)
        deviations = _SD**2 * np.minimum.outer(apart, apart)  # those of near sizes are alike
        # Before any measurement.
        self._shape = np.log1p(grown)
        self._prior = _LEVEL_SD**2 + np.outer(by_slope, by_slope) + deviations
        self._believe(self._shape, self._prior, _SD**2)
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
        covariance, sec = self._belief.covariance, self.at(sizes)
        rates = gains / sec
        best = int(rates.argmax())
        apart = _interpolation(sizes.tobytes())
        apart = apart - apart[best]
        variances = (apart @ covariance * apart).sum(axis=1)  # of the difference to the best
        doubts = np.sqrt(np.maximum(variances, 0.0))
        hoped = gains - rates.item(best) * sec * np.exp(-_HOPE * doubts)
        tried = int(hoped.argmax())
        if hoped.item(tried) <= 0.0:
            return best
        lost = sec.item(tried) - gains.item(tried) / rates.item(best)
        if lost > self._left:
            return best
        self._left -= lost
        return tried

    def record(self, size: float, sec: float) -> None:
        """Learn from a measurement."""
        logs, covariance, noise, _ = self._belief
        index = bisect_left(SIZES, size)
        last = max(1, min(index, len(SIZES) - 1))
        share = (min(size, SIZES[-1]) - SIZES[last - 1]) / (SIZES[last] - SIZES[last - 1])

        def at(values: Floats) -> Floats:
            """Return what values of all sizes are at this one."""
            interpolated: Floats = (1.0 - share) * values[last - 1] + share * values[last]
            return interpolated

        log_sec = math.log(max(sec, 1e-9))  # a coarse clock may not have advanced
        if not self.is_known:
            logs = logs + (log_sec - at(logs))
        surprise = float(log_sec - at(logs))
        is_first = index not in self._seen
        self._seen.add(index)
        # The first run of a size may include allocation and compilation.
        if is_first and surprise >= 0.0:
            self._believe(logs, covariance, noise)
            return
        self._largest = max(self._largest, size)
        of_all = at(covariance)
        variance = float(at(of_all)) + noise
        most = _OUTLIER * math.sqrt(variance)
        surprise = min(surprise, most)  # a time may be too long, but hardly too short
        seen = max(surprise, -most) ** 2
        noise = max(_LEAST_SD**2, noise + _NEWEST * (seen - variance))
        variance += _NEWEST * max(0.0, surprise) ** 2
        logs = logs + of_all * (surprise / variance)
        covariance = covariance - of_all[:, None] * (of_all / variance)
        # All but the level returns to the prior.
        logs += _FORGOTTEN * (self._shape + at(logs - self._shape) - logs)
        covariance += _FORGOTTEN * (self._prior - covariance)
        self._believe(logs, covariance, noise)
        saved = self._left + SHARE_OF_TRIALS * sec if self.is_known else math.inf
        self._left = min(saved, MOST_TRIALS * self._belief.curve.item(0))
        self.is_known = True

    def _believe(self, logs: Floats, covariance: Floats, noise: float) -> None:
        # A larger size takes no less time: if it seems to, the smaller one was measured under load.
        curve = np.exp(np.minimum.accumulate(logs[::-1])[::-1])
        self._belief = _Belief(logs, covariance, noise, curve)


@lru_cache(256)
def _interpolation(sizes: bytes) -> Floats:
    """Return the weights of the values of `KNOTS` at some sizes, [num_sizes, num_knots]."""
    each = np.frombuffer(sizes)
    return np.stack([np.interp(each, KNOTS, row) for row in np.eye(len(KNOTS))], axis=1)
