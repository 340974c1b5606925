"""How likely counts are under a distribution, in plain Python, for tests of distributions."""

import math
from collections.abc import Sequence

# A right distribution fails one test in a million (with the seeds fixed, it fails always or never).
FALSE_ALARM = 1e-6
# SideNodes with a smaller expectation are counted as one: the approximation by chi-square needs it.
MIN_EXPECTED = 20.0


def p_value(counts: Sequence[int], probs: Sequence[float]) -> float:
    """Return the chance of counts at least so far from their expectation; 0 for an impossible one.

    Source: Pearson's chi-square test, with as many degrees of freedom as cells but one.
    """
    if any(count for count, prob in zip(counts, probs, strict=True) if prob == 0):
        return 0.0
    num_samples = sum(counts)
    cells = []
    rest_count, rest_expected = 0, 0.0
    for count, prob in zip(counts, probs, strict=True):
        if num_samples * prob >= MIN_EXPECTED:
            cells.append((count, num_samples * prob))
        else:
            rest_count, rest_expected = rest_count + count, rest_expected + num_samples * prob
    if rest_expected > 0:
        cells.append((rest_count, rest_expected))
    distance = sum((count - expected) ** 2 / expected for count, expected in cells)
    return chi_square_tail(distance, len(cells) - 1)


def chi_square_tail(distance: float, degrees: int) -> float:
    """Return the chance that a chi-square variable exceeds `distance`; the closed form."""
    half = distance / 2
    if degrees == 0 or half == 0:
        return 1.0
    if degrees % 2 == 0:
        tail, exponent = 0.0, 0.0
    else:
        tail, exponent = math.erfc(math.sqrt(half)), 0.5
    while exponent < degrees / 2:
        tail += math.exp(exponent * math.log(half) - half - math.lgamma(exponent + 1))
        exponent += 1
    return tail
