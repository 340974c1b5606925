"""A pool's hash seed: a secret, so that no text can be made whose n-grams share a bucket."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from ngram_pool import NGramPool, _kernels
from tests.ngram_pool.test_pool import as_tuple, noisy_text


@pytest.fixture
def secret_seeds(monkeypatch: pytest.MonkeyPatch, seed_of_pools: None) -> None:
    """Undo what makes tests repeatable."""
    monkeypatch.undo()


def longest_chain(pool: NGramPool) -> int:
    """Return the number of positions in the fullest bucket of order 1."""
    text, links, heads = pool._held
    lengths = []
    for head in heads[0].tolist():
        length = 0
        while head != -1:
            head, length = int(links[head % len(text), 0]), length + 1
        lengths.append(length)
    return max(lengths)


@pytest.mark.usefixtures("secret_seeds")
def test_every_pool_has_a_seed_of_its_own_unless_it_is_given_one() -> None:
    assert len({NGramPool(10).seed for _ in range(20)}) == 20
    assert all(0 <= NGramPool(10).seed < 2**60 for _ in range(20))
    for seed in (0, 1, 2**31, 2**60 - 1):
        pool = NGramPool(10, seed=seed)
        assert pool.seed == seed
        assert copy.copy(pool).seed == pool.as_read_only().seed == seed
        assert pickle.loads(pickle.dumps(pool)).seed == seed
    assert NGramPool(10, seed=np.int64(7)).seed == 7  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [-1, 2**60])
def test_a_seed_has_sixty_bits(seed: int) -> None:
    with pytest.raises(ValueError, match=r"expected seed from 0 to 2\*\*60 - 1, got"):
        NGramPool(10, seed=seed)


@pytest.mark.parametrize("seed", [1.0, "1", True])
def test_a_seed_must_be_an_integer(seed: Any) -> None:
    with pytest.raises(TypeError, match="expected seed to be an integer or None, got"):
        NGramPool(10, seed=seed)


@pytest.mark.usefixtures("secret_seeds")
def test_a_text_made_for_one_seed_fills_no_bucket_of_another() -> None:
    """Where the seed is known, all 300 tokens share a bucket, and drafts read 256 entries of it."""
    bucket = _kernels.hash_step(0, 5) % 4096
    tokens = [t for t in range(2_000_000) if _kernels.hash_step(0, t) % 4096 == bucket][:300]
    known = NGramPool(4096, seed=0)
    known.observe(tokens)
    assert longest_chain(known) == 300
    for _ in range(20):
        secret = NGramPool(4096)
        secret.observe(tokens)
        assert longest_chain(secret) < 60


def test_drafts_of_different_seeds_hardly_ever_differ() -> None:
    text = noisy_text(3000, seed=5, alphabet=400)
    pools = [NGramPool(5000, seed=seed) for seed in (0, 12345, 2**59 + 2**20 + 3)]
    for pool in pools:
        pool.observe(text)
    contexts = [text[end - 6 : end] for end in range(100, 3000, 29)]
    drafts = [[as_tuple(pool.draft(context, 12)) for context in contexts] for pool in pools]
    assert drafts[0] == drafts[1] == drafts[2]
