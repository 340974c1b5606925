"""What a model's config says about how a call can be decoded, where a short check cannot see it."""

from typing import Any, NamedTuple

from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from lade.compat import Model
from lade.errors import UnsupportedModelError, UnsupportedOptionError
from lade.targets.layout import MAX_OVERHANG, rope_of


def refuse_encoder_decoder(model: Model) -> None:
    """Raise for a model that is no causal LM.

    Raises:
        UnsupportedModelError: it is an encoder-decoder.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder; lade decodes causal LMs"
        )


def refuse_sharded(model: Model) -> None:
    """Raise for a model whose weights are not where they are needed.

    Raises:
        UnsupportedOptionError: it is sharded by FSDP or DeepSpeed ZeRO-3.
    """
    if is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model):
        raise UnsupportedOptionError(
            "lade does not support models sharded by FSDP or DeepSpeed ZeRO-3 yet"
        )


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
