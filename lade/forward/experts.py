"""Read from a watched layer how it chooses experts, and what the experts compute.

Five tokens show little of a router and of experts. So they are asked about others, and the plan
must choose the same experts for all of them, and compute the same of large states as of small ones.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lade.forward import words
from lade.forward.comparing import (
    UnsupportedForwardError,
    difference,
    is_near,
    require,
)
from lade.forward.programs import Columns, Rows, Writer
from lade.forward.trace import Trace, Value

# Made-up tokens that a router is asked about, and how much larger half of them are: so large that
# a softmax of all scores loses what decides between the lower ones.
_NUM_ASKED, _LARGER = 256, 64.0
_MOST_SORTED = 17  # `_experts.select`
_ADDED = 0.0, 1e-20, 1e-12, 1e-9, 1e-6  # to a sum, so that nothing is divided by 0
_WAYS = (  # scores that weigh the choices, and whether raw scores choose the experts
    (words.BY_SOFTMAX, 0),
    (words.BY_SIGMOID, 0),
    (words.BY_SOFTMAX_OF_CHOSEN, words.SELECTS_RAW),
    (words.BY_SIGMOID, words.SELECTS_RAW),
)


STACKS = "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"
#: Parameters of experts whose stacks are packed.
PARTS = "gate_blocks", "up_blocks", "down_blocks", "gate_up_bias"


class RoutingPlan(NamedTuple):
    """How a router's scores choose experts and weigh their results."""

    weighs: int
    flags: int
    groups: tuple[
        int, int
    ]  # number of groups, and of groups with chosen experts; 0, 0 without groups
    share: float  # factor of all weights
    added: float = 0.0  # to the sum that divides them; of `_mixed`, how far apart scores may be


class ExpertsPlan(NamedTuple):
    """The experts of a layer."""

    module: nn.Module  # has the stacked weights
    lies: int  # how these lie
    router: Any  # the module that has the router's weight
    correction: tuple[nn.Module, str] | None  # added to the scores that choose experts
    shared_gate: nn.Linear | None
    routing: RoutingPlan
    num_chosen: int
    inner: int
    gating: str  # source of a program of columns of gate and up


class _Bias(NamedTuple):
    module: nn.Module
    name: str
    held: dict[str, Any]  # the dict that holds it
    numbers: Tensor  # made-up values while the router is asked


class Routed(NamedTuple):
    """The choices of a router for some tokens."""

    states: Tensor  # [num_tokens, hidden]
    chosen: Tensor  # int64 [num_tokens, num_chosen]
    shares: Tensor  # [num_tokens, num_chosen]


def experts_in(layer: nn.Module, calls: Mapping[nn.Module, Any]) -> nn.Module | None:
    """Return the module of a layer that has stacked weights, if one was called."""
    found = [
        module
        for module in layer.modules()
        if module in calls and any(each is not None and each.dim() == 3 for each in _own(module))
    ]
    require(len(found) <= 1, "a layer has several modules with stacked weights")
    return found[0] if found else None


def read_experts(
    block: nn.Module,
    module: Any,
    router: nn.Module,
    gates: Sequence[nn.Linear],
    calls: Mapping[nn.Module, Any],
) -> ExpertsPlan:
    """Return the plan of a layer's experts.

    Args:
        block: the module that calls `module` and `router`.
        module: the module with the stacked weights, `gate_up_proj` and `down_proj`.
        router: the module that chooses experts.
        gates: linear layers with one output, candidates for the gate of the shared expert.
        calls: inputs and outputs in the watched forward, by module.
    """
    name, (call, *others) = type(module).__name__, calls[module]
    given = [*call.args, *call.kwargs.values()]
    require(not others and len(given) == 3 and len(gates) <= 1, f"{name} is called otherwise")
    chosen = next(each for each in given if each.dtype is torch.int64)
    states, shares = (each for each in given if each is not chosen)
    stack, routed = _stack_of(module, states.shape[1]), Routed(states, chosen, shares)
    lies, gating = _traced(stack, call, routed)
    require(bool(calls[router][0].args), f"{type(router).__name__} is called otherwise")
    num, size = len(stack.weights[0]), states.shape[1]
    weighing = [each for each in router.modules() if _is_of(each, num, size)]
    require(len(weighing) == 1, f"{type(router).__name__} has no weight of a known shape")
    biases = _biases(block, num, weighing[0])
    asked = _asked(router, routed, calls[router][0], biases)
    routing, bias = _routing(block, router, weighing[0], biases, asked)
    correction = None if bias is None else (bias.module, bias.name)
    gate = gates[0] if gates else None
    of_choices = routing, chosen.shape[1], stack.inner
    return ExpertsPlan(module, lies, weighing[0], correction, gate, *of_choices, gating)


def _own(module: nn.Module) -> list[Any]:
    return [*module._parameters.values()]


def _is_of(module: nn.Module, num_experts: int, size: int) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.shape == (num_experts, size)


class _Stack(NamedTuple):
    """The stacked weights of experts, and their biases if they have some."""

    module: Any
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
    return _Stack(module, (up, down), (biases[0], biases[1]), inner, lies)


def _traced(stack: _Stack, call: Any, routed: Routed) -> tuple[int, str]:
    """Trace each chosen expert; return how weights lie, and what becomes of gate and up."""
    module, (states, chosen, shares) = stack.module, routed
    reason, found = f"{type(module).__name__} computes otherwise", set[tuple[int, str]]()
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
            *biases, taken, weight = value.node.ins  # type: ignore[union-attr]
            bias, total = stack.biases[which], taken.tensor @ stack.matrix(which, expert)
            if bias is not None and not biases:
                value = next(x for x in trace.made_by("add") if value in x.node.ins)  # type: ignore[union-attr]
            total = total if bias is None else total + bias[expert]
            is_product = torch.equal(weight.tensor, stack.matrix(which, expert))
            require(is_product and is_near(value.tensor, total), reason)
            given.append(taken)
            sums.append(value)
        require(torch.equal(given[0].tensor, states) and is_near(out, sums[1].tensor), reason)
        rows = Rows(len(states), lambda _: None)
        rows.give(sums[0], 0)
        columns = Writer(rows, given[1:], sums[:1].__contains__).columns(steps=(1, 2))
        found.add(_lying(columns, stack))
        parts[chosen == expert] = out[torch.where(chosen == expert)[0]]
    is_sum = is_near((parts * shares[..., None]).sum(dim=1), call.out)
    require(is_sum and len(found) == 1 and not columns.constants, reason)
    return found.pop()


def _lying(columns: Columns, stack: _Stack) -> tuple[int, str]:
    """Return how weights lie of which gate and up are columns, and their program, gate first."""
    places = [place for _, *place in columns.inputs]
    alternate = places in ([[0, 2], [1, 2]], [[1, 2], [0, 2]])
    in_order = alternate or sorted(places) == [[0, 1], [stack.inner, 1]]
    require(in_order and columns.size == stack.inner, "experts have another order of columns")
    text = columns.text if places[0][0] == 0 else columns.text.replace("a0, a1", "a1, a0", 1)
    return stack.lies | (words.ALTERNATE if alternate else 0), text


def router_of(module: nn.Module, calls: Mapping[nn.Module, Any]) -> nn.Module:
    """Return the module whose output is the choice and the shares of the stacked experts."""
    given = [*calls[module][0].args, *calls[module][0].kwargs.values()][1:]
    for router, (call, *_) in calls.items():
        made = {*map(id, call.out)} if isinstance(call.out, tuple) else set()
        if {*map(id, given)} <= made:
            return router
    raise UnsupportedForwardError(f"no module tells {type(module).__name__} what is chosen")


def _drawn(shape: Sequence[int], noise: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=noise, dtype=torch.float32, device="cpu")


def _asked(router: nn.Module, routed: Routed, call: Any, biases: Sequence[_Bias]) -> Routed:
    """Ask a router about made-up states, with made-up numbers as its correction."""
    (given, *others), kwargs = call.args, call.kwargs
    noise = torch.Generator().manual_seed(0)
    rows = _drawn((_NUM_ASKED, given.shape[-1]), noise) * given.std()
    rows[1::2] *= _LARGER
    put = {id(each.held[each.name]): each.numbers for each in biases}
    before = [each.held[each.name] for each in biases]
    try:
        for each in biases:
            each.held[each.name] = each.numbers
        others = [put.get(id(each), each) for each in others]
        out = router(rows.view(-1, *rows.shape) if given.dim() == 3 else rows, *others, **kwargs)
    finally:
        for each, was in zip(biases, before, strict=True):
            each.held[each.name] = was
    indices = [
        number
        for mine in (routed.chosen, routed.shares)
        for number, each in enumerate(call.out)
        if each is mine
    ]
    return Routed(rows, *(out[index] for index in indices))


def _biases(block: nn.Module, num_experts: int, weighing: nn.Module) -> list[_Bias]:
    """Return the parameters that may be added to the scores that choose experts."""
    found, noise = list[_Bias](), torch.Generator().manual_seed(1)
    for module in block.modules():
        for held in (module._parameters, module._buffers):
            for name, each in held.items():
                if each is None or each.numel() != num_experts:
                    continue
                if (module, name) != (weighing, "bias"):
                    numbers = _drawn(each.shape, noise) / num_experts
                    found.append(_Bias(module, name, held, numbers.to(each.dtype)))
    return found


def _routing(
    block: nn.Module, router: nn.Module, weighing: Any, biases: Sequence[_Bias], asked: Routed
) -> tuple[RoutingPlan, _Bias | None]:
    """Return the routing that gives the same choices and shares for all tokens."""
    num_experts, corrections = len(weighing.weight), [None, *biases]
    held = [each for module in (router, block) for each in vars(module).values()]
    sizes, factors = ({each for each in held if type(each) is kind} for kind in (int, float))
    groups: list[Any] = [(0, 0)] + [
        (num, left)
        for num, left in product(sorted(sizes), repeat=2)
        if num_experts > num > left > 0 and num_experts % num == 0
    ]
    doubled = (2 * asked.states.new_tensor(sorted(factors))).tolist()
    ways = [*((*way, 0.0) for way in _WAYS), *((words.BY_MIXING, 0, each) for each in doubled)]
    for correction, of_groups, (weighs, how, added), is_sorted in product(
        corrections, groups, ways, (words.IS_SORTED, 0)
    ):
        errors: dict[RoutingPlan, float] = {}
        plan = RoutingPlan(weighs, how | is_sorted, of_groups, 1.0, added)
        chosen, scores = _chosen(plan, weighing, correction, asked)
        if torch.equal(chosen, asked.chosen):
            errors = _errors(plan, scores, asked.shares, {1.0, *factors})
        if errors:
            require(asked.chosen.shape[1] <= _MOST_SORTED, "a token has too many experts")
            return min(errors, key=errors.__getitem__), correction
    raise UnsupportedForwardError(f"{type(router).__name__} chooses experts in another way")


def _chosen(
    plan: RoutingPlan, weighing: Any, correction: _Bias | None, asked: Routed
) -> tuple[Tensor, Tensor]:
    """Return the experts that a plan chooses, and their scores."""
    bias = weighing._parameters.get("bias")
    scores = raw = linear(asked.states, weighing.weight, bias)
    if plan.weighs == words.BY_MIXING:
        return _mixed(raw, asked.chosen.shape[1], plan.added)
    if plan.weighs == words.BY_SOFTMAX:
        scores = raw.softmax(dim=-1)
    elif plan.weighs == words.BY_SIGMOID:
        scores = raw.sigmoid()
    values = raw if plan.flags & words.SELECTS_RAW else scores
    if correction is not None:
        values = values + correction.numbers.reshape(-1)
    num, left = plan.groups
    if num:
        by_group = values.view(len(values), num, -1)
        sums = by_group.topk(2, dim=-1)[0].sum(dim=-1)
        out = torch.ones_like(sums).scatter_(1, sums.topk(left, dim=-1, sorted=False)[1], 0)
        values = by_group.masked_fill(out[..., None].bool(), -torch.inf).flatten(1)
    is_sorted = bool(plan.flags & words.IS_SORTED)
    chosen = values.topk(asked.chosen.shape[1], dim=-1, sorted=is_sorted)[1]
    return chosen, scores.gather(1, chosen)


def _mixed(raw: Tensor, num: int, apart: float) -> tuple[Tensor, Tensor]:
    """Choose one expert after another; each shares its weight with the rest that score like it."""
    left, found = raw, []
    for _ in range(num):
        most, which = left.max(dim=-1, keepdim=True)
        is_apart = (most - raw) / raw.abs().clamp(min=most) > apart
        shares = left.masked_fill(is_apart, -torch.inf).softmax(dim=-1)
        found.append((which, shares.gather(-1, which)))
        left = left.scatter(-1, which, -torch.inf)
    chosen, weights = zip(*found, strict=True)
    return torch.cat(chosen, dim=-1), torch.cat(weights, dim=-1)


def _errors(
    plan: RoutingPlan, scores: Tensor, shares: Tensor, numbers: set[float]
) -> dict[RoutingPlan, float]:
    """Return the routings that may turn scores into these shares, and how far off they are."""
    if plan.weighs == words.BY_SOFTMAX_OF_CHOSEN:
        scores = scores.softmax(dim=-1)
    kept, errors = shares.isfinite().all(dim=-1), dict[RoutingPlan, float]()
    sums = () if plan.weighs == words.BY_MIXING else _ADDED
    for share in sorted(numbers, key=lambda each: each != 1.0):
        for flag, added in ((0, plan.added), *((words.IS_SUMMED, each) for each in sums)):
            mine = scores / (scores.sum(dim=-1, keepdim=True) + added) if flag else scores
            mine = (mine * share)[kept]
            if is_near(mine, shares[kept]):
                found = plan._replace(flags=plan.flags | flag, share=share, added=added)
                errors[found] = difference(mine, shares[kept])
    return errors
