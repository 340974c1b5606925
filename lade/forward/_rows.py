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
    _exponential,
    _exponential_of_negative,
    _largest,
    _row,
    _silu,
    _summing,
    _tanh,
)
from lade.forward._tiles import compiled, job, pointer

F = np.float32
_MOST_SOFTENED = F(20)  # above, a softplus is the number itself, as torch has it
_one_by_one = threading.Lock()

# --- what programs call, by its name here ---------------------------------------------------------

largest, row, silu, tanh = _largest, _row, _silu, _tanh


@_summing
def total(row):  # type: ignore[no-untyped-def]
    made = F(0)
    for number in row:
        made += number
    return made


@compiled
def square(x):  # type: ignore[no-untyped-def]
    return x * x


@compiled
def cube(x):  # type: ignore[no-untyped-def]
    return x * x * x


@compiled
def at_least(x, low):  # type: ignore[no-untyped-def]
    return low if x < low else x  # NaN stays


@compiled
def at_most(x, high):  # type: ignore[no-untyped-def]
    return high if x > high else x


@compiled
def larger(x, y):  # type: ignore[no-untyped-def]
    return x if x > y or x != x else y


@compiled
def smaller(x, y):  # type: ignore[no-untyped-def]
    return x if x < y or x != x else y


@compiled
def exponential(x):  # type: ignore[no-untyped-def]
    bounded = F(89) if x > F(89) else x
    power = _exponential(bounded * F(0.5) if x > F(88) else bounded)
    return power * power if x > F(88) else power


@compiled
def sigmoid(x):  # type: ignore[no-untyped-def]
    return F(1) / (F(1) + _exponential_of_negative(x))


@compiled
def softplus(x):  # type: ignore[no-untyped-def]
    return x if x > _MOST_SOFTENED else F(math.log1p(math.exp(x)))


@compiled
def gelu(x):  # type: ignore[no-untyped-def]
    return F(0.5) * x * (F(1) + F(math.erf(x * F(0.7071067811865476))))


@compiled
def gelu_by_tanh(x):  # type: ignore[no-untyped-def]
    cubed = F(0.044715) * x * x * x
    return F(0.5) * x * (F(1) + tanh(F(0.7978845608028654) * (x + cubed)))


@compiled
def integers(address, size):  # type: ignore[no-untyped-def]
    return numba.carray(pointer(address), (size,), np.int64)


@compiled
def choose(row, out, memory, is_sorted):  # type: ignore[no-untyped-def]
    order = numba.carray(pointer(memory.ctypes.data), (len(row),), np.int64)
    select(row, order, len(out), is_sorted)
    for i in range(len(out)):
        out[i] = order[i]


@compiled
def choose_first(row, out):  # type: ignore[no-untyped-def]
    out[0] = 0
    for i in range(len(row)):
        out[0] = i if row[i] > row[int(out[0])] else out[0]


@compiled
def take(row, places, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        out[i] = row[int(places[i])]


@compiled
def put(row, places, out, number):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        out[i] = row[i]
    for place in places:
        out[int(place)] = number


# --- programs --------------------------------------------------------------------------------


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
    space: dict[str, Any] = {**globals(), "carray": numba.carray}
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
