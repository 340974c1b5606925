"""A drafter can never fail a call: what it raises, and what is no draft, costs the drafts alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

import lade
from lade.drafting.drafts import checked
from lade.drafting.guard import Guard, unchanged_generators
from lade.drafting.pool_drafter import PoolDrafter
from lade.errors import in_one_line
from lade.stats import SourceStats
from ngram_pool import Draft, SampledDraft
from tests.grids import thinned
from tests.lade.both import same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import tiny_model

PROMPT = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
OPTIONS: dict[str, Any] = {
    "attention_mask": torch.ones_like(PROMPT),
    "do_sample": False,
    "max_new_tokens": 12,
    "pad_token_id": 0,
}
SAMPLED = {**OPTIONS, "do_sample": True, "temperature": 1.5}


def compared(drafter: Any, options: dict[str, Any], **ours: Any) -> Any:
    """Hold the text, and the random state at its end, against those of plain decoding."""
    by = partial(lade.generate, **ours)
    model = shared_model("llama", seed=2)
    _, got = same_as_generate(model, PROMPT, drafter=drafter, seed=7, by=by, **options)
    return got.stats


@contextmanager
def one_warning(match: str) -> Iterator[None]:
    """Expect one warning of a drafter, and no other."""
    with pytest.warns(lade.DrafterWarning, match=match) as told:
        yield
    assert len(told) == 1


class Faulty(lade.Drafter):
    """Drafts a token or two, and fails in one method at one of its calls."""

    def __init__(self, method: str, at: int, answer: Any, error: BaseException | None) -> None:
        self.method, self.at, self.answer, self.error = method, at, answer, error
        self.calls: list[str] = []
        self.num_open = 0

    def _called(self, method: str) -> bool:
        self.calls.append(method)
        is_now = method == self.method and self.calls.count(method) == self.at
        if is_now and self.error is not None:
            raise self.error
        return is_now

    def open(self, prompt_ids: Sequence[int]) -> int:
        self._called("open")
        self.num_open += 1
        return 3

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Any:
        good = Draft(ints(6), ints(-1), ints(1), np.array([0.9]))
        return self.answer if self._called("draft") else good

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        self._called("observe")

    def close(self, sequence: int) -> None:
        self.num_open -= 1
        self._called("close")


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


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
    model = shared_model("llama", seed=2)
    at = 1 if answer is None else 2
    drafter = Faulty("draft", at, answer, None)
    with pytest.warns(lade.DrafterWarning, match=r"without drafts: Faulty failed .*expected"):
        same_as_generate(model, PROMPT, drafter=drafter, **OPTIONS)
    assert drafter.num_open == 0
    assert drafter.calls[-1] == "close"
    with pytest.raises((TypeError, ValueError), match="expected"):
        lade.generate(
            model,
            PROMPT,
            drafter=Faulty("draft", at, answer, None),
            config=lade.Config(strict_drafter=True),
            **OPTIONS,
        )


@pytest.mark.parametrize("method", ["open", "draft", "observe", "close"])
@pytest.mark.parametrize(
    ("error", "num_rows"),
    [
        pytest.param(RuntimeError("mine"), 1, marks=pytest.mark.exhaustive),
        (MemoryError("mine"), 3),
        pytest.param(AssertionError(), 1, marks=pytest.mark.exhaustive),
    ],
)
def test_what_a_drafter_raises_is_told_once(method: str, error: Exception, num_rows: int) -> None:
    model = shared_model("llama", seed=2)
    prompt = PROMPT.repeat(num_rows, 1)
    options = OPTIONS | {"attention_mask": torch.ones_like(prompt)}
    drafter = Faulty(method, 1, None, error)
    with pytest.warns(lade.DrafterWarning) as told:
        same_as_generate(model, prompt, drafter=drafter, **options)
    assert len(told) == 1
    assert type(error).__name__ in str(told[0].message)
    assert drafter.num_open == 0
    assert method == "close" or drafter.calls.count("draft") <= num_rows


class Able(Faulty):
    """Can do all that a drafter may, and nothing of it well."""

    num_successors: Any = 2
    draws = learns_ngrams = True
    has_table = takes_pool = False
    sources: Any = MappingProxyType({"mine": SourceStats()})

    def sample(self, *_: Any) -> Any:
        raise RuntimeError("not to be drawn from")

    def harvest(self, *_: Any) -> None:
        self._called("harvest")

    def explore(self, sequence: int, excluded: Any, max_tokens: int) -> Any:
        self._called("explore")
        return ints(), np.empty(0)

    def observe_ngrams(self, sequence: int, ngrams: Any) -> None:
        self._called("observe_ngrams")


def shy(*names: str, base: type = Able) -> Any:
    """Return a drafter of which some attributes raise when they are looked at."""

    def look(self: Any) -> Any:
        raise RuntimeError("do not look")

    return type("Shy", (base,), dict.fromkeys(names, property(look)))("", 0, None, None)


LOOKED_AT = [
    *("open", "draft", "observe", "close", "for_call", "takes_pool", "sources", "num_successors"),
    *("harvest", "explore", "has_table", "draws"),
]


@pytest.mark.parametrize("name", thinned(LOOKED_AT, "draft", "close", "num_successors", "draws"))
def test_what_raises_when_it_is_looked_at_is_told_once(name: str) -> None:
    with one_warning(r"goes on without drafts: Shy failed \(RuntimeError: do not look\)"):
        compared(shy(name), SAMPLED)
    with pytest.raises(RuntimeError, match="do not look"):
        compared(shy(name), SAMPLED, config=lade.Config(strict_drafter=True))


def test_what_raises_only_where_it_is_needed_is_told_there() -> None:
    drawing = lade.Config(acceptance="rejection", max_draft_tokens=4)
    with one_warning("do not look"):
        lade.generate(shared_model(), PROMPT, drafter=shy("sample"), config=drawing, **SAMPLED)
    with one_warning("do not look"):
        compared(shy("observe_ngrams"), OPTIONS, config=lade.Config(lookahead=lade.Lookahead()))
    with one_warning("do not look"):
        compared(shy(*LOOKED_AT), OPTIONS)
    with one_warning("do not look"):
        compared(shy("takes_pool"), OPTIONS, pool=lade.NGramPool())


@pytest.mark.parametrize("wanted", [-1, 1.5, "x", None, True, -(10**30)], ids=repr)
def test_a_wrong_number_of_successors_is_told_once(wanted: Any) -> None:
    drafter = Able("", 0, None, None)
    drafter.num_successors = wanted
    with one_warning(r"Able failed \(.*expected num_successors"):
        compared(drafter, SAMPLED)


@pytest.mark.parametrize("wanted", [0, np.int64(3), 10**6, 10**30], ids=repr)
def test_any_number_of_successors_may_be_asked_for(wanted: Any) -> None:
    drafter = Able("", 0, None, None)
    drafter.num_successors = wanted
    compared(drafter, OPTIONS)
    assert ("harvest" in drafter.calls) == (wanted > 0)


@pytest.mark.parametrize("sources", [3, {"mine": 3}, {3: SourceStats()}], ids=repr)
def test_counts_that_are_none_are_left_out(sources: Any) -> None:
    drafter = Able("", 0, None, None)
    drafter.sources = sources
    with one_warning("Able failed"):
        assert compared(drafter, OPTIONS).as_dict()["sources"] == {}


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class UntoldError(Exception):
    def __str__(self) -> Any:
        return 3


@pytest.mark.parametrize("error", [UnspeakableError(), UntoldError()])
def test_an_error_without_a_message_is_told_by_its_name(error: Exception) -> None:
    name = type(error).__name__
    assert in_one_line(error).startswith(f"{name}, and ")
    with one_warning(rf"Faulty failed \({name}, and \w+ for its message\)"):
        compared(Faulty("draft", 2, None, error), OPTIONS)


class Random(Able):
    """Draws from torch's generator, or seeds it, in all that it does."""

    @property
    def num_successors(self) -> int:  # type: ignore[override]
        self._called("num_successors")
        return 2

    @property
    def sources(self) -> Any:
        self._called("sources")
        return {}

    def _called(self, method: str) -> bool:
        torch.manual_seed(3) if len(self.calls) % 2 else torch.rand(5)
        return super()._called(method)


class Making(Random):
    @property
    def takes_pool(self) -> bool:  # type: ignore[override]
        return self._called("takes_pool")

    def for_call(self, call: Any) -> Any:
        self._called("for_call")
        return Random("", 0, None, None)


@pytest.mark.parametrize("options", [OPTIONS, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", thinned([Random, Making], Making))
def test_a_drafter_that_draws_changes_no_text(drafter: Any, options: dict[str, Any]) -> None:
    compared(drafter("", 0, None, None), options)
    config = lade.Config(lookahead=lade.Lookahead())
    compared(drafter("", 0, None, None), options, config=config)


def test_what_other_threads_draw_is_undone_by_no_drafter_of_lades_own() -> None:
    before = torch.get_rng_state()
    Guard(Random("", 0, None, None), "drafts").ask(lambda: torch.rand(1), None)
    assert torch.equal(torch.get_rng_state(), before)
    Guard(PoolDrafter(lade.NGramPool()), "drafts").ask(lambda: torch.rand(1), None)
    assert not torch.equal(torch.get_rng_state(), before)


def test_the_generator_of_a_gpu_is_put_back_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    states, device = {"cuda:1": 5}, torch.device("cuda", 1)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda of: states[str(of)])
    monkeypatch.setattr("torch.cuda.set_rng_state", lambda to, of: states.update({str(of): to}))
    before = torch.get_rng_state()
    with unchanged_generators(device):
        torch.rand(1)
        states["cuda:1"] = 6
    assert states == {"cuda:1": 5}
    assert torch.equal(torch.get_rng_state(), before)


def test_an_interrupt_in_a_drafter_is_an_interrupt() -> None:
    model = tiny_model("llama", seed=2)
    drafter = Faulty("draft", 2, None, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        lade.generate(model, PROMPT, drafter=drafter, **OPTIONS)
    assert drafter.num_open == 0


def test_depths_are_counted_and_not_believed() -> None:
    draft = Draft(ints(6, 7, 8), ints(-1, 0, 0), ints(9, 9, 9), np.array([0.9, 0.8, 0.1]))
    assert checked(draft, 3).depths.tolist() == [1, 2, 2]
    assert checked(draft, 2).token_ids.tolist() == [6, 7]
    model = tiny_model("llama", seed=2)
    expected = model.generate(PROMPT, **OPTIONS)

    class Lying(Faulty):
        def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
            right = expected[0, len(committed) : len(committed) + 2].tolist()
            size = len(right)
            parents = np.arange(-1, size - 1, dtype=np.int32)
            return Draft(ints(*right), parents, ints(*[1] * size), np.ones(size))

    same_as_generate(model, PROMPT, drafter=Lying("", 0, None, None), **OPTIONS)


def test_a_drawn_draft_must_hold_what_was_drawn() -> None:
    probs = np.array([[0.5, 0.5]])
    good = SampledDraft(ints(6), ints(-1), ints(1), np.array([0.5]), ints(6, 7)[None], probs)
    assert isinstance(checked(good, 4), SampledDraft)
    bad = SampledDraft(ints(5), ints(-1), ints(1), np.array([0.5]), ints(6, 7)[None], probs)
    with pytest.raises(ValueError, match="in the support that it was drawn from"):
        checked(bad, 4)


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


@pytest.mark.parametrize("model", ["SmolLM2", torch.nn.Linear(2, 2), None, tiny_model])
def test_what_is_no_model_does_not_pass_the_door(model: Any) -> None:
    for door in (lade.generate, lade.wrap):
        with pytest.raises(TypeError, match="expected a transformers causal LM"):
            door(model)


def test_placeholders_beside_embeddings_are_no_trouble() -> None:
    model = tiny_model("llama", seed=2)
    embeds = model.get_input_embeddings()(PROMPT)
    ids = torch.full_like(PROMPT, -1)
    options = OPTIONS | {"inputs_embeds": embeds}
    expected = model.generate(ids, **options)
    assert lade.generate(model, ids, **options).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("name", "error", "told"),
    [
        ("hf.generation.NGramPool.__init__", MemoryError("no room"), "drafts nothing"),
        ("budget.budget.compile_by", OSError("no compiler"), "drafts nothing"),
        ("drafting.successors.compile_by", OSError("no compiler"), "without drafts"),
    ],
)
def test_what_cannot_be_made_or_compiled_costs_the_drafts_alone(
    name: str, error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(f"lade.{name}", fail)
    with pytest.warns(lade.DrafterWarning, match=f"{told}.*{in_one_line(error)}"):
        _, got = same_as_generate(tiny_model("llama", seed=2), PROMPT, **OPTIONS)
    assert got.stats.num_draft_tokens == 0


def test_a_pool_that_cannot_grow_loses_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", seed=2)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    pool = lade.NGramPool()
    monkeypatch.setattr(pool, "observe", fail)
    with pytest.warns(lade.DrafterWarning, match=r"PoolDrafter failed \(MemoryError: no room\)"):
        same_as_generate(model, PROMPT, pool=pool, **OPTIONS)
    assert pool.num_open_sequences == 0
