"""Whether a pool is whole: every invariant of its arrays, in plain Python."""

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
from ngram_pool.origins import _MAX_STRETCHES
from ngram_pool.state import PoolState


def check_pool(pool: NGramPool) -> None:
    """Verify every invariant of a pool; O(tokens held * N).

    Raises:
        AssertionError: an invariant is broken.
    """
    with pool._lock:
        origins = pool._origins
        opened = [ref() for ref in pool._sequences.values()] + [*origins._continued.values()]
        _check_arrays(pool._state)
        _check_text(pool._state)
        for sequence in opened:
            if sequence is not None:
                _check_sequence(pool._state, sequence)
        bounds = [bound for stretch in origins.stretches for bound in stretch]
        assert bounds == sorted(set(bounds))
        assert len(origins.stretches) <= _MAX_STRETCHES


def _check_arrays(state: PoolState) -> None:
    text, links, _ = state.held
    num_rows, num_observed = len(text), state.counts.item(NEXT_POSITION)
    assert num_rows <= state.capacity
    assert links.shape == (num_rows, state.max_ngram_size)
    assert num_observed - state.first <= num_rows
    assert num_observed <= 2**31 - 1
    assert num_rows == state.capacity or num_observed <= num_rows
    assert np.isfinite(state.weights).all()
    assert len(state.harvested) == len(state.harvested.contexts())
    assert np.isfinite(state.unigrams.counts).all()
    assert (state.unigrams.counts[state.unigrams.token_ids == NONE] == 0).all()


def _check_sequence(pool: PoolState, opened: OpenSequence) -> None:
    text, state = pool.held.text, opened.state.copy()
    _kernels.lower(state, pool.counts)
    assert NONE <= state[TAIL] < pool.counts.item(NEXT_POSITION)
    assert state[TAIL] < pool.first or text[state[TAIL] % len(text), NEXT] == NONE
    assert 0 <= state[PROMPT] <= state[ANSWER]
    assert opened.state[LOWERED_THEN] <= state[LOWERED_THEN]


def _check_text(state: PoolState) -> None:
    text, links, heads = state.held
    num_rows, num_orders, first = len(text), state.max_ngram_size, state.first
    num_observed = state.counts.item(NEXT_POSITION)
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
        hashed, reached = state.counts.item(SEED), position
        for order in range(num_orders):
            if reached < first:
                break
            reached_row = text[reached % num_rows]
            hashed = _kernels.hash_with(
                hashed, int(reached_row[TOKEN]), state.counts.item(MULTIPLIER)
            )
            bucket = hashed & (heads.shape[1] - 1)
            expected.setdefault((order, bucket), []).insert(0, position)
            reached = int(reached_row[PREVIOUS])
    for order in range(num_orders):
        for bucket in range(heads.shape[1]):
            chain, position = [], int(heads[order, bucket])
            while position >= first:
                if _starts_at(state, position, order) >= first:
                    chain.append(position)
                older = int(links[position % num_rows, order])
                assert older < position, "links lead to older positions"
                position = older
            assert chain == expected.get((order, bucket), [])


def _starts_at(state: PoolState, position: int, order: int) -> int:
    for _ in range(order):
        if position < state.first:
            return NONE
        position = int(state.held.text[position % len(state.held.text), PREVIOUS])
    return position
