"""Rolling back transformers' caches to before a forward.

`crop` drops the newest tokens of a cache that holds every token separately. `saved` makes a
snapshot before a forward, for caches that fold the past into a state.
"""

import copy
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
)

from lade.compat import CACHE_NAMES
from lade.targets.kv_cache import kind_of


def find_cache(holder: Any) -> tuple[str, Any] | None:
    """Return name and value of the cache in model arguments or an output, or None."""
    for name in CACHE_NAMES:
        cache = holder.get(name)
        if cache is not None:
            return name, cache
    return None


def length_of(cache: Any) -> int | None:
    """Return the number of tokens in a cache; None if it is a state without a length."""
    try:
        length: int = cache.get_seq_length()
    except (AttributeError, ValueError):
        return None
    return length


def cache_in(holder: Any) -> Any:
    """Return the cache in model arguments or an output, under any name, or None."""
    found = find_cache(holder)
    return None if found is None else found[1]


def why_not_croppable(cache: Any) -> str | None:
    """Return why the newest tokens cannot be dropped from a filled cache, or None if they can."""
    if isinstance(cache, EncoderDecoderCache):
        if cache.cross_attention_cache.get_seq_length() > 0:
            return "its cache holds the output of an encoder"
        cache = cache.self_attention_cache
    if not isinstance(cache, Cache):
        return f"its cache is a {type(cache).__name__}"
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            # A new layer may get a state in its first forward.
            is_new = not any(layer.is_conv_states_initialized.values())
            if is_new or any(layer.is_recurrent_states_initialized.values()):
                return "it keeps a recurrent state, from which no token can be taken"
        elif kind_of(layer) is None:
            return f"its cache has layers of {type(layer).__name__}"
    return None


def record_past(cache: Any, is_on: bool) -> None:
    """Make windowed layers keep tokens that leave the window until the next `crop`, or stop it."""
    for layer in _layers(cache):
        if hasattr(layer, "record_past"):
            layer.record_past = is_on


def crop(cache: Any, num_tokens: int) -> None:
    """Drop the newest `num_tokens` tokens; must follow every forward, even to drop none."""
    for layer in _layers(cache):
        if not isinstance(layer, LinearAttentionCacheLayerMixin) or layer.record_past:
            layer.crop(-num_tokens)


def _layers(cache: Any) -> list[Any]:
    whole = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    layers: list[Any] = whole.layers
    return layers


def saved(cache: Any) -> Any:
    """Return a snapshot of a cache that later forwards do not change.

    Only tensors that a forward changes in place are copied; keys and values are shared.
    """
    if isinstance(cache, (list, tuple)):  # of states, as in the oldest recurrent models
        return tree_map_only(Tensor, Tensor.clone, cache)
    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        return copy.deepcopy(cache)
    twin = copy.copy(cache)
    for name, value in vars(cache).items():
        if name != "layers" and isinstance(value, (Tensor, list, dict)):
            setattr(twin, name, copy.deepcopy(value))
    twin.layers = [_saved_layer(layer) for layer in cache.layers]
    return twin


def _saved_layer(layer: Any) -> Any:
    if kind_of(layer) is not None:  # its updates make new tensors, and leave the old ones alone
        return copy.copy(layer)
    is_known = type(layer).__module__ == cache_utils.__name__
    if not is_known:
        return copy.deepcopy(layer)  # a model's own class; may hold anything
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if not (isinstance(layer, DynamicLayer) and name in ("keys", "values")):
            setattr(twin, name, tree_map_only(Tensor, Tensor.clone, value))
    return twin
