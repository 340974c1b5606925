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


class StacksPlan(NamedTuple):
    """The weights of a layer's experts, and what these compute."""

    module: nn.Module  # has the stacked weights
    lies: int  # how these lie
    inner: int
    gating: str  # source of a program of columns of gate and up


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


class _Stack(NamedTuple):
    """The stacked weights of experts, and their biases if they have some."""

    weights: tuple[Any, Any]  # gate and up together, and down
    biases: tuple[Tensor | None, Tensor | None]
    inner: int
    lies: int

    def matrix(self, which: int, expert: int) -> Tensor:
        """Return one of an expert's weights, [inputs, columns]."""
        weight: Tensor = self.weights[which][expert]
        return weight if self.lies & words.LIE_ACROSS else weight.T


def _stack_of(module: Any, hidden: int) -> _Stack:
    """Return the stacked weights of a module, if they have known names and shapes."""
    held: dict[str, Any] = {**module._parameters, **vars(module)}
    stacks: list[Any] = [held.get(name) for name in STACKS]
    up, down, *biases = stacks
    is_known = {*module._parameters} <= {*STACKS, *PARTS} and up is not None and down is not None
    if is_known:
        num, inner = len(up), down.numel() // (len(up) * hidden)
        shapes = [(num, 2 * inner, hidden), (num, hidden, inner)]
        across = [(each[0], each[2], each[1]) for each in shapes]
        lies = words.LIE_ACROSS if [up.shape, down.shape] == across else 0
        is_known = bool(lies) or [up.shape, down.shape] == shapes
        wanted = zip(biases, ((num, 2 * inner), (num, hidden)), strict=True)
        is_known = is_known and all(each is None or each.shape == shape for each, shape in wanted)
    require(is_known, f"{type(module).__name__} has weights of other shapes")
    return _Stack((up, down), (biases[0], biases[1]), inner, lies)


def read_experts(
    module: nn.Module, call: Any, states: Tensor, chosen: Tensor, shares: Tensor
) -> StacksPlan:
    """Return what a layer's experts compute, by a trace of each that is chosen.

    Args:
        module: the module with the stacked weights, `gate_up_proj` and `down_proj`.
        call: its call in the watched forward.
        states, chosen, shares: what it gets.
    """
    stack, found = _stack_of(module, states.shape[1]), set[tuple[int, str]]()
    reason = f"{type(module).__name__} computes otherwise"
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
        given, sums = list[Value](), list[Value]()
        for which, value in enumerate(made):
            *biases, taken, weight = value.node.ins
            bias, total = stack.biases[which], taken.tensor @ stack.matrix(which, expert)
            if bias is not None and not biases:
                value = next(x for x in trace.made_by("add") if value in x.node.ins)
            total = total if bias is None else total + bias[expert]
            is_product = torch.equal(weight.tensor, stack.matrix(which, expert))
            require(is_product and is_near(value.tensor, total), reason)
            given.append(taken)
            sums.append(value)
        require(torch.equal(given[0].tensor, states) and is_near(out, sums[1].tensor), reason)
        rows = TokenRows(len(states), lambda _: None)
        rows.give(sums[0], 0)
        columns = Writer(rows, given[1:], sums[:1].__contains__).columns(steps=(1, 2))
        found.add(_lying(columns, stack))
        parts[chosen == expert] = out[torch.where(chosen == expert)[0]]
    is_sum = is_near((parts * shares[..., None]).sum(dim=1), call.out)
    require(is_sum and len(found) == 1 and not columns.constants, reason)
    lies, gating = found.pop()
    return StacksPlan(module, lies, stack.inner, gating)


def _lying(columns: Columns, stack: _Stack) -> tuple[int, str]:
    """Return how a stack lies, and the program that joins columns of gate and up, gate first."""
    places = [place for _, *place in columns.inputs]
    alternate = places in ([[0, 2], [1, 2]], [[1, 2], [0, 2]])
    in_order = alternate or sorted(places) == [[0, 1], [stack.inner, 1]]
    require(in_order and columns.size == stack.inner, "experts have another order of columns")
    text = columns.text if places[0][0] == 0 else columns.text.replace("a0, a1", "a1, a0", 1)
    return stack.lies | (words.ALTERNATE if alternate else 0), text
