"""Rules for what a short check misses: methods ruled out by model, inputs, cache and lengths."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from lade.compat import (
    CACHE,
    INDEXERS_TAKE_MASKS,
    Model,
    has_adapters,
    has_hook,
    may_be_users,
    mesh_of,
)
from lade.compat.attempts import Attempt
from lade.compat.closeness import is_exact_in
from lade.config import SPECULATING, Verification
from lade.errors import UnsupportedModelError, UnsupportedOptionError
from lade.probing.profile import CacheKind
from lade.probing.user_code import is_code
from lade.targets.inputs import LOGITS_KEPT, TOKEN_TYPES, num_slots_of
from lade.targets.kv_cache import kind_of
from lade.targets.layout import MAX_OVERHANG, ropes_of
from lade.targets.rollback import cache_in, length_of, why_not_croppable
from lade.targets.static import is_too_long

# Methods that a call without a cache cannot use.
WITHOUT_CACHE: dict[Verification, str] = {"tree": "use_cache=False", "snapshot": "use_cache=False"}
# Model inputs that every verification method continues after the prompt.
_CONTINUED = {
    "attention_mask",
    "position_ids",
    *TOKEN_TYPES,
    CACHE,
    "cache_params",
    "use_cache",
    LOGITS_KEPT,
    "inputs_embeds",
    "output_attentions",
    "output_hidden_states",
}
# Layers that are copied to memory of lade's, and filled in the end.
_STATIC = (StaticLayer, StaticSlidingWindowLayer)
# Inputs that show how positions are counted in the prompt; every forward gets its positions.
_OF_PROMPT = {"image_grid_thw", "video_grid_thw", "second_per_grid_ts"}


def refuse_encoder_decoder(model: Model) -> None:
    """Raise if a model is an encoder-decoder.

    Raises:
        UnsupportedModelError: the model is an encoder-decoder.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder; lade decodes causal LMs"
        )


def refuse_sharded(model: Model) -> None:
    """Raise if a model's weights are sharded.

    Raises:
        UnsupportedOptionError: the model is sharded by FSDP or DeepSpeed ZeRO-3.
    """
    if is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model):
        raise UnsupportedOptionError(
            "lade does not support models sharded by FSDP or DeepSpeed ZeRO-3 yet"
        )


class Lengths(NamedTuple):
    """The extent of a call, in positions and in cache slots."""

    first_position: int  # of the first token after the prompt; the maximum over rows
    num_slots: int  # of the prompt
    num_new: int  # maximum number of tokens to emit
    is_padded: bool = False


def why_not_speculate(model: Model, lengths: Lengths) -> str | None:
    """Return why a call of these lengths must fall back to standard decoding, or None."""
    config = model.config.get_text_config(decoder=True)
    for kind, limit in _ropes_passed(model, lengths):
        # Drafts end where a dynamic embedding begins; batches of such models do not speculate.
        if kind == "longrope" and lengths.first_position <= limit:
            return (
                f"its rotary embedding ({kind}) changes at {limit} positions, and this call may "
                "pass them"
            )
    if lengths.is_padded and "minimax_m3_sparse" in (getattr(config, "layer_types", None) or ()):
        # A row with more padding than text sees no key there; attention then lets it see all keys.
        return "its sparse layers choose blocks by cache slot, and padding shifts them"
    num_tokens = lengths.num_slots + lengths.num_new
    topk: int | None = getattr(config, "index_topk", None)
    if topk is not None and num_tokens > topk:
        # Up to that length, it chooses all keys, and a short check finds it exact.
        if not INDEXERS_TAKE_MASKS:
            return f"beyond {topk} tokens, its sparse attention needs transformers 5.23 or newer"
        if is_exact_in(model):
            # Many keys score zero, and their order in memory decides between equal ones.
            return f"beyond {topk} tokens, rounding may decide which keys its attention chooses"
    if "lsh" in (getattr(config, "attn_layers", None) or ()):  # Reformer's
        chunk: int = config.lsh_attn_chunk_length
        if num_tokens > chunk:
            # Up to that length it attends to everything, and a short check finds it exact.
            return f"beyond {chunk} tokens, its attention hashes tokens by random projections"
    kept: int | None = getattr(config, "keep_window_size", None)
    if kept is not None and num_tokens > kept:
        return f"its dynamic mask changes at {kept} tokens, and this call may pass them"
    return None


def why_no_snapshot(model: Model, lengths: Lengths) -> str | None:
    """Return why a call of these lengths cannot go back to a snapshot, or None."""
    # After going back, more than one token would run again.
    kinds = (f"its rotary embedding is {kind}" for kind, _ in _ropes_passed(model, lengths))
    return next(kinds, None)


def _ropes_passed(model: Model, lengths: Lengths) -> list[tuple[str, int]]:
    """Return those of `ropes_of` whose limit the call may pass."""
    last = lengths.first_position + lengths.num_new
    ropes = ropes_of(model.config.get_text_config(decoder=True))
    return [(kind, limit) for kind, limit in ropes if last > limit]


def why_no_tree(model: Model, lengths: Lengths) -> str | None:
    """Return why a call of these lengths cannot verify trees, or None."""
    config = model.config.get_text_config(decoder=True)
    scale: int | None = getattr(config, "floor_scale", None)
    if scale is None or not getattr(config, "attn_temperature_tuning", False):
        return None
    # Layers without positions scale by slot, and a tree's nodes lie in later slots than in a text.
    last = lengths.num_slots + lengths.num_new + MAX_OVERHANG
    if lengths.num_slots // scale == last // scale:
        return None
    return f"its queries are scaled by cache slot, and the scale changes at multiples of {scale}"


def longest_draft(model: Model, num_tokens: int, lengths: Lengths) -> int:
    """Return the maximum total length a draft may reach, prompt of `num_tokens` included.

    Learned positions are limited, and a draft must not need more of them than standard decoding;
    nor may it reach the length where a dynamic rotary embedding depends on each forward's length.
    """
    config = model.config.get_text_config(decoder=True)
    limits: list[int | None] = [getattr(config, "max_position_embeddings", None)]
    limits += [limit for kind, limit in ropes_of(config) if kind == "dynamic"]
    left = [max(0, limit - lengths.first_position) for limit in limits if limit is not None]
    return num_tokens + min([lengths.num_new, *left])


def why_not_static(
    model: Model, num_rows: int, num_slots: int, user_code: str | None
) -> str | None:
    """Return why steps of a call must not be compiled on a static cache, or None."""
    devices = (getattr(model, "hf_device_map", None) or {}).values()
    reasons = (
        (num_rows > 1, "it has several rows"),
        (user_code is not None, f"your own code runs in its forward passes ({user_code})"),
        (mesh_of(model) is not None, "several processes run it together"),
        (
            len({str(device).removeprefix("cuda:") for device in devices}) > 1,
            "its layers are on several devices",
        ),
        (has_adapters(model), "it has adapters, which can be switched without a trace"),
        # Compilers do not look whether hooks have come or gone.
        (any(map(has_hook, model.modules())), "it has hooks"),
        (is_too_long(num_slots), "its prompt is too long"),
    )
    return next((reason for is_so, reason in reasons if is_so), None)


def cache_kind_of(model_kwargs: dict[str, Any]) -> CacheKind:
    """Return the kind of cache that a call prepared by `generate` has."""
    cache = cache_in(model_kwargs)
    if cache is None and not model_kwargs.get("use_cache", True):
        return "none"
    return "static" if type(cache) is StaticCache else "dynamic"


def excluded_by(
    model: Model,
    input_ids: Tensor,
    model_kwargs: dict[str, Any],
    lengths: Lengths,
    user_code: str | None,
) -> dict[Verification, str]:
    """Return the methods that a call prepared by `generate` rules out, and why."""
    excluded: dict[Verification, str] = {}

    def exclude(reason: str | None, *verifications: Verification) -> None:
        for verification in verifications if reason is not None else ():
            excluded.setdefault(verification, str(reason))

    uses_cache, kind = model_kwargs.get("use_cache", True), cache_kind_of(model_kwargs)
    exclude(why_not_speculate(model, lengths), *SPECULATING)
    exclude(_needs_more(model, input_ids, model_kwargs), *SPECULATING)
    exclude(why_no_tree(model, lengths), "tree")
    exclude(why_no_snapshot(model, lengths), "snapshot")
    text_config = model.config.get_text_config(decoder=True)
    cache = cache_in(model_kwargs)
    if kind == "none":
        for verification, reason in WITHOUT_CACHE.items():
            exclude(reason, verification)
        if any(model_kwargs.get(name) is not None for name in TOKEN_TYPES):
            # With a cache, only tokens of the prompt may.
            exclude("without a cache, its token types may let tokens see later ones", *SPECULATING)
    elif kind == "static":
        exclude(_why_not_moved(cache, lengths, len(input_ids)), "tree")
        exclude("its cache is static", "chain", "snapshot")
    elif type(cache) is not DynamicCache:
        exclude(f"its cache is a {type(cache).__name__}", "tree")
    if cache is not None and type(cache) not in (DynamicCache, StaticCache):
        exclude(f"{CACHE} is a {type(cache).__name__}", *SPECULATING)
    elif cache is not None and cache.offloading:
        exclude("its cache is offloaded", *SPECULATING)
    elif cache is not None and may_be_users(cache):
        exclude(_why_unusual(text_config, cache), *SPECULATING)
        exclude(why_not_croppable(cache), "chain")
    if cache is not None and not uses_cache:
        exclude("a cache was passed, and use_cache=False", *SPECULATING)
    if user_code is not None and mesh_of(model) is not None:
        reason = f"your own code runs in its forward passes ({user_code})"
        exclude(f"{reason}, and several processes run it together", *SPECULATING)
    return excluded


def _why_not_moved(cache: StaticCache, lengths: Lengths, num_rows: int) -> str | None:
    """Return why a static cache cannot be copied, and filled in the end, or None."""
    unknown = {type(layer).__name__ for layer in cache.layers if type(layer) not in _STATIC}
    if unknown or num_rows > 1:
        return f"its static cache has {', '.join(sorted(unknown)) or 'several rows'}"
    sizes = [layer.max_cache_len for layer in cache.layers if type(layer) is StaticLayer]
    if lengths.num_slots + lengths.num_new - 1 > min(sizes, default=math.inf):
        return "its static cache is shorter than its text may become"
    return None


def lengths_of(
    input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Lengths:
    """Return the extent of a call prepared by `generate`."""
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    num_slots = num_slots_of(input_ids, config, model_kwargs)
    first = num_slots if positions is None else int(positions[..., -1].max()) + 1
    # `generate` also takes a float, and infinity; no text has as many tokens as this.
    longest = math.ceil(min(config.max_length, torch.iinfo(torch.int32).max))
    is_padded = mask is not None and not bool(mask.all())
    if positions is not None and not is_padded:  # positions other than slots count as padding
        cache = cache_in(model_kwargs)
        num_cached = (0 if cache is None else length_of(cache)) or 0
        lasts = {num_slots, num_cached + positions.shape[-1]}  # of whole texts, or of the new part
        in_order = bool((positions.diff(dim=-1) == 1).all())
        is_padded = not in_order or not {*(positions[..., -1] + 1).flatten().tolist()} <= lasts
    return Lengths(first, num_slots, longest - input_ids.shape[1], is_padded)


def _needs_more(model: Model, input_ids: Tensor, model_kwargs: dict[str, Any]) -> str | None:
    """Return the model input that every forward, not only the prefill, needs, or None."""
    unknown = {
        name: value
        for name, value in model_kwargs.items()
        if name not in _CONTINUED | _OF_PROMPT and not _is_nothing(value)
    }
    if not unknown or input_ids.shape[1] == 0:
        return f"the model input {next(iter(unknown))}" if unknown else None
    known = {name: value for name, value in model_kwargs.items() if name in _CONTINUED}
    known.pop("inputs_embeds", None)
    with Attempt() as attempt:
        later = model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=1, is_first_iteration=False, **known, **unknown
        )
    if attempt.failure is not None:
        return f"it cannot prepare inputs after the prompt ({attempt.failure})"
    for name in unknown:
        if not _is_nothing(later.get(name)):
            return f"every forward takes the model input {name}"
    return None


def _is_nothing(value: Any) -> bool:
    """Return whether an input is absent: None, or an empty dict of encoded images."""
    return value is None or (isinstance(value, dict) and not value)


def _why_unusual(config: Any, cache: Any) -> str | None:
    """Return why a cache may behave unlike transformers' caches, or None.

    Args:
        config: of the model's text part.
        cache: a `DynamicCache` or a `StaticCache`, perhaps the caller's.
    """
    if any(is_code(value) for part in (cache, *cache.layers) for value in vars(part).values()):
        return "your own code runs in its cache"
    is_static = type(cache) is StaticCache
    made = StaticCache(config, 1) if is_static else DynamicCache(config=config)
    # It keeps every token. Any layer of a model may be one: masks limit what it sees.
    full = StaticLayer if is_static else DynamicLayer
    for index, layer in enumerate(cache.layers):
        usual = made.layers[index] if index < len(made.layers) else None
        if type(layer) not in (type(usual), full):
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
