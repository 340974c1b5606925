"""A drafter can never fail a call: what it raises, and what is no draft, costs the drafts alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import lade
from lade.drafting.drafts import checked
from ngram_pool import Draft, SampledDraft
from tests.lade.tiny import tiny_model

PROMPT = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
OPTIONS: dict[str, Any] = {
    "attention_mask": torch.ones_like(PROMPT),
    "do_sample": False,
    "max_new_tokens": 12,
    "pad_token_id": 0,
}


class Faulty:
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


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("answer", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_draft_is_named_and_the_text_is_right(answer: Any, at: int) -> None:
    model = tiny_model("llama", seed=2)
    drafter = Faulty("draft", at, answer, None)
    with pytest.warns(lade.DrafterWarning, match=r"without drafts: Faulty failed .*expected"):
        got = lade.generate(model, PROMPT, drafter=drafter, **OPTIONS)
    assert got.tolist() == model.generate(PROMPT, **OPTIONS).tolist()
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
@pytest.mark.parametrize("error", [RuntimeError("mine"), MemoryError("mine"), AssertionError()])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_what_a_drafter_raises_is_told_once(method: str, error: Exception, num_rows: int) -> None:
    model = tiny_model("llama", seed=2)
    prompt = PROMPT.repeat(num_rows, 1)
    options = OPTIONS | {"attention_mask": torch.ones_like(prompt)}
    drafter = Faulty(method, 1, None, error)
    with pytest.warns(lade.DrafterWarning) as told:
        got = lade.generate(model, prompt, drafter=drafter, **options)
    assert len(told) == 1
    assert type(error).__name__ in str(told[0].message)
    assert got.tolist() == model.generate(prompt, **options).tolist()
    assert drafter.num_open == 0
    assert method == "close" or drafter.calls.count("draft") <= num_rows


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

    got = lade.generate(model, PROMPT, drafter=Lying("", 0, None, None), **OPTIONS)
    assert got.tolist() == expected.tolist()


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
        ({"drafter": 3}, "expected drafter to be a lade.Drafter, got 3, which has no open"),
        ({"drafter": Faulty}, "expected drafter to be a lade.Drafter, got <class"),
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


def test_a_pool_that_cannot_be_made_loses_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", seed=2)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("lade.hf.generation.NGramPool.__init__", fail)
    with pytest.warns(lade.DrafterWarning, match=r"drafts nothing.*MemoryError: no room"):
        got = lade.generate(model, PROMPT, **OPTIONS)
    assert got.tolist() == model.generate(PROMPT, **OPTIONS).tolist()


def test_a_budget_that_cannot_be_compiled_costs_the_drafts_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no compiler")

    model = tiny_model("llama")
    prompt = torch.tensor([[5, 6, 7, 5, 6]])
    expected = model.generate(prompt, do_sample=False, max_new_tokens=20)
    monkeypatch.setattr("lade.budget.budget.compile_by", fail)
    with pytest.warns(lade.DrafterWarning, match=r"drafts nothing.*OSError: no compiler"):
        output = lade.generate(
            model, prompt, do_sample=False, max_new_tokens=20, return_dict_in_generate=True
        )
    assert output.sequences.tolist() == expected.tolist()
    assert output.stats.num_draft_tokens == 0


def test_ranks_that_cannot_be_compiled_cost_the_drafts_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no compiler")

    model = tiny_model("llama")
    prompt = torch.tensor([[5, 6, 7, 5, 6]])
    expected = model.generate(prompt, do_sample=False, max_new_tokens=20)
    monkeypatch.setattr("lade.drafting.successors.compile_by", fail)
    with pytest.warns(lade.DrafterWarning, match=r"without drafts.*OSError: no compiler"):
        got = lade.generate(model, prompt, do_sample=False, max_new_tokens=20)
    assert got.tolist() == expected.tolist()


def test_a_pool_that_cannot_grow_loses_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", seed=2)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    pool = lade.NGramPool()
    monkeypatch.setattr(pool, "observe", fail)
    with pytest.warns(lade.DrafterWarning, match=r"PoolDrafter failed \(MemoryError: no room\)"):
        got = lade.generate(model, PROMPT, pool=pool, **OPTIONS)
    assert got.tolist() == model.generate(PROMPT, **OPTIONS).tolist()
    assert pool.num_open_sequences == 0
