"""Several drafters as one: the text is that of plain decoding, and each part does what it does."""

import copy
import itertools
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import lade
from lade.drafters import AssistantModel, CallPool, Merged
from lade.drafters.merging import MergedDrafter
from lade.drafting.drafter import Drafter, DraftingCall
from lade.drafting.drafts import chain
from lade.drafting.pool_drafter import PoolDrafter
from lade.drafting.successors import Successors
from lade.errors import DrafterWarning, UnsupportedOptionError
from ngram_pool import Draft, SampledDraft
from tests.chi_square import FALSE_ALARM, p_value
from tests.grids import thinned
from tests.lade.both import answered, same_as_generate
from tests.lade.drafters.simulation import a_call
from tests.lade.drafting.test_call_drafters import Maker
from tests.lade.drafting.test_drafters import (
    LOOKED_AT,
    OPTIONS,
    SAMPLED,
    Able,
    Making,
    Random,
    compared,
    one_warning,
    shy,
)
from tests.lade.shared import shared_model
from tests.lade.tiny import VOCAB_SIZE, random_prompt, tiny_model
from tests.ngram_pool.threads import in_threads

STRICT = lade.Config(strict_drafter=True)


@pytest.fixture(autouse=True)
def simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each look at the clock take 1 ms and each row's step 20 ms, however busy a machine is."""
    ticks = itertools.count()
    observe = MergedDrafter.observe

    def observe_later(self: MergedDrafter, sequence: int, token_ids: Sequence[int]) -> None:
        for _ in range(20):
            next(ticks)
        observe(self, sequence, token_ids)

    monkeypatch.setattr("lade.drafters.merging.perf_counter", lambda: 1e-3 * next(ticks))
    monkeypatch.setattr(MergedDrafter, "observe", observe_later)


class Guessing(lade.Drafter):
    """Drafts one known text, or guesses, whatever the sequence is."""

    name = "guessing"

    def __init__(self, answers: Sequence[Sequence[int]] = (), seed: int = 0) -> None:
        self.answers = [*map(list, answers)]
        self.rng = np.random.default_rng(seed)
        self.texts: dict[int, list[int]] = {}
        self.num_opened = 0

    def open(self, prompt_ids: Sequence[int]) -> int:
        self.num_opened += 1
        self.texts[self.num_opened] = [*prompt_ids]
        return self.num_opened

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        assert self.texts[sequence] == list(committed)
        num = min(4, max_draft_tokens)
        for answer in self.answers:
            if answer[: len(committed)] == list(committed) and self.rng.random() < 0.7:
                return chain(answer[len(committed) : len(committed) + num], 0.6)
        return chain(self.rng.integers(2, VOCAB_SIZE, num).tolist(), 0.3)

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        self.texts[sequence] += token_ids

    def close(self, sequence: int) -> None:
        del self.texts[sequence]


class MadeLate(Guessing):
    """The same, made for each call and so opened late."""

    def for_call(self, call: DraftingCall) -> Drafter:
        return self


def answers_of(model: Any, prompt: torch.Tensor, num_tokens: int, **options: Any) -> Any:
    options = {"do_sample": False, "pad_token_id": 0} | options
    mask = torch.ones_like(prompt)
    return model.generate(
        prompt, attention_mask=mask, max_new_tokens=num_tokens, **options
    ).tolist()


def ours(model: Any, prompt: torch.Tensor, drafter: Any, num_tokens: int, **options: Any) -> Any:
    """Return what lade returns, whose text and random state are those of plain `generate`."""
    given: dict[str, Any] = {"config": STRICT, "max_new_tokens": num_tokens, **options}
    return same_as_generate(model, prompt, drafter=drafter, **given)[1]


@pytest.mark.parametrize(
    ("family", "samples", "num_rows"),
    [
        pytest.param("llama", False, 1, marks=pytest.mark.exhaustive),
        ("llama", True, 3),
        pytest.param("mistral", False, 3, marks=pytest.mark.exhaustive),
        pytest.param("mistral", True, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_text_is_that_of_plain_generate(family: str, samples: bool, num_rows: int) -> None:
    model = shared_model(family, seed=2)
    rng = np.random.default_rng(3)
    assistant = AssistantModel(shared_model("llama", seed=5), length=2)
    total = lade.DecodeStats()
    for number in range(4):
        prompt = random_prompt(rng).repeat(num_rows, 1)
        torch.manual_seed(number)
        expected = answers_of(model, prompt, 24, do_sample=samples)
        guessing = MadeLate(expected, number)
        merged = Merged([CallPool(), guessing, Guessing(expected), assistant])
        for most in (None, 12):  # the second time with what was learned
            config = lade.Config(strict_drafter=True, max_draft_tokens=most)
            options = {"config": config, "do_sample": samples, "seed": number}
            got = ours(model, prompt, merged, 24, pool=lade.NGramPool(), **options)
            assert not guessing.texts
            total.add(got.stats)
    assert total.num_accepted_tokens > 30
    assert set(total.sources) == {"pool", "guessing", "guessing_2", "assistant"}
    for stats in total.sources.values():
        assert stats.num_asked > 0
        assert stats.sec > 0
    assert total.sources["guessing"].num_accepted_tokens > 10


def test_joined_drafts_accept_at_least_what_each_part_would() -> None:
    model = shared_model("llama", seed=2)
    prompt = random_prompt(np.random.default_rng(1))
    right = Guessing(answers_of(model, prompt, 40))
    right.rng = np.random.default_rng(9)
    config = lade.Config(strict_drafter=True, max_draft_tokens=16)
    alone = ours(model, prompt, copy.deepcopy(right), 40, config=config)
    merged = Merged([Guessing(seed=4), right])
    both = ours(model, prompt, merged, 40, config=config)
    assert both.stats.num_steps == alone.stats.num_steps
    right_stats, wrong = both.stats.sources["guessing_2"], both.stats.sources["guessing"]
    assert right_stats.num_accepted_tokens >= both.stats.num_accepted_tokens > 10
    assert wrong.num_accepted_tokens < 4
    assert wrong.num_asked == right_stats.num_asked


def test_a_pool_alone_drafts_the_same_text_through_merged() -> None:
    model = shared_model("llama", seed=2)
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
    pool = lade.NGramPool()
    for _ in range(2):
        got = ours(model, prompt, Merged([pool]), 30)
    assert got.stats.sources["pool"].num_accepted_tokens > 10
    assert pool.num_open_sequences == 0
    # One that is only read is drafted from beside one that learns.
    read = ours(model, prompt, Merged([pool.as_read_only()]), 30)
    assert read.stats.num_accepted_tokens > 10


class Failing(Guessing):
    """Fails in one method, from its second call on."""

    name = "failing"

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method
        self.calls: list[str] = []

    def _called(self, method: str) -> None:
        self.calls.append(method)
        if method == self.method and self.calls.count(method) > 1:
            raise RuntimeError("mine")

    def open(self, prompt_ids: Sequence[int]) -> int:
        self._called("open")
        return super().open(prompt_ids)

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        self._called("draft")
        draft: Any = None if self.method == "nothing" else super().draft(sequence, committed, 3)
        return draft  # type: ignore[no-any-return]

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        self._called("observe")
        super().observe(sequence, token_ids)

    def close(self, sequence: int) -> None:
        self._called("close")
        super().close(sequence)


@pytest.mark.parametrize(
    "method", thinned(["open", "draft", "observe", "close", "nothing"], "open", "draft")
)
def test_a_part_that_fails_is_dropped_and_the_others_go_on(method: str) -> None:
    model = shared_model("llama", seed=2)
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5]] * 2)
    right = Guessing(answers_of(model, prompt, 24))
    merged, config = Merged([Failing(method), right]), lade.Config(max_draft_tokens=8)
    with pytest.warns(DrafterWarning, match="goes on without the drafter 'failing'") as told:
        got = ours(model, prompt, merged, 24, config=config)
    assert len([each for each in told if each.category is DrafterWarning]) == 1
    assert got.stats.num_accepted_tokens > 5
    assert not right.texts
    with pytest.raises((RuntimeError, TypeError)):
        ours(model, prompt, Merged([Failing(method), right]), 24)


@pytest.mark.parametrize(
    "name", thinned([*LOOKED_AT, "num_successors of -1"], "observe", "draws", "num_successors")
)
def test_a_part_that_raises_when_it_is_looked_at_is_dropped(name: str) -> None:
    part = Able("", 0, None, None) if " " in name else shy(name)
    vars(part).update({"num_successors": -1} if " " in name else {})
    with one_warning("goes on without the drafter '.*': it failed"):
        stats = compared(Merged([CallPool(), part]), {**SAMPLED, "max_new_tokens": 40})
    assert stats.sources["pool"].num_draft_tokens > 0


@pytest.mark.parametrize("kind", [MemoryError, ValueError])
def test_a_part_that_cannot_be_made_is_dropped_unless_it_refuses(kind: type[Exception]) -> None:
    def fail(call: Any, error: Exception) -> Any:
        raise error

    with one_warning(r"goes on without the drafter 'Maker': it failed"):
        compared(Merged([CallPool(), Maker(partial(fail, error=kind("mine")))]), SAMPLED)
    refusing = Maker(partial(fail, error=lade.UnsupportedOptionError("mine")))
    with pytest.raises(ValueError, match="mine"):
        compared(Merged([CallPool(), refusing]), SAMPLED)


@pytest.mark.parametrize("drafter", [Random, Making])
def test_a_part_that_draws_changes_no_text(drafter: Any) -> None:
    for options in (OPTIONS, SAMPLED):
        compared(Merged([CallPool(), drafter("", 0, None, None)]), options)


# --- what parts may do besides ------------------------------------------------------------------


class Learning(Guessing):
    """Harvests, explores and learns n-grams."""

    learns_ngrams = True

    def __init__(self, num_successors: int) -> None:
        super().__init__()
        self.num_successors = num_successors
        self.shapes: set[int] = set()
        self.num_ngrams = 0

    def harvest(
        self, sequence: int, committed: Any, token_ids: Any, parents: Any, successors: Successors
    ) -> None:
        self.shapes.add(successors.token_ids.shape[1])

    def explore(self, sequence: int, excluded: Any, max_tokens: int) -> Any:
        return np.array([7, 8, 9], np.int32)[:max_tokens], np.array([0.5, 0.3, 0.1])[:max_tokens]

    def observe_ngrams(self, sequence: int, ngrams: Any) -> None:
        self.num_ngrams += len(ngrams)


def test_parts_harvest_as_much_as_each_asks_for_and_learn_ngrams() -> None:
    model = shared_model("llama", seed=2)
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
    few, many = Learning(2), Learning(5)
    config = lade.Config(strict_drafter=True, lookahead=lade.Lookahead())
    ours(model, prompt, Merged([few, many]), 20, config=config)
    assert (few.shapes, many.shapes) == ({2}, {5})
    assert few.num_ngrams == many.num_ngrams > 0
    with pytest.raises(UnsupportedOptionError, match="learns_ngrams"):
        ours(model, prompt, Merged([Guessing()]), 20, config=config)


def test_what_several_parts_explore_is_named_once_best_first() -> None:
    call = Merged([Learning(1), Learning(1)]).for_call(a_call())
    sequence = call.open([1, 2])
    token_ids, worths = call.explore(sequence, np.array([], np.int32), 2)
    assert token_ids.tolist() == [7, 8]
    assert worths.tolist() == [0.5, 0.3]
    plain = Merged([Guessing()]).for_call(a_call())
    assert plain.num_successors == 0


# --- drawn drafts -------------------------------------------------------------------------------


class Drawing(lade.Drafter):
    """Draws one token after the text, from a distribution of its own."""

    name = "drawing"
    probs = np.array([0.5, 0.3, 0.2])

    def for_call(self, call: DraftingCall) -> Drafter:
        assert call.rngs is not None
        self.rng = call.rngs[0]
        return self

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> SampledDraft:
        token = int(self.rng.choice(3, p=self.probs))
        one = chain([token + 2], 0.5)
        return SampledDraft(
            *(one.token_ids, one.parents, one.depths, one.probs),
            np.array([[2, 3, 4]], np.int32),
            self.probs[None],
        )


@pytest.mark.parametrize("with_pool", thinned([False, True], False))
def test_rejection_has_the_targets_distribution(
    with_pool: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right scheme fails once in a million; with seeds fixed, always or never."""
    monkeypatch.setattr("lade.budget.sources._LEAST_STEPS", 0.5)  # answers are that short
    model = tiny_model("llama", seed=3, vocab_size=8, eos_token_id=None)
    prompt = torch.tensor([[2, 3, 2, 3, 2]])
    options: dict[str, Any] = {
        "max_new_tokens": 4,
        "do_sample": True,
        "top_k": 0,
        "pad_token_id": 0,
    }
    config = lade.Config(strict_drafter=True, acceptance="rejection", max_draft_tokens=4)
    parts: list[Any] = [Drawing(), *([lade.NGramPool()] if with_pool else [])]
    merged = Merged(parts)
    batch = prompt.repeat(100, 1)
    counts = np.zeros(8, np.int64)
    asked = 0
    for seed in range(12):
        torch.manual_seed(seed)
        got = answered(model, batch, drafter=merged, config=config, **options)
        asked += got.stats.sources["drawing"].num_asked
        counts += np.bincount(got.sequences[:, -2].numpy(), minlength=8)
    assert asked > 50
    with torch.no_grad():
        weights = torch.ones(1, dtype=torch.float64)
        texts = prompt
        for _ in range(2):  # all texts up to the second last token but one
            probs = model(texts).logits[:, -1].softmax(-1)
            weights = (weights[:, None] * probs).flatten()
            texts = torch.cat(
                [texts.repeat_interleave(8, 0), torch.arange(8).repeat(len(texts))[:, None]], 1
            )
        last = (weights[:, None] * model(texts).logits[:, -1].softmax(-1)).sum(0)
    assert p_value(counts.tolist(), last.tolist()) > FALSE_ALARM


def test_one_part_alone_drafts_where_drafts_are_drawn() -> None:
    rngs = [np.random.default_rng(0)]
    pool = lade.NGramPool()
    merged = Merged([Drawing(), pool])
    call = merged.for_call(a_call(rngs=rngs, samples=True))
    text = [2, 3, 2, 3, 2]
    sequence = call.open(text)
    kinds = set()
    for _ in range(30):
        draft = call.draft(sequence, text, 8)
        if isinstance(draft, SampledDraft):
            kinds.add("drawn by itself")
        elif len(draft):
            drawn = call.sample(sequence, text, 3, rngs[0])
            assert isinstance(drawn, SampledDraft)
            kinds.add("drawn by the pool")
        call.observe(sequence, [3])
        text = [*text, 3]
    assert kinds == {"drawn by itself", "drawn by the pool"}
    call.close(sequence)


# --- the object ---------------------------------------------------------------------------------


def test_parts_are_checked_flattened_and_named_apart() -> None:
    inner = Merged([Guessing(), lade.NGramPool()])
    merged = Merged([inner, Guessing(), PoolDrafter(lade.NGramPool()), CallPool()])
    assert merged.names == ("guessing", "pool", "guessing_2", "pool_2", "pool_3")
    assert merged.takes_pool
    assert not inner.takes_pool
    with pytest.raises(ValueError, match="expected at least one drafter, got none"):
        Merged([])
    for wrong in (3, Guessing, None):
        with pytest.raises(TypeError, match="expected drafters or pools, got"):
            Merged([wrong])  # type: ignore[list-item]


def test_pickles_and_copies_leave_out_what_was_measured() -> None:
    merged = Merged([lade.NGramPool()])
    twin = pickle.loads(pickle.dumps(merged))
    assert twin.names == merged.names
    assert copy.deepcopy(merged)._costs[0] is not merged._costs[0]


def test_threads_share_a_drafter() -> None:
    model = shared_model("llama", seed=2)
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
    expected = answers_of(model, prompt, 24)
    merged = Merged([lade.NGramPool(), MadeLate(expected)])
    found: list[Any] = []

    def work() -> None:
        found.extend(
            lade.generate(
                model, prompt, drafter=merged, config=STRICT, do_sample=False, max_new_tokens=24
            ).tolist()
            for _ in range(3)
        )

    assert in_threads(work, work, work, seconds=None) == []
    assert found == [expected] * 9


# --- entry points ------------------------------------------------------------------------------


def test_a_pool_goes_with_a_drafter_that_takes_it_and_no_other() -> None:
    model = shared_model("llama", seed=2)
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
    with pytest.raises(ValueError, match=r"got both.*CallPool"):
        ours(model, prompt, Merged([Guessing()]), 4, pool=lade.NGramPool())
    config = lade.Config(strict_drafter=True, max_candidates=1)
    pool = lade.NGramPool()
    for _ in range(2):
        got = ours(model, prompt, Merged([CallPool()]), 20, pool=pool, config=config)
    assert got.stats.num_accepted_tokens > 5
    with pytest.raises(ValueError, match="max_candidates"):
        ours(model, prompt, Merged([pool]), 4, config=config)


def test_a_wrapped_model_drafts_by_its_drafter_and_copies_do_not() -> None:
    model = tiny_model("llama", seed=2)
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(prompt),
        "do_sample": False,
        "max_new_tokens": 20,
        "return_dict_in_generate": True,
    }
    expected = model.generate(prompt, **options).sequences.tolist()
    guessing = Guessing(expected)
    assert lade.wrap(model, drafter=guessing) is model
    assert model.generate(prompt, **options).sequences.tolist() == expected
    assert guessing.num_opened == 1
    other = Guessing(expected)
    model.generate(prompt, drafter=other, **options)
    model.generate(prompt, pool=lade.NGramPool(), **options)
    assert (guessing.num_opened, other.num_opened) == (1, 1)
    twin = copy.deepcopy(model)
    assert twin.generate(prompt, **options).sequences.tolist() == expected
    assert guessing.num_opened == 1
    merged = Merged([CallPool(), guessing])
    lade.wrap(model, drafter=merged, shares_text=True)
    stats = [model.generate(prompt, **options).stats for _ in range(2)]
    assert stats[1].sources["pool"].num_accepted_tokens > 0
    lade.unwrap(model)
    for wrong, told in (
        ({"drafter": 3}, "expected drafter to be"),
        ({"drafter": guessing, "pool": lade.NGramPool()}, "got both"),
        ({"drafter": guessing, "shares_text": True}, "without a drafter"),
    ):
        with pytest.raises((TypeError, ValueError), match=told):
            lade.wrap(model, **wrong)
