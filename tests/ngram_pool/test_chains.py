"""Chains: many texts observed and drafted for in one call, as one by one."""

import copy
from typing import Any

import numpy as np
import pytest

from ngram_pool import NGramPool
from tests.ngram_pool.checking import check_pool
from tests.ngram_pool.test_pool import noisy_text

TEXT = noisy_text(900, seed=5)


def padded(texts: list[list[int]], width: int | None = None) -> tuple[Any, list[int]]:
    """Return texts as rows, with what is no text behind them, and their lengths."""
    width = max(map(len, texts)) if width is None else width
    rows = np.full((len(texts), width), -7, np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    return rows, [len(text) for text in texts]


def by_tree(pool: NGramPool, text: list[int], size: int, sequence: int | None) -> Any:
    """Return the oracle: the tree of one leaf."""
    if size == 0:
        return [], []
    draft = pool.draft(text, size, 1, sequence)
    assert draft.depths.tolist() == list(range(1, len(draft) + 1))
    return draft.token_ids.tolist(), draft.probs.tolist()


def some_texts(num: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    ends = rng.integers(3, len(TEXT), num).tolist()
    return [TEXT[max(0, end - int(rng.integers(1, 60))) : end] for end in ends]


def layered(pool: NGramPool, kind: str) -> int | None:
    """Open a sequence of a kind that differs from row to row."""
    docs, other = NGramPool(2000, 3), NGramPool(50)
    docs.observe(noisy_text(300, seed=8))
    docs.harvest([[-1, 1], [1, 2]], [[2, 3], [3, 4]], [[0.5, 0.25], [0.75, 0.125]])
    other.observe(noisy_text(90, seed=9))
    table = NGramPool()
    table.harvest([[-1, 2], [3, 2]], [[1, 3], [4, 5]], [[0.5, 0.25], [0.75, 0.125]])
    match kind:
        case "none":
            return None
        case "plain":
            return pool.open_sequence()
        case "table":
            return pool.open_sequence([table.as_read_only()])
        case "empty":
            return pool.open_sequence([NGramPool().as_read_only()])
        case "a layer":
            return pool.open_sequence([docs.as_read_only()])
    return pool.open_sequence([each.as_read_only() for each in (table, other, docs)])


@pytest.mark.parametrize("capacity", [40, 300, 5000])
@pytest.mark.parametrize("max_ngram_size", [1, 3, 5, 40])
def test_chains_are_the_trees_of_one_leaf(capacity: int, max_ngram_size: int) -> None:
    pool = NGramPool(capacity, max_ngram_size, seed=1)
    pool.observe(TEXT[:450])
    pool.observe(TEXT[450:], is_answer=True)
    pool.harvest([[-1, 5], [4, 5]], [[6, 7], [8, 9]], [[0.5, 0.25], [0.75, 0.125]])
    kinds = ["plain", "table", "empty", "a layer", "layers"]
    sequences = [layered(pool, kinds[i % len(kinds)]) for i in range(30)]
    texts = [*some_texts(29, seed=capacity), TEXT[-5:]]
    sizes = [i % 9 for i in range(30)]
    for sequence, text in zip(sequences, texts, strict=True):
        assert sequence is not None
        pool.observe(text, sequence, is_answer=True)
    chains = pool.draft_chains(*padded(texts), sizes, sequences)  # type: ignore[arg-type]
    found = zip(chains.tolist(), chains.probs.tolist(), texts, sizes, sequences, strict=True)
    for ids, probs, text, size, sequence in found:
        assert (ids, probs[: len(ids)]) == by_tree(pool, text, size, sequence)
    assert 4 < chains.lengths.max() <= 8
    without = pool.draft_chains(*padded(texts), 8)
    assert without.tolist() == [by_tree(pool, text, 8, None)[0] for text in texts]


@pytest.mark.parametrize("capacity", [60, 5000])
def test_tokens_observed_in_one_call_are_those_observed_one_by_one(capacity: int) -> None:
    one, other = NGramPool(capacity, seed=1), NGramPool(capacity, seed=1)
    texts = [list(TEXT[i * 40 :]) for i in range(6)]
    kinds = ["plain", "table", "a layer", "layers", "empty", "plain"]
    handles = [[layered(pool, kind) for kind in kinds] for pool in (one, other)]
    known = [5, 0, 9, 20, 1, 3]
    for pool, sequences in zip((one, other), handles, strict=True):
        for sequence, text, num in zip(sequences, texts, known, strict=True):
            pool.observe(text[:num], sequence)
    rng = np.random.default_rng(2)
    for _ in range(30):
        num_new = rng.integers(0, 5, len(texts))
        lengths = [num + new for num, new in zip(known, num_new.tolist(), strict=True)]
        rows = padded([text[:length] for text, length in zip(texts, lengths, strict=True)], 200)
        chains = one.draft_chains(*rows, 6, handles[0], num_new)  # type: ignore[arg-type]
        for i, sequence in enumerate(handles[1]):
            assert sequence is not None
            other.observe(texts[i][known[i] : lengths[i]], sequence, is_answer=True)
        expected = [
            by_tree(other, text[:length], 6, sequence)
            for text, length, sequence in zip(texts, lengths, handles[1], strict=True)
        ]
        assert chains.tolist() == [ids for ids, _ in expected]
        known = lengths
    check_pool(one)
    assert [text.tolist() for text in one.texts()] == [text.tolist() for text in other.texts()]
    assert (one._weights == other._weights).all()


def test_a_path_ends_where_it_is_too_unlikely_as_a_whole() -> None:
    pool = NGramPool(seed=1)
    pool.observe(TEXT)
    rows, lengths = padded(some_texts(40, seed=3))
    whole = pool.draft_chains(rows, lengths, 8)
    ended = 0
    for least in (0.05, 0.3, 1.0):
        cut = pool.draft_chains(rows, lengths, 8, min_probability=least)
        for i, ids in enumerate(cut.tolist()):
            probs = whole.probs[i, : whole.lengths[i]]
            assert ids == whole.tolist()[i][: len(ids)]
            assert (cut.probs[i, : len(ids)] >= least).all()
            assert len(ids) == len(probs) or probs[len(ids)] < least
            ended += len(ids) < len(probs)
    assert ended > 40


def test_pools_beside_each_other_are_drafted_from_in_one_call() -> None:
    pool = NGramPool(3000, 4, seed=9)
    mine = [pool, pool.beside(), pool.beside().beside()]
    alone = [NGramPool(3000, 4, seed=9) for _ in mine]
    assert {(one.capacity_tokens, one.max_ngram_size, one.seed) for one in mine} == {(3000, 4, 9)}
    handles = [[one.open_sequence() for one in pools] for pools in (mine, alone)]
    order = [0, 2, 1, 2]  # of pools by row: one has two rows
    handles[0].append(mine[2].open_sequence())
    handles[1].append(alone[2].open_sequence())
    by_row = [handles[0][0], handles[0][2], handles[0][1], handles[0][3]]
    alone_by_row = [handles[1][0], handles[1][2], handles[1][1], handles[1][3]]
    for end in range(4, 160, 3):
        texts = [TEXT[i * 100 : i * 100 + end] for i in range(4)]
        num_new = 4 if end == 4 else 3
        pools = [mine[i] for i in order]
        got = pool.draft_chains(*padded(texts), 5, by_row, [num_new] * 4, pools=pools)
        for i, text in enumerate(texts):
            alone[order[i]].observe(text[-num_new:], alone_by_row[i], is_answer=True)
        for i, text in enumerate(texts):
            assert got.tolist()[i] == by_tree(alone[order[i]], text, 5, alone_by_row[i])[0]
    for one, other in zip(mine, alone, strict=True):
        check_pool(one)
        assert [t.tolist() for t in one.texts()] == [t.tolist() for t in other.texts()]


def test_a_pool_beside_another_is_empty_and_shares_no_text() -> None:
    pool = NGramPool()
    pool.observe([1, 2, 3])
    pool.harvest([[-1, 7]], [[8]], [[0.5]])
    other = pool.beside()
    assert not len(other)
    assert not len(other.draft([1, 2], 2)) + len(other.draft([7], 2))
    other.observe([1, 2, 9])
    assert {*pool.draft([1, 2], 4).token_ids.tolist()} == {3, 8}  # 8 is what the target uses most
    with pytest.raises(ValueError, match="expected pools made beside"):
        pool.draft_chains([[1]], [1], 1, pools=[NGramPool()])
    with pytest.raises(ValueError, match="expected pools made beside"):
        pool.draft_chains([[1]], [1], 1, pools=[copy.copy(pool)])
    with pytest.raises(ValueError, match="expected pools made beside"):
        pool.draft_chains([[1]], [1], 1, pools=["pool"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1, 2], [2], 1), ValueError, "texts of shape"),
        (([[1.5]], [1], 1), TypeError, "texts to be integers"),
        (([[2**31]], [1], 1), ValueError, "token ids from 0"),
        (([[1, -1]], [2], 1), ValueError, "less in row 0"),
        (([[1, 2]], [3], 1), ValueError, "lengths from 0 to 2"),
        (([[1, 2]], [-1], 1), ValueError, "lengths from 0 to 2"),
        (([[1, 2]], [1, 1], 1), ValueError, r"lengths of shape \[1\]"),
        (([[1, 2]], 2, 1), ValueError, r"lengths of shape \[1\]"),
        (([[1, 2]], [2.0], 1), TypeError, "lengths to be integers"),
        (([[1, 2]], [2], -1), ValueError, "max_draft_tokens from 0"),
        (([[1, 2]], [2], [1, 2]), ValueError, "max_draft_tokens of shape"),
        (([[1, 2]], [2], 1, [0, 0]), ValueError, "expected 1 sequences, got 2"),
        (([[1, 2]], [2], 1, [99]), ValueError, "expected an open sequence, got 99"),
        (([[1, 2]], [2], 1, [0], [3]), ValueError, "num_new from 0 to 2"),
        (([[1, 2]], [1], 1, [0], [2]), ValueError, "num_new of at most lengths"),
        (([[1, 2]], [2], 1, None, [1]), ValueError, "expected sequences to observe"),
        (([[1, 2]], [2], 1, [0], [1], 1.5), ValueError, "min_probability from 0 to 1"),
        (([[1, 2]], [2], 1, [0], [1], 0.0, []), ValueError, "expected 1 pools, got 0"),
        (([[1], [2]], [1, 1], 1, [0, 99], [1, 1]), ValueError, "expected an open sequence"),
    ],
)
def test_wrong_arguments_are_named_and_change_nothing(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    pool = NGramPool()
    with pytest.raises(error, match=message):
        pool.draft_chains(*arguments)
    assert not len(pool)


def test_arrays_that_were_replaced_are_not_read_any_more() -> None:
    pool = NGramPool(seed=1)
    row = pool.open_sequence()
    ids = np.arange(3000)  # the table's arrays grow
    pool.harvest(np.stack([np.full(3000, -1), ids], 1), ids[:, None] + 1, np.full((3000, 1), 0.9))
    assert pool.draft_chains([[2000]], [1], 3, [row]).tolist() == [[2001, 2002, 2003]]
    pool.harvest([[-1, 7000]], [[7001]], [[0.9]])
    assert pool.draft_chains([[7000]], [1], 1, [row]).tolist() == [[7001]]
    pool.observe(np.arange(8000, 14_000))  # the pool's arrays grow
    assert pool.draft_chains([[13_000]], [1], 2, [row]).tolist() == [[13_001, 13_002]]
