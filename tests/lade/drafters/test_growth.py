"""Rules for K against plain simulations."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lade.budget.levels import Level, Rule
from lade.budget.sources import Mean
from lade.drafters.growth import Growth

SURE = Level(0.9, 0.9, 1)


def rule_of(length: str | int, **options: Any) -> Rule:
    return Growth(length, **options).rule()  # type: ignore[arg-type]


def grown(rule: Rule, probs: Sequence[float]) -> int:
    """Return how many levels a rule lets a chain of these probabilities have."""
    levels, mass = list[Level](), 1.0
    for prob in probs[: rule.num_levels]:
        mass *= prob
        levels.append(Level(mass, prob, 1))
        if not rule.goes_on(levels):
            break
    return len(levels)


def told(rule: Rule, num_levels: int, num_right: int) -> None:
    rule.learn([SURE] * num_levels, num_right, is_ended=True)


def test_a_constant_k_is_constant() -> None:
    rule = rule_of(5)
    told(rule, 5, 0)
    assert grown(rule, [0.01] * 9) == 5
    assert grown(rule_of(5, max_draft_tokens=3), [0.9] * 9) == 3


def test_confidence_ends_a_draft_with_its_first_unlikely_token() -> None:
    rule = rule_of("confidence", confidence=0.4)
    assert grown(rule, [0.9, 0.5, 0.39, 0.9]) == 3
    assert grown(rule, [0.4] * 30) == 20
    assert grown(rule_of("confidence", confidence=0.0), [0.01] * 30) == 20


def best_length(right: float, step: float, forward: float, node: float, most: int) -> int:
    """Return how many levels give the most tokens per second, by trying all; at least one."""
    speeds = [
        sum(right**depth for depth in range(num + 1)) / (step + num * (forward + node))
        for num in range(1, most + 1)
    ]
    return 1 + int(np.argmax(speeds))


@pytest.mark.parametrize(
    ("right", "promised"), [(0.3, 0.9), (0.5, 0.3), (0.7, 0.7), (0.9, 0.3), (0.97, 0.9)]
)
@pytest.mark.parametrize("forward", [0.001, 0.01, 0.05, 0.2])
def test_measured_drafts_are_as_long_as_is_fastest(
    right: float, forward: float, promised: float
) -> None:
    """Where levels are as likely, whatever is promised, the best length is found by trying all."""
    forward_sec = Mean()
    forward_sec.add(forward)
    rule = Rule(20, 0.4, lambda num_nodes: 0.1 + 0.002 * num_nodes, forward_sec)
    rng = np.random.default_rng(0)
    lengths = []
    for _ in range(600):
        num = grown(rule, [promised] * 20)
        lengths.append(num)
        num_right = int(np.argmax(rng.random(num + 1) >= [*[right] * num, 0.0]))
        levels = [Level(promised**depth, promised, 1) for depth in range(1, num + 1)]
        rule.learn(levels, num_right, num_right < num)
    expected = best_length(right, 0.1, forward, 0.002, 20)
    assert np.mean(lengths[100:]) == pytest.approx(expected, rel=0.3, abs=1)


def test_drafts_end_by_confidence_until_costs_are_known() -> None:
    rule = Rule(20, 0.4, lambda num_nodes: 0.1, Mean())
    assert grown(rule, [0.9, 0.5, 0.39, 0.9]) == 3
    assert grown(Growth("measured").rule(None), [0.9, 0.1, 0.9]) == 2


def test_how_often_levels_are_right_is_learned_of_late() -> None:
    rule = Rule(5)
    assert rule.mean_right == pytest.approx(0.7)
    for _ in range(50):
        told(rule, 5, 0)
    assert rule.mean_right < 0.1
    for _ in range(50):
        told(rule, 5, 5)
    assert rule.mean_right > 0.9


def test_of_the_first_times_the_shortest_counts() -> None:
    """Libraries prepare kernels in a first forward; it may take seconds."""
    mean = Mean()
    for sec in (1.5, *[0.02] * 10):
        mean.add_sec(sec)
    assert mean.value == pytest.approx(0.02)
    mean.add_sec(30.0)  # a pause of the user's
    assert mean.value < 0.03
    for _ in range(60):
        mean.add_sec(0.04)
    assert mean.value == pytest.approx(0.04, rel=0.1)


@pytest.mark.parametrize(
    ("length", "options", "message"),
    [
        ("long", {}, "expected length to be 'measured', 'confidence' or a number"),
        (True, {}, "expected length to be"),
        (0, {}, "expected length of at least 1, got 0"),
        ("confidence", {"confidence": 1.5}, "expected confidence from 0 to 1, got 1.5"),
        (3, {"expansion": "bush"}, "expected expansion to be 'tree' or 'chain', got 'bush'"),
        (3, {"max_draft_tokens": 0}, "expected max_draft_tokens of at least 1, got 0"),
    ],
)
def test_wrong_rules_are_refused(length: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule_of(length, **options)
