"""Trace a forward below torch's dispatcher: which operator made each tensor of which others.

A trace judges nothing. What stands in a module that is one large operation, such as experts, may
be of any kind; only what a program of rows (`programs.py`) is made of must be known.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lade.forward.operators import MAKERS, literal


class Value:
    """A tensor of a traced forward, as it was when an operator made it.

    Attributes:
        tensor: the tensor; its memory may have been written to since.
        node: the call that made it; None if it was there before.
        place: its number among that call's results.
        shape: of its numbers; of complex numbers, real and imaginary parts are the last axis.
        number: what all its numbers were, if the call made them of nothing; else None.
    """

    __slots__ = ("node", "number", "place", "shape", "tensor")

    def __init__(self, tensor: Tensor, node: "Node | None" = None, place: int = 0) -> None:
        self.tensor, self.node, self.place = tensor, node, place
        self.shape = (*tensor.shape, *[2] * tensor.is_complex())
        is_of_nothing = node is not None and (not node.ins or node.name in MAKERS)
        self.number = literal(tensor) if is_of_nothing else None


class Node:
    """The call of an operator.

    Attributes:
        name: the operator's, without its namespace, overload, and sign of writing in place; or
            "overwritten": a tensor after another one that shares its memory was written to.
        func: the operator.
        args, kwargs: its arguments, with values in the place of tensors.
        ins: the tensors among its arguments.
        outs: its results.
        module: in whose forward it was called; None in none.
    """

    __slots__ = ("args", "func", "ins", "kwargs", "module", "name", "outs")

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs, self.name = func, args, kwargs, "overwritten"
        if func is not None:
            self.name = _name_of(func)
        given = _leaves((*args, *kwargs.values()))
        self.ins = [each for each in given if type(each) is Value]
        self.outs: list[Value] = []
        self.module: Any = None


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that run in its context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: dict[int, Value] = {}  # by the tensor's identity: all are kept alive
        self._sharing: dict[int, dict[int, Tensor]] = {}  # tensors by the address of their memory
        self.seen: list[Value] = []
        self.asked: list[Value] = []  # values whose numbers Python asked for
        self.inside: list[Any] = []  # modules whose forward runs, the innermost last
        self.softmaxes: dict[Value, Value] = {}  # along the last axis: of each result, the input

    def value(self, tensor: Tensor) -> Value:
        """Return what a tensor now is; a value of no node for one that no operator made."""
        found = self._values.get(id(tensor))
        return self._keep(Value(tensor)) if found is None else found

    def made_by(self, *names: str) -> list[Value]:
        """Return what some operators made, by their names."""
        return [each for each in self.seen if each.node is not None and each.node.name in names]

    def forget(self) -> None:
        """Drop all values, and what they were made of."""
        for each in self.seen:
            del each.tensor, each.node
        self._values, self._sharing, self.seen, self.asked, self.softmaxes = {}, {}, [], [], {}

    def _keep(self, value: Value) -> Value:
        self.seen.append(value)
        self._values[id(value.tensor)] = value
        of_memory = self._sharing.setdefault(memory_of(value.tensor), {})
        of_memory[id(value.tensor)] = value.tensor
        return value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DECOMPOSED or (func is _PRODUCT and _are_complex(*args)):
            with self:
                out = _DECOMPOSED.get(func, _product_of_complex)(*args, **kwargs)
            if func is torch.ops.aten._softmax.default and args[1] in (-1, args[0].dim() - 1):
                self.softmaxes[self.value(out)] = self.value(args[0])
            return out
        values_of = {name: self._given(each) for name, each in kwargs.items()}
        node = Node(func, self._given(args), values_of)
        node.module = self.inside[-1] if self.inside else None
        self.asked += node.ins if func is torch.ops.aten._local_scalar_dense.default else []
        out = func(*args, **kwargs)
        made = (each for each in _leaves((out,)) if isinstance(each, Tensor))
        values = [self._keep(Value(each, node, place)) for place, each in enumerate(made)]
        node.outs = values
        if func._schema.is_mutable:
            for value in values:
                for each in [*self._sharing[memory_of(value.tensor)].values()]:
                    if each is not value.tensor:
                        self._keep(Value(each, Node(None, (self.value(each), value), {})))
        return out

    def _given(self, each: Any) -> Any:
        """Return an argument, or a list of them, with values in the place of tensors."""
        if isinstance(each, (list, tuple)):
            return type(each)(map(self._given, each))
        return self.value(each) if isinstance(each, Tensor) else each


@cache
def _name_of(func: Any) -> str:
    name = str(func.overloadpacket).split(".", 1)[-1]
    return name.rstrip("_") if func._schema.is_mutable else name


def _leaves(given: Iterable[Any]) -> Iterator[Any]:
    for each in given:
        if isinstance(each, (list, tuple)):
            yield from _leaves(each)
        else:
            yield each


def _are_complex(*given: Any) -> bool:
    return all(isinstance(each, Tensor) and each.is_complex() for each in given)


def _product_of_complex(first: Tensor, second: Tensor) -> Tensor:
    a, b, c, d = (part for x in (first, second) for part in torch.view_as_real(x).unbind(-1))
    return torch.view_as_complex(torch.stack((a * c - b * d, a * d + b * c), dim=-1))


def _norm_of(
    given: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = [-1 - each for each in range(len(shape))]
    mean = given.mean(dims, keepdim=True)
    factor = ((given - mean).square().mean(dims, keepdim=True) + eps).rsqrt()
    made = (given - mean) * factor
    made = made if weight is None else made * weight
    return made if bias is None else made + bias, mean, factor


def _softmax_of(given: Tensor, dim: int, _: bool) -> Tensor:
    powers = (given - given.amax(dim, keepdim=True)).exp()
    return powers / powers.sum(dim, keepdim=True)


#: Operators of several steps. Each step is a map or a reduction.
_DECOMPOSED: dict[Any, Any] = {
    torch.ops.aten.native_layer_norm.default: _norm_of,
    torch.ops.aten._softmax.default: _softmax_of,
}
_PRODUCT = torch.ops.aten.mul.Tensor


def memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which others may share."""
    return tensor.untyped_storage().data_ptr()
