"""Read from a watched layer how it chooses experts, and what the experts compute.

Five tokens show little of a router. So it is asked about many others, and the plan must choose the
same experts for all of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lade.forward import words
from lade.forward.comparing import (
    ACTIVATIONS,
    UnsupportedForwardError,
    difference,
    is_near,
    require,
)

_NUM_ASKED = 256  # made-up tokens that a router is asked about
_MOST_SORTED = 17  # `_experts.select`
_WAYS = (  # scores that weigh the choices, and whether raw scores choose the experts
    (words.BY_SOFTMAX, 0),
    (words.BY_SIGMOID, 0),
    (words.BY_SOFTMAX_OF_CHOSEN, words.SELECTS_RAW),
    (words.BY_SIGMOID, words.SELECTS_RAW),
)


class RoutingPlan(NamedTuple):
    """How a router's scores choose experts and weigh their results."""

    weighs: int
    flags: int
    groups: tuple[
        int, int
    ]  # number of groups, and of groups with chosen experts; 0, 0 without groups
    share: float  # factor of all weights


class ExpertsPlan(NamedTuple):
    """The experts of a layer."""

    module: nn.Module  # has the stacked weights
    router: Any  # the module that has the router's weight
    correction: tuple[nn.Module, str, torch.dtype] | None  # added to the scores that choose experts
    shared_gate: nn.Linear | None
    routing: RoutingPlan
    num_chosen: int
    inner: int
    activation: int


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
    up, down = (module._parameters.get(each) for each in ("gate_up_proj", "down_proj"))
    has_shape = up is not None and down is not None and len({*module._parameters}) == 2
    has_shape = has_shape and down.shape == (len(up), states.shape[1], up.shape[1] // 2)
    require(has_shape and up.shape[2] == states.shape[1], f"{name} has weights of other shapes")
    gated = [calls[each][-1] for each in module.children() if each in calls]
    require(len(gated) == 1, f"{name} has an activation of its own")
    activation = min(ACTIVATIONS, key=lambda which: _error(which, gated[0]))
    routed = Routed(states, chosen, shares)
    require(is_near(_result(module, activation, routed), call.out), f"{name} computes otherwise")
    require(bool(calls[router][0].args), f"{type(router).__name__} is called otherwise")
    weighing = [each for each in router.modules() if _is_of(each, len(up), states.shape[1])]
    require(len(weighing) == 1, f"{type(router).__name__} has no weight of a known shape")
    biases = _biases(block, len(up), weighing[0])
    asked = _asked(router, routed, calls[router][0], biases)
    routing, bias = _routing(block, router, weighing[0], biases, asked)
    correction = None if bias is None else (bias.module, bias.name, bias.numbers.dtype)
    gate = gates[0] if gates else None
    of_choices = chosen.shape[1], down.shape[2]
    return ExpertsPlan(module, weighing[0], correction, gate, routing, *of_choices, activation)


def _own(module: nn.Module) -> list[Any]:
    return [*module._parameters.values()]


def _is_of(module: nn.Module, num_experts: int, size: int) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.shape == (num_experts, size)


def _error(which: int, call: Any) -> float:
    return difference(ACTIVATIONS[which](call.args[0]), call.out)


def _result(module: Any, activation: int, routed: Routed) -> Tensor:
    """Return the weighted sum of the experts' results, in the order of choices."""
    states, chosen, shares = routed
    parts = states.new_zeros((*chosen.shape, states.shape[1]), dtype=shares.dtype)
    for expert in sorted({*chosen.flatten().tolist()}):
        token, place = torch.where(chosen == expert)
        gate, up = linear(states[token], module.gate_up_proj[expert]).chunk(2, dim=-1)
        out = linear(ACTIVATIONS[activation](gate) * up, module.down_proj[expert])
        parts[token, place] = out * shares[token, place, None]
    return parts.sum(dim=1).to(states.dtype)


def router_of(module: nn.Module, calls: Mapping[nn.Module, Any]) -> nn.Module:
    """Return the module whose output is the choice and the shares of the stacked experts."""
    given = [*calls[module][0].args, *calls[module][0].kwargs.values()][1:]
    for router, (call, *_) in calls.items():
        made = {*map(id, call.out)} if isinstance(call.out, tuple) else set()
        if {*map(id, given)} <= made:
            return router
    raise UnsupportedForwardError(f"no module tells {type(module).__name__} what is chosen")


def _asked(router: nn.Module, routed: Routed, call: Any, biases: Sequence[_Bias]) -> Routed:
    """Ask a router about made-up states, with made-up numbers as its correction."""
    (given, *others), kwargs = call.args, call.kwargs
    noise = torch.Generator().manual_seed(0)
    rows = torch.randn((_NUM_ASKED, given.shape[-1]), generator=noise) * given.float().std()
    rows = rows.to(given.dtype)
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
    places = [
        number
        for mine in (routed.chosen, routed.shares)
        for number, each in enumerate(call.out)
        if each is mine
    ]
    return Routed(rows, *(out[place] for place in places))


def _biases(block: nn.Module, num_experts: int, weighing: nn.Module) -> list[_Bias]:
    """Return the parameters that may be added to the scores that choose experts."""
    found, noise = list[_Bias](), torch.Generator().manual_seed(1)
    for module in block.modules():
        for held in (module._parameters, module._buffers):
            for name, each in held.items():
                if each is None or each.numel() != num_experts:
                    continue
                if (module, name) != (weighing, "bias"):
                    numbers = torch.randn(each.shape, generator=noise) / num_experts
                    found.append(_Bias(module, name, held, numbers.to(each.dtype)))
    return found


def _routing(
    block: nn.Module, router: nn.Module, weighing: Any, biases: Sequence[_Bias], asked: Routed
) -> tuple[RoutingPlan, _Bias | None]:
    """Return the routing that gives the same choices and shares for all tokens."""
    num_experts, is_rounded = len(weighing.weight), asked.states.dtype is not torch.float32
    corrections = [None, *biases]
    held = [each for module in (router, block) for each in vars(module).values()]
    sizes, factors = ({each for each in held if type(each) is kind} for kind in (int, float))
    groups: list[Any] = [(0, 0)] + [
        (num, left)
        for num, left in product(sorted(sizes), repeat=2)
        if num_experts > num > left > 0 and num_experts % num == 0
    ]
    rounding = (words.ROUNDS_SCORES, 0) if is_rounded else (0,)
    for rounds, correction, of_groups, (weighs, how), is_sorted in product(
        rounding, corrections, groups, _WAYS, (words.IS_SORTED, 0)
    ):
        plan = RoutingPlan(weighs, rounds | how | is_sorted, of_groups, 1.0)
        chosen, shares = _chosen(plan, weighing, correction, asked)
        if torch.equal(chosen, asked.chosen):
            for each in _shares(plan, shares, asked.shares, {1.0, *factors}):
                require(chosen.shape[1] <= _MOST_SORTED, "a token has too many experts")
                return each, correction
    raise UnsupportedForwardError(f"{type(router).__name__} chooses experts in another way")


def _chosen(
    plan: RoutingPlan, weighing: Any, correction: _Bias | None, asked: Routed
) -> tuple[Tensor, Tensor]:
    """Return the experts that a plan chooses, and the shares of their results."""
    states, weight, bias = asked.states, weighing.weight, weighing._parameters.get("bias")
    if not plan.flags & words.ROUNDS_SCORES:
        states, weight = states.float(), weight.float()
        bias = None if bias is None else bias.float()
    elif weight.dtype is not states.dtype:
        return torch.empty(0), torch.empty(0)
    raw = linear(states, weight, bias).float()
    scores = raw
    if plan.weighs == words.BY_SOFTMAX:
        scores = raw.softmax(dim=-1)
    elif plan.weighs == words.BY_SIGMOID:
        scores = raw.sigmoid()
    values = raw if plan.flags & words.SELECTS_RAW else scores
    if correction is not None:
        values = values + correction.numbers.reshape(-1).float()
    num, left = plan.groups
    if num:
        by_group = values.view(len(values), num, -1)
        sums = by_group.topk(2, dim=-1)[0].sum(dim=-1)
        out = torch.ones_like(sums).scatter_(1, sums.topk(left, dim=-1, sorted=False)[1], 0)
        values = by_group.masked_fill(out[..., None].bool(), -torch.inf).flatten(1)
    is_sorted = bool(plan.flags & words.IS_SORTED)
    chosen = values.topk(asked.chosen.shape[1], dim=-1, sorted=is_sorted)[1]
    return chosen, scores.gather(1, chosen)


def _shares(
    plan: RoutingPlan, scores: Tensor, shares: Tensor, numbers: set[float]
) -> Iterator[RoutingPlan]:
    """Yield the routings that may turn scores into these shares."""
    if plan.weighs == words.BY_SOFTMAX_OF_CHOSEN:
        scores = scores.softmax(dim=-1)
    for flag, share in product((0, words.IS_SUMMED), sorted(numbers, key=lambda each: each != 1.0)):
        mine = scores / scores.sum(dim=-1, keepdim=True) if flag else scores
        if is_near((mine * share).to(shares.dtype), shares):
            rounds = words.ROUNDS_SHARES * (shares.dtype is not torch.float32)
            yield plan._replace(flags=plan.flags | flag | rounds, share=share)
