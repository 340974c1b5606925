"""What torch's small operators do to the numbers of one token.

A *map* computes each number of its result from the numbers in the same place: one line of Python.
A *move* copies numbers; which ones is found by running it on a tensor of indices, whatever its name
and arguments are. A *reduction* makes one number of several, and a *choice* finds the largest ones.
An operator that is none of these is refused where a token's numbers depend on it.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

#: Operators whose results are copies of their inputs' numbers.
MOVES = {
    *("view", "_unsafe_view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze"),
    *("expand", "slice", "select", "split", "split_with_sizes", "unbind", "clone", "detach"),
    *("alias", "_reshape_alias", "lift_fresh", "repeat", "unfold", "roll", "flip", "as_strided"),
    *("view_as_complex", "view_as_real", "_to_copy", "index", "index_select", "diagonal"),
}
#: Moves of several tensors into one.
JOINS = {"cat", "stack", "index_put"}
#: Operators that make a tensor of one number, of a size that others have.
MAKERS = {
    *("lift_fresh", "new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like"),
    *("ones_like", "full_like"),
}
#: Operators that make one number of several: source of the result, from those and how many.
REDUCTIONS = {
    "mean": "total({0}) / F({1})",
    "sum": "total({0})",
    "amax": "largest({0})",
}


def _top(given: Any, num: int, dim: int = -1, largest: bool = True, in_order: bool = True) -> str:
    if not largest:
        raise ValueError("the smallest")
    return f"choose({{0}}, {{2}}, {{3}}, {in_order})"


#: Operators along the last axis that choose numbers, read chosen ones, or write to these: one line
#: for each row of that axis, in which `{0}` and `{1}` are inputs, `{2}` the result, `{3}` memory.
CHOICES: dict[str, Callable[..., str]] = {
    "topk": _top,
    "max": lambda given, dim, keepdim=False: "choose_first({0}, {2})",
    "gather": lambda *_: "take({0}, {1}, {2})",
    "scatter": lambda given, dim, index, value: f"put({{0}}, {{1}}, {{2}}, {number(value)})",
}


def number(value: Any) -> str:
    """Return a number as compiled code has it, in float32."""
    if isinstance(value, bool):
        return str(value)
    if math.isfinite(value):
        return f"F({float(value)!r})"
    return "F(np.nan)" if math.isnan(value) else f"F({'-' * (value < 0)}np.inf)"


def _clamp(given: str, min: str | None = None, max: str | None = None) -> str:
    made = given if min is None else f"at_least({given}, {min})"
    return made if max is None else f"at_most({made}, {max})"


def _joined(sign: str) -> Callable[..., str]:
    def write(mine: str, other: str, alpha: str = number(1)) -> str:
        return f"({mine} {sign} {other if alpha == number(1) else f'{alpha} * {other}'})"

    return write


def _power(given: str, exponent: str) -> str:
    known = {2.0: "square({})", 3.0: "cube({})", 0.5: "np.sqrt({})", -0.5: "(F(1) / np.sqrt({}))"}
    return {number(power): made for power, made in known.items()}[exponent].format(given)


def _gelu(given: str, approximate: str = "none") -> str:
    return f"gelu({given})" if approximate == "none" else f"gelu_by_tanh({given})"


_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "gt": ">"}
_SIGNS |= {"ge": ">=", "lt": "<", "le": "<=", "logical_and": "and", "bitwise_and": "and"}
#: From the source of a map's arguments to that of its result.
MAPS: dict[str, Callable[..., str]] = {
    **{name: _joined(sign) for name, sign in _SIGNS.items()},
    "rsub": lambda mine, other: f"({other} - {mine})",
    "neg": lambda x: f"(-{x})",
    "abs": lambda x: f"abs({x})",
    "square": lambda x: f"square({x})",
    "pow": _power,
    "sqrt": lambda x: f"np.sqrt({x})",
    "rsqrt": lambda x: f"(F(1) / np.sqrt({x}))",
    "reciprocal": lambda x: f"(F(1) / {x})",
    "exp": lambda x: f"exponential({x})",
    "log": lambda x: f"F(math.log({x}))",
    "log1p": lambda x: f"F(math.log1p({x}))",
    "expm1": lambda x: f"F(math.expm1({x}))",
    "floor": lambda x: f"np.floor({x})",
    "tanh": lambda x: f"tanh({x})",
    "erf": lambda x: f"F(math.erf({x}))",
    "sigmoid": lambda x: f"sigmoid({x})",
    "silu": lambda x: f"silu({x})",
    "relu": lambda x: f"at_least({x}, F(0))",
    "gelu": _gelu,
    "softplus": lambda x: f"softplus({x})",
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda x, most: _clamp(x, None, most),
    "minimum": lambda mine, other: f"smaller({mine}, {other})",
    "maximum": lambda mine, other: f"larger({mine}, {other})",
    "where": lambda holds, mine, other: f"({mine} if {holds} else {other})",
    "masked_fill": lambda mine, holds, other: f"({other} if {holds} else {mine})",
    "addcmul": lambda mine, first, second: f"({mine} + {first} * {second})",
    "logical_not": lambda x: f"(not {x})",
    "bitwise_not": lambda x: f"(not {x})",
}


def literal(tensor: Tensor) -> float | None:
    """Return the number that a tensor has everywhere; None if it has several, or complex ones."""
    if tensor.numel() == 0 or tensor.is_complex():
        return None
    first = tensor.flatten()[0]
    return float(first) if bool((tensor == first).all()) else None
