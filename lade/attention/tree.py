"""Attention over trees whose keys lie in preallocated slots, registered under our own name.

A dense mask over all slots would be as large as the scores, and `sdpa` with one copies keys and
values for all query heads. Here a mask merely carries what nodes see (`Seen`): one interval of the
prefix per node, and a mask of nodes by nodes for the tree. This file has the version in torch's
operations, which runs everywhere; on a GPU, `triton.py` replaces it. Calls with other masks, or
none, are passed on to `sdpa`.
"""

import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from lade.attention.masks import Seen
from lade.errors import KernelWarning, in_one_line

TREE_ATTENTION = "lade_tree"
STABLE_ATTENTION = "lade_stable_tree"

# Options that some layers pass; each changes the result, so none may be dropped. `sdpa` would drop
# the indices, too: models write them into masks only if the attention is named `sdpa` or `eager`.
# And it supports a paged cache only in newer versions of transformers.
_NOT_HONOURED = ("indices", "block_indices", "cache")
_NOT_HONOURED_IN_TREES = (*_NOT_HONOURED, "position_bias")
_NOT_HONOURED_BY_SDPA = ("softcap", "s_aux")

# Limits of the kernels: the tensor cores that they use came with compute capability 8.0.
_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_TRITON_CAPABILITY = (8, 0)
_TRITON_MAX_DIM = 256
_HAS_TRITON = importlib.util.find_spec("triton") is not None

# Devices and dtypes where the kernels have failed, as without a C compiler or on a card unknown to
# Triton. A retry would fail again, and may take seconds.
_failed: set[tuple[torch.device, torch.dtype]] = set()

_sdpa = AttentionInterface()["sdpa"]


def with_seen(mask: Tensor, seen: Seen) -> Tensor:
    """Attach a `Seen` to a mask for our attention, and return that mask.

    It is stored as an attribute of the tensor itself: a 4D mask passes through model code unchanged
    (even compiled by dynamo, to which the attribute's tensors are ordinary inputs); if it is
    changed on the way, the attribute is lost.

    Args:
        mask: [rows, 1, num_nodes, num_slots]. Its values matter only if the attribute is lost:
            `tree_attention` then passes the call to `sdpa`, so they should mean the same.
        seen: the slots and nodes that nodes see in the layers that get this mask.
    """
    mask._lade_seen = seen  # type: ignore[attr-defined]
    return mask


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Seen,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend over prefixes and trees, by torch's operations.

    Computes in float32, or float64 for float64 queries. No shape depends on values and nothing is
    read on the host, so this can be captured in a graph; but it always computes all slots.

    Args:
        query: [rows, num_heads, num_nodes, head_dim].
        key, value: [rows, num_key_heads, num_slots, head_dim of each], num_slots at least
            max(num_cached) + num_nodes. Slots that no node sees may hold anything, even NaN.
        seen: where the prefix and the nodes lie, and which node sees what.
        scaling: factor on the dot products of queries and keys.
        softcap: scores become softcap * tanh(scores / softcap), as in gemma2.
        sinks: [num_heads], a score per head that takes weight but has no value, as in gpt_oss.

    Returns:
        [rows, num_nodes, num_heads, head_dim of values], in the dtype of the queries.
    """
    rows, num_heads, num_nodes, head_dim = query.shape
    num_key_heads = key.shape[1]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    # Heads that share keys are packed into one list, so that no keys are repeated.
    packed = query.reshape(rows, num_key_heads, -1, head_dim).to(dtype)
    scores = packed @ key.to(dtype).transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    sees = _dense(seen, key.shape[2])
    of_packed = sees.repeat(1, num_heads // num_key_heads, 1)[:, None]
    scores = scores.masked_fill(~of_packed, -torch.inf)
    if sinks is not None:
        of_heads = sinks.to(dtype).reshape(1, num_key_heads, -1, 1)
        of_heads = of_heads.repeat_interleave(num_nodes, dim=2).expand(rows, -1, -1, -1)
        scores = torch.cat([scores, of_heads], dim=3)
    weights = scores.softmax(dim=3)[..., : key.shape[2]]
    # Values that no node sees may be NaN, and 0 * NaN is NaN.
    values = value.masked_fill(~sees.any(dim=1)[:, None, :, None], 0).to(dtype)
    attended = (weights @ values).reshape(rows, num_heads, num_nodes, -1)
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

    A call without a `Seen` is not a step over trees: another thread may prefill a prompt on the
    same model while this attention is active. Such a call is passed on to transformers' `sdpa`.

    Args:
        query, key, value: as `attend` takes them; without a `Seen`, as `sdpa` does.
        attention_mask: a mask from `with_seen`, a plain dense mask, or None.
        dropout, scaling: as transformers passes them.
        kwargs: with a `Seen`, which already includes windows, `softcap` and `s_aux` (sinks);
            without one, all options of `sdpa`.

    Returns:
        [rows, num_nodes, num_heads, head_dim of values], and None for the weights.

    Raises:
        NotImplementedError: the layer passes an option that this attention (or `sdpa` in its place)
            cannot honour, or the mask does not fit the queries and keys.
    """
    seen: Seen | None = getattr(attention_mask, "_lade_seen", None)
    if attention_mask is None or seen is None:
        _refuse_options(module, _NOT_HONOURED, kwargs)
        unless = " without a mask that carries what nodes see (with_seen)"
        _refuse_options(module, _NOT_HONOURED_BY_SDPA, kwargs, unless)
        left: tuple[Tensor, None] = _sdpa(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return left
    _refuse_options(module, _NOT_HONOURED_IN_TREES, kwargs)
    if dropout > 0 and module.training:
        raise _refusal(module, f"has no dropout, got {dropout} in training")
    expected, got = [query.shape[0], 1, query.shape[2], key.shape[2]], [*attention_mask.shape]
    if got != expected:
        raise _refusal(module, f"expected a mask of shape {expected}, got {got}")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if sinks is not None and sinks.shape != query.shape[1:2]:  # a kernel would read past its end
        raise _refusal(module, f"expected a sink for each of {query.shape[1]} heads")
    if not _is_for_triton(query, key, value):
        return attend(query, key, value, seen, scaling, softcap, sinks), None
    return attend_at_once(query, key, value, *seen, scaling, softcap, sinks), None


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
    """Attend as `tree_attention` does, summing in float64 and rounding once.

    This hides the order of summation, which depends on the slots and the steps of the keys: two
    orders differ by about 1e-16, and round differently in about one of 10^12 bfloat16 numbers.
    """
    if getattr(attention_mask, "_lade_seen", None) is None:
        return tree_attention(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    exact, _ = tree_attention(
        module, query.double(), key, value, attention_mask, dropout, scaling, **kwargs
    )
    return exact.to(query.dtype), None


@torch.library.custom_op(
    "lade::attend",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor num_cached, Tensor starts, Tensor "
    "ancestors, float scaling, float? softcap, Tensor? sinks) -> Tensor",
)
def attend_at_once(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    """Attend as `attend` does, as one torch operator, which compilers do not look into.

    On a GPU it runs the kernels of `triton.py`, as long as they work.
    """
    return attend(query, key, value, Seen(*others[:3]), *others[3:])


@attend_at_once.register_kernel("cuda")
def _attend_in_triton(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    """Attend by the Triton kernels; if they fail, warn once and use torch's operations."""
    given = query, key, value, Seen(*others[:3]), *others[3:]
    try:
        # Imported here, because triton is not installed on every machine.
        from lade.attention import triton as triton_attention

        return triton_attention.attend_by_kernels(*given)
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:
        _failed.add((query.device, query.dtype))
        warnings.warn(
            f"lade attends to trees by torch's operations on {query.device} in {query.dtype}, "
            f"because its Triton kernels do not run there ({in_one_line(failure)})",
            KernelWarning,
            stacklevel=2,
        )
        return attend(*given)


@attend_at_once.register_fake
def _shaped_like_attention(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    rows, num_heads, num_nodes, _ = query.shape
    return query.new_empty(rows, num_nodes, num_heads, value.shape[-1])


def _dense(seen: Seen, num_slots: int) -> Tensor:
    """Return which nodes see which slots, bool [rows, num_nodes, num_slots]."""
    num_nodes, device = seen.starts.shape[1], seen.starts.device
    slots = torch.arange(num_slots, dtype=torch.int64, device=device)
    is_there = slots < seen.num_cached[:, None]
    sees = (slots >= seen.starts[:, :, None]) & is_there[:, None]
    of_nodes = seen.num_cached[:, None] + torch.arange(num_nodes, dtype=torch.int64, device=device)
    return sees.scatter(2, of_nodes[:, None].expand(-1, num_nodes, -1), seen.ancestors)


def _refuse_options(
    module: nn.Module, names: Sequence[str], kwargs: dict[str, Any], unless: str = ""
) -> None:
    for name in names:
        if kwargs.get(name) is not None:
            raise _refusal(module, f"cannot honour {name!r}{unless}")
    if kwargs.get("output_attentions"):
        raise _refusal(module, "has no weights to return for output_attentions=True")


def _refusal(module: nn.Module, reason: str) -> NotImplementedError:
    return NotImplementedError(f"{type(module).__name__}: attention {TREE_ATTENTION!r} {reason}")


def runs_in_triton(device: torch.device, dtype: torch.dtype, head_dim: int = 0) -> bool:
    """Return whether there are kernels for a device, dtype and head size that have not failed."""
    is_known = dtype in _TRITON_DTYPES and head_dim <= _TRITON_MAX_DIM
    return is_known and (device, dtype) not in _failed and _has_kernels(device)


def _is_for_triton(query: Tensor, key: Tensor, value: Tensor) -> bool:
    dims = max(query.shape[-1], value.shape[-1])
    is_alike = query.dtype == key.dtype == value.dtype
    return is_alike and runs_in_triton(query.device, query.dtype, dims)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_kernels(device: torch.device) -> bool:
    """Return whether there are kernels for a device; compilers do not look into this."""
    is_cuda = device.type == "cuda"
    return (
        _HAS_TRITON and is_cuda and torch.cuda.get_device_capability(device) >= _TRITON_CAPABILITY
    )


for _name, _attend in ((TREE_ATTENTION, tree_attention), (STABLE_ATTENTION, stable_attention)):
    AttentionInterface.register(_name, _attend)
    AttentionMaskInterface.register(_name, AttentionMaskInterface()["sdpa"])
