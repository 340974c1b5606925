"""Read from a layer that was watched its recurrence: sizes, and which columns are what.

A gated delta net and a Mamba 2 have states, matrices from keys to values, behind a short
convolution. They differ in what a token adds to a state.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lade.compat.closeness import largest
from lade.forward.comparing import (
    UnsupportedForwardError,
    convolved,
    difference,
    only,
    require,
    tolerance,
)

# Results of a chunk of tokens, as torch adds them to a state, and of one by one; of the largest.
_ONE_BY_ONE = 1e-4


class RecurrencePlan(NamedTuple):
    """A gated delta net or a Mamba 2, behind a convolution."""

    module: nn.Module  # that has the following
    # Biases of decays, and what these are multiplied by, as logarithms; with Mamba 2 also the
    # factors by which values join the results.
    names: tuple[str, ...]
    heads: tuple[int, int, int, int]  # of keys, of values, and their sizes
    # Of queries, keys, values, gates, writing strengths and decays: the first column of the
    # layer's first products, and columns from those of one key head to those of the next.
    columns: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def is_delta(self) -> bool:
        """Whether it is a gated delta net, else a Mamba 2."""
        return len(self.names) == 2

    @property
    def channels(self) -> tuple[int, int, int]:
        """The first channel of queries, keys and values in the convolution."""
        num_keys, num_values, key_size, value_size = self.heads
        all_keys, all_values = num_keys * key_size, num_values * value_size
        straight = 0, all_keys, 2 * all_keys
        return straight if self.is_delta else (all_values + all_keys, all_values, 0)

    def num_scratch(self, taps: int) -> int:
        """Return the numbers that a thread needs for a state and a convolution."""
        *_, key_size, value_size = self.heads
        return key_size * value_size + (taps + 2) * max(key_size, value_size)


def read_recurrence(
    module: nn.Module,
    convolution: nn.Conv1d,
    rows: Tensor,
    results: Tensor,
    known: RecurrencePlan | None,
) -> RecurrencePlan:
    """Return the plan by which a recurrence gave its results.

    Args:
        module: has it.
        convolution: what queries, keys and values go through first.
        rows: what the first products gave, [num_tokens, columns].
        results: what it gives.
        known: the plan of an earlier layer, which most layers share.
    """
    num_tokens = len(rows)
    own = {name: each for name, each in module._parameters.items() if each is not None}
    num_values = max((each.numel() for each in own.values()), default=1)
    value_size = results.numel() // (num_tokens * num_values)
    all_keys = (convolution.out_channels - num_values * value_size) // 2
    num_columns = 2 * all_keys + num_values * (2 * value_size + 4 - len(own))
    has_shape = len(own) in (2, 3) and rows.shape[1] == num_columns
    has_shape = has_shape and all(each.shape == (num_values,) for each in own.values())
    require(has_shape, "its recurrence has other parameters than a gated delta net or a Mamba 2")
    limits = getattr(module, "time_step_limit", None)
    # Torch's forwards of one token do not know them.
    require(limits in (None, (0.0, math.inf)), "its recurrence limits its time steps")
    all_heads = [
        (num_keys, num_values, all_keys // num_keys, value_size)
        for num_keys in range(1, num_values + 1)
        if num_values % num_keys == all_keys % num_keys == 0
    ]
    plans = [plan for heads in all_heads for plan in _plans(module, [*own], heads)]
    wanted = results.view(num_tokens, num_values, value_size)
    limit = max(tolerance(wanted), _ONE_BY_ONE * largest(wanted))

    def error(plan: RecurrencePlan) -> float:
        return difference(_result(plan, convolution, rows), wanted)

    same = known and known._replace(module=module)
    if same in plans and error(same) <= limit:
        return same
    errors = {plan: error(plan) for plan in plans}
    # With one key head, nothing is a step apart.
    found = only(errors, limit, lambda plan: plan[:4] + plan[4:5] * (plan.heads[0] > 1))
    if found is None:
        raise UnsupportedForwardError("its recurrence is no gated delta net, and no Mamba 2")
    return found


def added_by(plan: RecurrencePlan) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]:
    """Return what a token adds to the cache of a recurrence besides inputs of its convolution.

    Returns:
        What is kept of a token, the state, and a function that adds the one to the other. The state
        has torch's shape; its memory is that of a job, key after key.
    """
    num_keys, num_values, key_size, value_size = plan.heads
    num_kept = num_keys * key_size + num_values * (value_size + 2)
    kept = torch.empty((1, 1, 1, num_kept), dtype=torch.float32, device="cpu")
    state = kept.new_empty((1, num_values, key_size, value_size))
    if plan.is_delta:
        return kept, state, partial(_advanced, is_delta=True)
    return kept, state.transpose(2, 3), _advanced_across


def _advanced_across(state: Tensor, row: Tensor) -> Tensor:
    return _advanced(state.transpose(1, 2), row, is_delta=False).transpose(1, 2)


def _advanced(state: Tensor, row: Tensor, *, is_delta: bool) -> Tensor:
    """Return a state [heads, key_size, value_size] after one more token, with the bits of a job.

    Args:
        state: is not changed.
        row: keys and values of the token, then decay and share of each head.
        is_delta: whether a value replaces what the state gives for its key.
    """
    num_heads, key_size, value_size = state.shape
    num_values, num_gates = num_heads * value_size, 2 * num_heads
    keys, values = row[: -num_values - num_gates], row[-num_values - num_gates : -num_gates]
    gates = row[-num_gates:]
    keys = keys.view(-1, key_size)
    keys = keys.repeat_interleave(num_heads // len(keys), dim=0)
    decays, shares = gates.view(num_heads, 2).unbind(dim=1)
    state = state * decays[:, None, None]
    change = values.view(num_heads, value_size)
    if is_delta:
        given = torch.zeros_like(change)
        for number in range(key_size):  # in the order in which a job adds
            given = given + state[:, number] * keys[:, number, None]
        change = change - given
    change = change * shares[:, None]
    advanced: Tensor = state + keys[:, :, None] * change[:, None]
    return advanced


def _plans(
    module: nn.Module, own: list[str], heads: tuple[int, int, int, int]
) -> Iterator[RecurrencePlan]:
    """Yield the plans of such heads, with each order of columns and of parameters."""
    arrangements = _arrangements(heads) if len(own) == 2 else [_arrangement(heads)]
    for (columns, steps), names in product(arrangements, permutations(own)):
        yield RecurrencePlan(module, names, heads, columns, steps)


def _sizes(heads: tuple[int, ...]) -> tuple[int, ...]:
    """Return the columns of each kind that belong to a key head."""
    num_keys, num_values, key_size, value_size = heads
    sharing = num_values // num_keys
    return key_size, key_size, *[sharing * value_size] * 2, sharing, sharing


def _arrangement(heads: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return first columns and steps of a Mamba 2, whose decays are its writing strengths."""
    sizes = _sizes(heads)
    values, keys, queries, decays = accumulate(heads[0] * sizes[kind] for kind in (3, 2, 1, 0))
    return (queries, keys, values, 0, decays, decays), sizes


def _arrangements(heads: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield those of a delta net: one kind after another, or key head after key head."""
    num_keys, num_values, *_ = heads
    sharing, sizes = num_values // num_keys, _sizes(heads)
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


def _part(plan: RecurrencePlan, rows: Tensor, kind: int) -> Tensor:
    """Return the columns of a kind, [num_tokens, …], head after head."""
    size = _sizes(plan.heads)[kind]
    starts = (plan.columns[kind] + plan.steps[kind] * head for head in range(plan.heads[0]))
    return torch.cat([rows[:, start : start + size] for start in starts], dim=1)


def _result(plan: RecurrencePlan, convolution: nn.Conv1d, rows: Tensor) -> Tensor:
    """Return what a plan gives of rows, [num_tokens, num_values, value_size]."""
    num_keys, num_values, key_size, value_size = plan.heads
    kinds = sorted(range(3), key=plan.channels.__getitem__)
    mixed = torch.cat([_part(plan, rows, kind) for kind in kinds], dim=1)
    made = functional.silu(convolved(convolution, mixed))
    shapes = (num_keys, key_size), (num_keys, key_size), (num_values, value_size)
    queries, keys, values = (
        made[:, first : first + math.prod(shape)].view(-1, *shape)
        for first, shape in zip(plan.channels, shapes, strict=True)
    )
    biases, logarithms, *skips = map(plan.module.get_parameter, plan.names)
    given: Any = _part(plan, rows, 5)
    if plan.is_delta:
        queries, keys = (
            each * torch.rsqrt(each.square().sum(dim=-1, keepdim=True) + 1e-6)
            for each in (queries, keys)
        )
        queries = queries * key_size**-0.5
        softened = functional.softplus(given + biases)
        shares = _part(plan, rows, 4).sigmoid()
    else:
        softened = shares = functional.softplus(given + biases)
    gates = torch.stack([(-logarithms.exp() * softened).exp(), shares], dim=-1)
    kept = torch.cat([each.flatten(1) for each in (keys, values, gates)], dim=1)
    state, results = kept.new_zeros((num_values, key_size, value_size)), []
    for query, value, row in zip(queries, values, kept, strict=True):
        state = _advanced(state, row, is_delta=plan.is_delta)
        query = query.repeat_interleave(num_values // num_keys, dim=0)
        joined = sum(value * skip[:, None] for skip in skips)
        results.append((state * query[..., None]).sum(dim=1) + joined)
    return torch.stack(results)
