"""Drafters that are made for one call, from what the call says."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import lade
from lade.drafting.drafter import DraftingCall
from lade.stats import SourceStats
from ngram_pool import Draft, SampledDraft
from tests.lade.both import same_as_generate
from tests.lade.drafting.test_drafters import (
    OPTIONS,
    PROMPT,
    SAMPLED,
    Faulty,
    UnspeakableError,
    compared,
    ints,
    one_warning,
)
from tests.lade.tiny import tiny_model


class Maker(lade.Drafter):
    """Makes the drafters of calls."""

    def __init__(self, make: Callable[[DraftingCall], Any]) -> None:
        self.make = make
        self.calls: list[DraftingCall] = []

    def for_call(self, call: DraftingCall) -> Any:
        self.calls.append(call)
        return self.make(call)


class Counting(Faulty):
    """Counts what it was asked for."""

    sources: Mapping[str, SourceStats] = {"mine": SourceStats(2, 3, 1, 0.5)}


def test_each_call_gets_a_drafter_of_its_own_that_knows_the_call() -> None:
    model = tiny_model("llama", seed=2)
    made: list[Counting] = []

    def make(call: DraftingCall) -> Counting:
        made.append(Counting("", 0, None, None))
        return made[-1]

    maker = Maker(make)
    for options in (OPTIONS, {**OPTIONS, "do_sample": True, "temperature": 0.5, "top_k": 3}):
        _, output = same_as_generate(model, PROMPT, drafter=maker, **options)
        assert output.stats.sources == {"mine": SourceStats(2, 3, 1, 0.5)}
        assert output.stats.as_dict()["sources"]["mine"]["num_asked"] == 2
    assert [each.calls[-1] for each in made] == ["close", "close"]
    greedy, sampled = maker.calls
    assert (greedy.samples, sampled.samples) == (False, True)
    assert len(sampled.processors) == len(greedy.processors) + 2
    assert greedy.model is model
    assert greedy.vocab_size == model.config.vocab_size
    assert greedy.max_length == PROMPT.shape[1] + OPTIONS["max_new_tokens"]
    assert (greedy.num_rows, greedy.max_candidates, greedy.rngs) == (1, None, None)


def test_the_drafter_of_the_call_itself_can_be_had() -> None:
    maker = Maker(lambda call: call.make_pool_drafter())
    _, output = same_as_generate(tiny_model("llama", seed=2), PROMPT, drafter=maker, **OPTIONS)
    assert output.stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    "error", [lade.UnsupportedModelError("mine"), lade.UnsupportedOptionError("mine")]
)
def test_what_cannot_draft_for_a_call_ends_it_before_anything_is_generated(
    error: Exception,
) -> None:
    def refuse(call: DraftingCall) -> Any:
        raise error

    seen: list[Any] = []
    with pytest.raises(type(error), match="mine"):
        lade.generate(tiny_model(), PROMPT, drafter=Maker(refuse), on_step=seen.append, **OPTIONS)
    assert not seen


@pytest.mark.parametrize("kind", [MemoryError, ValueError, UnspeakableError])
def test_a_drafter_that_cannot_be_made_loses_no_text(kind: type[Exception]) -> None:
    def fail(call: DraftingCall) -> Any:
        torch.rand(1)
        raise kind("mine")

    with one_warning(rf"goes on without drafts: Maker failed \({kind.__name__}"):
        compared(Maker(fail), SAMPLED)
    with pytest.raises(kind):
        compared(Maker(fail), SAMPLED, config=lade.Config(strict_drafter=True))


@pytest.mark.parametrize("made", [None, 3, Faulty])
def test_what_is_made_and_is_no_drafter_is_told_once(made: Any) -> None:
    with one_warning("goes on without drafts: .* failed"):
        compared(Maker(lambda call: made), OPTIONS)


def drawn(*token_ids: int) -> SampledDraft:
    """A chain of tokens, each drawn from two."""
    num = len(token_ids)
    support = np.array([[token_id, token_id + 1] for token_id in token_ids], np.int32)
    parents = np.arange(-1, num - 1, dtype=np.int32)
    probs = np.full((num, 2), 0.5)
    return SampledDraft(ints(*token_ids), parents, parents + 2, np.ones(num), support, probs)


class Drawing(Faulty):
    """Draws five tokens in each step."""

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        return drawn(4, 5, 6, 7, 8).first(max_draft_tokens)


def test_a_drawn_draft_is_verified_whole_whatever_it_costs() -> None:
    model = tiny_model("llama", seed=2)
    steps: list[Any] = []
    config = lade.Config(acceptance="rejection", strict_drafter=True, step_costs={1: 1, 2: 99})
    maker = Maker(lambda call: Drawing("", 0, None, None))
    options = {**OPTIONS, "do_sample": True, "eos_token_id": None, "max_new_tokens": 30}
    lade.generate(model, PROMPT, drafter=maker, config=config, on_step=steps.append, **options)
    (call,) = maker.calls
    assert call.rngs is not None
    assert len(call.rngs) == 1
    verified = [step.num_draft_tokens for step in steps[1:]]
    assert verified[:3] == [5, 5, 5]  # at the end of the text there is less room


@pytest.mark.parametrize(
    ("config", "draft", "told"),
    [
        (lade.Config(), drawn(4), "expected a Draft where drafts are not drawn"),
        (
            lade.Config(acceptance="rejection", verification="chain"),
            SampledDraft(
                ints(4, 5),
                ints(-1, -1),
                ints(1, 1),
                np.ones(2),
                ints(4, 5).reshape(2, 1),
                np.ones((2, 1)),
            ),
            "expected a drawn draft of at most 1 paths, got 2",
        ),
    ],
    ids=["not drawn", "too many paths"],
)
def test_a_drawn_draft_that_cannot_be_verified_is_refused(
    config: lade.Config, draft: SampledDraft, told: str
) -> None:
    model = tiny_model("llama", seed=2)
    maker = Maker(lambda call: Faulty("draft", 1, draft, None))
    options = {**OPTIONS, "do_sample": True}
    with pytest.warns(lade.DrafterWarning, match=told):
        lade.generate(model, PROMPT, drafter=maker, config=config, **options)
