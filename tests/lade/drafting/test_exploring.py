"""Tokens run for what is harvested there: where they go, and that they change no text."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import lade
from lade.budget.budget import Budget
from lade.budget.calibration import Outcome
from lade.drafting.drafts import draft_of, exploring
from lade.drafting.pool_drafter import PoolDrafter
from lade.drafting.proposer import Proposer
from lade.gpu.policy import DevicePolicy
from lade.hf import generation
from ngram_pool import Draft, NGramPool
from tests.grids import thinned
from tests.lade.both import same_as_generate
from tests.lade.tiny import VOCAB_SIZE, paths_of, tiny_model

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
Tokens = tuple[NDArray[np.int32], NDArray[np.float64]]


def named(*token_ids: int, worth: float = 0.25) -> Tokens:
    return np.array(token_ids, np.int32), np.full(len(token_ids), worth)


class Explorer(PoolDrafter):
    """A pool that drafts nothing and names what it is told to."""

    def __init__(self, answer: Any) -> None:
        super().__init__(NGramPool())
        self.answer = answer
        self.excluded: list[list[int]] = []

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        return Draft.empty()

    def explore(self, sequence: int, excluded: NDArray[np.int32], max_tokens: int) -> Tokens:
        self.excluded.append(excluded.tolist())
        answer: Tokens = self.answer
        if isinstance(answer, Exception):
            raise answer
        return answer


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    num_nodes = draw(st.integers(0, 8))
    parents = [draw(st.integers(-1, node - 1)) for node in range(num_nodes)]
    probs = sorted((draw(st.floats(0, 1)) for _ in range(num_nodes)), reverse=True)
    return draft_of(range(num_nodes), parents, probs)


MOST = st.integers(1, 14)


@given(drafts(), st.lists(st.floats(0, 1), max_size=6), st.sets(st.integers(100, 105)), MOST)
def test_tokens_join_a_draft_by_what_they_are_worth(
    draft: Draft, worths: list[float], excluded: set[int], most: int
) -> None:
    worths = sorted(worths, reverse=True)
    token_ids = np.arange(100, 100 + len(worths), dtype=np.int32)
    others = np.array([*excluded], np.int32)
    joined = exploring(draft, token_ids, np.array(worths), others, 200, most)
    assert not excluded & {*joined.token_ids.tolist()}
    worths = [worth for i, worth in enumerate(worths) if 100 + i not in excluded]
    expected = sorted([*draft.probs.tolist(), *worths], reverse=True)[:most]
    assert joined.probs.tolist() == expected
    paths = {*paths_of(joined)}
    assert paths <= {*paths_of(draft), *((int(t),) for t in token_ids)}
    assert len(paths) == len(joined)
    for node, parent in enumerate(joined.parents.tolist()):
        assert -1 <= parent < node
        assert joined.depths[node] == 1 + (joined.depths[parent] if parent >= 0 else 0)


def test_a_new_pool_soon_knows_the_successors_of_what_the_target_mentions() -> None:
    model = tiny_model("llama")
    prompt = torch.tensor([[5, 6, 7]])
    config = lade.Config(max_draft_tokens=6, uses_table=False)

    class Unexploring(PoolDrafter):
        def explore(self, *args: Any) -> Tokens:
            return named()

    known = []
    for make in (PoolDrafter, Unexploring):
        pool = NGramPool()
        same_as_generate(model, prompt, drafter=make(pool), config=config)
        keys = pool._harvested.arrays()["keys"]
        known.append((keys < VOCAB_SIZE).sum())  # single tokens
    assert known[0] > 1.3 * known[1]


@pytest.mark.parametrize("num_rows", thinned([1, 3], 3))
def test_texts_are_those_of_plain_decoding_whatever_is_explored(num_rows: int) -> None:
    model = tiny_model("llama", seed=2)
    prompt = torch.tensor([[5, 6, 7, 5, 6]]).repeat(num_rows, 1)
    mask = torch.ones_like(prompt)
    right = model.generate(prompt, attention_mask=mask, **GREEDY)[0, 5:8].tolist()
    for answer in (named(*right), named(1, 2, 3), named(*right, worth=1.0), named()):
        config = lade.Config(max_draft_tokens=4)
        same_as_generate(model, prompt, drafter=Explorer(answer), config=config)


@pytest.mark.parametrize(
    "answer",
    [
        named(3, 3),
        (np.array([3, 4], np.int32), np.array([0.2, 0.5])),
        pytest.param(named(3, worth=2.0), marks=pytest.mark.exhaustive),
        named(3, worth=float("nan")),
        pytest.param((np.array([[3]], np.int32), np.array([0.5])), marks=pytest.mark.exhaustive),
        pytest.param((np.array([0.5]), np.array([0.5])), marks=pytest.mark.exhaustive),
        pytest.param((np.array([3, 4], np.int32), np.array([0.5])), marks=pytest.mark.exhaustive),
        None,
        RuntimeError("mine"),
    ],
)
def test_a_drafter_that_names_nonsense_costs_the_drafts_alone(answer: Any) -> None:
    model = tiny_model("llama", seed=2)
    prompt = torch.tensor([[5, 6, 7]])
    with pytest.warns(lade.DrafterWarning, match="Explorer"):
        same_as_generate(model, prompt, drafter=Explorer(answer))


def test_tokens_without_embeddings_and_those_run_already_are_left_out() -> None:
    explorer = Explorer(named(VOCAB_SIZE, 3, -1, 9))
    proposer = Proposer(explorer, VOCAB_SIZE)
    proposer.open(0, [5, 6])
    proposer.propose(0, [5, 6], [5, 6], 10, 8)
    others = [np.array([9], np.int32)]
    assert proposer.explore(0, others, 8).token_ids.tolist() == [3]
    assert explorer.excluded == [[9]]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(0, 4), MOST)
def test_what_is_found_beforehand_is_what_would_be_found_then(
    token_ids: list[int], num_drafted: int, most: int
) -> None:
    """Also where the draft, and what other rows run, leave few of the tokens found."""
    contexts = [[-1, token_id] for token_id in token_ids]
    successors = [[(7 * token_id) % 41] for token_id in token_ids]
    drafts = []
    for is_prepared in (False, True):
        pool = NGramPool(seed=0)
        pool.harvest(contexts, successors, np.full((len(token_ids), 1), 0.5, np.float32))
        proposer = Proposer(PoolDrafter(pool), 41, placeholders=(5,))
        proposer.open(0, token_ids)
        if is_prepared:
            proposer.prepare(0, most)
        proposer.propose(0, token_ids, token_ids, 9, max(1, min(most, num_drafted)))
        draft = proposer.explore(0, [np.array([3, 9, 12], np.int32)], most)
        drafts.append([part.tolist() for part in (draft.token_ids, draft.parents, draft.probs)])
    assert drafts[0] == drafts[1]


@pytest.mark.usefixtures("waits")
def test_beside_a_device_that_is_waited_for_it_is_found_while_it_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama", seed=2)
    prompt = torch.tensor([[5, 6, 7]])
    explorer = Explorer(named(3))
    config = lade.Config(max_draft_tokens=4)
    same_as_generate(model, prompt, drafter=explorer, config=config)
    assert len(explorer.excluded) <= GREEDY["max_new_tokens"]  # once in each step
    monkeypatch.setattr(Proposer, "prepare", lambda *args: pytest.fail("on a CPU"))
    monkeypatch.setattr(generation.Generation, "policy", DevicePolicy())
    lade.generate(model, prompt, drafter=explorer, config=config, **GREEDY)


@pytest.mark.usefixtures("waits")
def test_a_drafter_that_fails_beforehand_costs_the_drafts_alone() -> None:
    model = tiny_model("llama", seed=2)
    prompt = torch.tensor([[5, 6, 7]])
    with pytest.warns(lade.DrafterWarning, match="Explorer"):
        same_as_generate(model, prompt, drafter=Explorer(RuntimeError("mine")))


@pytest.mark.parametrize("options", [{"max_candidates": 4}, {"rngs": [np.random.default_rng(0)]}])
def test_where_nodes_are_few_or_drawn_nothing_is_explored(options: Any) -> None:
    proposer = Proposer(Explorer(named(3)), VOCAB_SIZE, **options)
    proposer.open(0, [5, 6])
    proposer.propose(0, [5, 6], [5, 6], 10, 8)
    assert len(proposer.explore(0, [], 8)) == 0


def test_rows_explore_different_tokens() -> None:
    model = tiny_model("llama", seed=2)
    prompt = torch.tensor([[5, 6, 7], [5, 6, 8]])
    explorer = Explorer(named())
    options = GREEDY | {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 4}
    explorer.answer = named(3)
    lade.generate(
        model, prompt, drafter=explorer, config=lade.Config(max_draft_tokens=2), **options
    )
    assert explorer.excluded[:2] == [[], [3]]


def test_nothing_is_learned_of_a_drafters_trust_from_what_it_explores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama", seed=2)
    recorded: list[Outcome] = []

    class Recording(Budget):
        def record(self, *args: Any, **kwargs: Any) -> None:
            recorded.extend(kwargs["outcomes"])

    monkeypatch.setattr(generation, "Budget", Recording)
    config = lade.Config(max_draft_tokens=4)
    prompt = torch.tensor([[5, 6, 7]])
    lade.generate(model, prompt, drafter=Explorer(named(3)), config=config, **GREEDY)
    assert recorded
    assert all(len(outcome.draft) == 0 for outcome in recorded)
