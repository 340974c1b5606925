"""Read from a layer that was watched its gated delta net: sizes, and which columns are what."""

import math
from collections.abc import Iterator
from itertools import accumulate, permutations, product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lade.forward.comparing import (
    UnsupportedForwardError,
    convolved,
    difference,
    require,
    tolerance,
)

# Results of a chunk of tokens, as torch adds them to a state, and of one by one; of the largest.
_ONE_BY_ONE = 1e-4


class DeltaPlan(NamedTuple):
    """A gated delta net, behind a convolution."""

    module: nn.Module  # that has the following
    names: tuple[str, str]  # what decays are multiplied by, as logarithms, and their biases
    heads: tuple[int, int, int, int]  # of keys, of values, and their sizes
    # Of queries, keys, values, gates, writing strengths and decays: the first column of the
    # layer's first products, and columns from those of one key head to those of the next.
    columns: tuple[int, ...]
    steps: tuple[int, ...]


def gated(given: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rows after a norm, and its gate."""
    wide = given.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = weight * wide.to(given.dtype)
    return (normed * functional.silu(gate.float())).to(given.dtype)


def read_delta(
    module: nn.Module,
    convolution: nn.Conv1d,
    rows: Tensor,
    given: Tensor,
    gate: Tensor,
    known: DeltaPlan | None,
) -> DeltaPlan:
    """Return the plan by which a recurrence gave its results.

    Args:
        module: has it.
        convolution: what queries, keys and values go through first.
        rows: what the first products gave, [num_tokens, columns].
        given: the results, [num_tokens · heads, size].
        gate: numbers by which these are gated, of the same shape.
        known: the plan of an earlier layer, which most layers share.
    """
    num_tokens, value_size = len(rows), given.shape[-1]
    num_values = given.numel() // (num_tokens * value_size)
    all_keys = (convolution.out_channels - num_values * value_size) // 2
    own = [name for name, each in module._parameters.items() if each is not None]
    num_columns = 2 * all_keys + num_values * (2 * value_size + 2)
    has_shape = all(module._parameters[name].shape == (num_values,) for name in own)  # type: ignore[union-attr]
    has_shape = has_shape and len(own) == 2 and rows.shape[1] == num_columns
    require(has_shape, "its recurrence has other parameters than a gated delta net")
    plans = [
        plan
        for num_keys in range(1, num_values + 1)
        if num_values % num_keys == 0
        for plan in _plans(module, own, (num_keys, num_values, all_keys // num_keys, value_size))
        if torch.equal(_part(plan, rows, 3).flatten(), gate.flatten())
    ]
    wanted = given.view(num_tokens, num_values, value_size)
    limit = max(tolerance(wanted), _ONE_BY_ONE * float(wanted.abs().max()))

    def error(plan: DeltaPlan) -> float:
        return difference(_result(plan, convolution, rows), wanted)

    same = known and known._replace(module=module)
    if same in plans and error(same) <= limit:
        return same
    errors = [*map(error, plans)]
    if min(errors, default=math.inf) > limit:
        raise UnsupportedForwardError("its recurrence is no gated delta net")
    return plans[errors.index(min(errors))]


def _plans(
    module: nn.Module, own: list[str], heads: tuple[int, int, int, int]
) -> Iterator[DeltaPlan]:
    """Yield the plans of such heads, with each order of columns and of parameters."""
    for (columns, steps), (logarithms, biases) in product(_arrangements(heads), permutations(own)):
        yield DeltaPlan(module, (logarithms, biases), heads, columns, steps)


def _arrangements(heads: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield first columns and steps: one kind after another, or key head after key head."""
    num_keys, num_values, key_size, value_size = heads
    sharing = num_values // num_keys
    sizes = key_size, key_size, *[sharing * value_size] * 2, sharing, sharing
    straight = [0, *accumulate(num_keys * size for size in sizes)][:6]
    by_head, first = [0, *accumulate(sizes)][:4], num_keys * sum(sizes[:4])
    by_head += [first, first + sharing]
    for columns, steps in (
        (straight, sizes),
        (by_head, (*[sum(sizes[:4])] * 4, *[2 * sharing] * 2)),
    ):
        *others, strengths, decays = columns
        yield (*columns,), steps
        yield (*others, decays, strengths), steps


def _part(plan: DeltaPlan, rows: Tensor, kind: int) -> Tensor:
    """Return the columns of a kind, [num_tokens, …], head after head."""
    num_keys, num_values, key_size, value_size = plan.heads
    sharing = num_values // num_keys
    size = (key_size, key_size, *[sharing * value_size] * 2, sharing, sharing)[kind]
    starts = (plan.columns[kind] + plan.steps[kind] * head for head in range(num_keys))
    return torch.cat([rows[:, start : start + size] for start in starts], dim=1)


def _result(plan: DeltaPlan, convolution: nn.Conv1d, rows: Tensor) -> Tensor:
    """Return what a plan gives of rows, [num_tokens, num_values, value_size]."""
    num_keys, num_values, key_size, value_size = plan.heads
    mixed = torch.cat([_part(plan, rows, kind) for kind in range(3)], dim=1)
    made = functional.silu(convolved(convolution, mixed)).float()
    all_keys = num_keys * key_size
    queries, keys, values = made.tensor_split([all_keys, 2 * all_keys], dim=1)
    queries, keys = (
        (each * torch.rsqrt(each.square().sum(dim=-1, keepdim=True) + 1e-6)).repeat_interleave(
            num_values // num_keys, dim=1
        )
        for each in (each.reshape(len(rows), num_keys, key_size) for each in (queries, keys))
    )
    shares = _part(plan, rows, 4).sigmoid().float()
    logarithms, biases = map(plan.module.get_parameter, plan.names)
    softened = functional.softplus(_part(plan, rows, 5).float() + biases)
    decays = (-logarithms.float().exp() * softened).exp()
    state, results = torch.zeros(num_values, key_size, value_size), []
    for query, key, value, decay, share in zip(
        queries, keys, values.view(len(rows), num_values, value_size), decays, shares, strict=True
    ):
        state = state * decay[:, None, None]
        change = (value - (state * key[..., None]).sum(dim=1)) * share[:, None]
        state = state + key[..., None] * change[:, None]
        results.append((state * query[..., None]).sum(dim=1) * key_size**-0.5)
    return torch.stack(results).to(rows.dtype)
