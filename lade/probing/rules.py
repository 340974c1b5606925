"""Rules from a model's config about how a call can be decoded, where a short check is blind."""

from typing import Any, NamedTuple

from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from lade.closeness import is_exact_in
from lade.compat import INDEXERS_TAKE_MASKS, Model
from lade.errors import UnsupportedModelError, UnsupportedOptionError
from lade.targets.layout import MAX_OVERHANG, rope_of


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
    """Return why a call of these lengths must be decoded plainly, or None."""
    config = model.config.get_text_config(decoder=True)
    rope = _rope_passed(config, lengths)
    if rope is not None:
        kind, limit = rope
        # Drafts end where a dynamic one begins; batches of such models are plain anyway.
        if kind == "longrope" and lengths.first_position <= limit:
            return (
                f"its rotary embedding ({kind}) changes at {limit} positions, which this call may "
                "cross"
            )
    if lengths.is_padded and "minimax_m3_sparse" in (getattr(config, "layer_types", None) or ()):
        # A row with more padding than text sees no key at all there, and then all of them.
        return "its sparse layers choose blocks by cache slot, and padding shifts them"
    num_tokens = lengths.num_slots + lengths.num_new
    topk: int | None = getattr(config, "index_topk", None)
    if topk is not None and num_tokens > topk:
        # Up to that length all keys are chosen, and a short check finds it exact.
        if not INDEXERS_TAKE_MASKS:
            return f"beyond {topk} tokens, its sparse attention needs transformers 5.23 or newer"
        if is_exact_in(model):
            # Many keys score zero, and which of two equal ones is chosen depends on where they lie.
            return f"beyond {topk} tokens, rounding may decide which keys its attention chooses"
    if "lsh" in (getattr(config, "attn_layers", None) or ()):  # Reformer's
        chunk: int = config.lsh_attn_chunk_length
        if num_tokens > chunk:
            # Up to that length it attends to everything, and a short check finds it exact.
            return f"beyond {chunk} tokens, its attention hashes tokens by random projections"
    kept: int | None = getattr(config, "keep_window_size", None)
    if kept is not None and num_tokens > kept:
        return f"its dynamic mask changes at {kept} tokens, which this call may cross"
    return None


def why_not_reused(model: Model, lengths: Lengths) -> str | None:
    """Return why keys of a call of these lengths may not be those of another length, or None."""
    return why_no_snapshot(model, lengths) or why_not_speculate(model, lengths)


def why_no_snapshot(model: Model, lengths: Lengths) -> str | None:
    """Return why a call of these lengths cannot go back to copies of a state, or None."""
    rope = _rope_passed(model.config.get_text_config(decoder=True), lengths)
    if rope is None:
        return None
    # After going back, more than one token would be run again.
    return f"its rotary embedding is {rope[0]}"


def _rope_passed(config: Any, lengths: Lengths) -> tuple[str, int] | None:
    """Return the result of `rope_of` if the call may end past its limit, else None."""
    rope = rope_of(config)
    last = lengths.first_position + lengths.num_new
    return rope if rope is not None and last > rope[1] else None


def why_no_tree(model: Model, lengths: Lengths) -> str | None:
    """Return why a call of these lengths cannot verify trees, or None."""
    config = model.config.get_text_config(decoder=True)
    scale: int | None = getattr(config, "floor_scale", None)
    if scale is None or not getattr(config, "attn_temperature_tuning", False):
        return None
    # Layers without positions scale by slot, and a tree's nodes lie in slots after their own.
    last = lengths.num_slots + lengths.num_new + MAX_OVERHANG
    if lengths.num_slots // scale == last // scale:
        return None
    return f"its queries are scaled by cache slot, anew at multiples of {scale}"


def why_not_stable(model: Model) -> str | None:
    """Return why a model's text depends on drafts in half precision; None leaves it to the check.

    What is computed for one token must not depend on the others; with experts it may, which a check
    with few tokens would not notice.
    """
    if any("experts" in name.split(".") for name, _ in model.named_modules()):
        return "how many tokens its experts get follows what else is in a forward"
    return None


def longest_draft(model: Model, max_length: int, num_tokens: int, first_position: int) -> int:
    """Return the maximum total length a draft may reach, prompt included.

    Learned positions are limited, and a draft must not need more of them than plain decoding; nor
    may it reach the point where a dynamic rotary embedding follows the length of each forward.
    """
    config = model.config.get_text_config(decoder=True)
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = rope_of(config)
    if rope is not None and rope[0] == "dynamic":
        limits.append(rope[1])
    rooms: list[int] = [limit - first_position for limit in limits if limit is not None]
    return min([max_length, *(num_tokens + max(0, room) for room in rooms)])
