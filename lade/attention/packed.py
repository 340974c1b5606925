"""Attention over trees on a CPU: transformers' `sdpa`, without copies of keys and values.

If several query heads share a key head, `sdpa` in transformers copies keys and values for each of
them as soon as there is a mask. Here, the queries that share a key head are packed into one list
instead. SmolLM2 (9 query heads, 3 key heads), 9 tokens, one thread, per layer: 0.12 ms instead of
0.17 after 300 tokens, 0.32 instead of 1.20 after 900, with bitwise equal results.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

PACKED_SDPA = "lade_packed_sdpa"

_sdpa = AttentionInterface()["sdpa"]


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as `sdpa` does; calls other than a mask over shared heads are passed on to it.

    Args:
        module: the layer.
        query: [rows, num_heads, num_queries, head_dim].
        key, value: [rows, num_key_heads, num_keys, head_dim of each].
        attention_mask: [rows, 1, num_queries, num_keys], boolean or additive.
        dropout, scaling, is_causal, kwargs: as transformers passes them.

    Returns:
        [rows, num_queries, num_heads, head_dim of values], and None for the weights.
    """
    rows, num_heads, num_queries, _ = query.shape
    num_sharing = num_heads // key.shape[1]
    is_plain = (
        attention_mask is None
        or attention_mask.shape[1:3] != (1, num_queries)
        or num_sharing == 1
        or any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "cache"))
    )
    if is_plain:
        attended: tuple[Tensor, None] = _sdpa(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
        return attended
    assert attention_mask is not None
    packed = scaled_dot_product_attention(
        query.reshape(rows, key.shape[1], num_sharing * num_queries, query.shape[-1]),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, num_sharing, 1),
        dropout_p=dropout,
        scale=scaling,
    )
    of_heads = packed.reshape(rows, num_heads, num_queries, value.shape[-1])
    return of_heads.transpose(1, 2).contiguous(), None


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, AttentionMaskInterface()["sdpa"])
