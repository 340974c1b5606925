"""`SuccessorTable` against a plain dict, and what it promises of bounds, errors and files."""

import io
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ngram_pool import SuccessorTable
from tests.ngram_pool.table_oracle import Context, OracleTable

ALL_CONTEXTS = list(product(range(-1, 15), range(15)))


def random_puts(
    rng: np.random.Generator, num_contexts: int, num_ids: int = 3
) -> tuple[Any, Any, Any]:
    """Contexts, some of them twice, with up to `num_ids` different successors."""
    contexts = np.array(ALL_CONTEXTS)[rng.integers(0, len(ALL_CONTEXTS), num_contexts)]
    ids = np.array([rng.permutation(8)[:num_ids] for _ in contexts]).reshape(-1, num_ids)
    ends = rng.integers(0, num_ids + 1, len(contexts))
    ids[np.arange(num_ids) >= ends[:, None]] = -1
    probs = np.sort(rng.random(ids.shape).astype(np.float32))[:, ::-1]
    return contexts, ids, probs


def contents(table: SuccessorTable) -> dict[Context, tuple[list[int], list[float]]]:
    """All that `get` knows of."""
    found = {context: table.get(*context) for context in ALL_CONTEXTS}
    return {
        context: (known[0].tolist(), known[1].tolist())
        for context, known in found.items()
        if known is not None
    }


def expected_contents(oracle: OracleTable) -> dict[Context, tuple[list[int], list[float]]]:
    return {
        context: (
            [token_id for token_id, _ in known.successors],
            np.exp([cost / -4096 for _, cost in known.successors]).astype(np.float32).tolist(),
        )
        for context, known in oracle.known.items()
    }


def put_one(table: SuccessorTable, context: Context, token_id: int, prob: float = 0.5) -> None:
    table.put([context], [[token_id]], [[prob]])


# --- what is held ---------------------------------------------------------------------------


@given(
    capacity=st.sampled_from([1, 64, 100, 512]),
    num_successors=st.integers(1, 4),
    averages=st.booleans(),
    sizes=st.lists(st.integers(0, 150), max_size=6),
    seed=st.integers(0, 1000),
)
# A float32 product rounds to another cost here, if it is not made one of float64.
@example(capacity=100, num_successors=1, averages=True, sizes=[43, 94, 142, 6, 1, 54], seed=0)
def test_a_table_knows_what_the_oracle_knows(
    capacity: int, num_successors: int, averages: bool, sizes: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    table = SuccessorTable(capacity, num_successors, averages)
    oracle = OracleTable(capacity, num_successors, averages)
    for size in sizes:
        contexts, ids, probs = random_puts(rng, size)
        table.put(contexts, ids, probs)
        oracle.put(contexts.tolist(), ids.tolist(), probs.tolist())
        assert contents(table) == expected_contents(oracle)
        assert len(table) == len(oracle.known) <= table.capacity
    counts = sorted(known.count for known in oracle.known.values())
    assert sorted(table.arrays()["counts"].tolist()) == counts


# --- memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("capacity", "rounded"), [(1, 64), (64, 64), (65, 128), (1000, 1024)])
def test_memory_is_bounded_whatever_is_put(capacity: int, rounded: int) -> None:
    table = SuccessorTable(capacity)
    at_first = table.nbytes
    assert at_first == 64 * (8 + 4 + 8 * 4 + 8 * 2)
    for start in range(0, 10 * rounded, 500):
        contexts = [[-1, token_id] for token_id in range(start, start + 500)]
        table.put(contexts, [[1]] * 500, [[0.5]] * 500)
    assert table.capacity == rounded
    assert table.nbytes == at_first * rounded // 64
    assert 0.95 * rounded < len(table) <= rounded
    assert len(table.arrays()["keys"]) == len(table)
    assert repr(table) == (
        f"SuccessorTable(capacity={rounded}, held={len(table)}, nbytes={table.nbytes})"
    )


# --- files ----------------------------------------------------------------------------------


def filled(num_contexts: int, capacity: int = 4096, seed: int = 0) -> SuccessorTable:
    table = SuccessorTable(capacity)
    table.put(*random_puts(np.random.default_rng(seed), num_contexts))
    return table


@pytest.mark.parametrize("num_contexts", [0, 1, 17, 60, 300])
def test_a_table_comes_back_from_a_file(num_contexts: int) -> None:
    table = filled(num_contexts)
    file = io.BytesIO()
    np.savez(file, **table.arrays())  # type: ignore[arg-type]
    file.seek(0)
    with np.load(file) as arrays:
        again = SuccessorTable.from_arrays(arrays)
    assert len(again) == len(table)
    assert again.num_successors == table.num_successors
    assert contents(again) == contents(table)
    puts = random_puts(np.random.default_rng(1), 1)
    for _ in range(3):  # how often each was put came back, too
        table.put(*puts)
        again.put(*puts)
        assert contents(again) == contents(table)


def changed(name: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    arrays = dict(filled(20).arrays())
    arrays[name] = change(arrays[name])
    return arrays


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("keys", lambda x: x.astype(np.int32), "expected an array 'keys' of int64 in the table"),
        ("counts", lambda x: x.astype(float), "expected an array 'counts' of int32 in the table"),
        ("costs", lambda x: x.astype(int), "expected an array 'costs' of uint16 in the table"),
        ("keys", lambda x: x[:-1], "expected the arrays of a table to have a row for each key"),
        ("counts", lambda x: x[1:], "to have a row for each key"),
        ("token_ids", lambda x: x[:, 1:], "to have a row for each key"),
        ("keys", lambda x: x - 2**62, "expected keys, counts and token ids of a table, got neg"),
        ("token_ids", lambda x: x - 9, "expected keys, counts and token ids of a table"),
    ],
)
def test_other_arrays_are_refused(name: str, change: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SuccessorTable.from_arrays(changed(name, change))


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
    table = filled(40)
    before = {name: array.tolist() for name, array in table.arrays().items()}
    with pytest.raises(error, match=text):
        table.put(contexts, ids, probs)
    assert {name: array.tolist() for name, array in table.arrays().items()} == before


# --- joining tables -------------------------------------------------------------------------


def test_a_table_learns_what_another_holds_as_often_as_it_was_put_there() -> None:
    table, other, once = SuccessorTable(64), SuccessorTable(64), SuccessorTable(64)
    table.put([[1, 2]], [[3, 4]], [[0.75, 0.25]])
    for _ in range(3):
        other.put([[1, 2]], [[4, 5]], [[0.75, 0.25]])
    put_one(other, (7, 8), 9)
    before = contents(other)
    table.update(other)
    known = table.get(1, 2)
    assert known is not None
    assert known[0].tolist() == [4, 3, 5]
    np.testing.assert_allclose(known[1], [0.625, 0.1875, 0.1875], rtol=2e-3)  # not 0.5, ...
    assert table.arrays()["counts"].tolist().count(4) == 1
    assert contents(other) == before
    assert contents(table)[7, 8] == before[7, 8]
    once.update(SuccessorTable(64))
    assert len(once) == 0
