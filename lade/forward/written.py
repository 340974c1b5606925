"""Find attention that a model writes out: a product, a scale, a mask, a softmax, a product.

Operators are followed from the second product back to the first one. What lies between must keep
the order of scores, multiply all of them by a number, or add a mask that transformers made.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lade.forward.comparing import UnsupportedForwardError, require
from lade.forward.operators import MOVES
from lade.forward.trace import Trace, Value, memory_of

_PRODUCTS = "bmm", "baddbmm"
_HIDDEN = -1e30  # a score of at most this has no weight


class Attended(NamedTuple):
    """An attention: numbers of heads [1, heads, tokens, size], and how scores are made."""

    module: nn.Module  # in whose forward it runs
    query: Value
    key: Value  # [1, key heads, tokens, size], as `value`
    value: Value
    out: Value  # the result; [heads, tokens, size] where it is written out
    mask: Any  # as transformers made it
    kwargs: dict[str, Any]  # as transformers' functions of attention take them


def written_in(trace: Trace, masks: Sequence[Tensor]) -> Iterator[Attended]:
    """Yield the attentions that a forward wrote out.

    Args:
        trace: of the forward.
        masks: that transformers made in it.

    Raises:
        UnsupportedForwardError: an attention does more than multiply scores and mask them.
    """
    memory = {memory_of(mask): mask for mask in masks}
    for out in trace.made_by("bmm"):
        node: Any = out.node
        weights, values = node.ins
        scores = trace.softmaxes.get(_before(weights))
        if scores is None or node.module is None:
            continue
        try:
            yield Attended(node.module, *_read(scores, values, out, memory))
        except UnsupportedForwardError as error:
            raise UnsupportedForwardError(f"{type(node.module).__name__}: {error}") from None


def _read(scores: Value, values: Value, out: Value, memory: dict[int, Tensor]) -> tuple[Any, ...]:
    """Return the inputs of an attention, its result, its mask and its settings."""
    scaling, found = 1.0, list[Tensor]()
    node: Any
    while (node := (scores := _before(scores)).node) is None or node.name not in _PRODUCTS:
        require(node is not None, "its scores are no product")
        if node.name in ("mul", "div") and not node.kwargs:
            numbers = [*map(_number, node.args)]
            scores = next((x for x in node.ins if _number(x) is None), node.ins[0])
            (factor,) = (
                x for x, each in zip(numbers, node.args, strict=True) if each is not scores
            )
            if factor is None:
                raise UnsupportedForwardError(f"torch's {node.name} changes scores one by one")
            scaling = scaling * factor if node.name == "mul" else scaling / factor
        elif node.name == "maximum":
            scores, other = node.ins
            lowest = _number(other)
            is_low = lowest is not None and lowest <= _HIDDEN
            require(is_low, "torch's maximum changes scores one by one")
        else:
            masks = [(_mask_of(x, memory), x) for x in node.ins]
            is_known = node.name == "add" and not node.kwargs and len(masks) == 2
            added = [mask for mask, _ in masks if mask is not None]
            require(is_known and len(added) == 1, f"torch's {node.name} changes scores")
            scores = next(x for mask, x in masks if mask is None)
            found += added
    query, key = node.ins[-2:]
    is_plain = node.name == "bmm" or _number(node.ins[0]) == 0
    require(is_plain, "torch's baddbmm adds to scores")
    require(len(found) == 1, f"it adds {len(found)} masks of transformers to scores")
    multiplied = query.tensor, key.tensor.transpose(1, 2), values.tensor
    of_heads = [*map(_of_heads, (query, key, values), multiplied)]
    settings = {"scaling": scaling * node.kwargs.get("alpha", 1), "is_causal": True}
    return *of_heads, out, found[0], settings


def _sources(value: Value) -> Iterator[Value]:
    """Yield a value, what it is a move of, what that is a move of, and so on."""
    yield value
    while value.node is not None and value.node.name in MOVES:
        value = value.node.ins[0]
        yield value


def _before(value: Value) -> Value:
    """Return what a value has all numbers of, in their order."""
    for given in _sources(value):
        is_kept = given.tensor.dtype == value.tensor.dtype and given.tensor.is_contiguous()
        same = math.prod(given.shape) == math.prod(value.shape) and value.tensor.is_contiguous()
        if not (is_kept and same and given.shape[-2:] == value.shape[-2:]):
            break
        value = given
    return value


def _number(value: Any) -> float | None:
    """Return a number, or the one that all numbers of a value are; None for several."""
    if type(value) is not Value:
        return float(value)
    return next((x.number for x in _sources(value) if x.number is not None), None)


def _mask_of(value: Value, memory: dict[int, Tensor]) -> Tensor | None:
    """Return the mask that a value shows as it is, if transformers made it."""
    *_, first = _sources(value)
    return memory.get(memory_of(first.tensor))


def _of_heads(value: Value, wanted: Tensor) -> Value:
    """Return the value [1, heads, tokens, size] whose numbers, or copies, a product gets."""
    found = None
    for each in _sources(value):
        shape = each.tensor.shape
        if len(shape) == 4 and shape[0] == 1 and shape[2:] == wanted.shape[1:]:
            times = len(wanted) // shape[1]
            if torch.equal(each.tensor[0].repeat_interleave(times, dim=0), wanted):
                found = each
    if found is None:
        raise UnsupportedForwardError("its heads are not the first axis of what it multiplies")
    return found
