"""Model arguments that `generate` prepared for a prompt."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from lade.compat import CACHE

LOGITS_KEPT = "logits_to_keep"
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # of text, and of images in it
# Arguments with a value per token.
CONTINUED = ("attention_mask", *TOKEN_TYPES, "position_ids")
# All arguments of a prompt of tokens alone.
_OF_TEXT = {"attention_mask", "position_ids", CACHE, "use_cache", LOGITS_KEPT}


def is_text_alone(model_kwargs: Mapping[str, Any]) -> bool:
    """Return whether a prompt has tokens alone: no embeddings, images or token types.

    Only then do equal tokens have equal keys, and may transformers run them in chunks.
    """
    for name, value in model_kwargs.items():
        is_nothing = value is None or value is False or (isinstance(value, dict) and not value)
        if name not in _OF_TEXT and not is_nothing:
            return False
    return True


def num_slots_of(
    input_ids: Tensor, config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> int:
    """Return the number of tokens of prompts, including tokens that only the cache holds."""
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    # `generate` drops a mask of ones, but keeps its length.
    whole = getattr(config, "_mask_length", None) or input_ids.shape[1]
    num_slots: int = max(whole, input_ids.shape[1]) if mask is None else mask.shape[1]
    return num_slots if embeds is None else max(num_slots, embeds.shape[1])
