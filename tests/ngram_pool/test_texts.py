"""A merged pool knows what both knew."""

from collections.abc import Iterator

import numpy as np
import pytest

from ngram_pool import NGramPool, ReadOnlyPoolError
from tests.ngram_pool.checking import check_pool
from tests.ngram_pool.test_pool import noisy_text

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


def test_successors_of_both_are_known_and_averaged_where_both_know() -> None:
    pool, other = pool_of(), pool_of()
    pool.harvest([[-1, 1], [1, 2]], [[5], [6]], [[0.5], [0.25]])
    other.harvest([[1, 2], [-1, 3]], [[7], [8]], [[0.75], [0.5]])
    pool.merge(other)
    known = {last: pool.draft(context, 1).token_ids.tolist() for last, context in CONTEXTS.items()}
    assert known == {1: [5], 2: [7], 3: [8]}
    assert pool.draft([1, 2], 2).token_ids.tolist() == [7, 6]


def test_expected_counts_are_not_counted_twice() -> None:
    pool, other = pool_of(), pool_of()
    pool.harvest([[-1, 1]] * 2, [[5, 6]] * 2, [[0.5, 0.25]] * 2)
    other.harvest([[-1, 1]] * 4, [[5, 7]] * 4, [[0.5, 0.25]] * 4)
    for _ in range(2):
        pool.merge(other)
        found = dict(zip(*(part.tolist() for part in pool.explore(9)), strict=True))
        assert found == {5: 2.0 / 67.5, 7: 1.0 / 67.5, 6: 0.5 / 67.5}


def test_text_of_another_tokenizer_is_refused() -> None:
    pool, other = pool_of(ONE), pool_of(TWO)
    pool.tokenizer, other.tokenizer = "one", "two"
    with pytest.raises(ValueError, match="expected text of the tokenizer one, got a pool of two"):
        pool.merge(other)
    assert len(pool) == len(ONE)


def test_successors_of_another_model_are_left_out() -> None:
    pool, other = pool_of(ONE), pool_of(TWO)
    other.harvest([[1, 2]], [[77]], [[0.75]])
    pool.model, other.model = "one", "two"
    with pytest.warns(UserWarning, match="successors of the model two are left out"):
        pool.merge(other)
    assert len(pool) == len(ONE) + len(TWO)
    assert 77 not in pool.draft([1, 2], 9).token_ids


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
