"""Whether a pool is whole: every invariant of its arrays, in plain Python."""

import threading
from typing import Any

import numpy as np

from ngram_pool import NGramPool, _kernels
from ngram_pool._kernels import (
    ANSWER,
    LOWERED_THEN,
    MAX_TOKEN_ID,
    MULTIPLIER,
    NEXT,
    NEXT_POSITION,
    NONE,
    PREVIOUS,
    PROMPT,
    SEED,
    TAIL,
    TOKEN,
)
from ngram_pool.arrays import OpenSequence


def check_pool(pool: NGramPool) -> None:
    """Verify every invariant of a pool; O(tokens held * N).

    Raises:
        AssertionError: an invariant is broken.
    """
    with pool._lock:
        pool._header()  # whole, whatever was interrupted before
        _check_arrays(pool)
        _check_text(pool)
        for sequence in pool._sequences.values():
            _check_sequence(pool, sequence)


def is_free(lock: Any) -> bool:
    """Return whether another thread can have a lock."""
    got: list[bool] = []

    def take() -> None:
        got.append(lock.acquire(timeout=5))
        if got[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got[0]


def _first(pool: NGramPool) -> int:
    """Return the oldest position held."""
    return pool._counts.item(NEXT_POSITION) - len(pool)


def _check_arrays(pool: NGramPool) -> None:
    text, links, _ = pool._held
    num_rows, num_observed = len(text), pool._counts.item(NEXT_POSITION)
    assert num_rows <= pool.capacity_tokens
    assert links.shape == (num_rows, pool.max_ngram_size)
    assert num_observed - _first(pool) <= num_rows
    assert num_observed <= 2**31 - 1
    assert num_rows == pool.capacity_tokens or num_observed <= num_rows
    assert np.isfinite(pool._weights).all()
    assert len(pool._harvested.contexts()) == len(pool._harvested)
    assert np.isfinite(pool._unigrams.counts).all()
    assert (pool._unigrams.counts[pool._unigrams.token_ids == NONE] == 0).all()


def _check_sequence(pool: NGramPool, opened: OpenSequence) -> None:
    text, state = pool._held.text, opened.state.copy()
    _kernels.lower(state, pool._counts)
    assert NONE <= state[TAIL] < pool._counts.item(NEXT_POSITION)
    assert state[TAIL] < _first(pool) or text[state[TAIL] % len(text), NEXT] == NONE
    assert 0 <= state[PROMPT] <= state[ANSWER]
    assert opened.state[LOWERED_THEN] <= state[LOWERED_THEN]


def _check_text(pool: NGramPool) -> None:
    text, links, heads = pool._held
    num_rows, num_orders, first = len(text), pool.max_ngram_size, _first(pool)
    num_observed = pool._counts.item(NEXT_POSITION)
    expected: dict[tuple[int, int], list[int]] = {}
    for position in range(first, num_observed):
        row = text[position % num_rows]
        if row[TOKEN] == NONE:
            assert row.tolist() == [NONE] * 3
            assert (links[position % num_rows] == NONE).all()
            continue
        assert 0 <= row[TOKEN] <= MAX_TOKEN_ID
        assert NONE <= row[PREVIOUS] < position
        assert row[NEXT] == NONE or position < row[NEXT] < num_observed
        if row[PREVIOUS] >= first:
            assert text[row[PREVIOUS] % num_rows, NEXT] == position
        if row[NEXT] != NONE:
            assert text[row[NEXT] % num_rows, PREVIOUS] == position
        hashed, reached = pool._counts.item(SEED), position
        for order in range(num_orders):
            if reached < first:
                break
            reached_row = text[reached % num_rows]
            hashed = _kernels.hash_with(
                hashed, int(reached_row[TOKEN]), pool._counts.item(MULTIPLIER)
            )
            bucket = hashed & (heads.shape[1] - 1)
            expected.setdefault((order, bucket), []).insert(0, position)
            reached = int(reached_row[PREVIOUS])
    for order in range(num_orders):
        for bucket in range(heads.shape[1]):
            chain, position = [], int(heads[order, bucket])
            while position >= first:
                if _starts_at(pool, position, order) >= first:
                    chain.append(position)
                older = int(links[position % num_rows, order])
                assert older < position, "links lead to older positions"
                position = older
            assert chain == expected.get((order, bucket), [])


def _starts_at(pool: NGramPool, position: int, order: int) -> int:
    for _ in range(order):
        if position < _first(pool):
            return NONE
        position = int(pool._held.text[position % len(pool._held.text), PREVIOUS])
    return position
