"""Merged drafters in simulated time: at least as fast as the best part, but for a little.

Each call learns anew what parts bring, which costs short calls a few steps.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.grids import thinned
from tests.lade.drafters.simulation import (
    STEP_SEC,
    Clock,
    Made,
    Source,
    a_call,
    an_answer,
    decode,
    merged_of,
)

NUM_TOKENS = 4000
Rate = Callable[[int], float]


def phases(first: float, second: float, length: int = 300) -> Rate:
    return lambda place: (first, second)[place // length % 2]


def change(before: float, after: float) -> Rate:
    return lambda place: before if place < NUM_TOKENS // 2 else after


class Case(NamedTuple):
    """How often two sources are right, and what the second costs."""

    cheap: Rate
    dear: Rate
    sec: float
    most: float  # the time at most, relative to the best part's
    most_short: float  # the same where calls have 200 tokens
    honest: bool = True


def always(rate: float) -> Rate:
    return lambda place: rate


CASES = {
    "the cheap one pays": Case(always(0.6), always(0.7), 0.010, 1.02, 1.03),
    "the other is hopeless": Case(always(0.6), always(0.1), 0.040, 1.02, 1.02),
    "the other promises what it does not keep": Case(
        always(0.5), always(0.2), 0.010, 1.02, 1.04, honest=False
    ),
    "the other takes two steps": Case(always(0.5), always(0.9), 2 * STEP_SEC, 1.02, 1.02),
    "only the dear one pays": Case(always(0.05), always(0.8), 0.006, 1.02, 1.04),
    "neither pays much": Case(always(0.05), always(0.5), 0.018, 1.02, 1.04),
    # In one call, trials would have to run all of the text since the last one.
    "each in turn": Case(phases(0.9, 0.05), always(0.75), 0.010, 1.2, 0.9),
    "the dear one becomes good": Case(always(0.3), change(0.05, 0.85), 0.010, 1.02, 0.9),
    "the dear one becomes bad": Case(always(0.3), change(0.85, 0.05), 0.010, 0.9, 0.9),
}


def parts(clock: Clock, answer: list[int], case: Case) -> tuple[Source, Source]:
    cheap = Source(clock, answer, 0.00005, case.cheap, length=8, seed=3)
    dear = Source(clock, answer, case.sec, case.dear, prompt_sec=0.0005, honest=case.honest, seed=4)
    return cheap, dear


CALLS = [(name, num) for name in CASES for num in (NUM_TOKENS, 200)]
QUICK = (("each in turn", NUM_TOKENS), ("the cheap one pays", 200))


@pytest.mark.parametrize(
    "calls", thinned(CALLS, *QUICK), ids=lambda calls: f"{calls[0]}-{calls[1]}"
)
def test_the_best_part_is_hardly_faster(
    calls: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, per_call = calls
    case, answer = CASES[name], an_answer(NUM_TOKENS + 50)
    alone = []
    for which in (0, 1):
        clock = Clock()
        alone.append(decode(parts(clock, answer, case)[which], clock, answer, NUM_TOKENS, per_call))
    clock = Clock()
    cheap, dear = parts(clock, answer, case)
    merged = merged_of(monkeypatch, clock, cheap, Made(dear, "dear"))
    took = decode(merged, clock, answer, NUM_TOKENS, per_call)
    most = case.most if per_call == NUM_TOKENS else case.most_short
    assert took.sec < most * min(each.sec for each in alone)
    assert took.sources["dear"] == dear.num_asked
    assert dear.num_opened == dear.num_closed == NUM_TOKENS // per_call


@pytest.mark.exhaustive
def test_trials_of_what_does_not_pay_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = an_answer(20_050)
    clock = Clock()
    case = CASES["the other is hopeless"]
    cheap, dear = parts(clock, answer, case)
    merged = merged_of(monkeypatch, clock, cheap, Made(dear, "dear"))
    asked = [decode(merged, clock, answer, num).sources["dear"] for num in (500, 20_000)]
    assert asked[0] > 2
    # Half a percent of the time: of 20,000 tokens' 190 s, at 40 ms.
    assert 0 < asked[1] < 24


def test_a_model_does_not_run_a_prompt_before_the_cost_of_steps_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = an_answer(100)
    clock = Clock()
    cheap, dear = parts(clock, answer, CASES["only the dear one pays"])
    merged = merged_of(monkeypatch, clock, cheap, Made(dear, "dear"))
    decode(merged, clock, answer, 1)  # one step
    assert dear.num_asked == 0
    decode(merged, clock, answer, 40)
    assert dear.num_asked > 0


def test_order_is_that_of_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = an_answer(2050)
    clock = Clock()
    cheap, dear = parts(clock, answer, CASES["the cheap one pays"])
    merged: Any = merged_of(monkeypatch, clock, Made(dear, "dear"), cheap)
    decode(merged, clock, answer, 300)
    assert merged.for_call(a_call())._sources.by_cost([0, 1]) == [1, 0]
    assert cheap.num_asked > dear.num_asked


def test_a_call_does_not_tell_how_right_drafters_were_in_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A source that was right, or never, in the calls before; then the same call, step by step."""
    answer, num = an_answer(NUM_TOKENS + 50), 400
    found = []
    for rate in (0.95, 0.02):
        clock = Clock()
        before, same = always(rate), always(0.6)
        case = CASES["only the dear one pays"]._replace(cheap=before, dear=before)
        cheap, dear = parts(clock, answer, case)
        merged = merged_of(monkeypatch, clock, cheap, Made(dear, "dear"))
        decode(merged, clock, answer, 2000, 200)
        for source in (cheap, dear):
            source.rate, source.rng = same, np.random.default_rng(0)
        took = decode(merged, clock, answer, num)
        found.append((round(took.sec, 6), *took[1:]))
    assert found[0] == found[1]
    assert found[0][2]["dear"] >= 5
