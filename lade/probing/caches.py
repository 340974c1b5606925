"""Whether a cache does what transformers' own do: only these are taken over, rolled back or cut."""

from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer, StaticCache, StaticLayer

from lade.compat import may_be_users
from lade.probing.own_code import is_code, is_own
from lade.targets.kv_memory import kind_of

# Layers that keep every token, as any layer of a model may: its masks show what it sees of them.
_FULL = (DynamicLayer, StaticLayer)
# What models call of a cache and its layers.
_METHODS = (
    *("update", "update_conv_state", "update_recurrent_state"),
    *("get_seq_length", "get_mask_sizes"),
)


def why_unusual(config: Any, cache: Any) -> str | None:
    """Return why a cache may do something else than transformers' own, or None.

    Args:
        config: of the model's text part.
        cache: a `DynamicCache` or a `StaticCache`, which may be the caller's.
    """
    parts = (cache, *cache.layers)
    kinds = [*map(type, parts), getattr(cache, "layer_class_to_replicate", None)]
    methods = {kind: [getattr(kind, name, None) for name in _METHODS] for kind in kinds if kind}
    found = [kind for kind, of_kind in methods.items() if any(map(is_own, of_kind))]
    found += [type(part) for part in parts if any(map(is_code, vars(part).values()))]
    if found:
        return f"its cache runs code of one's own ({found[0].__name__})"
    if not may_be_users(cache):
        return None
    is_static = type(cache) is StaticCache
    made = StaticCache(config, 1) if is_static else DynamicCache(config=config)
    for place, layer in enumerate(cache.layers):
        usual = made.layers[place] if place < len(made.layers) else None
        if type(layer) is not type(usual) and type(layer) not in _FULL:
            return f"its cache has layers of {type(layer).__name__}"
        windows = {getattr(each, "sliding_window", None) for each in (layer, usual)}
        if type(layer) is type(usual) and len(windows) > 1:
            return "its cache has layers with other windows than the model"
    return _why_uneven([each for each in cache.layers if kind_of(each) is not None])


def _why_uneven(layers: Sequence[Any]) -> str | None:
    """Return why dynamic layers do not hold the same tokens, or None."""
    held = [each for each in layers if getattr(each, "keys", None) is not None]
    if len({(len(each.keys), each.get_seq_length()) for each in held}) > 1:
        return "the layers of its cache have different lengths"
    for layer in held:
        window, length = getattr(layer, "sliding_window", None), layer.get_seq_length()
        least = length if window is None else min(length, window - 1)
        if not least <= layer.keys.shape[2] == layer.values.shape[2]:
            return "its cache has lost some of its tokens"
    return None
