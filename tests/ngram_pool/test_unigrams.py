"""What the target would use most, by all that was harvested, and what is worth exploring."""

import copy
from collections import Counter

import numpy as np
import pytest

from ngram_pool import NGramPool, SuccessorTable, _kernels
from tests.ngram_pool.checking import check_pool

OFFSET = _kernels._UNSEEN_UNIGRAMS
FACTOR = _kernels._WORTH_OF_UNKNOWN


def harvested(num_contexts: int, seed: int, num_ids: int = 300) -> tuple[NGramPool, Counter[int]]:
    """Return a pool that harvested at random, and the expected counts in plain Python."""
    rng = np.random.default_rng(seed)
    pool = NGramPool()
    counts: Counter[int] = Counter()
    for _ in range(num_contexts):
        ids = rng.choice(num_ids, size=(1, 4), replace=False)
        probs = np.sort(rng.dirichlet(np.ones(5), size=1)[:, 1:].astype(np.float32))[:, ::-1]
        pool.harvest([[-1, int(rng.integers(num_ids // 3))]], ids, probs)
        for token_id, prob in zip(ids[0].tolist(), probs[0].tolist(), strict=True):
            counts[token_id] += prob
    return pool, counts


@pytest.mark.parametrize("seed", range(3))
def test_worths_are_unigram_probabilities_and_more_where_nothing_is_known(seed: int) -> None:
    pool, counts = harvested(60, seed)
    known = set(pool._harvested.arrays()["keys"].tolist())
    worths = {
        token_id: min(1.0, count * (1 if token_id in known else FACTOR) / (OFFSET + counts.total()))
        for token_id, count in counts.items()
    }
    token_ids, found = pool.explore(20)
    assert len(token_ids) == len(set(token_ids.tolist())) == 20
    assert found.tolist() == pytest.approx([worths[token_id] for token_id in token_ids.tolist()])
    assert found.tolist() == pytest.approx(sorted(worths.values(), reverse=True)[:20])
    assert len(pool.explore(1000)[0]) == len(counts)


def test_nothing_is_named_before_a_harvest_nor_what_is_excluded() -> None:
    assert len(NGramPool().explore(5)[0]) == 0
    pool, _ = harvested(60, 0)
    first = pool.explore(10)[0].tolist()
    assert pool.explore(4, excluded=first[:6])[0].tolist() == first[6:]


def test_what_a_table_knows_is_worth_no_more_than_its_probability() -> None:
    pool, _ = harvested(60, 0)
    token_id = int(pool.explore(1)[0][0])
    table = SuccessorTable(64)
    table.put([[-1, token_id]], [[7]], [[0.5]])
    sequences = pool.open_sequence(), pool.open_sequence(table)
    without, with_table = (
        dict(zip(*(part.tolist() for part in pool.explore(1000, (), sequence)), strict=True))
        for sequence in sequences
    )
    assert without.keys() == with_table.keys()
    assert with_table[token_id] == pytest.approx(without[token_id] / FACTOR)
    del without[token_id], with_table[token_id]
    assert without == with_table


def test_counts_of_rare_tokens_give_way_and_nothing_grows() -> None:
    pool = NGramPool()
    often = np.arange(8)[None]
    for start in range(0, 40_000, 8):
        rare = np.arange(start, start + 8)[None] + 1000
        pool.harvest([[-1, start], [-1, 5]], [rare[0], often[0]], np.full((2, 8), [[0.01], [0.1]]))
    check_pool(pool)
    nbytes = pool.nbytes
    pool.harvest([[-1, 1]], [[123_456]], [[0.5]])
    assert pool.nbytes == nbytes
    assert set(pool.explore(8, excluded=[123_456])[0].tolist()) >= set(range(8)) - {5}


def test_copies_count_on_their_own() -> None:
    pool, _ = harvested(20, 1)
    before = [part.tolist() for part in pool.explore(9)]
    copied = copy.deepcopy(pool)
    copied.harvest([[-1, 3]], [[77_777]], [[1.0]])
    assert [part.tolist() for part in pool.explore(9)] == before
    assert 77_777 in copied.explore(9)[0]


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        NGramPool().explore(0)
    with pytest.raises(ValueError, match="excluded"):
        NGramPool().explore(1, excluded=[-1])
    with pytest.raises(ValueError, match="open sequence"):
        NGramPool().explore(1, sequence=5)
