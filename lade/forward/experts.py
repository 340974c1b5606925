"""Read from a watched layer what its experts compute, by a trace of one after the other."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lade.forward import words
from lade.forward.comparing import is_near, require
from lade.forward.programs import Columns, TokenRows, Writer
from lade.forward.trace import Trace, Value

STACKS = "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"
#: Parameters of experts whose stacks are packed.
PARTS = "gate_blocks", "up_blocks", "down_blocks", "gate_up_bias"


class ExpertsPlan(NamedTuple):
    """The experts of a layer, once each token has chosen some, and what they compute."""

    module: nn.Module  # has the stacked weights
    lies: int  # how these lie
    inner: int
    gating: str  # source of a program of columns of gate and up
    num: int
    num_chosen: int  # of a token


def experts_in(layer: nn.Module, calls: Mapping[nn.Module, Any]) -> nn.Module | None:
    """Return the module of a layer that has stacked weights, if one was called."""
    found = [
        module
        for module in layer.modules()
        if module in calls
        and any(each is not None and each.dim() == 3 for each in module._parameters.values())
    ]
    require(len(found) <= 1, "a layer has several modules with stacked weights")
    return found[0] if found else None


def read_experts(
    module: nn.Module, call: Any, states: Tensor, chosen: Tensor, shares: Tensor, *, num: int
) -> ExpertsPlan:
    """Return what a layer's experts compute, by a trace of each that is chosen.

    Args:
        module: the module with the stacked weights, `gate_up_proj` and `down_proj`.
        call: its call in the watched forward.
        states, chosen, shares: what it gets.
        num: number of experts.
    """
    held: dict[str, Any] = {**module._parameters, **vars(module)}
    named: list[Any] = [held.get(name) for name in STACKS]
    stacks, biases = named[:2], named[2:]
    is_known = all(each is not None for each in stacks)
    is_known = is_known and {*module._parameters} <= {*STACKS, *PARTS}
    require(is_known, f"{type(module).__name__} has other weights")
    found, reason = set[Any](), f"{type(module).__name__} computes otherwise"
    parts = states.new_zeros((*chosen.shape, states.shape[1]))
    for expert in sorted({*chosen.flatten().tolist()}):
        put = {id(chosen): torch.full_like(chosen[:, :1], expert)}
        put[id(shares)] = torch.ones_like(shares[:, :1])
        args = [put.get(id(each), each) for each in call.args]
        kwargs = {name: put.get(id(each), each) for name, each in call.kwargs.items()}
        with Trace() as trace:
            out = module(*args, **kwargs)
        made = trace.made_by("mm", "addmm")
        require(len(made) == 2, reason)
        given, sums, across = list[Value](), list[Value](), list[bool]()
        for value, stack, bias in zip(made, stacks, biases, strict=True):
            *added, taken, weight = value.node.ins
            across.append(torch.equal(weight.tensor, stack[expert]))
            is_product = across[-1] or torch.equal(weight.tensor, stack[expert].T)
            if bias is not None and not added:
                value = next(x for x in trace.made_by("add") if value in x.node.ins)
            total = taken.tensor @ weight.tensor
            total = total if bias is None else total + bias[expert]
            require(is_product and is_near(value.tensor, total), reason)
            given.append(taken)
            sums.append(value)
        require(torch.equal(given[0].tensor, states) and is_near(out, sums[1].tensor), reason)
        rows = TokenRows(len(states), lambda _: None)
        rows.give(sums[0], 0)
        columns = Writer(rows, given[1:], sums[:1].__contains__).columns(steps=(1, 2))
        inner = sums[0].shape[-1] // 2
        alternate, gating = _gating(columns, inner)
        found.add((*across, alternate, inner, gating))
        parts[chosen == expert] = out[torch.where(chosen == expert)[0]]
    is_sum = is_near((parts * shares[..., None]).sum(dim=1), call.out)
    require(is_sum and len(found) == 1 and not columns.constants, reason)
    first, second, alternate, inner, gating = found.pop()
    require(first == second, reason)
    lies = words.LIE_ACROSS * first | words.ALTERNATE * alternate
    return ExpertsPlan(module, lies, inner, gating, num, shares.shape[-1])


def _gating(columns: Columns, inner: int) -> tuple[bool, str]:
    """Return whether gate and up alternate, and the program that joins their columns, gate first.

    Args:
        columns: what becomes of the columns of both.
        inner: number of columns of each.
    """
    places = [place for _, *place in columns.inputs]
    alternate = places in ([[0, 2], [1, 2]], [[1, 2], [0, 2]])
    in_order = alternate or sorted(places) == [[0, 1], [inner, 1]]
    require(in_order and columns.size == inner, "experts have another order of columns")
    text = columns.text if places[0][0] == 0 else columns.text.replace("a0, a1", "a1, a0", 1)
    return alternate, text
