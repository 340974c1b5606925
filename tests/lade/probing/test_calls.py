"""Caches and lengths of one call: each does in lade what it does in `generate`, whatever it is."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    MistralConfig,
    StaticCache,
    StoppingCriteria,
)
from transformers.cache_utils import DynamicLayer

from tests.grids import thinned
from tests.lade.both import EIGHT, ONE, same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import CACHE, tiny_model
from tests.support.tiny import tiny_model as architecture

PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 9, 11, 13, 5, 6, 7, 8, 20, 21, 22, 23]])
OPTIONS: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": None}

Made = dict[str, Any]  # options of a call, a cache among them


def check(
    model: Any, fresh: Callable[[], Made], plainly: str | None, ids: Tensor = PROMPT, **options: Any
) -> None:
    """Hold lade against `generate`, greedy and sampled, with a pool that knows the answer.

    Args:
        plainly: the reason in the warning of the first call, the only one; None if it drafts.
    """
    given, said = {**OPTIONS, "knows": True, "fresh": fresh, "config": EIGHT, **options}, plainly
    for do_sample in (False, True):
        _, got = same_as_generate(model, ids, plainly=said, do_sample=do_sample, **given)
        said = None
        assert (got.stats.num_draft_tokens == 0) is (plainly is not None)


# --- caches of another kind -----------------------------------------------------------------------


class Own(DynamicCache):  # type: ignore[misc]
    """Of the caller's; nobody knows what it does."""


def fading(update: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `update` that gives half of the values once there are some."""

    def changed(*args: Any, **kwargs: Any) -> Any:
        keys, values = update(*args, **kwargs)
        return keys, values * 0.5 if keys.shape[2] > 5 else values

    return changed


def layered(*kinds: Any) -> Made:
    cache = DynamicCache()
    cache.layers = [kind() for kind in kinds]
    return {CACHE: cache}


class Fading(DynamicLayer):  # type: ignore[misc]
    update = fading(DynamicLayer.update)


def patched() -> Made:
    cache = DynamicCache()
    cache.update = fading(cache.update)
    return {CACHE: cache}


def windowed(window: int) -> Made:
    config = MistralConfig(num_hidden_layers=3, sliding_window=window)
    return {CACHE: DynamicCache(config=config)}


UNUSUAL: list[tuple[str, Callable[[], Made], str]] = [
    ("llama", patched, "your own code runs in its cache"),
    ("gpt2", partial(layered, DynamicLayer, DynamicLayer, Fading), "layers of Fading"),
    ("llama", partial(windowed, 8), "layers of DynamicSlidingWindowLayer"),
    ("mistral", partial(windowed, 16), "other windows than the model"),
    ("llama", lambda: {CACHE: Own()}, "Own"),
]


@pytest.mark.parametrize(("family", "fresh", "why"), UNUSUAL)
def test_a_cache_of_ones_own_does_what_it_does_in_generate(
    family: str, fresh: Callable[[], Made], why: str
) -> None:
    check(shared_model(family, seed=1), fresh, why)


class Full(StoppingCriteria):  # type: ignore[misc]
    """Stops once a cache holds so many tokens."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), self.cache.get_seq_length() >= 26)


@pytest.mark.parametrize("family", thinned(["llama", "mistral"], "mistral"))
def test_whoever_reads_a_cache_reads_what_generate_has_written(family: str) -> None:
    model = shared_model(family, seed=1)

    def fresh() -> Made:
        cache = DynamicCache(config=model.config)
        return {CACHE: cache, "stopping_criteria": [Full(cache)]}

    check(model, fresh, "may look at the cache")


# --- usual caches ---------------------------------------------------------------------------------

USUAL: dict[str, Callable[[Any], Made]] = {
    "without a config": lambda _: {CACHE: DynamicCache()},
    "with the model's": lambda model: {CACHE: DynamicCache(config=model.config)},
    "static": lambda model: {CACHE: StaticCache(config=model.config, max_cache_len=80)},
    "made by generate": lambda _: {"cache_implementation": "static"},
    "none": lambda _: {"use_cache": False},
}


@pytest.mark.parametrize("made", thinned(USUAL, "with the model's", "static", "none"))
@pytest.mark.parametrize("family", thinned(["llama", "gpt2", "mistral"], "mistral"))
def test_usual_caches_have_drafts(family: str, made: str) -> None:
    model = tiny_model(family, seed=1)  # in which `generate` keeps a static cache
    check(model, partial(USUAL[made], model), None)


# --- lengths that a short check cannot see --------------------------------------------------------


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **options}}


_FACTORS = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
_LONG: dict[str, Any] = rope("longrope", original_max_position_embeddings=24, **_FACTORS)
_LONG |= {"max_position_embeddings": 96, "original_max_position_embeddings": 24}
_BY_KIND = {
    kind: rope("longrope", original_max_position_embeddings=limit, **_FACTORS)["rope_parameters"]
    for kind, limit in (("full_attention", 12), ("sliding_attention", 24))
}
_DYNAMIC = {"max_position_embeddings": 24, **rope("dynamic", factor=2.0)}
_DOGE = {"num_attention_heads": 4, "keep_window_size": 24, "head_dim": 8}
_SCALED = {"floor_scale": 100, "attn_temperature_tuning": True}
# Of a model: the number of tokens in a prompt and an answer, and why it is plain, if it is.
LENGTHS: list[tuple[str, dict[str, Any], list[tuple[int, int, str | None]]]] = [
    ("llama", _DYNAMIC, [(4, 30, None), (20, 30, None), (6, 12, None)]),
    ("phi3", _LONG, [(4, 12, None), (30, 20, None), (20, 20, r"\(longrope\) changes at 24")]),
    ("gemma3_text", {"rope_parameters": _BY_KIND}, [(20, 20, r"\(longrope\) changes at 24")]),
    ("llama4_text", _SCALED, [(8, 25, None), (78, 25, None)]),
    ("doge", _DOGE, [(6, 12, None), (18, 12, "dynamic mask changes at 24 tokens")]),
]


@pytest.mark.parametrize(("family", "options", "calls"), LENGTHS)
def test_what_changes_with_the_length_is_heeded(family: str, options: Any, calls: Any) -> None:
    model = tiny_model(family, seed=1, **options)
    for length, num_new, plainly in calls:
        ids = torch.randint(2, 90, (1, length), generator=torch.Generator().manual_seed(1))
        given = {**OPTIONS, "max_new_tokens": num_new, "knows": True, "config": EIGHT}
        _, got = same_as_generate(model, ids, plainly=plainly, **given)
        assert (got.stats.num_accepted_tokens > 0) == (plainly is None)


def test_attention_that_hashes_at_random_is_plain_where_it_begins_to() -> None:
    model = architecture("reformer")
    chunk = model.config.lsh_attn_chunk_length
    for room, is_plain in ((chunk - ONE.shape[1], False), (chunk, True)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            same_as_generate(model, ONE, max_new_tokens=room, use_cache=False)
        assert any("hashes tokens" in str(each.message) for each in told) == is_plain
