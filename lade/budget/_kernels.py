"""Every Numba function of budgets, and nothing else; `ngram_pool/_kernels.py` says why.

The estimate of seconds is in two arrays, as in `seconds.py`: `mean` has the level, the logarithm of
the slope, and the deviation of each size in `knots`; `covariance` is their covariance.
"""

import math

from ngram_pool._kernels import Float64Array, inlined, kernel


@kernel
def knot_before(knots: Float64Array, size: float) -> tuple[int, float]:
    """Return the index of the knot before a size, and the share of the way to the next one."""
    knot = 0
    while knot < knots.shape[0] - 2 and knots[knot + 1] <= size:
        knot += 1
    return knot, (size - knots[knot]) / (knots[knot + 1] - knots[knot])


@inlined
def interpolated(knots: Float64Array, curve: Float64Array, size: float) -> float:
    """Return the curve at a size, by linear interpolation between knots."""
    knot, share = knot_before(knots, min(max(size, knots[0]), knots[knots.shape[0] - 1]))
    return float((1.0 - share) * curve[knot] + share * curve[knot + 1])


@kernel
def add_row(
    mean: Float64Array, knots: Float64Array, size: float, times: float, row: Float64Array
) -> float:
    """Add the gradient of a size's log seconds by `mean`, times `times`, to `row`; return them."""
    size = min(max(size, knots[0]), knots[knots.shape[0] - 1])
    knot, share = knot_before(knots, size)
    grown = math.exp(mean[1]) * (size - 1.0)
    row[0] += times
    row[1] += times * grown / (1.0 + grown)
    row[2 + knot] += times * (1.0 - share)
    row[3 + knot] += times * share
    deviation = (1.0 - share) * mean[2 + knot] + share * mean[3 + knot]
    return float(mean[0] + math.log1p(grown) + deviation)


@kernel
def project(covariance: Float64Array, row: Float64Array, of_row: Float64Array) -> float:
    """Write `covariance` @ `row` to `of_row`; return the variance of the sum weighted by `row`."""
    variance = 0.0
    for i in range(row.shape[0]):
        total = 0.0
        for j in range(row.shape[0]):
            total += covariance[i, j] * row[j]
        of_row[i] = total
        variance += row[i] * total
    return variance


@kernel
def choose(
    mean: Float64Array,
    covariance: Float64Array,
    curve: Float64Array,
    knots: Float64Array,
    sizes: Float64Array,
    gains: Float64Array,
    hope: float,
    left: Float64Array,
    scratch: Float64Array,
) -> int:
    """Return the index of the size with the best ratio of gain to seconds, or of one to try.

    Args:
        mean, covariance: the estimate.
        curve: [num_knots], seconds of the sizes `knots`.
        knots: [num_knots], sizes in tokens.
        sizes: [num_sizes], in tokens.
        gains: [num_sizes], expected tokens.
        hope: standard deviations by which a size may be better than expected.
        left: [1], seconds that trials may lose; the expected loss of this one is subtracted.
        scratch: [2, 2 + num_knots].
    """
    best, rate = 0, 0.0
    for i in range(sizes.shape[0]):
        found = gains[i] / interpolated(knots, curve, sizes[i])
        if found > rate:
            best, rate = i, found
    tried, most, lost = best, 0.0, 0.0
    for i in range(sizes.shape[0]):
        if i == best or rate == 0.0:
            continue
        scratch[:] = 0.0
        add_row(mean, knots, sizes[i], 1.0, scratch[0])
        add_row(mean, knots, sizes[best], -1.0, scratch[0])
        doubt = math.sqrt(max(0.0, project(covariance, scratch[0], scratch[1])))
        sec = interpolated(knots, curve, sizes[i])
        hoped = gains[i] - rate * sec * math.exp(-hope * doubt)
        if hoped > most:
            tried, most, lost = i, hoped, sec - gains[i] / rate
    if lost > left[0]:
        return best
    left[0] -= lost
    return tried


@kernel
def write_curve(mean: Float64Array, knots: Float64Array, curve: Float64Array) -> None:
    """Write the seconds of the sizes `knots`.

    A larger size takes no less time: if it seems to, the smaller one was measured under load.
    """
    least, slope = math.inf, math.exp(mean[1])
    for i in range(knots.shape[0] - 1, -1, -1):
        least = min(least, mean[0] + math.log1p(slope * (knots[i] - 1.0)) + mean[2 + i])
        curve[i] = math.exp(least)


@kernel
def correct(
    mean: Float64Array,
    covariance: Float64Array,
    unknown: Float64Array,
    prior: Float64Array,
    of_row: Float64Array,
    surprise: float,
    variance: float,
    forgotten: float,
    new_mean: Float64Array,
    new_covariance: Float64Array,
) -> None:
    """Write the estimate after a measurement, and after some forgetting.

    Args:
        mean, covariance: the estimate before it.
        unknown, prior: mean and covariance before any measurement.
        of_row: covariance of each number with the measurement.
        surprise: the measured log seconds minus the expected ones.
        variance: of the measurement.
        forgotten: share of the estimate, level excepted, that returns to the prior.
        new_mean, new_covariance: written.
    """
    for i in range(of_row.shape[0]):
        new_mean[i] = mean[i] + of_row[i] * surprise / variance
        if i > 0:
            new_mean[i] += forgotten * (unknown[i] - new_mean[i])
        for j in range(of_row.shape[0]):
            known = covariance[i, j] - of_row[i] * of_row[j] / variance
            new_covariance[i, j] = (1.0 - forgotten) * known + forgotten * prior[i, j]
