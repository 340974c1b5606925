"""Caches that the caller passes: each does in lade what it does in `generate`, whatever it is."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, MistralConfig, StoppingCriteria
from transformers.cache_utils import DynamicLayer

import lade
from lade.compat import CACHE, MARKS_CACHES
from lade.probing.caches import why_unusual
from tests.lade.both import EIGHT, same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import VOCAB_SIZE

PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 9, 11, 13, 5, 6, 7, 8, 20, 21, 22, 23]])
NEW = torch.tensor([[31]])
OPTIONS: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": None}

Made = dict[str, Any]  # options of a call, a cache among them


def check(
    model: Any, fresh: Callable[[], Made], plainly: str | None, ids: Tensor = PROMPT, **options: Any
) -> None:
    """Hold lade against `generate`, with and without a pool that knows the answer.

    Args:
        plainly: the reason in the warning of the first call, the only one; None if it drafts.
    """
    given = {**OPTIONS, **options}
    torch.manual_seed(0)
    mask = torch.ones_like(ids)
    answer = model.generate(ids, **{"attention_mask": mask, "do_sample": False, **given} | fresh())
    pool = lade.NGramPool()
    pool.observe(PROMPT[0].tolist() + answer[0, ids.shape[1] :].tolist())
    said = plainly
    for config in (None, EIGHT):
        _, got = same_as_generate(
            model, ids, pool=pool, config=config, fresh=fresh, plainly=said, **given
        )
        said = None
    assert (got.stats.num_draft_tokens == 0) is (plainly is not None)


# --- layers -----------------------------------------------------------------------------------


class Evicting(DynamicLayer):  # type: ignore[misc]
    """Keeps the first four and the last twelve tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        held = super().update(key_states, value_states)
        self.num += key_states.shape[2]
        if held[0].shape[2] > 16:
            self.keys, self.values = (torch.cat([x[:, :, :4], x[:, :, -12:]], 2) for x in held)
        return held

    def get_seq_length(self) -> int:
        return self.num

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.keys.shape[2] if self.is_initialized else 0) + query_length, 0


class Fading(DynamicLayer):  # type: ignore[misc]
    """Halves what values were there before each token."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        if self.is_initialized:
            self.values *= 0.5
        return super().update(key_states, value_states)


class Same(DynamicLayer):  # type: ignore[misc]
    """Does nothing of its own, which nobody can know of a class."""


def layered(kind: Any) -> Made:
    cache = DynamicCache()
    cache.layers = [kind() for _ in range(3)]
    return {CACHE: cache}


def partly(kind: Any) -> Made:
    """Return a cache whose last layer alone is of a kind."""
    cache = DynamicCache()
    cache.layers = [DynamicLayer(), DynamicLayer(), kind()]
    return {CACHE: cache}


def windowed(window: int) -> Made:
    config = MistralConfig(num_hidden_layers=3, sliding_window=window)
    return {CACHE: DynamicCache(config=config)}


# --- patches ----------------------------------------------------------------------------------


def fading(update: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `update` that gives half of the values once there are some."""

    def changed(*args: Any, **kwargs: Any) -> Any:
        keys, values = update(*args, **kwargs)
        return keys, values * 0.5 if keys.shape[2] > 5 else values

    return changed


def patched() -> Made:
    cache = DynamicCache()
    cache.update = fading(cache.update)
    return {CACHE: cache}


def patched_in_a_layer() -> Made:
    cache = DynamicCache()
    cache.layers = [DynamicLayer() for _ in range(3)]
    cache.layers[1].update = fading(cache.layers[1].update)
    return {CACHE: cache}


MADE: dict[str, tuple[Callable[[], Made], str]] = {
    "evicting": (lambda: layered(Evicting), "code of one's own"),
    "fading": (lambda: layered(Fading), "code of one's own"),
    "same": (lambda: layered(Same), "layers of Same"),
    "last evicting": (lambda: partly(Evicting), "code of one's own"),
    "last same": (lambda: partly(Same), "layers of Same"),
    "patched": (patched, "code of one's own"),
    "patched in a layer": (patched_in_a_layer, "code of one's own"),
}
# A model with windows makes its masks for what its first layer holds.
IN_FAMILIES = [
    *((family, name) for family in ("llama", "gpt2") for name in MADE),
    *(("mistral", name) for name in MADE if name != "last evicting"),
]


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("family", "name"), IN_FAMILIES)
def test_a_cache_with_code_of_ones_own_does_what_it_does_in_generate(
    family: str, name: str, do_sample: bool
) -> None:
    fresh, why = MADE[name]
    check(shared_model(family, seed=1), fresh, why, do_sample=do_sample)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("family", "window", "why"),
    [
        ("llama", 8, "layers of DynamicSlidingWindowLayer"),
        ("gpt2", 8, "layers of DynamicSlidingWindowLayer"),
        ("mistral", 5, "other windows than the model"),
        ("mistral", 16, "other windows than the model"),
    ],
)
def test_windows_of_a_cache_hold_where_the_model_has_others(
    family: str, window: int, why: str, do_sample: bool
) -> None:
    model = shared_model(family, seed=1)
    check(model, lambda: windowed(window), why, do_sample=do_sample)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", [DynamicCache, DynamicLayer])
@pytest.mark.parametrize("is_passed", [False, True], ids=["own", "passed"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_a_method_patched_in_its_class_is_heeded_in_any_cache(
    family: str, is_passed: bool, kind: Any, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_model(family, seed=1)
    made: Any = (lambda: {CACHE: DynamicCache()}) if is_passed else dict
    # Layers with windows have an `update` of their own.
    is_meant = kind is DynamicCache or is_passed or family != "mistral"
    check(model, made, None, do_sample=do_sample)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "update", fading(kind.update))
        check(model, made, "code of one's own" if is_meant else None, do_sample=do_sample)
    check(model, made, None, do_sample=do_sample)


# --- contents ---------------------------------------------------------------------------------


def held(model: Any, change: Callable[[int, Any], None], num_new: int = 1) -> Made:
    """Return a cache that has run the prompt, and of which each layer was changed since."""
    cache, num_held = DynamicCache(config=model.config), PROMPT.shape[1]
    with torch.no_grad():
        model(PROMPT, **{CACHE: cache})
    for place, layer in enumerate(cache.layers):
        change(place, layer)
    return {
        CACHE: cache,
        "attention_mask": torch.ones(1, num_held + num_new, dtype=torch.long),
        "position_ids": torch.arange(num_held, num_held + num_new)[None],
    }


def cut(layer: Any, start: int) -> None:
    layer.keys, layer.values = layer.keys[:, :, start:], layer.values[:, :, start:]


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("lengths", [(18, 15, 12), (12, 15, 18), (18, 18, 17)])
def test_layers_of_uneven_length_stay_so(family: str, lengths: Any, do_sample: bool) -> None:
    model = shared_model(family, seed=1)

    def fresh() -> Made:
        return held(model, lambda place, layer: cut(layer, 18 - lengths[place]))

    check(model, fresh, "have different lengths", NEW, do_sample=do_sample)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tokens_that_every_layer_has_lost_stay_lost(family: str, do_sample: bool) -> None:
    """A guard: they are told apart by their positions."""
    model = shared_model(family, seed=1)
    fresh = partial(held, model, lambda _, layer: cut(layer, 6))
    for config in (None, EIGHT):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lade.PlainDecodingWarning)
            given = {**OPTIONS, "config": config, "do_sample": do_sample}
            same_as_generate(model, NEW, fresh=fresh, accept=0.7, may_fail=True, **given)


def test_a_window_that_has_lost_tokens_is_noticed() -> None:
    """By itself, for `generate` raises."""
    model = shared_model("mistral", seed=1)
    whole = held(model, lambda *_: None)[CACHE]
    assert why_unusual(model.config, whole) is None
    assert [layer.keys.shape[2] for layer in whole.layers] == [7, 7, 7]
    cut(whole.layers[1], 1)
    if MARKS_CACHES:  # as `generate` does
        whole._is_user_defined = True
    assert why_unusual(model.config, whole) == "its cache has lost some of its tokens"


# --- usual caches -----------------------------------------------------------------------------


def filled(model: Any, num_new: int, has_positions: bool) -> Made:
    """Return a cache that an earlier turn has filled, for a call with its new tokens alone."""
    options = held(model, lambda *_: None, num_new)
    return options if has_positions else {**options, "position_ids": None}


USUAL: dict[str, Callable[[Any], Made]] = {
    "without a config": lambda _: {CACHE: DynamicCache()},
    "with the model's": lambda model: {CACHE: DynamicCache(config=model.config)},
    "with layers": lambda _: layered(DynamicLayer),
}


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("made", USUAL.values(), ids=USUAL)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_usual_caches_have_drafts(family: str, made: Any, do_sample: bool) -> None:
    model = shared_model(family, seed=1)
    check(model, partial(made, model), None, do_sample=do_sample)


@pytest.mark.parametrize("has_positions", [False, True], ids=["counted", "positions"])
@pytest.mark.parametrize("num_new", [1, 4])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_a_cache_of_an_earlier_turn_has_drafts(
    family: str, num_new: int, has_positions: bool
) -> None:
    model = shared_model(family, seed=1)
    new = torch.tensor([[31, 5, 6, 7]])[:, :num_new]
    check(model, partial(filled, model, num_new, has_positions), None, new)


# --- whoever reads them -----------------------------------------------------------------------


class Full(StoppingCriteria):  # type: ignore[misc]
    """Stops once a cache holds so many tokens."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), self.cache.get_seq_length() >= 26)


class Reading(LogitsProcessor):  # type: ignore[misc]
    """Prefers the token of the number that a cache holds."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, self.cache.get_seq_length() % VOCAB_SIZE] += 3
        return scores


READERS: dict[str, Callable[[Any], Made]] = {
    "criterion": lambda cache: {"stopping_criteria": [Full(cache)]},
    "processor": lambda cache: {"logits_processor": [Reading(cache)]},
    "prefix function": lambda cache: {
        "prefix_allowed_tokens_fn": lambda *_: [20 + cache.get_seq_length() % 7, 30]
    },
}


@pytest.mark.parametrize("verification", [None, "chain", "snapshot"])
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_whoever_reads_a_cache_reads_what_generate_has_written(
    family: str, reader: Any, verification: Any
) -> None:
    model = shared_model(family, seed=1)

    def fresh() -> Made:
        cache = DynamicCache(config=model.config)
        return {CACHE: cache, **reader(cache)}

    config = lade.Config(verification=verification, max_draft_tokens=8)
    why = "may look at the cache"
    same_as_generate(model, PROMPT, fresh=fresh, config=config, plainly=why, accept=0.7, **OPTIONS)
