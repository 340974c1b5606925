"""Attention over trees: transformers' `sdpa`, without copies of keys, values and masks.

If several query heads share a key head, `sdpa` in transformers copies keys and values for each of
them as soon as there is a mask. Here, the queries that share a key head are packed into one list
instead. SmolLM2 (9 query heads, 3 key heads), 9 tokens, one thread, per layer: 0.12 ms instead of
0.17 after 300 tokens, 0.32 instead of 1.20 after 900, with bitwise equal results. Besides, torch
would convert a boolean mask to an additive one in each layer; here it is converted once a step.

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
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

PACKED_SDPA = "lade_packed_sdpa"
PACKED_ROWS = "lade_packed_rows"  # the same, where masks may carry calls
_INDICES = {"indices", "block_indices"}

# For one token that sees all keys, torch on a CPU takes two to seven times as long in these dtypes
# if each head has its own keys. In float32 and float64 it does not, and the call by transformers
# gives bit for bit the result of `generate`.
_HALVES = (torch.bfloat16, torch.float16)
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
    """Attach the masks of several calls to a mask for `packed_sdpa`; return the mask."""
    mask._lade_calls = calls  # type: ignore[attr-defined]
    return mask


def with_held(states: Tensor, held: Sequence[Tensor]) -> Tensor:
    """Return new keys or values that carry all keys or values of each call, for `packed_sdpa`."""
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
    """Attend as `sdpa` does; anything other than a decoding step is passed on to it.

    If the mask has several calls, each sees only its keys. All layers but attention treat the
    tokens of all calls alike, so no call needs padding, and a short one does not pay for the keys
    of a long one.

    Args:
        query: [rows, num_heads, num_queries, head_dim].
        key, value: [rows, num_key_heads, num_keys, head_dim of each]; from `with_held` if there are
            several calls.
        attention_mask: [rows, 1, num_queries, num_keys], boolean or additive, or from `with_calls`.
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
        raise NotImplementedError(f"packed attention cannot honour {min(refused)!r}")
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
    if not is_step or given & _ELSEWHERE:
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
        added: [rows, 1, num_queries, num_keys], from `_added`.
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
    # This is torch's kernel that takes masks; its other results are for a backward pass.
    attended: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, added, False, scale=scaling
    )[0]
    return attended


_ALIGNMENT = 16  # bytes between heads, for the kernel; and numbers between the rows of its mask


def _added(mask: Tensor, num_sharing: int, dtype: torch.dtype) -> Tensor:
    """Return an additive mask, [rows, 1, num_sharing · num_queries, num_keys].

    All layers of a step get the same mask, so the result is kept there until the mask is written
    to.
    """
    # Writes to tensors of inference mode are not counted, and compilers do not trace the count.
    if torch.compiler.is_compiling() or mask.is_inference():
        return _additive(mask, num_sharing, dtype)
    key = num_sharing, dtype, mask._version
    known: tuple[Any, Tensor] | None = getattr(mask, "_lade_added", None)
    if known is None or known[0] != key:
        known = key, _additive(mask, num_sharing, dtype)
        mask._lade_added = known  # type: ignore[attr-defined]
    return known[1]


def _additive(mask: Tensor, num_sharing: int, dtype: torch.dtype) -> Tensor:
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
