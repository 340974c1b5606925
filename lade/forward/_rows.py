"""Every compiled function that programs of rows call, and what compiles a program's source.

A program is cached on disk by its source: Numba's cache is given it as a function of this file,
with a hash of all that is compiled into it in its name.
"""

import math
import threading
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from typing import Any

import llvmlite
import numba
import numpy as np

from lade.forward._experts import select
from lade.forward._kernels import (
    _F,
    _exponential,
    _largest,
    _row,
    _sigmoid,
    _silu,
    _softplus,
    _sum,
    _tanh,
)
from lade.forward._tiles import compiled, job, pointer


@compiled
def _square(x):  # type: ignore[no-untyped-def]
    return x * x


@compiled
def _cube(x):  # type: ignore[no-untyped-def]
    return x * x * x


@compiled
def _at_least(x, low):  # type: ignore[no-untyped-def]
    return low if x < low else x  # NaN stays


@compiled
def _at_most(x, high):  # type: ignore[no-untyped-def]
    return high if x > high else x


@compiled
def _larger(x, y):  # type: ignore[no-untyped-def]
    return x if x > y or x != x else y


@compiled
def _smaller(x, y):  # type: ignore[no-untyped-def]
    return x if x < y or x != x else y


@compiled
def _any_exponential(x):  # type: ignore[no-untyped-def]
    bounded = _F(89) if x > _F(89) else x
    power = _exponential(bounded * _F(0.5) if x > _F(88) else bounded)
    return power * power if x > _F(88) else power


@compiled
def _gelu(x):  # type: ignore[no-untyped-def]
    return _F(0.5) * x * (_F(1) + _F(math.erf(x * _F(0.7071067811865476))))


@compiled
def _gelu_by_tanh(x):  # type: ignore[no-untyped-def]
    cubed = _F(0.044715) * x * x * x
    return _F(0.5) * x * (_F(1) + _tanh(_F(0.7978845608028654) * (x + cubed)))


@compiled
def _integers(address, size):  # type: ignore[no-untyped-def]
    return numba.carray(pointer(address), (size,), np.int64)


@compiled
def _choose(row, out, memory, is_sorted):  # type: ignore[no-untyped-def]
    order = numba.carray(pointer(memory.ctypes.data), (len(row),), np.int64)
    select(row, order, len(out), is_sorted)
    for i in range(len(out)):
        out[i] = order[i]


@compiled
def _choose_first(row, out):  # type: ignore[no-untyped-def]
    out[0] = 0
    for i in range(len(row)):
        out[0] = i if row[i] > row[int(out[0])] else out[0]


@compiled
def _take(row, places, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        out[i] = row[int(places[i])]


@compiled
def _put(row, places, out, number):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        out[i] = row[i]
    for place in places:
        out[int(place)] = number


#: What programs call, by the names in their source.
FUNCTIONS = {
    "F": np.float32,
    "np": np,
    "math": math,
    "total": _sum,
    "largest": _largest,
    "square": _square,
    "cube": _cube,
    "at_least": _at_least,
    "at_most": _at_most,
    "larger": _larger,
    "smaller": _smaller,
    "exponential": _any_exponential,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "gelu": _gelu,
    "gelu_by_tanh": _gelu_by_tanh,
    "softplus": _softplus,
    "choose": _choose,
    "choose_first": _choose_first,
    "take": _take,
    "put": _put,
}
_one_by_one = threading.Lock()


def address_of(text: str, given: Sequence[str], tables: Sequence[Sequence[int]] = ()) -> int:
    """Return the address of a compiled program, which takes the address of int64.

    Args:
        text: source of the function `program`.
        given: source of its arguments, in which `given` has those int64.
        tables: tables of indices that it reads.
    """
    call = f"def run(address):\n    given = carray(address, ({len(given) + 3},), np.int64)\n"
    call += f"    program({', '.join(given)})\n"
    with _one_by_one:
        return int(_compiled(text, call, tuple(map(tuple, tables))).address)


@cache
def _compiled(text: str, call: str, tables: tuple[tuple[int, ...], ...]) -> Any:
    space: dict[str, Any] = {**FUNCTIONS, "carray": numba.carray, "__name__": __name__}
    space |= {"row": _row, "integers": _integers}
    space |= {f"t{number}": np.array(each, np.int64) for number, each in enumerate(tables)}
    exec(compile(text, __file__, "exec"), space)
    versions = numba.__version__, llvmlite.__version__
    digest = sha256(repr((text, call, tables, versions)).encode()).hexdigest()
    # Code from the disk has symbols by these names: two of the same name would be one.
    space["program"].__qualname__ = f"program_{digest[:32]}"
    space["program"] = compiled(space["program"])
    exec(compile(call, __file__, "exec"), space)
    space["run"].__qualname__ = f"rows_{digest[:32]}"
    return job(space["run"])()
