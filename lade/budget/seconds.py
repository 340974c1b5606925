"""What something takes by its size in tokens: the one model of seconds.

It serves steps, forwards of several calls, pieces of prompts and sources of drafts. A forward reads
the weights, then computes: its seconds grow with its tokens, slowly at first. What a machine adds,
such as a step from the first token to the second, is learned as deviations:

    log seconds(n) = level + log(1 + slope * (n - 1)) + deviation(n)

All of it is one belief, normal about its mean, that each measurement corrects (an extended Kalman
filter). So a few measurements tell of all sizes; a load that comes and goes moves the level, and
doubt grows about sizes that were not measured of late. Nothing is drawn at random.
"""

import math
from bisect import bisect_left
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lade.budget import _kernels
from ngram_pool.compiling import compile_by

Floats = NDArray[np.float64]

# Sizes at which seconds are known; in between they lie on a line. A step is one of these sizes
# where it can be: of any number of tokens, each would be measured too rarely, and with twice as
# many sizes, first steps lost 2 % more on simulated machines.
SIZES = (
    *(1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64),
    *(96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
)
KNOTS = np.array(SIZES, np.float64)

# Of the time, what trials may lose that do not pay.
SHARE_OF_TRIALS = 0.005

# These were chosen on simulated machines (`tests/lade/budget/machines.py`) with drafts of recorded
# texts. The slope before any measurement, and standard deviations of logarithms: of the level, of
# the slope, and of the deviation from a size to one e times as large.
_SLOPE = 0.04
_LEVEL_SD, _SLOPE_SD, _DEVIATION_SD = 2.0, 1.1, 0.12
_FORGOTTEN = 0.001  # of what is known, with each measurement
# Of a measurement, at first; later as measured, with this weight of the last. What is too long has
# more of it, by this share of the square of what it is too long by: else one such time among the
# first ones kept one of eight simulated batches from drafting for good.
_NOISE_SD, _NEWEST, _SHARE_OF_EXCESS = 0.06, 0.02, 0.03
_LEAST_NOISE_SD = 0.02
_ALL_COMPUTE = 64  # tokens, from which on deviations are the same
_OUTLIER = 2.5  # standard deviations; what lies further off counts as this
# How far a size may seem better than it is expected to be, and be tried: standard deviations. What
# trials may lose at once is saved up to so many steps of one token.
_HOPE, _MOST_TRIALS = 0.7, 3.0
_REACH = 6  # the largest size to try, times the largest measured
_AROUND = 1.5  # times a size, and as much less: where what one more token adds is looked at


class _Belief(NamedTuple):
    """What is believed; exchanged as a whole, for calls of other threads."""

    mean: Floats  # level, logarithm of the slope, deviation of each size
    covariance: Floats
    noise: float  # variance of measurements
    curve: Floats  # seconds of the sizes `KNOTS`, never less for more


class Seconds:
    """Seconds by size in tokens, learned from measurements.

    Args:
        num_alike: tokens that each token stands for, as where rows run side by side.
    """

    def __init__(self, num_alike: int = 1) -> None:
        compile_kernels()
        mean = np.zeros(2 + len(KNOTS))
        mean[1] = math.log(_SLOPE * num_alike)
        self._unknown = mean
        self._believe(mean, _PRIOR, _NOISE_SD**2)
        self._seen: set[int] = set()  # about which sizes have run
        self._largest = 1.0  # measured
        self._num_asked = 0
        self._left = np.zeros(1)  # seconds that trials may lose
        #: Whether there is a measurement.
        self.is_known = False

    def at(self, sizes: Floats | float) -> Floats:
        """Return the seconds of sizes; up to an unknown factor until one was measured."""
        return np.asarray(np.interp(sizes, KNOTS, self._belief.curve))

    def largest_within(self, sec: float) -> int:
        """Return the largest size that takes no longer, at least 1."""
        return int(np.interp(sec, self._belief.curve, KNOTS))

    def price(self, size: float) -> float:
        """Return what one more token adds to a size, as a share of its seconds."""
        few, many = size / _AROUND, size * _AROUND
        before, here, after = self.at(np.array([few, size, many]))
        return float((after - before) / (many - max(few, 1.0)) / here)

    def choose(self, sizes: Floats, gains: Floats) -> int:
        """Return the index of the size with the best ratio of gain to seconds.

        Or of one that may be better, and costs little to try.

        Args:
            sizes: ascending; the first is what has to be run in any case.
            gains: of each.
        """
        self._num_asked += 1
        # The first is measured first. After a few calls without a measurement the guess has to do:
        # where finished rows stay in the forward, what is measured counts for a larger batch.
        must_begin = not self.is_known and self._num_asked <= _REACH
        if must_begin or sizes[-1] == sizes[0]:
            return 0
        most = _REACH * max(self._largest, sizes.item(0))
        num = max(1, int(sizes.searchsorted(most, "right")))
        mean, covariance, _, curve = self._belief
        scratch = np.empty((2, len(mean)))
        belief = mean, covariance, curve, KNOTS
        return int(_kernels.choose(*belief, sizes[:num], gains[:num], _HOPE, self._left, scratch))

    def record(self, size: float, sec: float) -> None:
        """Learn from a measurement."""
        mean, covariance, noise, _ = self._belief
        row, of_row = np.zeros((2, len(mean)))
        expected = _kernels.add_row(mean, KNOTS, float(size), 1.0, row)
        log_sec = math.log(max(sec, 1e-9))  # a coarse clock may not have advanced
        place = bisect_left(SIZES, size)
        is_first = place not in self._seen
        self._seen.add(place)
        if not self.is_known:
            mean = mean.copy()
            mean[0] += log_sec - expected
            expected = log_sec
        # What runs for the first time may hold more than later ones do: memory and kernels.
        if is_first and log_sec >= expected:
            self._believe(mean, covariance, noise)
            return
        self._largest = max(self._largest, size)
        variance = _kernels.project(covariance, row, of_row) + noise
        most = _OUTLIER * math.sqrt(variance)
        surprise = min(log_sec - expected, most)  # a time may be too long, but hardly too short
        seen = max(surprise, -most) ** 2
        noise = max(_LEAST_NOISE_SD**2, noise + _NEWEST * (seen - variance))
        variance += _SHARE_OF_EXCESS * max(0.0, surprise) ** 2
        known, learned = (mean, covariance), (np.empty_like(mean), np.empty_like(covariance))
        told = surprise, variance, _FORGOTTEN
        _kernels.correct(*known, self._unknown, _PRIOR, of_row, *told, *learned)
        self._believe(*learned, noise)
        saved = self._left.item() + SHARE_OF_TRIALS * sec if self.is_known else math.inf
        self._left[0] = min(saved, _MOST_TRIALS * self._belief.curve.item(0))
        self.is_known = True

    def _believe(self, mean: Floats, covariance: Floats, noise: float) -> None:
        curve = np.empty(len(KNOTS))
        _kernels.write_curve(mean, KNOTS, curve)
        self._belief = _Belief(mean, covariance, noise, curve)


def _prior() -> Floats:
    """Return the covariance before any measurement: deviations of near sizes are alike."""
    # Of its own is the second token, for which another way of computing begins.
    apart = np.log(np.minimum(KNOTS, _ALL_COMPUTE)) + (KNOTS > 1)
    steps = _DEVIATION_SD**2 * apart
    covariance = np.zeros((2 + len(KNOTS), 2 + len(KNOTS)))
    covariance[0, 0], covariance[1, 1] = _LEVEL_SD**2, _SLOPE_SD**2
    covariance[2:, 2:] = np.minimum.outer(steps, steps)
    return covariance


_PRIOR = _prior()


@cache
def compile_kernels() -> None:
    """Compile the kernels of budgets, so that no step waits for them or fails by them."""
    compile_by(_run_kernels, _kernels)


def _run_kernels() -> None:
    curve, left = np.ones(len(KNOTS)), np.zeros(1)
    mean, scratch = np.zeros(len(_PRIOR)), np.zeros((2, len(_PRIOR)))
    _kernels.write_curve(mean, KNOTS, curve)
    _kernels.choose(mean, _PRIOR, curve, KNOTS, curve, curve, _HOPE, left, scratch)
    expected = _kernels.add_row(mean, KNOTS, 1.0, 1.0, scratch[0])
    told = expected, _kernels.project(_PRIOR, *scratch), _FORGOTTEN
    _kernels.correct(mean, _PRIOR, mean, _PRIOR, scratch[1], *told, mean, np.empty_like(_PRIOR))
