"""Texts as a whole: what is forgotten is nowhere, and a merged pool knows what both knew."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ngram_pool import NGramPool, ReadOnlyPoolError
from tests.ngram_pool.checking import check_pool
from tests.ngram_pool.test_pool import noisy_text
from tests.oracle import OraclePool

SECRET = [70_001, 70_002, 70_003, 70_004]
OTHER = noisy_text(300, alphabet=12)


def arrays_of(thing: Any, seen: set[int]) -> list[NDArray[Any]]:
    """Every array that an object holds, however deep, by what it is made of."""
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        return [thing] if thing.base is None else [thing, *arrays_of(thing.base, seen)]
    if isinstance(thing, dict):
        inner = list(thing.values())
    elif isinstance(thing, list | tuple | set):
        inner = list(thing)
    else:
        slots = [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
        inner = [*getattr(thing, "__dict__", {}).values(), *slots]
    return [array for part in inner for array in arrays_of(part, seen)]


def places_of(pool: NGramPool, token_ids: list[int]) -> list[str]:
    """Where any of the token ids stands in any array of a pool, in whatever width."""
    found = []
    for array in arrays_of(pool, set()):
        values = {int(value) for value in np.unique(array.view(array.dtype)) if value == value}
        keys = {value >> 31 for value in values} | {value & 2**31 - 1 for value in values}
        if array.dtype == np.int64:  # of contexts, among others; one more than the token before
            values |= keys | {key - 1 for key in keys}
        found += [f"{t} in {array.dtype} {array.shape}" for t in token_ids if t in values]
    return found


def told(secret: list[int]) -> NGramPool:
    """A pool that was told a secret, had it drafted, and has seen what a target makes of it."""
    pool = NGramPool(2000)
    sequence = pool.open_sequence()
    pool.observe(OTHER[:100])
    pool.observe([*OTHER[:20], *secret, *OTHER[20:40]], sequence)
    pool.observe([3, *secret[:2]], sequence, is_answer=True)
    pool.observe(secret[2:], sequence, is_answer=True)
    pool.harvest([[secret[0], secret[1]]], [[secret[2], 5]], [[0.9, 0.05]])
    pool.harvest([[-1, secret[1]], [4, secret[0]]], [[secret[2], 5]] * 2, [[0.9, 0.05]] * 2)
    pool.harvest([[1, 2], [-1, 2]], [[7, secret[3], 6]] * 2, [[0.5, 0.3, 0.1]] * 2)
    pool.draft(secret[:2], 30, None, sequence)
    pool.sample(secret[:2], 30, np.random.default_rng(0), None, sequence)
    pool.explore(9)
    return pool


def test_a_secret_is_in_no_array_afterwards() -> None:
    pool = told(SECRET)
    assert pool.draft(SECRET[:2], 30).candidates()[0][:2] == SECRET[2:]
    kinds = {place.split(" in ")[1].split()[0] for place in places_of(pool, SECRET)}
    assert {"int32", "int64"} <= kinds  # the search finds it where it is
    assert pool.forget(SECRET) == 2
    assert places_of(pool, SECRET) == []
    check_pool(pool)
    assert pool._harvested.get(1, 2)[0].tolist() == [7, 6]  # type: ignore[index]
    assert len(pool.draft(SECRET[:2], 30)) == 0


@pytest.mark.parametrize("capacity", [7, 40])
@given(
    texts=st.lists(st.lists(st.integers(0, 2), max_size=30), max_size=4),
    sought=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    more=st.lists(st.integers(0, 2), max_size=20),
)
def test_what_is_left_is_what_a_plain_search_leaves(
    capacity: int, texts: list[list[int]], sought: list[int], more: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ngram_pool.pool._FIRST_NUM_ROWS", 2)
        patch.setattr("ngram_pool.pool._POSITION_LIMIT", 90)
        pool, oracle = NGramPool(capacity, 3), OraclePool(capacity, 3)
        for text in texts:
            handle = pool.open_sequence()
            oracle.open_sequence(handle)
            for tokens, its in ((text, handle), (text[:5], 0)):
                pool.observe(tokens, its)
                oracle.observe(tokens, its)
        for _ in range(2):
            assert pool.forget(sought) == oracle.forget(sought)
            assert [text.tolist() for text in pool.texts()] == oracle.texts()
            check_pool(pool)
            pool.observe(more)
            oracle.observe(more)


@pytest.mark.parametrize(
    ("token_ids", "error"), [([], ValueError), ([-1], ValueError), ([1.5], TypeError)]
)
def test_what_cannot_be_forgotten_is_refused(token_ids: Any, error: type[Exception]) -> None:
    pool = told(SECRET)
    with pytest.raises(error, match=r"^expected token_ids"):
        pool.forget(token_ids)
    assert sum(map(len, pool.texts())) == len(pool)


# --- merging ---


ONE, TWO = noisy_text(200, seed=1, alphabet=8), noisy_text(200, seed=2, alphabet=8)


CONTEXTS = {1: [1], 2: [1, 2], 3: [3]}


def pool_of(*texts: list[int], capacity: int = 2000) -> NGramPool:
    pool = NGramPool(capacity)
    for text in texts:
        pool.observe(text, None)
    return pool


def drafts_of(pool: NGramPool) -> Iterator[list[list[int]]]:
    for begin in range(0, 190, 10):
        yield pool.draft(TWO[begin : begin + 4], 20).candidates()


def test_text_is_drafted_from_as_if_it_had_been_observed() -> None:
    pool, other = pool_of(ONE), pool_of(TWO, ONE[:50])
    pool.merge(other)
    assert [text.tolist() for text in pool.texts()] == [ONE, TWO, ONE[:50]]
    assert list(drafts_of(pool)) == list(drafts_of(pool_of(ONE, TWO, ONE[:50])))
    assert [text.tolist() for text in other.texts()] == [TWO, ONE[:50]]
    check_pool(pool)


def test_successors_of_both_are_known_those_of_the_other_where_both_know() -> None:
    pool, other = pool_of(), pool_of()
    pool.harvest([[-1, 1], [1, 2]], [[5], [6]], [[0.5], [0.25]])
    other.harvest([[1, 2], [-1, 3]], [[7], [8]], [[0.75], [0.5]])
    pool.merge(other)
    known = {last: pool.draft(context, 1).token_ids.tolist() for last, context in CONTEXTS.items()}
    assert known == {1: [5], 2: [7], 3: [8]}


def test_expected_counts_are_not_counted_twice() -> None:
    pool, other = pool_of(), pool_of()
    pool.harvest([[-1, 1]] * 2, [[5, 6]] * 2, [[0.5, 0.25]] * 2)
    other.harvest([[-1, 1]] * 4, [[5, 7]] * 4, [[0.5, 0.25]] * 4)
    for _ in range(2):
        pool.merge(other)
        found = dict(zip(*(part.tolist() for part in pool.explore(9)), strict=True))
        assert found == {5: 5 * 2.0 / 19.5, 7: 5 * 1.0 / 19.5, 6: 5 * 0.5 / 19.5}


def test_text_of_another_tokenizer_is_refused() -> None:
    pool, other = pool_of(ONE), pool_of(TWO)
    pool.tokenizer, other.tokenizer = "one", "two"
    with pytest.raises(ValueError, match="expected text of the tokenizer one, got a pool of two"):
        pool.merge(other)
    assert len(pool) == len(ONE)


def test_successors_of_another_model_are_left_out() -> None:
    pool, other = pool_of(ONE), pool_of(TWO)
    other.harvest([[1, 2]], [[7]], [[0.75]])
    pool.model, other.model = "one", "two"
    with pytest.warns(UserWarning, match="successors of the model two are left out"):
        pool.merge(other)
    assert len(pool) == len(ONE) + len(TWO)
    assert 7 not in pool.draft([1, 2], 9).token_ids


def test_only_another_pool_is_taken() -> None:
    pool = pool_of(ONE)
    with pytest.raises(ValueError, match="expected another pool, got this one itself"):
        pool.merge(pool)
    frozen = pool.as_read_only()
    for other in (pool_of(TWO), pool_of()):
        other.tokenizer = "words"
        with pytest.raises(ReadOnlyPoolError):
            frozen.merge(other)
    assert (len(frozen), frozen.tokenizer) == (len(ONE), "")
    pool.merge(frozen)
    assert [text.tolist() for text in pool.texts()] == [ONE, ONE]
    with pytest.raises(TypeError, match="expected an NGramPool, got"):
        pool.merge(np.array(ONE))  # type: ignore[arg-type]
