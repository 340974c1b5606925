"""Read from a layer that was watched its recurrence: its kind, and sizes of heads.

A gated delta net and a Mamba 2 have states, matrices from keys to values, behind a short
convolution. They differ in what a token adds to a state.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lade.compat.closeness import largest
from lade.forward.comparing import convolved, difference, require, tolerance

# Results of a chunk of tokens, as torch adds them to a state, and of one by one; of the largest.
_ONE_BY_ONE = 1e-4
_REASON = "its recurrence is no gated delta net, and no Mamba 2"


class RecurrencePlan(NamedTuple):
    """A gated delta net or a Mamba 2, behind a convolution."""

    heads: tuple[int, int, int, int]  # of keys, of values, and their sizes
    #: With Mamba 2, the parameter by which values are multiplied that join the results.
    skips: tuple[nn.Module, str] | None

    @property
    def is_delta(self) -> bool:
        """Whether it is a gated delta net, else a Mamba 2."""
        return self.skips is None

    @property
    def row(self) -> int:
        """Numbers of a token's channels, and of the decays and shares of its heads."""
        num_keys, num_values, key_size, value_size = self.heads
        return 2 * num_keys * key_size + num_values * (value_size + 2)

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
    given: Sequence[Tensor],
    results: Tensor,
    names: Sequence[str],
) -> RecurrencePlan:
    """Return the plan by which a recurrence gave its results.

    Args:
        module: has it.
        convolution: what queries, keys and values go through first.
        given: of each token, inputs of the convolution, decays as logarithms, and shares.
        results: what it gives.
        names: parameters of the module that made none of these.
    """
    (num_tokens, num_channels), num_values = given[0].shape, given[1].shape[1]
    skips = [(module, name) for name in names if module.get_parameter(name).shape == (num_values,)]
    require(len(skips) == len(names) < 2, _REASON)
    # Torch's forwards of one token do not know them.
    limits = getattr(module, "time_step_limit", None)
    require(limits in (None, (0.0, math.inf)), "its recurrence limits its time steps")
    value_size = results.numel() // (num_tokens * num_values)
    all_keys = (num_channels - num_values * value_size) // 2
    plans = [
        RecurrencePlan((num, num_values, all_keys // num, value_size), (*skips, None)[0])
        for num in range(1, num_values + 1)
        if num_values % num == all_keys % num == 0
    ]
    wanted = results.view(num_tokens, num_values, value_size)
    limit = max(tolerance(wanted), _ONE_BY_ONE * largest(wanted))
    found = [x for x in plans if difference(_result(x, convolution, *given), wanted) <= limit]
    require(len(found) == 1, _REASON if not found else "several recurrences give its results")
    return found[0]


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


def _result(
    plan: RecurrencePlan, convolution: nn.Conv1d, inputs: Tensor, decays: Tensor, shares: Tensor
) -> Tensor:
    """Return what a plan gives, [num_tokens, num_values, value_size]; see `read_recurrence`."""
    num_keys, num_values, key_size, value_size = plan.heads
    made = functional.silu(convolved(convolution, inputs))
    shapes = (num_keys, key_size), (num_keys, key_size), (num_values, value_size)
    queries, keys, values = (
        made[:, first : first + math.prod(shape)].view(-1, *shape)
        for first, shape in zip(plan.channels, shapes, strict=True)
    )
    if plan.is_delta:
        queries, keys = (
            each * torch.rsqrt(each.square().sum(dim=-1, keepdim=True) + 1e-6)
            for each in (queries, keys)
        )
        queries = queries * key_size**-0.5
    gates = torch.stack([decays.exp(), shares], dim=-1)
    kept = torch.cat([each.flatten(1) for each in (keys, values, gates)], dim=1)
    state, results = kept.new_zeros((num_values, key_size, value_size)), []
    for query, value, row in zip(queries, values, kept, strict=True):
        state = _advanced(state, row, is_delta=plan.is_delta)
        query = query.repeat_interleave(num_values // num_keys, dim=0)
        made = (state * query[..., None]).sum(dim=1)
        if plan.skips is not None:
            module, name = plan.skips
            made = made + value * module.get_parameter(name)[:, None]
        results.append(made)
    return torch.stack(results)
