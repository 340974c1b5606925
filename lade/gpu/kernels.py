"""The operators of `ops.py` on a GPU, in Triton: one kernel each, rounding as models round.

Models compute in their own dtype, each operation rounded. Here numbers are float32 in registers and
are rounded where the model's code would store them, without fused products and sums, so that only
the order of a sum and the last bit of an exponential can differ. Only `ops.py` imports this file,
and only on a GPU: triton is not installed on every machine.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements that a program handles of an operation without sums. A step of few tokens is all latency:
# small blocks spread it over the multiprocessors.
_BLOCK = 1024

_jit: Callable[[Callable[..., Any]], Any] = triton.jit


def rms_norm(x: Tensor, weight: Tensor, eps: float, form: str) -> Tensor:
    """Normalise as `ops.rms_norm` does; `x` is contiguous."""
    normed = torch.empty_like(x)
    _launch_rms_norm(x, None, weight, eps, form, x, normed)
    return normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, form: str
) -> tuple[Tensor, Tensor]:
    """Add and normalise as `ops.add_rms_norm` does; `x` and `residual` are contiguous."""
    summed, normed = torch.empty_like(x), torch.empty_like(x)
    _launch_rms_norm(x, residual, weight, eps, form, summed, normed)
    return summed, normed


def _launch_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    form: str,
    summed: Tensor,
    normed: Tensor,
) -> None:
    size = weight.shape[0]
    block = triton.next_power_of_2(size)
    with torch.cuda.device(x.get_device()):  # Triton launches on the current one
        _rms_norm[(x.numel() // size,)](
            x,
            x if residual is None else residual,
            weight,
            summed,
            normed,
            size,
            eps,
            has_residual=residual is not None,
            is_rounded_first=form == "rounded",
            is_offset=form == "offset",
            block=block,
            num_warps=min(32, max(1, block // 512)),
            enable_fp_fusion=False,
        )


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up; both are contiguous and of one shape."""
    out = torch.empty_like(gate)
    with torch.cuda.device(gate.get_device()):
        _gated[(triton.cdiv(gate.numel(), _BLOCK),)](
            gate,
            up,
            out,
            gate.numel(),
            activation=activation,
            block=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the halves of queries and keys [rows, heads of each, tokens, dim] by angles.

    Args:
        query, key: of any strides.
        cos, sin: [rows or 1, tokens, dim], contiguous.
    """
    rows, num_heads, num_tokens, dim = query.shape
    num_key_heads = key.shape[1]
    rotated, rotated_key = torch.empty_like(query), torch.empty_like(key)
    block_d = triton.next_power_of_2(dim // 2)
    block_h = max(1, _BLOCK // 2 // block_d)
    num_blocks = triton.cdiv(num_heads, block_h) + triton.cdiv(num_key_heads, block_h)
    with torch.cuda.device(query.get_device()):
        _rotate[(rows * num_tokens, num_blocks)](
            query,
            key,
            cos,
            sin,
            rotated,
            rotated_key,
            *query.stride(),
            *key.stride(),
            *rotated.stride(),
            *rotated_key.stride(),
            num_tokens,
            num_heads,
            num_key_heads,
            num_tokens * dim if cos.shape[0] > 1 else 0,
            dim=dim,
            block_h=block_h,
            block_d=block_d,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return rotated, rotated_key


def write_slots(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor
) -> None:
    """Write new keys and values [rows, heads, tokens, dim of each] at their slots.

    Args:
        keys, values: [rows, heads, num_slots, dim of each], of any strides; modified.
        new_keys, new_values: of any strides.
        slots: int64 [rows, tokens].
    """
    rows, num_heads, num_tokens, _ = new_keys.shape
    dims = new_keys.shape[3], new_values.shape[3]
    block_d = triton.next_power_of_2(max(dims))
    block_h = max(1, min(_BLOCK // block_d, triton.next_power_of_2(num_heads)))
    with torch.cuda.device(keys.get_device()):
        _write_slots[(rows * num_tokens, triton.cdiv(num_heads, block_h), 2)](
            keys,
            values,
            new_keys,
            new_values,
            slots,
            *keys.stride(),
            *values.stride(),
            *new_keys.stride(),
            *new_values.stride(),
            *slots.stride(),
            num_tokens,
            num_heads,
            *dims,
            block_h=block_h,
            block_d=block_d,
            num_warps=4,
        )


@_jit
def _rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    summed: tl.tensor,
    normed: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    has_residual: tl.constexpr,
    is_rounded_first: tl.constexpr,
    is_offset: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Normalise one row, of a sum with `residual` if there is one, which is then stored, too."""
    first = tl.program_id(0).to(tl.int64) * size
    dims = tl.arange(0, block)
    is_dim = dims < size
    dtype = normed.dtype.element_ty
    row = tl.load(x + first + dims, mask=is_dim, other=0.0).to(tl.float32)
    if has_residual:
        row += tl.load(residual + first + dims, mask=is_dim, other=0.0).to(tl.float32)
        row = row.to(dtype)
        tl.store(summed + first + dims, row, mask=is_dim)
        row = row.to(tl.float32)
    scale = tl.load(weight + dims, mask=is_dim, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(row * row, axis=0), size.to(tl.float32))
    row = row * tl.rsqrt(mean + eps)
    if is_rounded_first:
        row = row.to(dtype).to(tl.float32)
    if is_offset:
        scale += 1.0
    tl.store(normed + first + dims, (row * scale).to(dtype), mask=is_dim)


@_jit
def _gated(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    activation: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute one block of activation(gate) * up."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_there = at < size
    x = tl.load(gate + at, mask=is_there, other=0.0).to(tl.float32)
    other = tl.load(up + at, mask=is_there, other=0.0).to(tl.float32)
    if activation == "silu":
        active = tl.div_rn(x, 1.0 + tl.exp(-x))
    elif activation == "gelu":
        active = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:  # the approximation of gelu by tanh, which is 1 - 2 / (exp(2 y) + 1)
        y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        active = 0.5 * x * (2.0 - tl.div_rn(2.0, tl.exp(2.0 * y) + 1.0))
    active = active.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (active * other).to(out.dtype.element_ty), mask=is_there)


@_jit
def _rotate(
    query: tl.tensor,
    key: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    rotated: tl.tensor,
    rotated_key: tl.tensor,
    query_row: tl.tensor,  # strides, in elements
    query_head: tl.tensor,
    query_token: tl.tensor,
    query_dim: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    key_token: tl.tensor,
    key_dim: tl.tensor,
    to_row: tl.tensor,
    to_head: tl.tensor,
    to_token: tl.tensor,
    to_dim: tl.tensor,
    to_key_row: tl.tensor,
    to_key_head: tl.tensor,
    to_key_token: tl.tensor,
    to_key_dim: tl.tensor,
    num_tokens: tl.tensor,
    num_heads: tl.tensor,
    num_key_heads: tl.tensor,
    angle_row: tl.tensor,  # stride of `cos` and `sin`
    dim: tl.constexpr,
    block_h: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    """Rotate some heads of one token; program ids: row and token, block of heads.

    Blocks of query heads come first, then those of key heads.
    """
    row = tl.program_id(0).to(tl.int64) // num_tokens
    token = tl.program_id(0).to(tl.int64) % num_tokens
    half: tl.constexpr = dim // 2
    dims = tl.arange(0, block_d)
    is_dim = dims < half
    angles = row * angle_row + token * dim + dims
    cos_1 = tl.load(cos + angles, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos + angles + half, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin + angles, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin + angles + half, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    num_blocks = tl.cdiv(num_heads, block_h)
    if tl.program_id(1) < num_blocks:
        heads = tl.program_id(1) * block_h + tl.arange(0, block_h)
        _rotate_heads(
            query + row * query_row + token * query_token,
            rotated + row * to_row + token * to_token,
            (heads * query_head)[:, None] + (dims * query_dim)[None, :],
            (heads * to_head)[:, None] + (dims * to_dim)[None, :],
            half * query_dim,
            half * to_dim,
            (heads < num_heads)[:, None] & is_dim[None, :],
            cos_1,
            cos_2,
            sin_1,
            sin_2,
        )
    else:
        heads = (tl.program_id(1) - num_blocks) * block_h + tl.arange(0, block_h)
        _rotate_heads(
            key + row * key_row + token * key_token,
            rotated_key + row * to_key_row + token * to_key_token,
            (heads * key_head)[:, None] + (dims * key_dim)[None, :],
            (heads * to_key_head)[:, None] + (dims * to_key_dim)[None, :],
            half * key_dim,
            half * to_key_dim,
            (heads < num_key_heads)[:, None] & is_dim[None, :],
            cos_1,
            cos_2,
            sin_1,
            sin_2,
        )


@_jit
def _rotate_heads(
    states: tl.tensor,
    rotated: tl.tensor,
    at: tl.tensor,
    to: tl.tensor,
    half_of_states: tl.tensor,
    half_of_rotated: tl.tensor,
    is_there: tl.tensor,
    cos_1: tl.tensor,
    cos_2: tl.tensor,
    sin_1: tl.tensor,
    sin_2: tl.tensor,
) -> None:
    """Rotate a block [heads, half of the dims]; products are rounded before they are added."""
    dtype = rotated.dtype.element_ty
    x = tl.load(states + at, mask=is_there, other=0.0).to(tl.float32)
    y = tl.load(states + at + half_of_states, mask=is_there, other=0.0).to(tl.float32)
    one = (x * cos_1).to(dtype).to(tl.float32) + (-y * sin_1).to(dtype).to(tl.float32)
    two = (y * cos_2).to(dtype).to(tl.float32) + (x * sin_2).to(dtype).to(tl.float32)
    tl.store(rotated + to, one.to(dtype), mask=is_there)
    tl.store(rotated + to + half_of_rotated, two.to(dtype), mask=is_there)


@_jit
def _write_slots(
    keys: tl.tensor,
    values: tl.tensor,
    new_keys: tl.tensor,
    new_values: tl.tensor,
    slots: tl.tensor,
    key_row: tl.tensor,  # strides, in elements
    key_head: tl.tensor,
    key_slot: tl.tensor,
    key_dim: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    value_slot: tl.tensor,
    value_dim: tl.tensor,
    new_key_row: tl.tensor,
    new_key_head: tl.tensor,
    new_key_token: tl.tensor,
    new_key_dim: tl.tensor,
    new_value_row: tl.tensor,
    new_value_head: tl.tensor,
    new_value_token: tl.tensor,
    new_value_dim: tl.tensor,
    slot_row: tl.tensor,
    slot_token: tl.tensor,
    num_tokens: tl.tensor,
    num_heads: tl.tensor,
    num_key_dims: tl.tensor,
    num_value_dims: tl.tensor,
    block_h: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    """Copy some heads of one token; program ids: row and token, block of heads, key or value."""
    row = tl.program_id(0).to(tl.int64) // num_tokens
    token = tl.program_id(0).to(tl.int64) % num_tokens
    slot = tl.load(slots + row * slot_row + token * slot_token)
    heads = tl.program_id(1).to(tl.int64) * block_h + tl.arange(0, block_h)
    dims = tl.arange(0, block_d)
    is_head = (heads < num_heads)[:, None]
    if tl.program_id(2) == 0:
        is_there = is_head & (dims < num_key_dims)[None, :]
        at = row * new_key_row + token * new_key_token
        at += (heads * new_key_head)[:, None] + (dims * new_key_dim)[None, :]
        to = row * key_row + slot * key_slot
        to += (heads * key_head)[:, None] + (dims * key_dim)[None, :]
        tl.store(keys + to, tl.load(new_keys + at, mask=is_there), mask=is_there)
    else:
        is_there = is_head & (dims < num_value_dims)[None, :]
        at = row * new_value_row + token * new_value_token
        at += (heads * new_value_head)[:, None] + (dims * new_value_dim)[None, :]
        to = row * value_row + slot * value_slot
        to += (heads * value_head)[:, None] + (dims * value_dim)[None, :]
        tl.store(values + to, tl.load(new_values + at, mask=is_there), mask=is_there)
