"""`pool=` at every door: one that learns, over any number that are only read."""

import copy
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lade
from ngram_pool import NGramPool, PoolStore
from tests.lade.tiny import tiny_model

PROMPT = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
GREEDY: dict[str, Any] = {
    "attention_mask": torch.ones_like(PROMPT),
    "do_sample": False,
    "max_new_tokens": 40,
}
FOUR = lade.Config(max_draft_tokens=4)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PoolStore]:
    with PoolStore(tmp_path, save_every_sec=math.inf) as store:
        yield store


@pytest.fixture
def model() -> Any:
    return tiny_model("llama", seed=1)


@pytest.fixture
def expected(model: Any) -> list[list[int]]:
    ids: list[list[int]] = type(model).generate(model, PROMPT, **GREEDY).tolist()
    return ids


@pytest.fixture
def docs(expected: list[list[int]]) -> NGramPool:
    """A pool that knows the answer, and is only read."""
    pool = NGramPool()
    pool.observe(expected[0])
    return pool.as_read_only()


def test_a_call_leaves_nothing_of_lade_on_a_pool(model: Any) -> None:
    pool = NGramPool()
    before = {*vars(pool)}
    lade.generate(model, PROMPT, pool=pool, config=FOUR, **GREEDY)
    assert {*vars(pool)} == before
    assert b"lade" not in pickle.dumps(pool)


def test_every_door_drafts_from_layers_and_gives_the_text_of_plain_generate(
    model: Any, expected: list[list[int]], docs: NGramPool
) -> None:
    options: dict[str, Any] = {**GREEDY, "config": FOUR, "return_dict_in_generate": True}
    mine, other = NGramPool(), NGramPool(50, 2)
    other.observe([5, 6, 7, 8, 9, 5, 6, 9, 9])
    pool = [mine, other.as_read_only(), docs]
    before = pickle.dumps(docs)
    outputs = [
        lade.generate(model, PROMPT, pool=pool, **options),
        model.generate(PROMPT, custom_generate=lade.decode, pool=pool, **options),
        lade.wrap(model, pool=pool).generate(PROMPT, **options),
        model.generate(PROMPT, pool=tuple(pool), **options),
    ]
    lade.unwrap(model)
    for output in outputs:
        assert output.sequences.tolist() == expected
        assert output.stats.mean_accepted_tokens > 3.0  # 1.7 with a new pool
    assert len(mine) == 4 * len(expected[0])
    assert pickle.dumps(docs) == before


def test_where_none_learns_a_new_pool_does_for_the_call(
    model: Any, expected: list[list[int]], docs: NGramPool
) -> None:
    for pool in (docs, [docs], [docs, docs], []):
        output = lade.generate(
            model, PROMPT, pool=pool, config=FOUR, return_dict_in_generate=True, **GREEDY
        )
        assert output.sequences.tolist() == expected
        assert (output.stats.mean_accepted_tokens > 3.0) == bool(pool)


def test_a_named_pool_is_open_for_the_length_of_a_call(
    model: Any, expected: list[list[int]], docs: NGramPool, store: PoolStore
) -> None:
    alice = store.named("alice")
    in_use: set[int] = set()

    def look(_: lade.Step) -> None:
        in_use.add(store.stats.num_in_use)

    pools: list[Any] = [alice, [alice], [docs, alice]]
    for pool in pools:
        got = lade.generate(model, PROMPT, pool=pool, on_step=look, **GREEDY)
        assert got.tolist() == expected
    assert in_use == {1}
    assert store.stats.num_in_use == 0
    with alice.open() as mine:
        assert len(mine) == 3 * len(expected[0])
    assert store.names() == ["alice"]
    lade.wrap(model, pool=[docs, alice])
    assert model.generate(PROMPT, **GREEDY).tolist() == expected
    lade.unwrap(model)
    with alice.open() as mine:
        assert len(mine) == 4 * len(expected[0])


def test_a_named_pool_is_closed_where_a_call_fails(model: Any, store: PoolStore) -> None:
    def fail(_: lade.Step) -> None:
        assert store.stats.num_in_use == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lade.generate(model, PROMPT, pool=store.named("alice"), on_step=fail, **GREEDY)
    assert store.stats.num_in_use == 0


def test_pools_are_checked_before_anything_is_generated(
    model: Any, docs: NGramPool, store: PoolStore
) -> None:
    def ours(pool: Any) -> Any:
        return lade.generate(model, PROMPT, pool=pool, **GREEDY)

    two = [NGramPool(), docs, NGramPool()]
    with pytest.raises(ValueError, match=r"expected at most one pool that learns, got 2: make the"):
        ours(two)
    with pytest.raises(ValueError, match="expected at most one pool that learns, got 2"):
        lade.wrap(model, pool=two)
    assert [len(pool) for pool in two] == [0, len(docs), 0]
    for wrong in ("docs", Path("docs.pool"), [docs, None], 5):
        with pytest.raises(
            TypeError, match=r"expected pool to be a lade\.NGramPool, a named"
        ) as told:
            ours(wrong)
        assert ("lade.load_pool" in str(told.value)) == isinstance(wrong, str | Path)
    with pytest.raises(ValueError, match="expected at most one pool that learns, got 2"):
        ours([NGramPool(), store.named("alice")])
    assert store.stats.num_in_use == 0


def test_a_copy_of_a_wrapped_model_carries_no_text(
    model: Any, expected: list[list[int]], docs: NGramPool, store: PoolStore
) -> None:
    mine = NGramPool(1000, 3)
    mine.observe([1, 2, 3])
    lade.wrap(model, pool=[docs, mine])
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        pool = copied.generate.pool
        assert (len(pool), pool.capacity_tokens, pool.max_ngram_size) == (0, 1000, 3)
        assert copied.generate(PROMPT, **GREEDY).tolist() == expected
    for pool in (docs, store.named("alice")):
        lade.wrap(model, pool=pool)
        assert copy.deepcopy(model).generate.pool is None
    lade.unwrap(model)
