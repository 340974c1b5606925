"""A user's drafter changes the speed alone, whatever it returns, raises, draws or is."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor

import lade
from ngram_pool import Draft
from tests.grids import thinned
from tests.lade.both import same_as_generate
from tests.lade.drafting.made import (
    OPTIONS,
    PROMPT,
    SAMPLED,
    STRICT,
    Able,
    Faulty,
    Maker,
    Making,
    Random,
    compared,
    ints,
    one_warning,
    shy,
)
from tests.lade.shared import shared_model
from tests.lade.tiny import chain, tiny_model

MALFORMED = {
    "none": None,
    "a list": [6, 7],
    "unequal lengths": Draft(ints(6, 7), ints(-1), ints(1, 2), np.array([0.9, 0.8])),
    "a parent behind its child": Draft(ints(6, 7), ints(1, -1), ints(2, 1), np.array([0.9, 0.8])),
    "a parent that is not there": Draft(ints(6), ints(4), ints(1), np.array([0.9])),
    "a parent below the root": Draft(ints(6), ints(-2), ints(1), np.array([0.9])),
    "tokens that are floats": Draft(np.array([6.5]), ints(-1), ints(1), np.array([0.9])),
    "no number as a probability": Draft(ints(6), ints(-1), ints(1), np.array([np.nan])),
    "a probability above 1": Draft(ints(6), ints(-1), ints(1), np.array([2.0])),
    "two axes": Draft(ints(6)[None], ints(-1), ints(1), np.array([0.9])),
}


@pytest.mark.parametrize("answer", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_draft_is_named_and_the_text_is_right(answer: Any) -> None:
    drafter = Faulty("draft", 1 if answer is None else 2, answer)
    with one_warning(r"without drafts of .Faulty., which failed .*expected"):
        compared(drafter, OPTIONS)
    assert drafter.num_open == 0
    assert drafter.calls[-1] == "close"
    with pytest.raises((TypeError, ValueError), match="expected"):
        compared(Faulty("draft", 2, answer), OPTIONS, config=STRICT)


def test_depths_are_counted_and_what_is_too_much_or_unknown_is_cut() -> None:
    """Nodes past the limit, outside of the vocabulary, and deeper than the text may go."""
    model = shared_model("llama", seed=2)
    (answer,) = model.generate(PROMPT, **OPTIONS).tolist()

    class Lying(Faulty):
        def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
            right = [*answer[len(committed) :], 3, 2**30, 7, 7, 7][:9]
            parents = np.arange(-1, len(right) - 1, dtype=np.int32)
            return Draft(ints(*right), parents, ints(*[1] * len(right)), np.ones(len(right)))

    stats = compared(Lying(), OPTIONS, config=lade.Config(max_draft_tokens=4, strict_drafter=True))
    assert stats.num_steps == 3  # 11 tokens after the prefill's, five a step
    assert stats.accepted_by_depth == [2, 2, 2, 2]


@pytest.mark.parametrize("method", ["open", "draft", "observe", "close"])
@pytest.mark.parametrize("error", thinned([AssertionError, MemoryError], MemoryError))
def test_what_a_drafter_raises_is_told_once(method: str, error: type[Exception]) -> None:
    model, prompt = shared_model("llama", seed=2), PROMPT.repeat(3, 1)
    options = OPTIONS | {"attention_mask": torch.ones_like(prompt)}
    drafter = Faulty(method, error=error())
    with one_warning(error.__name__):
        same_as_generate(model, prompt, drafter=drafter, **options)
    assert drafter.num_open == 0
    assert method == "close" or drafter.calls.count("draft") <= 3


LOOKED_AT = ["open", "draft", "observe", "close", "for_call", "num_successors", "harvest"]


@pytest.mark.parametrize("name", thinned(LOOKED_AT, "draft", "close", "num_successors"))
def test_what_raises_when_it_is_looked_at_is_told_once(name: str) -> None:
    with one_warning(
        r"goes on without drafts of .Shy., which failed \(RuntimeError: do not look\)"
    ):
        compared(shy(name), SAMPLED)
    with pytest.raises(RuntimeError, match="do not look"):
        compared(shy(name), SAMPLED, config=STRICT)


def test_what_raises_whatever_is_looked_at_is_told_once() -> None:
    with one_warning("do not look"):
        compared(shy(*LOOKED_AT), OPTIONS)


@pytest.mark.parametrize("wanted", thinned([-1, 1.5, "x", None, True, -(10**30)], -1, None))
def test_a_wrong_number_of_successors_is_told_once(wanted: Any) -> None:
    drafter = Able()
    drafter.num_successors = wanted
    with one_warning(r"Able., which failed \(.*expected num_successors"):
        compared(drafter, SAMPLED)


@pytest.mark.parametrize("wanted", [0, np.int64(3), 10**30], ids=repr)
def test_any_number_of_successors_may_be_asked_for(wanted: Any) -> None:
    drafter = Able()
    drafter.num_successors = wanted
    compared(drafter, OPTIONS)
    assert ("harvest" in drafter.calls) == (wanted > 0)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_without_a_message_is_told_by_its_name() -> None:
    with one_warning(
        r"Faulty., which failed \(UnspeakableError, and RuntimeError for its message\)"
    ):
        compared(Faulty("draft", 2, error=UnspeakableError()), OPTIONS)


@pytest.mark.parametrize("options", [OPTIONS, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", thinned([Random, Making], Making))
def test_a_drafter_that_draws_changes_no_text(drafter: Any, options: dict[str, Any]) -> None:
    compared(drafter(), options)
    compared(lade.drafters.Merged([lade.drafters.CallPool(), drafter()]), options)


class Emptying(lade.Drafter, LogitsProcessor, lade.ForcedTokens):  # type: ignore[misc]
    """Empties every list that it is given."""

    num_successors = 2

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def forced_tokens(self, row: int, committed: Any, max_tokens: int) -> list[int]:
        committed.clear()
        return []

    def draft(self, sequence: int, committed: Any, max_draft_tokens: int) -> Draft:
        committed.clear()
        return chain([9])

    def observe(self, sequence: int, token_ids: Any) -> None:
        token_ids.clear()

    def harvest(self, sequence: int, *lists: Any) -> None:
        for each in lists[:3]:
            each.clear()


def test_lists_of_a_drafter_are_its_own() -> None:
    model, reported = shared_model("llama", seed=2), list[int]()
    options: dict[str, Any] = {**OPTIONS, "logits_processor": [Emptying()]}
    options["drafter"] = lade.drafters.Merged([Emptying(), lade.drafters.CallPool()])
    options["on_step"] = lambda step: reported.extend(step.token_ids)
    got = lade.generate(model, PROMPT, config=STRICT, **options)
    assert got.tolist() == model.generate(PROMPT, **OPTIONS).tolist()
    assert reported == got[0, PROMPT.shape[1] :].tolist()


def test_an_interrupt_in_a_drafter_is_an_interrupt() -> None:
    drafter = Faulty("draft", 2, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        lade.generate(tiny_model("llama", seed=2), PROMPT, drafter=drafter, **OPTIONS)
    assert drafter.num_open == 0


@pytest.mark.parametrize(
    ("ours", "told"),
    [
        (
            {"pool": 3},
            "expected pool to be a lade.NGramPool, a named pool, or a list of these, got 3",
        ),
        ({"pool": lade.NGramPool}, "or a list of these, got <class"),
        ({"config": {"max_draft_tokens": 3}}, "expected config to be a lade.Config, got {"),
        ({"drafter": 3}, "expected drafter to be an object of a subclass of lade.Drafter, got 3"),
        ({"drafter": Faulty}, "subclass of lade.Drafter, got <class"),
        ({"on_step": 3}, "expected on_step to be callable, got 3"),
    ],
)
def test_wrong_types_do_not_pass_the_door(ours: Any, told: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(TypeError) as raised:
        lade.generate(model, PROMPT, **ours, **OPTIONS)
    assert told in str(raised.value)
    with pytest.raises(TypeError):
        model.generate(PROMPT, custom_generate=lade.decode, **ours, **OPTIONS)


def test_a_pool_that_cannot_grow_costs_the_drafts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    pool = lade.NGramPool()  # observes something as it is made
    monkeypatch.setattr("ngram_pool.NGramPool.observe", fail)
    with pytest.warns(lade.DrafterWarning, match=r"failed \(MemoryError: no room\)"):
        _, got = same_as_generate(tiny_model("llama", seed=2), PROMPT, pool=pool, **OPTIONS)
    assert got.stats.num_draft_tokens == 0


# --- drafters that are made for a call --------------------------------------------------------


def test_each_call_gets_a_drafter_of_its_own_that_knows_the_call() -> None:
    model = tiny_model("llama", seed=2)
    made: list[Faulty] = []

    def make(call: Any) -> Faulty:
        made.append(Faulty())
        return made[-1]

    maker = Maker(make)
    for options in (OPTIONS, {**OPTIONS, "do_sample": True, "temperature": 0.5, "top_k": 3}):
        same_as_generate(model, PROMPT, drafter=maker, **options)
    assert [each.calls[-1] for each in made] == ["close", "close"]
    greedy, sampled = maker.calls
    assert (greedy.samples, sampled.samples) == (False, True)
    assert len(sampled.processors) == len(greedy.processors) + 2
    assert greedy.model is model
    assert greedy.vocab_size == model.config.vocab_size
    assert greedy.max_length == PROMPT.shape[1] + OPTIONS["max_new_tokens"]
    assert (greedy.num_rows, greedy.max_candidates, greedy.rngs) == (1, None, None)


@pytest.mark.parametrize(
    "error", [lade.UnsupportedModelError("mine"), lade.UnsupportedOptionError("mine")]
)
@pytest.mark.parametrize("is_part", [False, True])
def test_what_cannot_draft_for_a_call_ends_it_before_anything_is_generated(
    error: Exception, is_part: bool
) -> None:
    def refuse(call: Any) -> Any:
        raise error

    drafter: Any = Maker(refuse)
    drafter = lade.drafters.Merged([lade.drafters.CallPool(), drafter]) if is_part else drafter
    seen: list[Any] = []
    with pytest.raises(type(error), match="mine"):
        lade.generate(tiny_model(), PROMPT, drafter=drafter, on_step=seen.append, **OPTIONS)
    assert not seen


@pytest.mark.parametrize("kind", [MemoryError, UnspeakableError])
def test_a_drafter_that_cannot_be_made_loses_no_text(kind: type[Exception]) -> None:
    def fail(call: Any) -> Any:
        torch.rand(1)
        raise kind("mine")

    with one_warning(rf"goes on without drafts of .Maker., which failed \({kind.__name__}"):
        compared(Maker(fail), SAMPLED)
    with pytest.raises(kind):
        compared(Maker(fail), SAMPLED, config=STRICT)
