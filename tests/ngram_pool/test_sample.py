"""What `NGramPool.sample` promises: true distributions, and places that do not look at tokens."""

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest

from ngram_pool import NGramPool, SampledDraft
from tests.chi_square import FALSE_ALARM, p_value
from tests.grids import thinned
from tests.ngram_pool.test_pool import noisy_text


def pool_of(text: list[int]) -> NGramPool:
    pool = NGramPool()
    pool.observe(text)
    return pool


def as_tuple(draft: SampledDraft) -> tuple[Any, ...]:
    return (
        *(draft.token_ids.tolist(), draft.parents.tolist(), draft.depths.tolist()),
        *(draft.probs.tolist(), draft.support_token_ids.tolist(), draft.support_probs.tolist()),
    )


def test_equal_generators_give_equal_drafts_and_smaller_ones_are_their_beginnings() -> None:
    text = noisy_text(2000)
    pool = pool_of(text)
    seen = set()
    for end in range(1000, 1050):
        context = text[end - 5 : end]
        large = pool.sample(context, 20, np.random.default_rng(end))
        assert as_tuple(large) == as_tuple(pool.sample(context, 20, np.random.default_rng(end)))
        small = pool.sample(context, 7, np.random.default_rng(end))
        assert as_tuple(large.first(7)) == as_tuple(small)
        children = [*zip(large.parents.tolist(), large.token_ids.tolist(), strict=True)]
        assert len({*children}) == len(children)  # a token is drawn once behind a node
        seen.add(tuple(large.token_ids.tolist()))
    assert len(seen) > 25


@pytest.mark.parametrize("max_candidates", thinned([None, 2], 2))
def test_places_depend_on_earlier_tokens_only_and_tokens_come_as_often_as_stated(
    max_candidates: int | None,
) -> None:
    """Chi-square over each history of draws; a false alarm in one run of 10,000."""
    text = noisy_text(400, seed=3, alphabet=4)
    pool = pool_of(text)
    rng = np.random.default_rng(1)
    places: dict[tuple[int, ...], Any] = {}
    drawn: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for _ in range(20_000):
        draft = pool.sample([1, 2], 6, rng, max_candidates)
        tokens = tuple(draft.token_ids.tolist())
        dense = draft.dense_probs(vocab_size=4).tolist()
        for node, token_id in enumerate(tokens):
            place = (draft.parents[node], draft.probs[node], dense[node])
            assert places.setdefault(tokens[:node], place) == place
            drawn[tokens[:node]][token_id] += 1
    frequent = [history for history, counts in drawn.items() if counts.total() >= 200]
    assert len(frequent) > 20
    assert max(map(len, frequent)) >= 2
    for history in frequent:
        counts = [drawn[history][token_id] for token_id in range(4)]
        assert p_value(counts, places[history][2]) > FALSE_ALARM


def test_a_vocabulary_too_small_for_the_support_raises() -> None:
    draft = pool_of([1, 2, 7]).sample([2], 1, np.random.default_rng(0))
    assert draft.dense_probs(8).tolist() == [[0.0] * 7 + [1.0]]
    with pytest.raises(ValueError, match="expected vocab_size of at least 8, got 7"):
        draft.dense_probs(7)


def test_arguments_are_checked_before_anything_is_drawn() -> None:
    pool = pool_of([1, 2, 3])
    rng = np.random.default_rng(0)
    with pytest.raises(TypeError, match=r"expected rng to be a numpy.random.Generator, got None"):
        pool.sample([1], 3, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected max_draft_tokens to be positive, got 0"):
        pool.sample([1], 0, rng)
    with pytest.raises(ValueError, match="expected max_candidates to be positive, got 0"):
        pool.sample([1], 3, rng, max_candidates=0)
    with pytest.raises(ValueError, match="expected context from 0 to 2147483647, got -1"):
        pool.sample([-1], 3, rng)
    assert rng.random() == np.random.default_rng(0).random()
