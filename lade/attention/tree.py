"""Attention over trees whose keys lie in preallocated slots, under a name of our own.

A dense mask over all slots would be as large as the scores, and `sdpa` with one copies keys and
values to all query heads. Here a mask only carries what nodes see (`Seen`): the prefix is an
interval for each node, less what nobody sees, and only the tree has a mask, of nodes by nodes. This
file has the version in plain torch, which runs everywhere; on a GPU that of `triton.py`
takes its place. Masks that carry nothing, and none at all, are left to `sdpa`.
"""

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

TREE_ATTENTION = "lade_tree"
STABLE_ATTENTION = "lade_stable_tree"

# Passed by some layers; each changes what is attended to, so none may be dropped. `sdpa` would drop
# the indices too: models write them into masks only where the attention's name is that or `eager`.
# And it knows a paged cache only in the newer versions of transformers.
_NOT_HONOURED = ("indices", "block_indices", "cache")
_NOT_HONOURED_IN_TREES = (*_NOT_HONOURED, "position_bias")
_NOT_HONOURED_BY_SDPA = ("softcap", "s_aux")

# What the kernels are written for: the tensor cores they count on came with compute capability 8.0.
_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_TRITON_CAPABILITY = (8, 0)
_TRITON_MAX_DIM = 256

_sdpa = AttentionInterface()["sdpa"]


class Seen(NamedTuple):
    """What the nodes of a batch of trees see in one kind of layer.

    All of it is read on the device, so that a captured graph stays valid as these tensors change.
    """

    num_cached: Tensor  # int32 [rows]: slots of the prefix; the nodes' own keys lie right behind
    starts: (
        Tensor  # int32 [rows, num_nodes]: a node sees the slots starts … num_cached - 1, or none
    )
    ancestors: (
        Tensor  # bool [rows, num_nodes, num_nodes]: node (row) sees node (column), itself too
    )
    # bool [rows, num_slots]: False for slots of the prefix that no node sees (padding, masked
    # tokens); what it says of others does not count. None where all are seen.
    visible: Tensor | None = None


def with_seen(mask: Tensor, seen: Seen) -> Tensor:
    """Tell our attention what a mask means, and return that mask.

    It is kept as an attribute of this very tensor: a 4D mask passes through the code of models
    untouched (also compiled by dynamo, for which the attribute's tensors are inputs as others are);
    where one is changed on its way, the attribute is lost.

    Args:
        mask: [rows, 1, num_nodes, num_slots]. Its values count only where the attribute is lost:
            `tree_attention` then leaves it to `sdpa`, so they should say the same.
        seen: of the layers that get this mask.

    Raises:
        ValueError: the two do not fit each other, or a dtype is another one.
    """
    rows, _, num_nodes, num_slots = mask.shape
    expected = {
        "num_cached": (torch.int32, (rows,)),
        "starts": (torch.int32, (rows, num_nodes)),
        "ancestors": (torch.bool, (rows, num_nodes, num_nodes)),
    }
    if seen.visible is not None:
        expected["visible"] = (torch.bool, (rows, num_slots))
    for name, (dtype, shape) in expected.items():
        got = getattr(seen, name)
        if got.dtype != dtype or got.shape != shape:
            raise ValueError(
                f"expected {name} of {dtype} {list(shape)}, got {got.dtype} {list(got.shape)}"
            )
    mask._lade_seen = seen  # type: ignore[attr-defined]
    return mask


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Seen,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend over prefixes and trees, in plain torch.

    Computed in float32, in float64 for float64. No shape follows the data and nothing is read on
    the host, so this can be captured in a graph; the price is that all slots are looked at.

    Args:
        query: [rows, num_heads, num_nodes, head_dim].
        key, value: [rows, num_key_heads, num_slots, head_dim of each], num_slots at least
            max(num_cached) + num_nodes. What lies where no node looks may be anything, even NaN.
        seen: where the prefix and the nodes lie, and who sees what.
        scaling: of the products of queries and keys.
        softcap: scores become softcap * tanh(scores / softcap), as in gemma2.
        sinks: [num_heads], a score of each head that takes a share and has no value, as in gpt_oss.

    Returns:
        [rows, num_nodes, num_heads, head_dim of values], in the dtype of the queries.

    Source: parts of a softmax merged by their log-sum-exp: flash decoding, as in arXiv 2205.14135,
    section 3.1.
    """
    rows, num_heads, num_nodes, head_dim = query.shape
    num_key_heads = key.shape[1]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    # Heads that share keys stand in one list, so that nothing is repeated for them.
    packed = query.reshape(rows, num_key_heads, -1, head_dim).to(dtype)
    prefix = _sees_prefix(seen, key.shape[2])
    of_nodes = seen.num_cached[:, None] + torch.arange(num_nodes, device=key.device)
    parts = [
        _part(packed, key, _zeroed(value, prefix), prefix, scaling, softcap),
        _part(packed, _at(key, of_nodes), _at(value, of_nodes), seen.ancestors, scaling, softcap),
    ]
    if sinks is not None:
        of_heads = sinks.to(dtype).reshape(1, num_key_heads, -1, 1)
        peaks = of_heads.repeat_interleave(num_nodes, dim=2)
        parts.append(_Part(torch.zeros_like(peaks), torch.ones_like(peaks), peaks))
    attended = _merged(parts).reshape(rows, num_heads, num_nodes, value.shape[-1])
    return attended.transpose(1, 2).to(query.dtype).contiguous()


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as the mask's `Seen` says; the function that transformers calls.

    Without a `Seen` this is no step of a tree: another thread may prefill a prompt on the same
    model while this attention is switched on. Such a call is left to transformers' `sdpa`.

    Args:
        module: the layer.
        query, key, value: as `attend` takes them; without a `Seen`, as `sdpa` does.
        attention_mask: from `with_seen`; or another, dense one, or None.
        dropout, scaling: as transformers passes them.
        kwargs: `softcap` and `s_aux` (sinks) are honoured with a `Seen`, in which windows are
            already; without one, whatever `sdpa` honours.

    Returns:
        [rows, num_nodes, num_heads, head_dim of values], and None for the weights.

    Raises:
        NotImplementedError: the layer passes what this attention (or `sdpa` in its place) cannot
            honour, or the mask is not that of these queries and keys.
    """
    seen: Seen | None = getattr(attention_mask, "_lade_seen", None)
    if attention_mask is None or seen is None:
        _refuse_options_of_sdpa(module, attention_mask, kwargs)
        left: tuple[Tensor, None] = _sdpa(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return left
    sinks = kwargs.get("s_aux")
    _refuse_options(module, dropout, query.shape[1], sinks, kwargs)
    _refuse_misfit(module, query, key, attention_mask)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap = kwargs.get("softcap")
    if not _is_for_triton(query, key, value):
        attended = attend(query, key, value, seen, scaling=scaling, softcap=softcap, sinks=sinks)
        return attended, None
    from lade.attention import (
        triton as triton_attention,  # here, for triton is not on every machine
    )

    attended = triton_attention.attend(
        query, key, value, *seen, scaling=scaling, softcap=softcap, sinks=sinks
    )
    return attended, None


def stable_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as `tree_attention` does, summed in float64 and rounded once.

    In which slots and in which steps keys lie, and so in which order they are summed, does not show
    then: two orders differ by about 1e-16, and round apart about once in 10^12 numbers of bfloat16.
    """
    if getattr(attention_mask, "_lade_seen", None) is None:
        return tree_attention(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    exact, _ = tree_attention(
        module, query.double(), key, value, attention_mask, dropout, scaling, **kwargs
    )
    return exact.to(query.dtype), None


class _Part(NamedTuple):
    """A part of a softmax: exact once divided by the totals of all parts."""

    summed: (
        Tensor  # [rows, num_key_heads, num_packed, head_dim], values weighted by exp(score - peak)
    )
    totals: Tensor  # [rows, num_key_heads, num_packed, 1], sums of these weights
    peaks: Tensor  # [rows, num_key_heads, num_packed, 1], the greatest scores, always finite


def _part(
    query: Tensor, key: Tensor, value: Tensor, sees: Tensor, scaling: float, softcap: float | None
) -> _Part:
    """Attend to some of the keys; `sees` is [rows, num_nodes, num_keys]."""
    scores = query @ key.to(query.dtype).transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    num_sharing = query.shape[2] // sees.shape[1]
    scores = scores.masked_fill(~sees.repeat(1, num_sharing, 1)[:, None], -torch.inf)
    # Finite also where nothing is seen: the difference of two infinities would be NaN.
    peaks = scores.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = torch.exp(scores - peaks)
    return _Part(weights @ value.to(query.dtype), weights.sum(dim=-1, keepdim=True), peaks)


def _merged(parts: list[_Part]) -> Tensor:
    """Return what attention to all parts at once would be."""
    peak = functools.reduce(torch.maximum, (part.peaks for part in parts))
    summed, totals = torch.zeros_like(parts[0].summed), torch.zeros_like(peak)
    for part in parts:
        scale = torch.exp(part.peaks - peak)
        summed += part.summed * scale
        totals += part.totals * scale
    return summed / totals  # no total is 0: a node sees itself


def _sees_prefix(seen: Seen, num_slots: int) -> Tensor:
    """Return bool [rows, num_nodes, num_slots]: which nodes see which slots of their prefix."""
    slots = torch.arange(num_slots, device=seen.starts.device)
    is_there = slots < seen.num_cached[:, None]
    if seen.visible is not None:
        is_there = is_there & seen.visible
    return (slots >= seen.starts[:, :, None]) & is_there[:, None]


def _zeroed(value: Tensor, sees: Tensor) -> Tensor:
    """Clear the values that no node sees: what lies there may be NaN, and 0 * NaN is NaN."""
    return value.masked_fill(~sees.any(dim=1)[:, None, :, None], 0)


def _at(slots: Tensor, index: Tensor) -> Tensor:
    """Return the keys or values in the slots [rows, num_nodes] of each row."""
    rows, num_key_heads, _, dim = slots.shape
    return slots.gather(2, index[:, None, :, None].expand(rows, num_key_heads, -1, dim))


def _refuse_options(
    module: nn.Module, dropout: float, num_heads: int, sinks: Tensor | None, kwargs: dict[str, Any]
) -> None:
    _refuse_any(module, _NOT_HONOURED_IN_TREES, kwargs)
    if dropout > 0 and module.training:
        raise _refusal(module, f"has no dropout, got {dropout} in training")
    if sinks is not None and sinks.shape != (num_heads,):
        got = list(sinks.shape)
        raise _refusal(
            module, f"expected s_aux with a score of each of {num_heads} heads, got {got}"
        )


def _refuse_options_of_sdpa(module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Refuse what `sdpa` would ignore."""
    got = "no mask" if mask is None else f"one of shape {list(mask.shape)} without"
    unless = f" without a mask that carries what nodes see (with_seen), got {got}"
    _refuse_any(module, _NOT_HONOURED, kwargs)
    _refuse_any(module, _NOT_HONOURED_BY_SDPA, kwargs, unless)


def _refuse_any(
    module: nn.Module, names: Sequence[str], kwargs: dict[str, Any], unless: str = ""
) -> None:
    for name in names:
        if kwargs.get(name) is not None:
            raise _refusal(module, f"cannot honour {name!r}{unless}")
    if kwargs.get("output_attentions"):
        raise _refusal(module, "has no weights to return for output_attentions=True")


def _refuse_misfit(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor) -> None:
    """Refuse a mask that is not that of these queries and keys."""
    expected = [query.shape[0], 1, query.shape[2], key.shape[2]]
    if list(mask.shape) != expected:
        raise _refusal(module, f"expected a mask of shape {expected}, got {list(mask.shape)}")


def _refusal(module: nn.Module, reason: str) -> NotImplementedError:
    return NotImplementedError(f"{type(module).__name__}: attention {TREE_ATTENTION!r} {reason}")


def runs_in_triton(device: torch.device, dtype: torch.dtype, head_dim: int = 0) -> bool:
    """Tell whether there are kernels for a device and dtype, and heads of so many dims."""
    return (
        device.type == "cuda"
        and dtype in _TRITON_DTYPES
        and head_dim <= _TRITON_MAX_DIM
        and torch.cuda.get_device_capability(device) >= _TRITON_CAPABILITY
        and _has_triton()
    )


def _is_for_triton(query: Tensor, key: Tensor, value: Tensor) -> bool:
    dims = max(query.shape[-1], value.shape[-1])
    is_alike = query.dtype == key.dtype == value.dtype
    return is_alike and runs_in_triton(query.device, query.dtype, dims)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


for _name, _attend in ((TREE_ATTENTION, tree_attention), (STABLE_ATTENTION, stable_attention)):
    AttentionInterface.register(_name, _attend)
    AttentionMaskInterface.register(_name, AttentionMaskInterface()["sdpa"])
