"""`SuccessorTable` against a plain dict, and what it promises of bounds, errors and files."""

import io
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ngram_pool import SuccessorTable, _kernels
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


def contexts_of_one_bucket(num_rows: int, num_contexts: int) -> list[Context]:
    oracle = OracleTable(1)
    oracle.num_rows = num_rows
    found = [context for context in ALL_CONTEXTS if oracle.bucket(context) == 0]
    assert len(found) >= num_contexts
    return found[:num_contexts]


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


def test_the_largest_token_ids_are_held() -> None:
    table = SuccessorTable(64)
    put_one(table, (2**31 - 1, 2**31 - 1), 2**31 - 1)
    known = table.get(2**31 - 1, 2**31 - 1)
    assert known is not None
    assert known[0].tolist() == [2**31 - 1]


@pytest.mark.parametrize("previous", [-2, -(2**31)])
def test_what_can_be_no_context_is_unknown(previous: int) -> None:
    assert SuccessorTable(64).get(previous, 2**31 - 1) is None


@pytest.mark.parametrize("ids", [[], [-1], [-1, 3]])
def test_a_context_without_successors_is_known_for_that(ids: list[int]) -> None:
    table = SuccessorTable(64)
    table.put([[1, 2]], [ids], [[0.5] * len(ids)])
    known = table.get(1, 2)
    assert known is not None
    assert len(known[0]) == len(known[1]) == 0
    assert len(table) == 1


def test_the_likeliest_successors_are_held_and_probabilities_to_a_part_in_4096() -> None:
    table = SuccessorTable(64, num_successors=3)
    probs = [0.5, 0.31, 0.1, 0.001]
    table.put([[1, 2]], [[4, 3, 2, 1]], [probs])
    known = table.get(1, 2)
    assert known is not None
    assert known[0].tolist() == [4, 3, 2]
    np.testing.assert_allclose(known[1], probs[:3], rtol=1 / 4096)


# --- putting again --------------------------------------------------------------------------


def test_a_table_that_averages_gives_every_put_its_share() -> None:
    table = SuccessorTable(64)
    table.put([[1, 2]], [[3, 4]], [[0.75, 0.25]])
    table.put([[1, 2]], [[4, 5]], [[0.75, 0.25]])
    known = table.get(1, 2)
    assert known is not None
    assert known[0].tolist() == [4, 3, 5]  # not [4, 5]
    np.testing.assert_allclose(known[1], [0.5, 0.375, 0.125], rtol=1e-3)
    for _ in range(100):
        put_one(table, (1, 2), 3, 1.0)
    put_one(table, (1, 2), 6, 1.0)
    known = table.get(1, 2)
    assert known is not None
    assert known[0].tolist()[:2] == [3, 6]
    np.testing.assert_allclose(known[1][:2], [0.9, 0.1], rtol=2e-3)  # a tenth, not 1 / 103


def test_what_get_returns_is_the_callers_own() -> None:
    table = SuccessorTable(64)
    put_one(table, (1, 2), 3)
    for _ in range(2):
        known = table.get(1, 2)
        assert known is not None
        assert known[0].tolist() == [3]
        known[0][:] = 7


# --- memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("capacity", "rounded"), [(1, 64), (64, 64), (65, 128), (1000, 1024)])
def test_memory_is_bounded_whatever_is_put(capacity: int, rounded: int) -> None:
    table = SuccessorTable(capacity)
    at_first = table.nbytes
    assert at_first == 64 * (8 + 4 + 4 + 8 * 4 + 8 * 2)
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


def test_memory_grows_with_the_contexts_and_none_is_lost_on_the_way() -> None:
    table = SuccessorTable(2**20)
    contexts = [[-1, token_id] for token_id in range(2000)]
    table.put(contexts, [[1]] * 2000, [[0.5]] * 2000)
    assert table.nbytes <= 8192 * 64
    assert len(table) > 0.98 * 2000


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_table_that_cannot_grow_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    table = SuccessorTable(10_000)
    contexts = [[-1, token_id] for token_id in range(100)]
    table.put(contexts[:10], [[1]] * 10, [[0.5]] * 10)
    nbytes = table.nbytes
    full, num_calls = np.full, 0

    def starving(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > failing:
            raise MemoryError
        return full(*args)

    with monkeypatch.context() as patch:
        patch.setattr(np, "full", starving)
        with pytest.raises(MemoryError):
            table.put(contexts[10:], [[1]] * 90, [[0.5]] * 90)
    assert table.nbytes == nbytes
    assert all(table.get(-1, token_id) is not None for token_id in range(10))
    table.put(contexts[10:], [[1]] * 90, [[0.5]] * 90)
    assert len(table) > 90


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


@pytest.mark.parametrize("num_contexts", [20, 31, 64, 128, 250])
def test_no_context_is_lost_on_the_way_through_arrays(num_contexts: int) -> None:
    for seed in range(15):
        table = SuccessorTable(4096)
        contexts = np.random.default_rng(seed).integers(0, 2**31, (num_contexts, 2))
        for context in contexts.tolist():
            put_one(table, context, 1)
        again = SuccessorTable.from_arrays(table.arrays())
        assert sorted(again.arrays()["keys"]) == sorted(table.arrays()["keys"])


def test_a_full_table_comes_back_in_the_order_of_its_puts() -> None:
    table = filled(1000, capacity=64)
    assert len(table) > 56
    again = SuccessorTable.from_arrays(table.arrays(), capacity=64)
    for name, array in table.arrays().items():
        assert again.arrays()[name].tolist() == array.tolist()
    for context in ALL_CONTEXTS[:40]:  # the same ones go
        put_one(table, context, 1)
        put_one(again, context, 1)
    assert contents(again) == contents(table)


def test_a_smaller_capacity_is_kept_to() -> None:
    table = filled(1000)
    again = SuccessorTable.from_arrays(table.arrays(), capacity=64)
    assert again.capacity == 64
    assert 48 < len(again) <= 64
    known = contents(table)
    assert contents(again).items() <= known.items()


def test_arrays_are_copies() -> None:
    table = filled(50)
    before = contents(table)
    for array in table.arrays().values():
        array[:] = 1
    assert contents(table) == before
    again = SuccessorTable.from_arrays(table.arrays())
    put_one(again, (-1, 3), 7, 1.0)
    assert contents(table) == before


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
        ("keys", lambda x: x[:, None], "to have a row for each key"),
        ("counts", lambda x: x[1:], "to have a row for each key"),
        ("token_ids", lambda x: x[:, 1:], "to have a row for each key"),
        ("token_ids", lambda x: x.ravel(), "to have a row for each key"),
        ("keys", lambda x: x - 2**62, "expected keys, counts and token ids of a table, got neg"),
        ("counts", lambda x: x * 0, "expected keys, counts and token ids of a table"),
        ("token_ids", lambda x: x - 9, "expected keys, counts and token ids of a table"),
    ],
)
def test_other_arrays_are_refused(name: str, change: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SuccessorTable.from_arrays(changed(name, change))


@pytest.mark.parametrize("name", ["keys", "counts", "token_ids", "costs"])
def test_a_missing_array_is_named(name: str) -> None:
    arrays = filled(20).arrays()
    del arrays[name]
    with pytest.raises(ValueError, match=f"expected an array '{name}' of"):
        SuccessorTable.from_arrays(arrays)


# --- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contexts", "ids", "probs", "error", "text"),
    [
        ([[1.0, 2.0]], [[3]], [[0.5]], TypeError, "contexts to be integers, got dtype float64"),
        ([[1, 2]], [[True]], [[0.5]], TypeError, "token_ids to be integers, got dtype bool"),
        ([[1, 2]], [["a"]], [[0.5]], TypeError, "token_ids to be integers, got dtype <U1"),
        ([1, 2], [[3]], [[0.5]], ValueError, r"contexts of shape \[n, 2\], got shape \[2\]"),
        ([[1, 2, 3]], [[3]], [[0.5]], ValueError, r"got shape \[1, 3\]"),
        ([[1, 2]], [3], [0.5], ValueError, r"of shape \[1, k\], got shapes \[1\] and \[1\]"),
        ([[1, 2]], [[3, 4]], [[0.5]], ValueError, r"got shapes \[1, 2\] and \[1, 1\]"),
        ([[1, 2]] * 2, [[3]], [[0.5]], ValueError, r"of shape \[2, k\], got shapes \[1, 1\]"),
        ([[-2, 2]], [[3]], [[0.5]], ValueError, "expected contexts from -1 to 2147483647"),
        ([[1, -1]], [[3]], [[0.5]], ValueError, "expected contexts from 0 to 2147483647"),
        ([[1, 2**31]], [[3]], [[0.5]], ValueError, "expected contexts from 0 to 2147483647"),
        ([[1, 2]], [[-2]], [[0.5]], ValueError, "expected token_ids from -1 to 2147483647"),
        ([[1, 2]], [[2**31]], [[0.5]], ValueError, "expected token_ids from -1 to 2147483647"),
        ([[1, 2]], [[3]], [[1.5]], ValueError, "expected probs from 0 to 1"),
        ([[1, 2]], [[3]], [[-0.5]], ValueError, "expected probs from 0 to 1"),
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


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="expected capacity to be positive, got 0"):
        SuccessorTable(0)
    with pytest.raises(TypeError, match="expected num_successors to be an integer, got"):
        SuccessorTable(10, 1.5)  # type: ignore[arg-type]


def test_nothing_put_is_nothing_held() -> None:
    table = SuccessorTable(64)
    table.put(np.empty((0, 2), int), np.empty((0, 4), int), np.empty((0, 4)))
    assert len(table) == 0
    assert table.held.keys.max() == _kernels.NONE


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


def test_a_table_that_replaces_learns_the_newest_of_another() -> None:
    table, other = SuccessorTable(64, averages=False), SuccessorTable(64)
    put_one(table, (1, 2), 3)
    for _ in range(3):
        put_one(other, (1, 2), 4, 0.25)
    table.update(other)
    known = table.get(1, 2)
    assert known is not None
    assert known[0].tolist() == [4]
    assert table.arrays()["counts"].tolist() == [1]


@given(st.integers(0, 2**32 - 1), st.integers(0, 200), st.integers(0, 200))
def test_tables_that_are_joined_hold_the_contexts_of_both(seed: int, num: int, more: int) -> None:
    # Buckets may be full: of 6,000 joins one lost 6 contexts, 13 lost 4, and the others fewer.
    assert num_lost_in_joining(seed, num, more) <= 12


def test_few_contexts_are_lost_where_tables_are_joined() -> None:
    sizes = np.random.default_rng(0).integers(0, 200, (200, 2)).tolist()
    lost = [num_lost_in_joining(seed, *of_seed) for seed, of_seed in enumerate(sizes)]
    assert np.mean(lost) < 0.5


def num_lost_in_joining(seed: int, num: int, more: int) -> int:
    """Join two tables, check what they hold then, and return how many contexts are gone."""
    rng = np.random.default_rng(seed)
    table, other = SuccessorTable(1024), SuccessorTable(1024)
    table.put(*random_puts(rng, num))
    other.put(*random_puts(rng, more))
    expected = {*map(tuple, [*table.contexts().tolist(), *other.contexts().tolist()])}
    table.update(other)
    held = {*contents(table)}
    assert held <= expected
    assert held == {*map(tuple, table.contexts().tolist())}
    return len(expected) - len(held)


def test_the_newest_contexts_of_another_table_stay_where_it_is_full() -> None:
    (first, *rest) = contexts_of_one_bucket(64, 10)
    table, other = SuccessorTable(64), SuccessorTable(64)
    for context in (first, *rest):
        put_one(table, context, 1)
        put_one(other, context, 1)
    empty = SuccessorTable(64)
    empty.update(other)
    for place in range(40):  # the same ones go
        put_one(empty, ALL_CONTEXTS[place], 1)
        put_one(other, ALL_CONTEXTS[place], 1)
    assert contents(empty) == contents(other)
