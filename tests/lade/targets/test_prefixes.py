"""Kept texts: which one is found, what makes room, and that none is ever changed."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from lade.targets.prefixes import KeptText, Origin, PrefixStore

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
