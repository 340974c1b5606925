"""Seconds learned on made-up machines: what is chosen by them, and what that costs."""

from functools import partial

import numpy as np
import pytest

from lade.budget.seconds import KNOTS, Seconds
from tests.grids import thinned
from tests.lade.budget.machines import KINDS, Floats, Machine, gains, rates

NUM_STEPS, NUM_SEEDS = 300, 10
OPTIONS = KNOTS[KNOTS <= 64]


def learned(seconds: Seconds, machine: Machine, expected: Floats) -> int:
    """Choose by what was learned, and learn what comes of it."""
    best = seconds.choose(OPTIONS, expected[OPTIONS.astype(int) - 1])
    size = int(OPTIONS[best])
    seconds.record(size, machine.measure(size))
    return size


def known(machine: Machine, expected: Floats) -> int:
    """Choose what is best."""
    size = 1 + int((expected / machine.sec()).argmax())
    machine.measure(size)
    return size


def fixed(size: int, machine: Machine, expected: Floats) -> int:
    """Choose the same size in each step."""
    machine.measure(size)
    return size


QUICK = ("a job in bfloat16", "steep", "noise", "a load beside a cliff")


@pytest.mark.parametrize("name", thinned([*KINDS], *QUICK))
def test_what_is_chosen_loses_2_percent_at_most_once_100_steps_were_measured_and_6_before(
    name: str,
) -> None:
    """Against the best of fixed sizes in hindsight; and little against one who knows it all."""
    kind, found, best, ideal = KINDS[name], [], [], []
    for seed in range(NUM_SEEDS):
        expected, seconds = gains(NUM_STEPS, seed), Seconds()
        found.append(rates(kind, partial(learned, seconds), expected, seed))
        ideal.append(rates(kind, known, expected, seed))
        of_fixed = [
            rates(kind, partial(fixed, size), expected, seed)
            for size in (1, 2, 4, 8, 12, 16, 24, 32, 64)
        ]
        best.append(np.max(of_fixed, axis=0))
    early, late = np.mean(np.array(found) / np.array(best), axis=0)
    assert early >= 0.94
    assert late >= 0.98
    early, late = np.mean(np.array(found) / np.array(ideal), axis=0)
    assert early >= 0.88
    assert late >= 0.91
