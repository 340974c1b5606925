"""Attention over trees, and where one row holds the tokens of several calls: torch's own.

If several query heads share a key head, `sdpa` in transformers copies keys and values for each of
them as soon as there is a mask. Torch's kernel for a CPU takes them as they are. SmolLM2 (9 query
heads, 3 key heads), 9 tokens, float32, one thread, per layer: 0.11 ms instead of 0.25 after 300
tokens, 0.28 instead of 0.78 after 900.

On CUDA the kernel is called by its name. `scaled_dot_product_attention` chooses a kernel by the
shape of its arguments. On cards of compute capability 9 and 10, in 16 bits, it is cuDNN's, which
builds a plan for each new shape (tens to hundreds of milliseconds); nearly every tree has a new
shape.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

TREE_SDPA = "lade_sdpa"
_INDICES = {"indices", "block_indices"}
_ELSEWHERE = {"softcap", "position_bias", "cache"}  # honoured by `sdpa` alone
_NOT_OF_CALLS = {*_INDICES, *_ELSEWHERE, "s_aux"}

_sdpa = AttentionInterface()["sdpa"]


class Calls:
    """The calls that the tokens of a forward pass belong to, and the keys that they see.

    The tokens of several calls share one row, but each sees only keys and values of its call. A
    compiled forward takes the calls as parts (`lade.forward`); other forwards attend call by call.

    Args:
        sizes: number of tokens of each call, in the order of their tokens.
        masks: bool [1, 1, num_tokens, num_keys] of each call, or additive; None for a causal mask.
    """

    def __init__(self, sizes: Sequence[int], masks: Sequence[Tensor | None]) -> None:
        stops = [*accumulate(sizes)]
        self.nodes = [*map(slice, [0, *stops[:-1]], stops)]
        self.masks = masks


def with_calls(mask: Tensor, calls: Calls) -> Tensor:
    """Attach the masks of several calls to a mask for `attend`; return the mask."""
    mask._lade_calls = calls  # type: ignore[attr-defined]
    return mask


def with_held(states: Tensor, held: Sequence[Tensor]) -> Tensor:
    """Return new keys or values that carry all keys or values of each call, for `attend`."""
    carrying = states[:]  # a tensor of our own
    carrying._lade_held = held  # type: ignore[attr-defined]
    return carrying


def attend(
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
    """Attend as `sdpa` does; anything other than a tree under its mask is passed on to it.

    If the mask has several calls, each sees only its keys. All layers but attention treat the
    tokens of all calls alike, so no call needs padding, and a short one does not pay for the keys
    of a long one.

    Args:
        query: [rows, num_heads, num_queries, head_dim].
        key, value: [rows, num_key_heads, num_keys, head_dim of each]; from `with_held` if there are
            several calls.
        attention_mask: bool [rows, 1, num_queries, num_keys], or from `with_calls`.
        dropout, scaling, is_causal, kwargs: as transformers passes them.

    Returns:
        [rows, num_queries, num_heads, head_dim of values], and None for the weights.

    Raises:
        NotImplementedError: the model, and not the mask, chooses keys. Or there are several calls
            and an unsupported option, or keys and values that the caches did not return.
    """
    calls: Calls | None = getattr(attention_mask, "_lade_calls", None)
    # Models with sparse attention mask keys for `sdpa`, but pass other attentions their indices.
    given = {name for name, value in kwargs.items() if value is not None}
    if refused := given & (_INDICES if calls is None else _NOT_OF_CALLS):
        raise NotImplementedError(f"attention to trees cannot honour {min(refused)!r}")
    if calls is not None:
        if not hasattr(key, "_lade_held") or not hasattr(value, "_lade_held"):
            raise NotImplementedError("keys and values change between the cache and attention")
        parts = zip(calls.nodes, key._lade_held, value._lade_held, calls.masks, strict=True)
        of_calls = [
            attend(module, query[:, :, nodes], keys, values, mask, dropout, scaling)[0]
            for nodes, keys, values, mask in parts
        ]
        return torch.cat(of_calls, dim=1), None
    is_usual = not dropout and not given & _ELSEWHERE
    if is_usual and attention_mask is not None and attention_mask.dtype == torch.bool:
        if query.device.type == "cpu":
            attended = scaled_dot_product_attention(
                query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
            )
            return attended.transpose(1, 2).contiguous(), None
        sizes = query.shape[-1] * query.element_size(), value.shape[-1] * value.element_size()
        is_aligned = attention_mask.shape[1] == 1 and not any(each % _ALIGNMENT for each in sizes)
        if query.is_cuda and is_aligned and query.dtype != torch.float64:
            return _on_cuda(query, key, value, attention_mask, scaling), None
    passed = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
    of_sdpa: tuple[Tensor, None] = _sdpa(module, query, key, value, attention_mask, **passed)
    return of_sdpa


_ALIGNMENT = 16  # bytes between heads, for the kernel; and numbers between the rows of its mask


def _on_cuda(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Attend by torch's kernel that takes masks, with the queries of a key head as one list."""
    (rows, num_heads, num, dim), (num_key_heads, num_keys) = query.shape, key.shape[1:3]
    num_sharing, width = num_heads // num_key_heads, -(-num_keys // _ALIGNMENT) * _ALIGNMENT
    added = query.new_zeros((rows, num_sharing, num, width))
    added[..., :num_keys].masked_fill_(~mask, float("-inf"))
    attended: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query.reshape(rows, num_key_heads, num_sharing * num, dim),
        key,
        value,
        added.view(rows, 1, -1, width)[..., :num_keys].expand(-1, num_key_heads, -1, -1),
        False,  # no results for a backward pass
        scale=scaling,
    )[0]
    return attended.reshape(rows, num_heads, num, -1).transpose(1, 2).contiguous()


AttentionInterface.register(TREE_SDPA, attend)
AttentionMaskInterface.register(TREE_SDPA, AttentionMaskInterface()["sdpa"])
