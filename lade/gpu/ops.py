"""Operators that do at once what models do in several operations of a few tokens each.

A recorded step of a few tokens is so short that the gaps between small kernels count. Each operator
is one Triton kernel on a GPU (`kernels.py`) and what models do, written out, elsewhere. They are
registered with torch, so that compilers and recorders take them as they are; `dense.py` puts them
into a view of a model.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

#: How a norm applies its weight: to numbers rounded to the model's dtype, before they are rounded,
#: or as its difference from one.
Form = Literal["rounded", "float", "offset"]
FORMS: tuple[Form, ...] = get_args(Form)

#: Longest row that the kernels of norms hold in registers.
MAX_NORMED = 32_768

#: Activations of gated MLPs.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@torch.library.custom_op("lade::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float, form: str) -> Tensor:
    """Normalise rows by their root mean square.

    Args:
        x: [..., size].
        weight: [size], of the same dtype.
        eps: added to the mean square.
        form: one of `FORMS`.

    Returns:
        Like `x`.
    """
    normed = x.float()
    normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + eps)
    if form == "rounded":
        return weight * normed.to(x.dtype)
    scale = 1.0 + weight.float() if form == "offset" else weight.float()
    return (normed * scale).to(x.dtype)


@torch.library.custom_op("lade::add_rms_norm", mutates_args=())
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, form: str
) -> tuple[Tensor, Tensor]:
    """Return residual + x, and that normalised as by `rms_norm`."""
    summed = residual + x
    return summed, rms_norm(summed, weight, eps, form)


@torch.library.custom_op("lade::gated", mutates_args=())
def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up.

    Args:
        gate, up: of one shape and dtype.
        activation: a key of `ACTIVATIONS`.
    """
    return ACTIVATIONS[activation](gate) * up


@torch.library.custom_op("lade::rotate", mutates_args=())
def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions.

    Args:
        query, key: [rows, heads of each, tokens, dim]; the first half of the dims is rotated with
            the second.
        cos, sin: [rows or 1, tokens, dim].

    Returns:
        Both, rotated; like `query` and `key`.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    of_query, of_key = query * cos + _turned(query) * sin, key * cos + _turned(key) * sin
    return torch.empty_like(query).copy_(of_query), torch.empty_like(key).copy_(of_key)


@torch.library.custom_op("lade::write_slots", mutates_args=("keys", "values"))
def write_slots(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor
) -> None:
    """Write new keys and values at slots that only the device knows.

    Args:
        keys, values: [rows, heads, num_slots, dim of each]; modified.
        new_keys, new_values: [rows, heads, tokens, dim of each].
        slots: int64 [rows, tokens].
    """
    rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
    keys[rows, :, slots] = new_keys.transpose(1, 2)
    values[rows, :, slots] = new_values.transpose(1, 2)


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


# Kernels are imported where they are launched, because triton is not installed on every machine.


@rms_norm.register_kernel("cuda")
def _rms_norm(x: Tensor, weight: Tensor, eps: float, form: str) -> Tensor:
    from lade.gpu import kernels

    return kernels.rms_norm(x.contiguous(), weight, eps, form)


@add_rms_norm.register_kernel("cuda")
def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, form: str
) -> tuple[Tensor, Tensor]:
    from lade.gpu import kernels

    return kernels.add_rms_norm(x.contiguous(), residual.contiguous(), weight, eps, form)


@gated.register_kernel("cuda")
def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    from lade.gpu import kernels

    return kernels.gated(gate.contiguous(), up.contiguous(), activation)


@rotate.register_kernel("cuda")
def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from lade.gpu import kernels

    return kernels.rotate(query, key, cos.contiguous(), sin.contiguous())


@write_slots.register_kernel("cuda")
def _write_slots(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor
) -> None:
    from lade.gpu import kernels

    kernels.write_slots(keys, values, new_keys, new_values, slots)


rms_norm.register_fake(lambda x, weight, eps, form: torch.empty_like(x))
add_rms_norm.register_fake(
    lambda x, residual, weight, eps, form: (torch.empty_like(x), torch.empty_like(x))
)
gated.register_fake(lambda gate, up, activation: torch.empty_like(gate))
rotate.register_fake(lambda query, key, cos, sin: (torch.empty_like(query), torch.empty_like(key)))
