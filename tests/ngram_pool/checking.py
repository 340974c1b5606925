"""Whether a pool is whole, in plain Python; that its chains are those of its text, drafts tell."""

import numpy as np

from ngram_pool import NGramPool
from ngram_pool._kernels import ANSWER, NEXT, NEXT_POSITION, NONE, PROMPT, TAIL
from ngram_pool.files import check_text


def check_pool(pool: NGramPool) -> None:
    """Verify the invariants of a pool's arrays.

    Raises:
        AssertionError, PoolFileError: an invariant is broken.
    """
    with pool._lock:
        (text, links, heads), end = pool._held, pool._counts.item(NEXT_POSITION)
        assert len(text) <= pool.capacity_tokens
        assert links.shape == (len(text), pool.max_ngram_size)
        assert end <= 2**31 - 1
        assert len(text) == pool.capacity_tokens or end <= len(text)
        check_text(text, links, heads, end)
        assert np.isfinite(pool._weights).all()
        assert len(pool._harvested.contexts()) == len(pool._harvested)
        assert np.isfinite(pool._unigrams.counts).all()
        assert (pool._unigrams.counts[pool._unigrams.token_ids == NONE] == 0).all()
        for sequence in pool._sequences.values():
            state = sequence.state
            assert NONE <= state[TAIL] < end
            is_held = state[TAIL] >= end - len(pool)
            assert not is_held or text[state[TAIL] % len(text), NEXT] == NONE
            assert 0 <= state[PROMPT] <= state[ANSWER]
