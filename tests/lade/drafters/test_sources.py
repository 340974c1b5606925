"""Several drafters in simulated time: hardly slower than the best of them alone."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import lade
from lade.batch import Batch
from lade.budget.budget import Budget
from lade.budget.seconds import Seconds
from lade.drafters import Merged
from lade.drafters.merged import sources_of
from lade.drafting.drafter import DraftingCall
from lade.drafting.drafts import chain
from lade.drafting.speculator import Speculator
from lade.tree import matched_path
from tests.grids import thinned

NUM_TOKENS, NUM_PROMPT, VOCAB_SIZE = 4000, 100, 50
STEP_SEC, SEC_PER_NODE = 0.020, 0.0006  # of a forward over one token, and of each further one
ANSWER = np.random.default_rng(1).integers(0, VOCAB_SIZE, NUM_TOKENS + 50).tolist()
Rate = Callable[[int], float]


class Clock:
    """Time that passes only where the simulation says so, and where in the text a call begins."""

    now, place = 0.0, 0

    def __call__(self) -> float:
        return self.now


class Source(lade.Drafter):
    """Drafts chains of the answer, each token right at the rate of its place; takes its time."""

    def __init__(
        self, clock: Clock, sec: float, rate: Rate, is_model: bool, honest: bool = True
    ) -> None:
        self.clock, self.sec, self.rate, self.is_model = clock, sec, rate, is_model
        self.honest, self.rng = honest, np.random.default_rng(3 + is_model)
        self.num_asked = self.num_run = 0

    def for_call(self, call: DraftingCall) -> Any:
        self.num_run = 0
        return self

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Any:
        # A few tokens are run in the time of one.
        num_behind = len(committed) - self.num_run if self.is_model else 0
        self.clock.now += self.sec + (0.0005 * num_behind if num_behind > 16 else 0.0)
        self.num_run = len(committed)
        self.num_asked += 1
        start = self.clock.place + len(committed) - NUM_PROMPT
        rate = self.rate(start)
        tokens = []
        for right in ANSWER[start : start + min(7, max_draft_tokens)]:
            wrong = (right + int(self.rng.integers(1, VOCAB_SIZE))) % VOCAB_SIZE
            tokens.append(right if self.rng.random() < rate else wrong)
        promised = rate if self.honest else 0.9
        return chain(tokens, (promised ** np.arange(1.0, len(tokens) + 1)).tolist())


class Cheap(Source):
    for_call = lade.Drafter.for_call  # known to be no model


def decode(
    drafter: Any, clock: Clock, num_tokens: int = NUM_TOKENS, per_call: int = 10**6
) -> float:
    """Decode texts of `per_call` tokens by a drafter; return the seconds."""
    costs, begun, place = dict[int, Seconds](), clock.now, 0
    model = SimpleNamespace(config=None)
    while place < num_tokens:
        end = min(num_tokens, place + per_call)
        length = NUM_PROMPT + min(per_call, num_tokens)
        call = DraftingCall(model, VOCAB_SIZE, length)
        clock.place, prompt, budget = place, [0] * NUM_PROMPT, Budget(costs)
        batch = Batch(torch.tensor([prompt]), None)
        (row,) = batch.rows
        text, row.context = row.token_ids, prompt
        sources, runner = sources_of(drafter, call, is_strict=True), SimpleNamespace()
        speculator = Speculator(batch, sources, call, budget, runner)
        speculator.open_all()
        while (now := place + len(text) - NUM_PROMPT) < end:
            started = clock.now
            draft = speculator.propose(row, budget.wish)
            num = budget.nums_of_nodes({row: draft.probs})[row]
            clock.now += STEP_SEC + SEC_PER_NODE * num
            coming = ANSWER[now : now + num + 1]
            emitted = coming[: len(matched_path(draft.first(num), coming)) + 1]
            text += emitted
            speculator.observe(row, emitted)
            budget.learn({row: (draft, emitted)}, {row: len(text)})
            speculator.record(1, num, clock.now - started, False)
        speculator.close()
        place = end
    return clock.now - begun


class Case(NamedTuple):
    """How often two sources are right, and what the second costs."""

    cheap: Rate
    dear: Rate
    sec: float
    most: float  # the time at most, relative to the best part's
    most_short: float  # the same where calls have 200 tokens
    honest: bool = True

    def sources(self, clock: Clock) -> tuple[Source, Source]:
        return (
            Cheap(clock, 0.00005, self.cheap, is_model=False),
            Source(clock, self.sec, self.dear, is_model=True, honest=self.honest),
        )


def always(rate: float) -> Rate:
    return lambda place: rate


def changing(before: float, after: float, length: int = NUM_TOKENS // 2) -> Rate:
    return lambda place: (before, after)[place // length % 2]


CASES = {
    "the cheap one pays": Case(always(0.6), always(0.7), 0.010, 1.03, 1.04),
    "the other is hopeless": Case(always(0.6), always(0.1), 0.040, 1.03, 1.03),
    "the other promises too much": Case(always(0.5), always(0.2), 0.010, 1.03, 1.05, False),
    "only the dear one pays": Case(always(0.05), always(0.8), 0.006, 1.03, 1.05),
    # In one call, trials would have to run all of the text since the last one.
    "each in turn": Case(changing(0.9, 0.05, 300), always(0.75), 0.010, 1.25, 0.95),
    "the dear one becomes good": Case(always(0.3), changing(0.05, 0.85), 0.010, 1.03, 0.95),
}
CALLS = [(name, num) for name in CASES for num in (NUM_TOKENS, 200)]
QUICK = (("each in turn", NUM_TOKENS), ("the cheap one pays", 200))


@pytest.mark.parametrize(
    "calls", thinned(CALLS, *QUICK), ids=lambda calls: "-".join(map(str, calls))
)
def test_the_best_part_is_hardly_faster(
    calls: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, per_call = calls
    case, alone = CASES[name], []
    for which in (0, 1):
        clock = Clock()
        alone.append(decode(case.sources(clock)[which], clock, per_call=per_call))
    clock = Clock()
    monkeypatch.setattr("lade.drafting.speculator.perf_counter", clock)
    took = decode(Merged(case.sources(clock)), clock, per_call=per_call)
    most = case.most if per_call == NUM_TOKENS else case.most_short
    assert took < most * min(alone)


def test_a_call_tells_nothing_of_texts_but_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that was right, or never, in the calls before; then the same call, step by step."""
    found = []
    for rate in (0.95, 0.02):
        clock = Clock()
        monkeypatch.setattr("lade.drafting.speculator.perf_counter", clock)
        cheap, dear = Case(always(rate), always(rate), 0.006, 0, 0).sources(clock)
        merged = Merged([dear, cheap])
        decode(merged, clock, 2000, 200)
        # Models come last: the dear one is asked where it adds to the cheap one.
        assert cheap.num_asked > dear.num_asked > 0
        for source in (cheap, dear):
            source.rate, source.rng, source.num_asked = always(0.6), np.random.default_rng(0), 0
        found.append((round(decode(merged, clock, 400), 6), cheap.num_asked, dear.num_asked))
    # How often drafts were measured decides how exactly it is known what they take.
    assert found[0] == pytest.approx(found[1], rel=0.1)
    assert found[0][2] >= 5
