"""Several drafters as one: the text is that of plain decoding, and each part does what it does."""

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import lade
from lade.drafters import AssistantModel, CallPool, Merged
from ngram_pool import Draft, NGramPool
from tests.chi_square import FALSE_ALARM, p_value
from tests.grids import thinned
from tests.lade.both import answered, same_as_generate
from tests.lade.drafting.made import (
    OPTIONS,
    PROMPT,
    STRICT,
    Faulty,
    Guessing,
    chain_of,
    exact_pairs,
    one_warning,
    pairs_of,
)
from tests.lade.shared import shared_model
from tests.lade.tiny import random_prompt, tiny_model
from tests.ngram_pool.threads import in_threads


class MadeLate(Guessing):
    """Made for each call, and so opened late."""

    def for_call(self, call: Any) -> lade.Drafter:
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


# --- the text -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", thinned([1, 3], 3))
@pytest.mark.parametrize("samples", thinned([False, True], True))
def test_text_is_that_of_plain_decoding(num_rows: int, samples: bool) -> None:
    model, rng = shared_model("llama", seed=2), np.random.default_rng(3)
    assistant = AssistantModel(shared_model("llama", seed=5), length=2)
    total = lade.DecodeStats()
    for number in range(3):
        prompt = random_prompt(rng).repeat(num_rows, 1)
        torch.manual_seed(number)
        expected = answers_of(model, prompt, 24, do_sample=samples)
        guessing = MadeLate(expected, number)
        merged = Merged([CallPool(), guessing, Guessing(expected), assistant])
        for most in (None, 12):  # the second time with what was learned
            config = lade.Config(strict_drafter=True, max_draft_tokens=most)
            options = {"config": config, "do_sample": samples, "seed": number}
            got = ours(model, prompt, merged, 24, pool=NGramPool(), **options)
            assert not guessing.texts
            total.add(got.stats)
    assert total.num_accepted_tokens > 20
    assert set(total.sources) == {"pool", "guessing", "guessing_2", "assistant"}
    for stats in total.sources.values():
        assert stats.num_asked > 0
        assert stats.sec > 0


def test_pools_are_parts_also_those_that_are_only_read() -> None:
    model, pool = shared_model("llama", seed=2), NGramPool()
    for _ in range(2):
        got = ours(model, PROMPT, Merged([pool]), 30)
    assert got.stats.sources["pool"].num_accepted_tokens > 10
    assert pool.num_open_sequences == 0
    read = ours(model, PROMPT, Merged([pool.as_read_only()]), 30)
    assert read.stats.num_accepted_tokens > 10
    assert ours(model, PROMPT, None, 30).stats.sources["pool"].num_asked > 10


# --- parts that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["draft", "observe", "nothing"])
def test_a_part_that_fails_is_dropped_and_the_others_go_on(method: str) -> None:
    model, prompt = shared_model("llama", seed=2), PROMPT.repeat(2, 1)
    right = Guessing(answers_of(model, prompt, 24))

    def merged() -> Merged:
        failing = Faulty("draft", 2) if method == "nothing" else Faulty(method, 2, error=OSError())
        return Merged([failing, right])

    with one_warning("goes on without drafts of 'Faulty', which failed"):
        got = ours(model, prompt, merged(), 24, config=lade.Config(max_draft_tokens=8))
    assert got.stats.num_accepted_tokens > 5
    assert not right.texts
    with pytest.raises((OSError, TypeError)):
        ours(model, prompt, merged(), 24)


# --- what parts may do besides ------------------------------------------------------------------


class Learning(Guessing):
    """Harvests."""

    def __init__(self, num_successors: int) -> None:
        super().__init__()
        self.num_successors = num_successors
        self.shapes: set[int] = set()

    def harvest(self, sequence: int, committed: Any, ids: Any, parents: Any, found: Any) -> None:
        self.shapes.add(found.token_ids.shape[1])


def test_parts_harvest_as_much_as_each_asks_for() -> None:
    model = shared_model("llama", seed=2)
    few, many = Learning(2), Learning(5)
    ours(model, PROMPT, Merged([few, many]), 20, config=STRICT)
    assert (few.shapes, many.shapes) == ({2}, {5})


# --- drawn drafts -------------------------------------------------------------------------------


class Drawing(lade.Drafter):
    """Draws one token after the text, from a distribution of its own."""

    name = "drawing"
    probs = np.array([0.5, 0.3, 0.2])

    def for_call(self, call: Any) -> lade.Drafter:
        assert call.rngs is not None
        self.rng = call.rngs[0]
        return self

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        return chain_of([int(self.rng.choice(3, p=self.probs)) + 2], 0.5)


@pytest.mark.parametrize("with_pool", thinned([False, True], True))
def test_rejection_has_the_targets_distribution(with_pool: bool) -> None:
    """A right scheme fails once in a million; with seeds fixed, always or never."""
    model = tiny_model("llama", seed=3, vocab_size=8, eos_token_id=None)
    prompt = [2, 3, 2, 3, 2]
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "top_k": 0}
    config = lade.Config(strict_drafter=True, acceptance="rejection", max_draft_tokens=4)
    merged = Merged([Drawing(), *([NGramPool()] if with_pool else [])])
    batch = torch.tensor([prompt]).repeat(100, 1)
    counts, asked = np.zeros(64, np.int64), 0
    for seed in range(6):
        torch.manual_seed(seed)
        got = answered(model, batch, drafter=merged, config=config, **options)
        asked += got.stats.num_draft_tokens
        counts += pairs_of(got.sequences, len(prompt), 8)
    assert asked > 25
    assert p_value(counts.tolist(), exact_pairs(model, prompt)) > FALSE_ALARM


# --- the object ---------------------------------------------------------------------------------


def test_parts_are_checked_flattened_and_named_apart() -> None:
    inner = Merged([Guessing(), NGramPool()])
    merged = Merged([inner, Guessing(), CallPool()])
    assert merged.names == ("guessing", "pool", "guessing_2", "pool_2")
    assert pickle.loads(pickle.dumps(Merged([NGramPool()]))).names == ("pool",)
    with pytest.raises(ValueError, match="expected at least one drafter, got none"):
        Merged([])
    for wrong in (3, Guessing, None):
        with pytest.raises(TypeError, match="expected drafters or pools, got"):
            Merged([wrong])  # type: ignore[list-item]


def test_threads_share_a_drafter() -> None:
    model = shared_model("llama", seed=2)
    expected = answers_of(model, PROMPT, 24)
    merged = Merged([NGramPool(), MadeLate(expected)])
    options: dict[str, Any] = {**OPTIONS, "config": STRICT, "max_new_tokens": 24}
    found: list[Any] = []

    def work() -> None:
        found.extend(
            lade.generate(model, PROMPT, drafter=merged, **options).tolist() for _ in range(3)
        )

    assert in_threads(work, work, work, seconds=None) == []
    assert found == [expected] * 9


def test_a_pool_goes_with_a_drafter_that_takes_it_and_no_other() -> None:
    model = shared_model("llama", seed=2)
    with pytest.raises(ValueError, match=r"got both.*CallPool"):
        ours(model, PROMPT, Merged([Guessing()]), 4, pool=NGramPool())
    config = lade.Config(strict_drafter=True, max_candidates=1)
    pool = NGramPool()
    for _ in range(2):
        got = ours(model, PROMPT, Merged([CallPool()]), 20, pool=pool, config=config)
    assert got.stats.num_accepted_tokens > 5
    with pytest.raises(ValueError, match="max_candidates"):
        ours(model, PROMPT, Merged([pool]), 4, config=config)


def test_a_wrapped_model_drafts_by_its_drafter_and_copies_do_not() -> None:
    model = tiny_model("llama", seed=2)
    options = {**OPTIONS, "max_new_tokens": 20, "return_dict_in_generate": True}
    expected = model.generate(PROMPT, **options).sequences.tolist()
    guessing = Guessing(expected)
    assert lade.wrap(model, drafter=guessing) is model
    assert model.generate(PROMPT, **options).sequences.tolist() == expected
    assert guessing.num_opened == 1
    other = Guessing(expected)
    model.generate(PROMPT, drafter=other, **options)
    model.generate(PROMPT, pool=NGramPool(), **options)
    assert (guessing.num_opened, other.num_opened) == (1, 1)
    assert copy.deepcopy(model).generate(PROMPT, **options).sequences.tolist() == expected
    assert guessing.num_opened == 1
    lade.wrap(model, drafter=Merged([CallPool(), guessing]), shares_text=True)
    stats = [model.generate(PROMPT, **options).stats for _ in range(2)]
    assert stats[1].sources["pool"].num_accepted_tokens > 0
    lade.unwrap(model)
    for wrong, told in (
        ({"drafter": 3}, "expected drafter to be"),
        ({"drafter": guessing, "pool": NGramPool()}, "got both"),
        ({"drafter": guessing, "shares_text": True}, "without a drafter"),
    ):
        with pytest.raises((TypeError, ValueError), match=told):
            lade.wrap(model, **wrong)
