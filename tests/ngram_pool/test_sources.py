"""Sources that `NGramPool` blends: harvested successors, unigrams, layers."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ngram_pool import NGramPool, ReadOnlyPoolError
from tests.ngram_pool.table_oracle import OracleTable
from tests.ngram_pool.test_harvest import contents, expected_contents
from tests.ngram_pool.test_pool import as_tuple, noisy_text

NUM_TOKENS = 30


# --- what is known --------------------------------------------------------------------------


def test_a_tree_is_harvested_as_its_pairs_and_single_tokens_most_likely_last() -> None:
    rng = np.random.default_rng(5)
    pool, oracle = NGramPool(), OracleTable(2**16)
    for _ in range(80):
        num_nodes = int(rng.integers(1, 20))
        nodes = rng.integers(0, NUM_TOKENS, num_nodes)
        parents = np.array([-1, *(rng.integers(0, node) for node in range(1, num_nodes))])
        previous = int(rng.integers(-1, NUM_TOKENS))
        ids = np.stack([rng.permutation(NUM_TOKENS)[:4] for _ in nodes])
        probs = -np.sort(-rng.random(ids.shape, np.float32), axis=1)
        pool.harvest_tree(previous, nodes, parents, ids, probs)
        befores = [nodes.item(over) if over >= 0 else previous for over in parents.tolist()]
        for firsts in ([-1] * num_nodes, befores):
            pairs = list(zip(firsts, nodes.tolist(), strict=True))
            oracle.put(pairs[::-1], ids.tolist()[::-1], probs.tolist()[::-1], averages=False)
    assert contents(pool) == expected_contents(oracle)
    assert pool.num_contexts > 400


@pytest.mark.parametrize(
    ("previous", "nodes", "parents", "ids", "prob", "error"),
    [
        (-2, [5, 6], [-1, 0], [[7], [8]], 0.5, ValueError),
        (-1, [5, -1], [-1, 0], [[7], [8]], 0.5, ValueError),
        (-1, [5, 6], [-1, 1], [[7], [8]], 0.5, ValueError),
        (-1, [5, 6], [-1, 0], [[7], [8]], 1.5, ValueError),
        (-1, [5, 6], [-1, 0], [[7], [8]], np.nan, ValueError),
        (-1, [5], [-1, 0], [[7], [8]], 0.5, ValueError),
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


# --- unigrams ---


def test_counts_of_rare_tokens_give_way_and_nothing_grows() -> None:
    pool = NGramPool()
    often = np.arange(8)[None]
    for start in range(0, 40_000, 8):
        rare = np.arange(start, start + 8)[None] + 1000
        pool.harvest([[-1, start], [-1, 5]], [rare[0], often[0]], np.full((2, 8), [[0.01], [0.1]]))
    nbytes = pool.nbytes
    pool.harvest([[-1, 1]], [[123_456]], [[0.5]])
    assert pool.nbytes == nbytes
    assert {*pool.unigrams()} >= {*range(8), 123_456} - {5}


# --- layers ---

TEXT = noisy_text(600, seed=4)


def frozen(text: Any, capacity: int = 2000, max_ngram_size: int = 5) -> NGramPool:
    pool = NGramPool(capacity, max_ngram_size)
    pool.observe(text)
    return pool.as_read_only()


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
