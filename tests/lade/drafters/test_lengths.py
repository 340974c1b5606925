"""Rules for K against plain simulations."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lade.drafters.lengths import (
    Length,
    Level,
    Mean,
    MeasuredCosts,
    Outcome,
    Rule,
    StepSeconds,
)

SURE = Level(0.9, 0.9, 1)
UNSURE = Level(0.1, 0.3, 1)


def rule_of(length: str | int, costs: MeasuredCosts | None = None, **options: Any) -> Rule:
    made = Length(length, **options)  # type: ignore[arg-type]
    return made.rule(costs or MeasuredCosts())


def grown(rule: Rule, probs: Sequence[float], num_behind: int = 1) -> int:
    """Return how many levels a rule lets a chain of these probabilities have."""
    most, levels, mass = rule.begin(num_behind), list[Level](), 1.0
    for prob in probs[:most]:
        mass *= prob
        levels.append(Level(mass, prob, 1))
        if not rule.goes_on(levels):
            break
    return len(levels)


def told(rule: Rule, num_levels: int, num_right: int, is_ended: bool = True) -> None:
    rule.learn(Outcome([SURE] * num_levels, num_right, is_ended))


@pytest.mark.parametrize(("length", "first", "more"), [("seed", 1, 1), ("heuristic", 20, 2)])
def test_k_grows_after_whole_drafts_and_shrinks_after_others(
    length: str, first: int, more: int
) -> None:
    """Against a simulation of 300 drafts."""
    rng = np.random.default_rng(0)
    rule, k = rule_of(length), first
    for _ in range(300):
        assert rule.begin(1) == k
        num_right = k if rng.random() < 0.6 else int(rng.integers(k))
        told(rule, k, num_right)
        k = min(64, k + more) if num_right == k else max(1, k - 1)


def test_a_draft_that_was_cut_tells_nothing() -> None:
    rule = rule_of("seed")
    told(rule, 1, 1)
    assert rule.begin(1) == 2
    told(rule, 2, 1, is_ended=False)
    assert rule.begin(1) == 2
    told(rule, 2, 0)
    assert rule.begin(1) == 1


def test_a_constant_k_is_constant() -> None:
    rule = rule_of(5)
    told(rule, 5, 0)
    assert grown(rule, [0.01] * 9) == 5
    assert grown(rule_of(5, max_levels=3), [0.9] * 9) == 3


def test_confidence_ends_a_draft_with_its_first_unlikely_token() -> None:
    rule = rule_of("confidence", confidence=0.4)
    assert grown(rule, [0.9, 0.5, 0.39, 0.9]) == 3
    assert grown(rule, [0.4] * 30) == 20
    assert grown(rule_of("confidence", confidence=0.0), [0.01] * 30) == 20
    assert grown(rule_of("heuristic", confidence=0.4), [0.9, 0.1, 0.9]) == 2
    assert grown(rule_of("seed", confidence=0.4), [0.1]) == 1


def steps(base: float, node: float = 0.0) -> StepSeconds:
    """Return what is known after many steps that take so long."""
    known = StepSeconds()
    for num_nodes in [0, 2, 5, 9] * 100:
        known.add(num_nodes, base + node * num_nodes)
    return known


def best_length(right: float, step: float, forward: float, node: float, most: int) -> int:
    """Return how many levels give the most tokens per second, by trying all."""
    speeds = [
        sum(right**depth for depth in range(num + 1)) / (step + num * (forward + node))
        for num in range(most + 1)
    ]
    return int(np.argmax(speeds))


@pytest.mark.parametrize("right", [0.3, 0.5, 0.7, 0.9, 0.97])
@pytest.mark.parametrize("forward", [0.001, 0.01, 0.05, 0.2])
def test_measured_drafts_are_as_long_as_is_fastest(right: float, forward: float) -> None:
    """Where all levels are as likely and that is known, the best length is found by trying all."""
    costs = MeasuredCosts(Mean(forward), Mean(0.001), steps(0.1, 0.002))
    costs.tried, costs.right = [100_000.0] * 10, [100_000.0 * right] * 10
    costs.newest_tried, costs.newest_right = 100_000.0, 100_000.0 * right
    expected = best_length(right, 0.1, forward, 0.002, 20)
    assert grown(rule_of("measured", costs), [right] * 30) == pytest.approx(expected, abs=1)
    assert (expected == 0) == (grown(rule_of("measured", costs), [right] * 30) == 0)


def test_measured_drafts_rest_where_they_do_not_pay_and_are_tried_more_and_more_rarely() -> None:
    """A level costs as much as a step and is never right: of 20,000 steps, few have a draft."""
    costs = MeasuredCosts()
    rule = rule_of("measured", costs)
    tried: list[int] = []
    num_behind, spent = 100, 0.0
    for step in range(20_000):
        num_levels = grown(rule, [0.5] * 20, num_behind)
        if num_levels:
            tried.append(step)
            first_sec = 0.1 + 0.0001 * num_behind
            costs.record_draft(num_behind, first_sec, [0.1] * (num_levels - 1))
            told(rule, num_levels, 0)
            spent += first_sec + 0.1 * (num_levels - 1)
            num_behind = 0
        costs.record_step(num_levels, 0.1 + 0.001 * num_levels)
        num_behind += 1
    assert 3 < len(tried) < 30
    gaps = np.diff(tried)
    assert gaps[-1] > 5 * gaps[0]
    assert spent < 0.01 * 20_000 * 0.1


def test_a_long_text_is_not_run_for_a_trial_alone() -> None:
    """A token to catch up with costs more than a trial may, so only a new, short text is tried."""
    costs = MeasuredCosts(Mean(0.1), Mean(0.01), steps(0.1))
    costs.newest_tried = 50.0
    rule = rule_of("measured", costs)
    for step in range(5000):
        assert rule.begin(100 + step) == 0
        costs.record_step(0, 0.1)
    assert rule.begin(20) == 3


def test_two_wrong_levels_decide_nothing() -> None:
    """A trial costs little beside a rest that holds for two per cent of the time."""
    costs = MeasuredCosts()
    rule = rule_of("measured", costs)
    for is_right in (False, False, True, True, True, True, True, True):
        num_levels = grown(rule, [0.9] * 20)
        assert num_levels >= 3
        costs.record_draft(1, 0.01, [0.01] * (num_levels - 1))
        told(rule, num_levels, num_levels * is_right)
        costs.record_step(num_levels, 0.1)


def test_measured_drafts_come_back_where_they_begin_to_pay() -> None:
    costs = MeasuredCosts(Mean(0.01), Mean(0.001), steps(0.1))
    costs.newest_tried = 50.0
    rule = rule_of("measured", costs)
    assert rule.begin(1) == 0
    num_drafts = 0
    for _ in range(3000):
        num_levels = grown(rule, [0.9] * 20)
        if num_levels:
            num_drafts += 1
            costs.record_draft(1, 0.01, [0.01] * (num_levels - 1))
            told(rule, num_levels, num_levels)
        costs.record_step(num_levels, 0.1)
    assert num_drafts > 1000


def test_a_line_through_steps_follows_a_text_that_grows() -> None:
    known = StepSeconds()
    for _ in range(100):
        for num_nodes in (3, 6, 9):
            known.add(num_nodes, 0.030 + 0.001 * num_nodes)
    assert known.base == pytest.approx(0.030, rel=0.02)
    assert known.node == pytest.approx(0.001, rel=0.1)
    for _ in range(40):  # a text that is much longer: all steps are slower, none by its draft
        for num_nodes in (3, 6, 9):
            known.add(num_nodes, 0.060 + 0.001 * num_nodes)
    assert known.base == pytest.approx(0.060, rel=0.02)
    assert known.node == pytest.approx(0.001, rel=0.1)
    known.add(6, 30.0)  # a pause of the user's
    assert known.base < 0.1


def test_steps_alike_tell_little_of_a_draft_token() -> None:
    known = StepSeconds()
    assert known.node == 0.0
    for _ in range(100):
        known.add(0, 0.1)
    assert known.base == pytest.approx(0.1)
    assert known.node == pytest.approx(0.001)


def test_of_the_first_times_the_shortest_counts() -> None:
    """Libraries prepare kernels in a first forward; it may take seconds."""
    mean = Mean(1.5)
    for _ in range(10):
        mean.add(0.02)
    assert mean.sec == pytest.approx(0.02)
    for _ in range(20):
        mean.add(0.04)
    assert mean.sec == pytest.approx(0.04, rel=0.1)


def test_what_is_measured_is_kept_from_call_to_call() -> None:
    length = Length("measured")
    costs = length.begin_call()
    costs.record_draft(1, 0.5, [0.5])
    costs.record_step(0, 0.1)
    costs.tried[3] = 7.0
    assert length.begin_call().forward is None
    length.end_call(costs)
    costs.tried[3] = 9.0
    known = length.begin_call()
    assert known.tried[3] == 7.0
    assert known.forward == Mean(0.5, 2)
    assert known.step.base == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("length", "options", "message"),
    [
        ("long", {}, "expected length to be 'measured', 'seed', 'heuristic', 'confidence' or a"),
        (True, {}, "expected length to be"),
        (0, {}, "expected length of at least 1, got 0"),
        ("confidence", {"confidence": 1.5}, "expected confidence from 0 to 1, got 1.5"),
    ],
)
def test_wrong_rules_are_refused(length: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule_of(length, **options)
