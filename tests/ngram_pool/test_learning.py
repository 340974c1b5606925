"""Sources that `NGramPool` blends: what each brings, and how answers teach which one to trust."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ngram_pool import NGramPool, SuccessorTable, _kernels

NUM_TOKENS = 30


def weigh(pool: NGramPool, **weights: float) -> None:
    """Give a pool weights of its own, 0 but for those named."""
    pool._weights[:] = 0.0
    for name, weight in weights.items():
        pool._weights[: _kernels.MATCH_ROWS, getattr(_kernels, name)] = weight


def likeliest(pool: NGramPool, context: list[int], sequence: int | None = None) -> list[int]:
    found: list[int] = pool.draft(context, max_draft_tokens=1, sequence=sequence).token_ids.tolist()
    return found


def root_probs(
    pool: NGramPool, context: list[int], sequence: int | None = None
) -> dict[int, float]:
    """Return what a draft of 100 nodes says of the next token."""
    draft = pool.draft(context, 100, sequence=sequence)
    at_root = draft.parents == -1
    return dict(zip(draft.token_ids[at_root].tolist(), draft.probs[at_root].tolist(), strict=True))


# --- what is known --------------------------------------------------------------------------


def test_what_was_harvested_is_drafted_where_no_text_is() -> None:
    pool = NGramPool()
    pool.harvest([[-1, 5], [4, 5], [-1, 6]], [[6, 7], [8, 9], [5, -1]], [[0.7, 0.1]] * 3)
    assert likeliest(pool, [5]) == [6]
    weigh(pool, HARVESTED_PAIR=0.3)
    assert likeliest(pool, [4, 5]) == [8]
    assert root_probs(pool, [4, 5]).keys() == {6, 7, 8, 9}  # of the pair and of the last one
    assert len(pool.draft([9], 4)) == 0
    drawn = pool.sample([5], 4, np.random.default_rng(0))
    assert set(drawn.token_ids.tolist()) <= {5, 6, 7}


def test_what_is_harvested_again_replaces_what_was() -> None:
    pool = NGramPool()
    pool.harvest([[-1, 5]], [[6, 7]], [[0.7, 0.1]])
    pool.harvest([[-1, 5]], [[8]], [[0.3]])
    assert pool.draft([5], 5).token_ids.tolist() == [8]


def test_a_tree_is_harvested_as_its_pairs_and_single_tokens_most_likely_last() -> None:
    rng = np.random.default_rng(0)
    trees, contexts = SuccessorTable(4096), SuccessorTable(4096)
    for _ in range(300):
        num_nodes = int(rng.integers(1, 20))
        nodes = rng.integers(0, NUM_TOKENS, num_nodes)
        parents = np.array([rng.integers(-1 if i == 0 else 0, max(1, i)) for i in range(num_nodes)])
        parents = np.array([-1, *(rng.integers(0, node) for node in range(1, num_nodes))])
        previous = int(rng.integers(-1, NUM_TOKENS))
        ids = np.stack([rng.permutation(NUM_TOKENS)[:4] for _ in nodes])
        probs = -np.sort(-rng.random(ids.shape), axis=1)
        trees.put_tree(previous, nodes, parents, ids, probs)
        for node in reversed(range(num_nodes)):
            contexts.put([[-1, nodes[node]]], ids[[node]], probs[[node]])
        for node in reversed(range(num_nodes)):
            before = nodes[parents[node]] if node else previous
            contexts.put([[before, nodes[node]]], ids[[node]], probs[[node]])
    assert len(trees) == len(contexts) > 800
    for first in range(-1, NUM_TOKENS):
        for second in range(NUM_TOKENS):
            known, expected = trees.get(first, second), contexts.get(first, second)
            assert (known is None) == (expected is None)
            if known is not None and expected is not None:
                assert [part.tolist() for part in known] == [part.tolist() for part in expected]


@pytest.mark.parametrize(
    ("previous", "nodes", "parents", "ids", "prob", "error"),
    [
        (-2, [5, 6], [-1, 0], [[7], [8]], 0.5, ValueError),
        (2**31, [5, 6], [-1, 0], [[7], [8]], 0.5, ValueError),
        (-1, [5, -1], [-1, 0], [[7], [8]], 0.5, ValueError),
        (-1, [5, 6], [-1, 1], [[7], [8]], 0.5, ValueError),
        (-1, [5, 6], [-1, -2], [[7], [8]], 0.5, ValueError),
        (-1, [5, 6], [-1, 0], [[7], [-2]], 0.5, ValueError),
        (-1, [5, 6], [-1, 0], [[7], [8]], 1.5, ValueError),
        (-1, [5, 6], [-1, 0], [[7], [8]], np.nan, ValueError),
        (-1, [5], [-1, 0], [[7], [8]], 0.5, ValueError),
        (-1, [5, 6], [-1, 0], [7, 8], 0.5, ValueError),
        (-1, [5.0, 6.0], [-1, 0], [[7], [8]], 0.5, TypeError),
    ],
)
def test_a_bad_tree_raises_and_changes_nothing(
    previous: int, nodes: Any, parents: Any, ids: Any, prob: float, error: type[Exception]
) -> None:
    pool = NGramPool()
    with pytest.raises(error, match="expected"):
        pool.harvest_tree(previous, nodes, parents, ids, np.full(np.shape(ids), prob))
    assert len(pool.draft([5], 5)) == 0


def test_a_bad_harvest_raises_and_changes_nothing() -> None:
    pool = NGramPool()
    pool.harvest([[-1, 5]], [[6]], [[0.7]])
    with pytest.raises(ValueError, match="expected probs from 0 to 1"):
        pool.harvest([[-1, 5]], [[7]], [[1.7]])
    assert pool.draft([5], 5).token_ids.tolist() == [6]


def test_a_prior_is_used_by_its_sequence_alone_and_never_written() -> None:
    prewarmed = SuccessorTable(100)
    prewarmed.put([[-1, 5], [4, 5]], [[6, 7], [8, 9]], [[0.7, 0.1]] * 2)
    before = {name: array.tolist() for name, array in prewarmed.arrays().items()}
    pool = NGramPool()
    mine, other = pool.open_sequence(prewarmed), pool.open_sequence()
    assert likeliest(pool, [5], mine) == [6]
    for sequence in (None, 0, other):
        assert len(pool.draft([5], 4, sequence=sequence)) == 0
        assert len(pool.sample([5], 4, np.random.default_rng(0), sequence=sequence)) == 0
    assert set(pool.sample([5], 1, np.random.default_rng(0), sequence=mine).token_ids) <= {6, 7}
    pool.harvest([[-1, 5], [1, 5]], [[3], [3]], [[0.5], [0.5]])
    pool.observe([4, 5, 1, 4, 5, 2] * 20, mine, is_answer=True)
    assert {name: array.tolist() for name, array in prewarmed.arrays().items()} == before
    prewarmed.put([[-1, 77]], [[78]], [[0.9]])  # its owner may
    assert likeliest(pool, [77], mine) == [78]
    pool.close_sequence(mine)
    assert len(pool.draft([77], 4)) == 0


def test_sequence_0_has_no_prior_however_often_it_starts_afresh() -> None:
    prewarmed = SuccessorTable(100)
    prewarmed.put([[-1, 5]], [[6]], [[0.7]])
    pool = NGramPool()
    pool.open_sequence(prewarmed)
    pool.close_sequence(0)
    assert len(pool.draft([5], 4, sequence=0)) == 0


def test_behind_an_exchanged_token_the_original_goes_on() -> None:
    pool = NGramPool()
    pool.observe([1, 2, 3, 4, 5, 6])
    weigh(pool, SKIP=1.0, BIAS=-1.0)
    assert likeliest(pool, [1, 2, 3, 40]) == [5]  # 40 for 4
    assert len(pool.draft([8, 2, 30], 4)) == 0  # too little before it


def test_only_the_newest_contexts_are_looked_at_for_exchanged_tokens() -> None:
    for num_newer, expected in ((10, {8, 9}), (20, {9})):
        pool = NGramPool()
        pool.observe([1, 2, 4, 8] + [1, 2, 3, 9] * num_newer)
        assert root_probs(pool, [5, 1, 2, 3]).keys() == expected


def test_what_is_drafted_though_unlikely_is_still_promised_something() -> None:
    pool = NGramPool()
    pool.observe([1, 2, 3, 4])
    weigh(pool, BIAS=-9.5)
    draft = pool.draft([1], 4)
    assert draft.token_ids.tolist() == [2, 3, 4]
    assert (draft.probs > 0).all()
    drawn = pool.sample([1], 4, np.random.default_rng(0))
    assert drawn.token_ids.tolist() == [2, 3, 4]


# --- whose text -----------------------------------------------------------------------------


def test_text_of_the_own_answer_and_prompt_is_told_apart() -> None:
    pool = NGramPool()
    pool.observe([1, 2, 9], pool.open_sequence())
    mine = pool.open_sequence()
    pool.observe([1, 3, 9], mine)
    pool.observe([1, 4, 9], mine, is_answer=True)
    for name, token_id in (("IN_PROMPT", 3), ("IN_ANSWER", 4)):
        weigh(pool, **{name: 3.0})
        probs = root_probs(pool, [1], mine)
        assert probs.keys() == {2, 3, 4}
        assert all(probs[token_id] > 3 * probs[other] for other in {2, 3, 4} - {token_id})
        for sequence in (None, pool.open_sequence()):
            assert len(set(root_probs(pool, [1], sequence).values())) == 1
    weigh(pool, IN_PROMPT=-3.0, IN_ANSWER=-3.0)
    assert likeliest(pool, [1], mine) == [2]


def test_an_answer_may_come_first_and_a_restarted_sequence_has_none() -> None:
    pool = NGramPool()
    pool.observe([1, 2], 0)
    pool.close_sequence(0)
    pool.observe([], 0, is_answer=True)  # nothing begins with nothing
    pool.observe([1, 3], 0)
    pool.observe([9, 1, 4, 9], 0, is_answer=True)
    weigh(pool, IN_PROMPT=3.0)
    assert likeliest(pool, [1], 0) == [3]
    weigh(pool, IN_ANSWER=3.0)
    assert likeliest(pool, [1], 0) == [4]
    pool.close_sequence(0)
    assert len(set(root_probs(pool, [1], 0).values())) == 1


# --- learning -------------------------------------------------------------------------------


def epochs(right: str, num_epochs: int) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Yield next tokens to harvest, and an answer in which one source is right.

    Text is right where the next token never changes, and harvests tell of another one; harvests
    are where it is another one in each epoch, so that all text is out of date.
    """
    rng = np.random.default_rng(0)
    always = (np.arange(NUM_TOKENS) + 1) % NUM_TOKENS
    for _ in range(num_epochs):
        # One cycle through all tokens, in any order.
        order = rng.permutation(NUM_TOKENS)
        now = np.empty(NUM_TOKENS, int)
        now[order] = np.roll(order, -1)
        truth = always if right == "text" else now
        answer = [0]
        while len(answer) <= NUM_TOKENS:
            answer.append(int(truth[answer[-1]]))
        yield now, answer


def told(right: str, num_epochs: int, is_answer: bool) -> tuple[float, float]:
    """Return how often the first node was right in the last epochs, and its mean probability.

    The pool begins with all its trust in the other source, and learns fast.
    """
    pool = NGramPool()
    pool._learning_rate = 0.01
    weigh(pool, **{"HARVESTED_SINGLE" if right == "text" else "TEXT": 1.0}, BIAS=-8.0)
    hits, probs = [], []
    tokens = np.arange(NUM_TOKENS)
    for epoch, (now, answer) in enumerate(epochs(right, num_epochs)):
        pool.harvest(
            np.stack([np.full(NUM_TOKENS, -1), tokens], 1),
            now[:, None],
            np.full((NUM_TOKENS, 1), 0.9),
        )
        if epoch >= num_epochs - 3:
            for end in range(1, len(answer)):
                came = answer[end]
                hits.append(likeliest(pool, answer[:end]) == [came])
                probs.append(root_probs(pool, answer[:end]).get(came, 0.0))
        pool.close_sequence(0)
        pool.observe(answer, 0, is_answer)
    return float(np.mean(hits)), float(np.mean(probs))


@pytest.mark.parametrize("right", ["text", "harvest"])
def test_answers_teach_which_source_is_right(right: str) -> None:
    hits, prob = told(right, 40, is_answer=True)
    hits_untaught, prob_untaught = told(right, 40, is_answer=False)
    assert hits_untaught < 0.5 < 0.9 < hits
    assert prob > 2 * prob_untaught


def test_only_answers_teach() -> None:
    pool = NGramPool()
    before = pool._weights.copy()
    pool.observe([1, 2, 3] * 20)
    pool.harvest([[-1, 1]], [[3]], [[0.5]])
    pool.draft([1, 2], 10)
    pool.sample([1, 2], 10, np.random.default_rng(0))
    assert (pool._weights == before).all()
    pool.observe([1, 2, 3], is_answer=True)
    assert (pool._weights != before).any()
    assert np.isfinite(pool._weights).all()


def test_what_comes_is_likelier_after_it_came() -> None:
    """One step along the gradient, from weights as random as can be."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        pool = NGramPool()
        weights = pool._weights[: _kernels.LAYER_ROW]
        weights[:] = rng.normal(0.0, 0.3, weights.shape)
        pool.observe(rng.integers(0, 4, 60))
        pool.harvest(np.arange(8).reshape(4, 2) % 4, np.full((4, 1), 2), np.full((4, 1), 0.5))
        context = rng.integers(0, 4, 5).tolist()
        draft = pool.draft(context, 1)
        pool.close_sequence(0)
        pool.observe(context)
        before = root_probs(pool, context)
        came = int(draft.token_ids[0])
        learned = copy.deepcopy(pool)
        learned.observe([came], is_answer=True)
        untaught = copy.deepcopy(pool)
        untaught._weights[:] = learned._weights
        assert root_probs(untaught, context)[came] > before[came]
