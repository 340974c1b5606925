"""Attention over trees: transformers' `sdpa`, without copies of keys, values and masks.

If several query heads share a key head, `sdpa` in transformers copies keys and values for each of
them as soon as there is a mask. Here, the queries that share a key head are packed into one list
instead. SmolLM2 (9 query heads, 3 key heads), 9 tokens, one thread, per layer: 0.12 ms instead of
0.17 after 300 tokens, 0.32 instead of 1.20 after 900, with bitwise equal results. And a mask of
booleans, which torch makes one of numbers in each layer, is made one once a step.

On CUDA the kernel is called by its name. `scaled_dot_product_attention` chooses one by the shape of
its arguments: on cards of compute capability 9 and 10, in 16 bits, that of cuDNN, which builds a
plan for each new shape (tens to hundreds of milliseconds), and nearly every tree has a new one.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

PACKED_SDPA = "lade_packed_sdpa"
PACKED_ROWS = "lade_packed_rows"  # the same, where masks may carry calls
_INDICES = ("indices", "block_indices")

# For one token that sees all keys, torch takes two to seven times as long on a CPU in these formats
# where each head has keys of its own. In float32 and float64 it does not, and there the call of
# transformers gives bit for bit what `generate` has.
_HALVES = (torch.bfloat16, torch.float16)
_ELSEWHERE = ("softcap", "position_bias", "cache")  # honoured by `sdpa` alone

_sdpa = AttentionInterface()["sdpa"]


class Calls:
    """The calls that the tokens of a forward pass belong to, and the keys that they see.

    Several calls in one row of tokens see the keys and values of their own call: a forward that is
    one job takes them as its parts (`lade.forward`), elsewhere one attends after the other.

    Args:
        sizes: number of tokens of each call, in the order of their tokens.
        masks: bool [1, 1, num_tokens, num_keys] of each, or additive; None where each token sees
            itself and all before it.
    """

    def __init__(self, sizes: Sequence[int], masks: Sequence[Tensor | None]) -> None:
        stops = [*accumulate(sizes)]
        self.nodes = [*map(slice, [0, *stops[:-1]], stops)]
        self.masks = masks


def with_calls(mask: Tensor, calls: Calls) -> Tensor:
    """Attach what calls see to a mask for `packed_sdpa`; return the mask."""
    mask._lade_calls = calls  # type: ignore[attr-defined]
    return mask


def with_held(states: Tensor, held: Sequence[Tensor]) -> Tensor:
    """Return new keys or values that carry all those of each call, for `packed_sdpa`."""
    carrying = states[:]  # a tensor of our own
    carrying._lade_held = held  # type: ignore[attr-defined]
    return carrying


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
    """Attend as `sdpa` does; calls other than steps of a decoding are passed on to it.

    Where the mask has calls, each sees its own keys alone. Everything but attention takes the
    tokens of all calls alike, so these need no padding there; and a short one does not wait for the
    keys of a long one.

    Args:
        query: [rows, num_heads, num_queries, head_dim].
        key, value: [rows, num_key_heads, num_keys, head_dim of each]; with calls these carry those
            of each.
        attention_mask: [rows, 1, num_queries, num_keys], boolean or additive, or of `with_calls`.
        dropout, scaling, is_causal, kwargs: as transformers passes them.

    Returns:
        [rows, num_queries, num_heads, head_dim of values], and None for the weights.

    Raises:
        NotImplementedError: keys are chosen by the model, and not by the mask. Or there are calls
            and something that is not honoured, or keys and values that are not those that the
            caches of the calls have returned.
    """
    calls: Calls | None = getattr(attention_mask, "_lade_calls", None)
    # Models with sparse attention mask keys for `sdpa`, and tell all others which they chose.
    for name in _INDICES if calls is None else (*_INDICES, *_ELSEWHERE, "s_aux"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"packed attention cannot honour {name!r}")
    if calls is not None:
        if not hasattr(key, "_lade_held") or not hasattr(value, "_lade_held"):
            raise NotImplementedError("keys and values change between the cache and attention")
        parts = zip(calls.nodes, key._lade_held, value._lade_held, calls.masks, strict=True)
        of_calls = [
            packed_sdpa(module, query[:, :, nodes], keys, values, mask, dropout, scaling)[0]
            for nodes, keys, values, mask in parts
        ]
        return torch.cat(of_calls, dim=1), None
    rows, num_heads, num_queries, _ = query.shape
    num_sharing = num_heads // key.shape[1]
    if attention_mask is None:
        is_step = num_queries == 1 and (query.is_cuda or query.dtype in _HALVES)
    else:
        is_step = attention_mask.shape[1:3] == (1, num_queries)
    if not is_step or any(kwargs.get(name) is not None for name in _ELSEWHERE):
        passed = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        attended: tuple[Tensor, None] = _sdpa(module, query, key, value, attention_mask, **passed)
        return attended
    packed = _attended(
        query.reshape(rows, key.shape[1], num_sharing * num_queries, query.shape[-1]),
        key,
        value,
        None if attention_mask is None else _added(attention_mask, num_sharing, query.dtype),
        dropout,
        scaling,
    )
    of_heads = packed.reshape(rows, num_heads, num_queries, value.shape[-1])
    return of_heads.transpose(1, 2).contiguous(), None


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor | None,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """Attend with as many query heads as key heads; no choice depends on the number of tokens.

    Args:
        query, key, value: [rows, num_key_heads, num_queries or num_keys, head_dim of each].
        added: [rows, 1, num_queries, num_keys], of `_added`.
        dropout, scaling: as transformers passes them.
    """
    dims = query.shape[-1], value.shape[-1]
    is_for_others = not query.is_cuda or query.dtype == torch.float64 or bool(dropout)
    if is_for_others or any(dim * query.element_size() % _ALIGNMENT for dim in dims):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=added, dropout_p=dropout, scale=scaling
        )
    if added is not None:
        added = added.expand(*query.shape[:2], -1, -1)
    # Of torch's kernels the one that takes masks; its other results are for a backward pass.
    attended: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, added, False, scale=scaling
    )[0]
    return attended


_ALIGNMENT = 16  # bytes between heads, for the kernel; and numbers between the rows of its mask


def _added(mask: Tensor, num_sharing: int, dtype: torch.dtype) -> Tensor:
    """Return what a mask adds to scores, [rows, 1, num_sharing · num_queries, num_keys].

    All layers of a step get the same mask, so it is kept there until the mask is written to.
    """
    # Nothing tells when tensors of inference mode are written to, and compilers do not trace it.
    if torch.compiler.is_compiling() or mask.is_inference():
        return _made_to_add(mask, num_sharing, dtype)
    key = num_sharing, dtype, mask._version
    kept: tuple[Any, Tensor] | None = getattr(mask, "_lade_added", None)
    if kept is None or kept[0] != key:
        kept = key, _made_to_add(mask, num_sharing, dtype)
        mask._lade_added = kept  # type: ignore[attr-defined]
    return kept[1]


def _made_to_add(mask: Tensor, num_sharing: int, dtype: torch.dtype) -> Tensor:
    rows, _, num_queries, num_keys = mask.shape
    width = -(-num_keys // _ALIGNMENT) * _ALIGNMENT
    added = mask.new_zeros((rows, num_sharing, num_queries, width), dtype=dtype)
    if mask.dtype == torch.bool:
        added[..., :num_keys].masked_fill_(~mask, float("-inf"))
    else:
        added[..., :num_keys] = mask
    return added.view(rows, 1, -1, width)[..., :num_keys]


for _name in (PACKED_SDPA, PACKED_ROWS):
    AttentionInterface.register(_name, packed_sdpa)
    AttentionMaskInterface.register(_name, AttentionMaskInterface()["sdpa"])
