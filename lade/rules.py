"""What a model's config says about how it can verify drafts, where a short check cannot see it.

Next file: `probing.py`.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers.cache_utils import DynamicCache

from lade.cache import LayerKind, kind_of
from lade.errors import UnsupportedModelError
from lade.internals import Model
from lade.masks import FULL, Reach

# Layers with several masks: which of a config's fields says how far they reach.
_REACHES = {
    "full_attention": None,
    "indexed_attention": None,
    "sliding_attention": "window",
    "chunked_attention": "chunk",
}


def refuse_encoder_decoder(model: Model) -> None:
    """Raise for a model that is no causal LM.

    Raises:
        UnsupportedModelError: it is an encoder-decoder.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder; lade decodes causal LMs"
        )


class TreeLayout(NamedTuple):
    """What the attention layers of a model keep, and how far they reach."""

    kinds: tuple[LayerKind, ...]
    reaches: dict[str, Reach]  # by layer type; all alike, under any name, where one mask does


def tree_layout(model: Model) -> TreeLayout:
    """Return the layout of a model whose trees a 4D mask can describe.

    Raises:
        UnsupportedModelError: a rule says that trees are beyond it; what only a forward can tell
            is left to `probing.py`.
    """
    config = model.config.get_text_config(decoder=True)
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError("it keeps a recurrent state")
    if "position_ids" not in parameters and not takes_any:
        raise UnsupportedModelError("its forward takes no position_ids")
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise UnsupportedModelError("its local layers mask by cache slot, inside the model")
    if getattr(config, "alibi", False):
        raise UnsupportedModelError("its ALiBi bias follows the cache slots and not the positions")
    layers = DynamicCache(config=config).layers
    kinds = [kind_of(layer) for layer in layers]
    unknown = {type(layer).__name__ for layer in layers if kind_of(layer) is None}
    if unknown or not kinds:
        names = ", ".join(sorted(unknown)) or "no layers"
        raise UnsupportedModelError(f"its cache has {names}")
    reaches = _reaches(config, layers)
    is_remote = not type(model).__module__.startswith("transformers.")
    if is_remote and any(reach != FULL for reach in reaches.values()):
        raise UnsupportedModelError(
            "its code is not part of transformers, and has a window that a short check cannot see"
        )
    return TreeLayout(tuple(kind for kind in kinds if kind is not None), reaches)


def _reaches(config: Any, layers: Sequence[Any]) -> dict[str, Reach]:
    windows = {getattr(layer, "sliding_window", None) for layer in layers} - {None}
    chunk = getattr(config, "attention_chunk_size", None)
    names = set(getattr(config, "layer_types", None) or ())
    if not names:
        # All layers are alike, as transformers' own caches and masks have it.
        if getattr(config, "sliding_window", None) is not None:
            return {"sliding_attention": Reach(window=config.sliding_window)}
        if chunk is not None:
            return {"chunked_attention": Reach(chunk=chunk)}
        return {"full_attention": FULL}
    reaches = {}
    for name in names - {"moe", "mlp"}:
        if name not in _REACHES:
            raise UnsupportedModelError(f"it has layers of {name}")
        if _REACHES[name] == "window":
            of_windows = windows - {chunk} if "chunked_attention" in names else windows
            of_windows = of_windows or {config.sliding_window}
            if len(of_windows) > 1:
                raise UnsupportedModelError("its layers have windows of different sizes")
            reaches[name] = Reach(window=next(iter(of_windows)))
        else:
            reaches[name] = Reach(chunk=chunk) if _REACHES[name] == "chunk" else FULL
    return reaches


def rope_of(config: Any) -> tuple[str, int] | None:
    """Return type and limit of a rotary embedding whose angles follow the length of a forward.

    The limit is the number of positions at which the angles change.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for entry in (parameters, *nested):
        if entry.get("rope_type") in ("dynamic", "longrope"):
            limit = entry.get("original_max_position_embeddings")
            limit = limit or getattr(config, "original_max_position_embeddings", None)
            return entry["rope_type"], limit or config.max_position_embeddings
    return None


class Lengths(NamedTuple):
    """What a call will run through, in positions and in slots."""

    num_rows: int
    first_position: int  # of the first token after the prompt; the greatest of all rows
    num_slots: int  # of the prompt
    num_new: int  # at most
    is_padded: bool = False


def why_not_speculate(model: Model, lengths: Lengths) -> str | None:
    """Return why a call of such lengths has to be decoded plainly, or None."""
    config = model.config.get_text_config(decoder=True)
    rope = _rope_passed(config, lengths)
    if rope is not None:
        kind, limit = rope
        # Past the limit a forward over one token is plain decoding, so a row alone may go on.
        is_past = lengths.first_position > limit if kind == "longrope" else lengths.num_rows == 1
        if not is_past:
            return (
                f"its rotary embedding ({kind}) changes at {limit} positions, which this call may "
                "cross"
            )
    if lengths.is_padded and "minimax_m3_sparse" in (getattr(config, "layer_types", None) or ()):
        # A row with more padding than text sees no key there at all, and then all of them.
        return "its sparse layers choose blocks by cache slot, and padding shifts them"
    kept: int | None = getattr(config, "keep_window_size", None)
    if kept is not None and lengths.num_slots + lengths.num_new > kept:
        return f"its dynamic mask changes at {kept} tokens, which this call may cross"
    return None


def why_no_snapshot(model: Model, lengths: Lengths) -> str | None:
    """Return why a call of such lengths cannot go back to copies of a state, or None."""
    rope = _rope_passed(model.config.get_text_config(decoder=True), lengths)
    if rope is None:
        return None
    # What is run again would be more than one token.
    return f"its rotary embedding is {rope[0]}"


def _rope_passed(config: Any, lengths: Lengths) -> tuple[str, int] | None:
    """Return what `rope_of` does where a call may go beyond the limit, or begins there."""
    rope = rope_of(config)
    last = lengths.first_position + lengths.num_new
    return rope if rope is not None and last > rope[1] else None


def why_no_tree(model: Model, lengths: Lengths) -> str | None:
    """Return why a call of such lengths cannot have trees, or None."""
    config = model.config.get_text_config(decoder=True)
    scale: int | None = getattr(config, "floor_scale", None)
    if scale is None or not getattr(config, "attn_temperature_tuning", False):
        return None
    # Layers without positions scale by slot; a tree's nodes lie in slots behind their own.
    last = lengths.num_slots + lengths.num_new + MAX_OVERHANG
    if lengths.num_slots // scale == last // scale:
        return None
    return f"its queries are scaled by cache slot, anew at multiples of {scale}"


def why_not_stable(model: Model) -> str | None:
    """Return why text of a model depends on drafts in half precision, or None if a check may tell.

    What is run for one token must not depend on the others; a check with few tokens would not see
    that of experts.
    """
    if any("experts" in name.split(".") for name, _ in model.named_modules()):
        return "how many tokens its experts get follows what else is in a forward"
    return None


def longest_draft(model: Model, max_length: int, num_tokens: int, first_position: int) -> int:
    """Return how long the text may get with a draft.

    Learned positions end somewhere, and a draft must not ask for more than plain decoding would;
    nor may it reach where a dynamic rotary embedding begins to follow the length of each forward.

    Args:
        model: the target.
        max_length: tokens of the longest text.
        num_tokens: of the prompt.
        first_position: of the first token after it.
    """
    config = model.config.get_text_config(decoder=True)
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = rope_of(config)
    if rope is not None and rope[0] == "dynamic":
        limits.append(rope[1])
    rooms: list[int] = [limit - first_position for limit in limits if limit is not None]
    return min([max_length, *(num_tokens + max(0, room) for room in rooms)])


# Slots behind the longest text: the rejected part of a last tree.
MAX_OVERHANG = 64
