"""Harvested successors against a plain dict, and what pools promise of bounds and errors."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ngram_pool import NGramPool
from ngram_pool._kernels import NONE
from tests.ngram_pool.table_oracle import Context, OracleTable

ALL_CONTEXTS = list(product(range(-1, 15), range(15)))


def random_puts(
    rng: np.random.Generator, num_contexts: int, num_ids: int = 3
) -> tuple[Any, Any, Any]:
    """Contexts, some of them twice, with up to `num_ids` different successors."""
    contexts = np.array(ALL_CONTEXTS)[rng.integers(0, len(ALL_CONTEXTS), num_contexts)]
    ids = np.array([rng.permutation(12)[:num_ids] for _ in contexts]).reshape(-1, num_ids)
    ends = rng.integers(0, num_ids + 1, len(contexts))
    ids[np.arange(num_ids) >= ends[:, None]] = -1
    probs = np.sort(rng.random(ids.shape).astype(np.float32))[:, ::-1]
    return contexts, ids, probs


def contents(pool: NGramPool) -> dict[Context, tuple[list[int], list[float]]]:
    """The successors of every context, and their probabilities."""
    held, found = pool._harvested.held, {}
    rows = np.flatnonzero(held.keys >= 0)
    for row, (previous, last) in zip(rows, pool.contexts().tolist(), strict=True):
        is_known = held.token_ids[row] >= 0
        probs = np.exp(held.costs[row, is_known] / -4096).astype(np.float32)
        found[previous, last] = held.token_ids[row, is_known].tolist(), probs.tolist()
    return found


def expected_contents(oracle: OracleTable) -> dict[Context, tuple[list[int], list[float]]]:
    return {
        context: (
            [token_id for token_id, _ in known.successors],
            np.exp([cost / -4096 for _, cost in known.successors]).astype(np.float32).tolist(),
        )
        for context, known in oracle.known.items()
    }


# --- what is held ---------------------------------------------------------------------------


@given(
    capacity=st.sampled_from([1, 64, 100, 512]),
    sizes=st.lists(st.integers(0, 150), max_size=6),
    seed=st.integers(0, 1000),
)
def test_a_table_knows_what_the_oracle_knows(capacity: int, sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool, oracle = NGramPool(16 * capacity), OracleTable(capacity)
    for size in sizes:
        contexts, ids, probs = random_puts(rng, size)
        pool.harvest(contexts, ids, probs)
        oracle.put(contexts.tolist(), ids.tolist(), probs.tolist())
        assert contents(pool) == expected_contents(oracle)
        assert pool.num_contexts == len(oracle.known)
    counts = sorted(known.count for known in oracle.known.values())
    held = pool._harvested.held
    assert sorted(held.counts[held.keys != NONE].tolist()) == counts


# --- memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("capacity", "rounded"), [(1, 64), (64, 64), (65, 128), (1000, 1024)])
def test_memory_is_bounded_whatever_is_put(capacity: int, rounded: int) -> None:
    pool = NGramPool(16 * capacity)
    at_first, row = pool.nbytes, 8 + 4 + 8 * 4 + 8 * 2
    for start in range(0, 10 * rounded, 500):
        contexts = [[-1, token_id] for token_id in range(start, start + 500)]
        pool.harvest(contexts, [[1]] * 500, [[0.5]] * 500)
    assert pool.nbytes == at_first + (rounded - 64) * row
    assert 0.95 * rounded < pool.num_contexts <= rounded
    assert len(pool.contexts()) == pool.num_contexts


# --- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contexts", "ids", "probs", "error", "text"),
    [
        ([[1.0, 2.0]], [[3]], [[0.5]], TypeError, "contexts to be integers, got dtype float64"),
        ([[1, 2]], [[True]], [[0.5]], TypeError, "token_ids to be integers, got dtype bool"),
        ([1, 2], [[3]], [[0.5]], ValueError, r"contexts of shape \[n, 2\], got shape \[2\]"),
        ([[1, 2]], [3], [0.5], ValueError, r"of shape \[1, k\], got shapes \[1\] and \[1\]"),
        ([[1, 2]], [[3, 4]], [[0.5]], ValueError, r"got shapes \[1, 2\] and \[1, 1\]"),
        ([[-2, 2]], [[3]], [[0.5]], ValueError, "expected contexts from -1 to 2147483647"),
        ([[1, -1]], [[3]], [[0.5]], ValueError, "expected contexts from 0 to 2147483647"),
        ([[1, 2**31]], [[3]], [[0.5]], ValueError, "expected contexts from 0 to 2147483647"),
        ([[1, 2]], [[2**31]], [[0.5]], ValueError, "expected token_ids from -1 to 2147483647"),
        ([[1, 2]], [[3]], [[1.5]], ValueError, "expected probs from 0 to 1"),
        ([[1, 2]], [[3]], [[float("nan")]], ValueError, "expected probs from 0 to 1"),
    ],
)
def test_bad_arguments_raise_and_change_nothing(
    contexts: Any, ids: Any, probs: Any, error: type[Exception], text: str
) -> None:
    pool = NGramPool()
    pool.harvest(*random_puts(np.random.default_rng(0), 40))
    before = contents(pool)
    with pytest.raises(error, match=text):
        pool.harvest(contexts, ids, probs)
    assert contents(pool) == before
