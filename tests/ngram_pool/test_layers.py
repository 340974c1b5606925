"""Layers: pools that are only read, drafted from beside the one that learns."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from ngram_pool import NGramPool, ReadOnlyPoolError, SuccessorTable, _kernels
from tests.ngram_pool.test_pool import as_tuple, noisy_text
from tests.ngram_pool.threads import in_threads

TEXT = noisy_text(600, seed=4)


def frozen(text: Any, capacity: int = 2000, max_ngram_size: int = 5) -> NGramPool:
    pool = NGramPool(capacity, max_ngram_size)
    pool.observe(text)
    return pool.as_read_only()


def test_a_draft_follows_the_text_of_every_layer() -> None:
    pool = NGramPool()
    pool.observe([1, 2, 3, 10, 11])
    layers = [frozen([1, 2, 3, 20 + i, 30 + i]) for i in range(6)]
    sequence = pool.open_sequence(layers=layers)
    draft = pool.draft([1, 2, 3], 40, sequence=sequence)
    at_root = draft.token_ids[draft.parents == -1].tolist()
    assert sorted(at_root) == [10, *range(20, 26)]
    assert sorted(draft.candidates()) == [[10, 11], *([20 + i, 30 + i] for i in range(6))]
    for other in (pool.open_sequence(), 0, None):  # its layers are a sequence's own
        assert pool.draft([1, 2, 3], 40, sequence=other).candidates() == [[10, 11]]


def test_no_layer_is_starved_by_frequent_text_elsewhere() -> None:
    pool = NGramPool()
    pool.observe([1, 2, 3, 10] * 50)
    layers = [frozen([1, 2, 3, 20] * 50), frozen([1, 2, 3, 30])]
    sequence = pool.open_sequence(layers=layers)
    draft = pool.draft([1, 2, 3], 40, sequence=sequence)
    assert set(draft.token_ids[draft.parents == -1].tolist()) == {10, 20, 30}


@pytest.mark.parametrize("max_ngram_size", [1, 3, 9])
@pytest.mark.parametrize("capacity", [60, 700, 5000])
def test_a_layer_may_have_any_size(capacity: int, max_ngram_size: int) -> None:
    pool = NGramPool(1000)
    pool.observe(TEXT[:100])
    sequence = pool.open_sequence(layers=[frozen(TEXT, capacity, max_ngram_size)])
    newest = TEXT[-50:]
    num_followed = 0
    for end in range(10, 49):
        draft = pool.draft(newest[:end], 8, sequence=sequence)
        num_followed += newest[end] in draft.token_ids[draft.parents == -1].tolist()
    assert num_followed > 30


def test_what_a_layer_has_harvested_counts_where_the_pool_knows_nothing() -> None:
    learned = NGramPool()
    learned.harvest([[-1, 1], [-1, 2]], [[5], [6]], [[0.9], [0.9]])
    pool = NGramPool()
    pool.harvest([[-1, 1]], [[7]], [[0.9]])
    sequence = pool.open_sequence(layers=[frozen([99]), learned.as_read_only()])
    assert pool.draft([1], 1, sequence=sequence).token_ids.tolist() == [7]
    assert pool.draft([2], 1, sequence=sequence).token_ids.tolist() == [6]
    assert len(pool.draft([2], 1)) == 0


def test_a_token_that_a_layer_knows_is_not_worth_exploring_more() -> None:
    learned = NGramPool()
    learned.harvest([[-1, 6]], [[1]], [[0.5]])
    pool = NGramPool()
    pool.harvest([[-1, 5]], [[6, 7]], [[0.5, 0.25]])
    assert pool.explore(2)[0].tolist() == [6, 7]
    sequence = pool.open_sequence(layers=[learned.as_read_only()])
    token_ids, worths = pool.explore(2, sequence=sequence)
    assert token_ids.tolist() == [7, 6]
    assert worths.tolist() == [5 * 0.25 / 16.75, 0.5 / 16.75]


def test_answers_teach_which_layer_to_trust() -> None:
    """What follows in one layer comes, what follows in the other never does."""
    right, wrong = np.arange(300), np.arange(1000, 1300)
    pool = NGramPool()
    pool._learning_rate = 0.02
    sequence = pool.open_sequence(layers=[frozen(wrong), frozen(right)])

    def trust() -> list[float]:
        ends = [[int(text[250])] for text in (wrong, right)]
        return [float(pool.draft(end, 1, sequence=sequence).probs[0]) for end in ends]

    before, (in_wrong, in_right) = pool._weights.copy(), trust()
    assert in_wrong == in_right
    for i in range(60):
        answer = [*right[4 * i : 4 * i + 4], wrong[2 * i], 2000 + i]
        pool.observe(answer, sequence, is_answer=True)
    in_wrong, in_right = trust()
    assert in_right > 1.2 * in_wrong
    moved = np.abs(pool._weights - before).sum(axis=1)
    assert (moved[_kernels.LAYER_ROW :] > 0.0).tolist() == [True, True, False, False]


def test_layers_begin_as_earlier_text_does() -> None:
    """A draft from a layer alone has the probabilities that earlier text would get."""
    text = [1, 2, 3, 4, 5, 1, 2, 3, 6, 7]
    own, pool = NGramPool(), NGramPool()
    own.observe(text)
    for num_layers in (1, 4):
        layers = [*[frozen([99])] * (num_layers - 1), frozen(text)]
        sequence = pool.open_sequence(layers=layers)
        found = pool.draft([1, 2, 3], 20, sequence=sequence)
        assert as_tuple(found) == as_tuple(own.draft([1, 2, 3], 20))


def test_a_sampled_draft_comes_from_layers_too() -> None:
    pool = NGramPool()
    sequence = pool.open_sequence(layers=[frozen([1, 2, 3] * 4), frozen([1, 2, 4] * 4)])
    draft = pool.sample([1, 2], 8, np.random.default_rng(0), sequence=sequence)
    assert {3, 4} <= set(draft.support_token_ids[0].tolist())


# --- pools that are only read ---------------------------------------------------------------


def test_a_read_only_pool_is_an_independent_copy_that_drafts_the_same() -> None:
    pool = NGramPool(500)
    pool.observe(TEXT)
    pool.harvest([[-1, 1]], [[2]], [[0.5]])
    fixed = pool.as_read_only()
    assert (pool.is_read_only, fixed.is_read_only) == (False, True)
    assert fixed.as_read_only() is fixed
    before = as_tuple(fixed.draft(TEXT[-4:], 20))
    assert before == as_tuple(pool.draft(TEXT[-4:], 20))
    pool.observe(list(range(500)))
    assert as_tuple(fixed.draft(TEXT[-4:], 20)) == before
    assert as_tuple(pool.draft(TEXT[-4:], 20)) != before
    for copied in (copy.copy(fixed), copy.deepcopy(fixed), pickle.loads(pickle.dumps(fixed))):
        assert copied.is_read_only
        assert as_tuple(copied.draft(TEXT[-4:], 20)) == before


WRITES: dict[str, Callable[[NGramPool], object]] = {
    "observe": lambda pool: pool.observe([1]),
    "harvest": lambda pool: pool.harvest([[-1, 1]], [[2]], [[0.5]]),
    "harvest_tree": lambda pool: pool.harvest_tree(-1, [0], [-1], [[0]], [[1.0]]),
    "open_sequence": lambda pool: pool.open_sequence(),
    "close_sequence": lambda pool: pool.close_sequence(0),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_to_a_read_only_pool_raises_and_changes_nothing(name: str) -> None:
    fixed = frozen(TEXT)
    before = pickle.dumps(fixed)
    with pytest.raises(ReadOnlyPoolError, match=f"a pool that learns for {name}, got NGramPool"):
        WRITES[name](fixed)
    assert pickle.dumps(fixed) == before


def test_layers_are_checked_before_a_sequence_opens() -> None:
    pool = NGramPool()
    with pytest.raises(ValueError, match=r"from NGramPool.load\(..., read_only=True\) or as_read"):
        pool.open_sequence(layers=[frozen([1]), NGramPool()])
    with pytest.raises(TypeError, match="expected layers to be NGramPools, got 'docs'"):
        pool.open_sequence(layers=["docs"])  # type: ignore[list-item]
    assert pool.num_open_sequences == 0


def test_layers_live_as_long_as_their_sequence_and_no_longer() -> None:
    pool, layer = NGramPool(), frozen([1, 2, 3])
    alive = weakref.ref(layer)
    sequence = pool.open_sequence(SuccessorTable(10), [layer])
    del layer
    gc.collect()
    assert pool.draft([1], 2, sequence=sequence).token_ids.tolist() == [2, 3]
    pool.close_sequence(sequence)
    del sequence
    gc.collect()
    assert alive() is None


def test_many_threads_draft_from_one_layer_while_their_own_pools_learn() -> None:
    layer = frozen(TEXT)
    expected = as_tuple(layer.draft(TEXT[5:9], 8))

    def work(seed: int) -> None:
        mine = NGramPool(500)
        sequence = mine.open_sequence(layers=[layer])
        for start in range(0, 200, 5):
            mine.observe([1000 + seed] * 5, sequence, is_answer=start % 2 == 0)
            found = mine.draft(TEXT[start : start + 4], 8, sequence=sequence)
            assert found.token_ids.max(initial=0) < 1000
            assert as_tuple(layer.draft(TEXT[5:9], 8)) == expected

    assert not in_threads(*(partial(work, seed) for seed in range(4)), seconds=None)
