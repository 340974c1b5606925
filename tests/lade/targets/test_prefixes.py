"""Kept texts: which one is found, what makes room, and that none is ever changed."""

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from lade.targets.prefixes import KeptText, Origin, PrefixStore
from ngram_pool import NGramPool

ORIGIN = Origin("model", None)


def cache_of(token_ids: Sequence[int]) -> DynamicCache:
    """Return a cache whose keys and values are the tokens themselves."""
    states = torch.tensor(token_ids).float()[None, None, :, None].expand(1, 2, -1, 4)
    cache = DynamicCache()
    cache.update(states.clone(), states.clone() + 0.5, 0)
    return cache


def text_of(token_ids: Sequence[int], origin: Origin = ORIGIN) -> KeptText:
    return KeptText(origin, token_ids, cache_of(token_ids))


def found(store: PrefixStore, prompt_ids: Sequence[int], origin: Origin = ORIGIN) -> int:
    """Look a prompt up, look at the keys of what was found, and return how many tokens it has."""
    hit = store.find(origin, prompt_ids)
    if hit is None:
        return 0
    text, num_tokens = hit
    layer: Any = text.first(num_tokens).layers[0]
    assert layer.keys[0, 1, :, 3].tolist() == [*map(float, prompt_ids[:num_tokens])]
    assert layer.values.shape == layer.keys.shape
    return num_tokens


def store_of(*texts: Sequence[int], max_bytes: int = 2**20) -> PrefixStore:
    store = PrefixStore()
    for text in texts:
        store.keep(text_of(text), max_bytes)
    return store


def held(store: PrefixStore) -> list[list[int]]:
    return [text.token_ids.tolist() for text in store]


def test_the_text_not_used_for_longest_goes_first() -> None:
    texts = [[number] * 10 for number in range(1, 5)]
    most = 3 * (10 * 4 * 2 * 2 * 4 + 80)
    assert text_of(texts[0]).num_bytes == most // 3
    store = store_of(*texts[:3], max_bytes=most)
    assert found(store, [*texts[0], 1]) == 10
    store.keep(text_of(texts[3]), most)
    assert held(store) == [texts[2], texts[0], texts[3]]
    store.keep(text_of([9] * 11), most)  # takes the room of two
    assert held(store) == [texts[3], [9] * 11]
    assert store.num_bytes <= most
    store.keep(text_of([8] * 40), most)  # no room at all: the others stay
    assert held(store) == [texts[3], [9] * 11]
    store.keep(text_of([7]), 0)
    assert len(held(store)) == 0


def test_other_owners_find_nothing_and_other_models_leave_nothing() -> None:
    store = store_of([1, 2, 3])
    origin = ORIGIN._replace(owner="other")
    assert found(store, [1, 2, 3, 4], origin) == 0
    assert len(held(store)) == 1
    store.keep(text_of([1, 2, 3, 4], origin), 2**20)
    assert found(store, [1, 2, 3, 4, 5]) == 3
    assert len(held(store)) == 2
    assert found(store, [1, 2, 3, 4], ORIGIN._replace(model="changed")) == 0
    assert len(held(store)) == 0


def test_whoever_goes_on_from_a_text_does_not_change_it() -> None:
    store = store_of([1, 2, 3, 4])
    for _ in range(2):
        hit = store.find(ORIGIN, [1, 2, 3, 9, 9])
        assert hit is not None
        cache = hit[0].first(hit[1])
        cache.update(torch.ones(1, 2, 2, 4), torch.ones(1, 2, 2, 4), 0)
        cache.crop(-4)
        assert cache.get_seq_length() == 1
    assert found(store, [1, 2, 3, 4, 5]) == 4


def test_an_owner_is_an_object_and_ends_with_it() -> None:
    store = PrefixStore()
    mine, other = NGramPool(), NGramPool()
    assert store.owner_of(mine) == store.owner_of(mine)
    assert store.owner_of(mine) != store.owner_of(other)
    for each in (mine, other):
        store.keep(text_of([1, 2, 3], ORIGIN._replace(owner=store.owner_of(each))), 2**20)
    del mine, each
    gc.collect()
    assert len(held(store)) == 1


@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_the_longest_beginning_that_is_held_is_found(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    store = PrefixStore()
    for _ in range(60):
        length = int(torch.randint(1, 12, (), generator=generator))
        ids = torch.randint(0, 2, (length,), generator=generator).tolist()
        texts = [text[:-1] if text == ids[: len(text)] == ids else text for text in held(store)]
        longest = 0
        for text in texts:
            shared = 0
            while shared < min(len(text), len(ids) - 1) and text[shared] == ids[shared]:
                shared += 1
            longest = max(longest, shared)
        assert found(store, ids) == longest
        store.keep(text_of(ids), 2000)
        assert store.num_bytes <= 2000
