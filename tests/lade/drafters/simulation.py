"""Decoding in simulated time: sources of known cost and quality, a target of known cost."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from lade.budget.budget import MeasuredBudget
from lade.budget.calibration import Outcome
from lade.budget.costs import ForwardCosts
from lade.drafters.merged import Merged
from lade.drafting.drafter import Drafter, DraftingCall
from lade.drafting.drafts import chain, matched_depth
from ngram_pool import Draft

VOCAB_SIZE = 50
NUM_PROMPT = 100
STEP_SEC = 0.020  # of a forward over one token
SEC_PER_NODE = 0.0006  # of each further one


class Clock:
    """Time that passes only where the simulation says so, and where in the text a call begins."""

    def __init__(self) -> None:
        self.now = 0.0
        self.place = 0

    def __call__(self) -> float:
        return self.now


class Source(Drafter):
    """Drafts chains of an answer, each token right with a probability that may change.

    Args:
        clock: goes on by `sec` with each draft, and by `prompt_sec` with each token that it runs.
        answer: the whole text.
        rate: the probability at a place of the text.
        honest: whether the drafts' probabilities are that rate; else they promise 0.9.
        made: whether it makes a drafter for each call, as a model does.
    """

    def __init__(
        self,
        clock: Clock,
        answer: Sequence[int],
        sec: float,
        rate: Callable[[int], float],
        *,
        length: int = 6,
        prompt_sec: float = 0.0,
        honest: bool = True,
        seed: int = 0,
    ) -> None:
        self.clock, self.answer, self.sec, self.rate = clock, answer, sec, rate
        self.length, self.prompt_sec, self.honest = length, prompt_sec, honest
        self.rng = np.random.default_rng(seed)
        self.num_asked = self.num_opened = self.num_closed = self.num_run = 0

    def open(self, prompt_ids: Sequence[int]) -> int:
        self.num_opened += 1
        self.num_run = 0
        return self.num_opened

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        num_behind = len(committed) - self.num_run
        # A few tokens are run in the time of one.
        self.clock.now += self.sec + (self.prompt_sec * num_behind if num_behind > 16 else 0.0)
        self.num_run = len(committed)
        self.num_asked += 1
        start = self.clock.place + len(committed) - NUM_PROMPT
        rate = self.rate(start)
        tokens: list[int] = []
        for place in range(start, start + min(self.length, max_draft_tokens)):
            right = self.answer[place % len(self.answer)]
            is_right = self.rng.random() < rate
            tokens.append(
                right if is_right else (right + int(self.rng.integers(1, VOCAB_SIZE))) % VOCAB_SIZE
            )
        promised = rate if self.honest else 0.9
        return chain(tokens, (promised ** np.arange(1.0, len(tokens) + 1)).tolist())

    def close(self, sequence: int) -> None:
        self.num_closed += 1


class Made(Drafter):
    """Makes a source the drafter of each call, so that it is opened late."""

    def __init__(self, source: Source, name: str) -> None:
        self.source, self.name = source, name

    def for_call(self, call: DraftingCall) -> Any:
        return self.source


class Run(NamedTuple):
    """What a simulation took."""

    sec: float
    num_steps: int
    sources: dict[str, Any]


def a_call(max_length: int = 10**6, **changes: Any) -> DraftingCall:
    fields: dict[str, Any] = {"model": None, "vocab_size": VOCAB_SIZE, "is_strict": True}
    return DraftingCall(max_length=max_length, **(fields | changes))


def decode(
    drafter: Any, clock: Clock, answer: Sequence[int], num_tokens: int, per_call: int = 10**6
) -> Run:
    """Decode texts of `per_call` tokens by a drafter, or by one that it makes for each call."""
    costs = ForwardCosts()
    begun, num_steps, sources = clock.now, 0, dict[str, Any]()
    place = 0
    while place < num_tokens:
        end = min(num_tokens, place + per_call)
        of_call = (
            drafter.for_call(a_call(NUM_PROMPT + min(per_call, num_tokens)))
            if hasattr(drafter, "for_call")
            else drafter
        )
        clock.place, text = place, [0] * NUM_PROMPT
        sequence, budget = of_call.open(text), MeasuredBudget(costs)
        while (place_now := place + len(text) - NUM_PROMPT) < end:
            draft = of_call.draft(sequence, text, budget.max_draft_tokens)
            num = budget.num_nodes([draft.probs], 0)
            sec = STEP_SEC + SEC_PER_NODE * num
            clock.now += sec
            coming = [answer[(place_now + i) % len(answer)] for i in range(num + 1)]
            accepted = matched_depth(draft.first(num), coming)
            emitted = coming[: accepted + 1]
            text += emitted
            of_call.observe(sequence, emitted)
            budget.record(1, num, sec, [Outcome(0, draft, emitted)], {0: len(text)})
            num_steps += 1
        of_call.close(sequence)
        for name, stats in getattr(of_call, "sources", {}).items():
            sources[name] = sources.get(name, 0) + stats.num_asked
        place = end
    return Run(clock.now - begun, num_steps, sources)


def an_answer(num_tokens: int, seed: int = 1) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, VOCAB_SIZE, num_tokens).tolist()
    return found


def merged_of(monkeypatch: pytest.MonkeyPatch, clock: Clock, *parts: Any) -> Merged:
    """Return drafters as one that measures simulated time."""
    monkeypatch.setattr("lade.drafters.merging.perf_counter", clock)
    return Merged(parts)
