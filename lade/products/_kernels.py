"""Every Numba function of this package, and nothing else: linear layers for few rows.

y = x · Wᵀ + b. A weight is read once, a block of columns and inputs at a time, and used for all
rows while it is in the cache: four rows and three columns of sums are kept in registers, so that
one load of a vector serves several products. The sums of a row run along the weight's own rows, so
nothing is packed and no copy can go stale. What is in 16 bits is widened a block at a time, and is
summed in float32.

A job is run by any number of threads at once: each takes the next few columns until none are left,
so that a thread that was interrupted delays the others by no more than these.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

_F = TypeVar("_F", bound=Callable[..., Any])
Floats = NDArray[np.float32]

# Sums may be taken in any order, as vectors do; NaN and infinity are what they are.
_OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "nsz", "contract"},
    "nogil": True,
    "error_model": "numpy",
}

# A job is an int64 array: addresses of inputs float32 [rows, K], weights [N, K], bias float32 [N]
# or 0, results float32 [rows, N], and of scratch float32 [threads, SCRATCH]; then rows, K and N,
# the format of the weights, columns that are taken at once, and the next column and thread.
INPUTS, WEIGHTS, BIAS, RESULTS, SCRATCH_AT = range(5)
NUM_ROWS, NUM_INPUTS, NUM_COLUMNS, FORMAT, CHUNK, NEXT_COLUMN, NEXT_THREAD = range(5, 12)
JOB_SIZE = 12
FLOAT32, BFLOAT16, FLOAT16 = range(3)

#: Columns whose weights are widened at once, and inputs of each: 48 kB, which a second cache holds.
PANEL, DEPTH = 12, 1024
SCRATCH = PANEL * DEPTH


def _compiled(function: _F) -> _F:
    """Compile to be called by other functions of this file."""
    compiled: _F = numba.njit(**_OPTIONS)(function)
    return compiled


def job(function: _F) -> Any:
    """Compile to be called by threads that know nothing of Python; cache on disk if possible."""
    try:
        return numba.cfunc(types.void(types.voidptr), cache=True, **_OPTIONS)(function)
    except RuntimeError:  # Numba found no writable folder for its cache
        return numba.cfunc(types.void(types.voidptr), **_OPTIONS)(function)


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing_context: Any, address: Any) -> Any:
    """Return an integer as a pointer, which `numba.carray` takes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _take(typing_context: Any, address: Any, number: Any) -> Any:
    """Add to an integer that threads share, and return what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "monotonic")

    return types.int64(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _as_float(typing_context: Any, bits: Any) -> Any:
    """Return the float32 of some bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@_compiled
def _add_products(
    x: Floats, w: Floats, row: int, out: Floats, column: int, num: int, k: int, size: int, wk: int
) -> None:
    """Add the products of some inputs to some columns of the results.

    Args:
        x: the inputs [rows, K].
        w: weights, of which `num` rows count from `row` on, and `size` of each from `wk` on.
        out: the results [rows, N], from `column` on.
        k: the first of the inputs.
    """
    num_rows = x.shape[0]
    c = 0
    while c + 3 <= num:
        w0 = w[row + c][wk : wk + size]
        w1 = w[row + c + 1][wk : wk + size]
        w2 = w[row + c + 2][wk : wk + size]
        o = column + c
        r = 0
        while r + 4 <= num_rows:
            x0 = x[r][k : k + size]
            x1 = x[r + 1][k : k + size]
            x2 = x[r + 2][k : k + size]
            x3 = x[r + 3][k : k + size]
            a0 = a1 = a2 = b0 = b1 = b2 = np.float32(0)
            c0 = c1 = c2 = d0 = d1 = d2 = np.float32(0)
            for i in range(size):
                u, v, t = w0[i], w1[i], w2[i]
                a0 += x0[i] * u
                a1 += x0[i] * v
                a2 += x0[i] * t
                b0 += x1[i] * u
                b1 += x1[i] * v
                b2 += x1[i] * t
                c0 += x2[i] * u
                c1 += x2[i] * v
                c2 += x2[i] * t
                d0 += x3[i] * u
                d1 += x3[i] * v
                d2 += x3[i] * t
            out[r, o] += a0
            out[r, o + 1] += a1
            out[r, o + 2] += a2
            out[r + 1, o] += b0
            out[r + 1, o + 1] += b1
            out[r + 1, o + 2] += b2
            out[r + 2, o] += c0
            out[r + 2, o + 1] += c1
            out[r + 2, o + 2] += c2
            out[r + 3, o] += d0
            out[r + 3, o + 1] += d1
            out[r + 3, o + 2] += d2
            r += 4
        if r + 2 <= num_rows:
            x0 = x[r][k : k + size]
            x1 = x[r + 1][k : k + size]
            a0 = a1 = a2 = b0 = b1 = b2 = np.float32(0)
            for i in range(size):
                u, v, t = w0[i], w1[i], w2[i]
                a0 += x0[i] * u
                a1 += x0[i] * v
                a2 += x0[i] * t
                b0 += x1[i] * u
                b1 += x1[i] * v
                b2 += x1[i] * t
            out[r, o] += a0
            out[r, o + 1] += a1
            out[r, o + 2] += a2
            out[r + 1, o] += b0
            out[r + 1, o + 1] += b1
            out[r + 1, o + 2] += b2
            r += 2
        if r < num_rows:
            x0 = x[r][k : k + size]
            a0 = a1 = a2 = np.float32(0)
            for i in range(size):
                a0 += x0[i] * w0[i]
                a1 += x0[i] * w1[i]
                a2 += x0[i] * w2[i]
            out[r, o] += a0
            out[r, o + 1] += a1
            out[r, o + 2] += a2
        c += 3
    while c < num:  # the last one or two of all
        w0 = w[row + c][wk : wk + size]
        for r in range(num_rows):
            x0 = x[r][k : k + size]
            a0 = np.float32(0)
            for i in range(size):
                a0 += x0[i] * w0[i]
            out[r, column + c] += a0
        c += 1


@_compiled
def _begin(out: Floats, bias: Floats, has_bias: bool, column: int, num: int) -> None:
    """Begin the sums of some columns with the bias."""
    for r in range(out.shape[0]):
        for c in range(column, column + num):
            out[r, c] = bias[c] if has_bias else np.float32(0)


@_compiled
def _widen(w: NDArray[np.uint16], wide: Floats, is_half: bool) -> None:
    """Convert 16-bit weights to float32."""
    if not is_half:  # bfloat16 is the upper half of a float32
        for i in range(len(w)):
            wide[i] = _as_float(np.uint32(w[i]) << np.uint32(16))
        return
    for i in range(len(w)):
        half = np.uint32(w[i])
        bits = (half & np.uint32(0x7FFF)) << np.uint32(13)
        # Exponents have a bias that is less by 112, those of subnormal numbers, too. The largest
        # exponent is that of infinity and NaN.
        is_finite = (half & np.uint32(0x7C00)) != np.uint32(0x7C00)
        value = _as_float(bits) * np.float32(2.0**112)
        value = value if is_finite else _as_float(bits | np.uint32(0x7F800000))
        wide[i] = -value if half & np.uint32(0x8000) else value


@job
def run_job(address: Any) -> None:
    """Run what other threads leave of a job."""
    d = numba.carray(address, (JOB_SIZE,), np.int64)
    num_rows, num_inputs, num_columns = d[NUM_ROWS], d[NUM_INPUTS], d[NUM_COLUMNS]
    x = numba.carray(_pointer(d[INPUTS]), (num_rows, num_inputs), np.float32)
    out = numba.carray(_pointer(d[RESULTS]), (num_rows, num_columns), np.float32)
    bias = numba.carray(_pointer(d[BIAS]), (num_columns,), np.float32)
    whole = numba.carray(_pointer(d[WEIGHTS]), (num_columns, num_inputs), np.float32)
    narrow = numba.carray(_pointer(d[WEIGHTS]), (num_columns, num_inputs), np.uint16)
    is_whole, is_half = d[FORMAT] == FLOAT32, d[FORMAT] == FLOAT16
    scratch = d[SCRATCH_AT] + 4 * SCRATCH * _take(d.ctypes.data + 8 * NEXT_THREAD, 1)
    wide = numba.carray(_pointer(scratch), (PANEL, DEPTH), np.float32)
    while True:
        start = _take(d.ctypes.data + 8 * NEXT_COLUMN, d[CHUNK])
        if start >= num_columns:
            break
        stop = min(start + d[CHUNK], num_columns)
        for column in range(start, stop, PANEL):
            num = min(PANEL, stop - column)
            _begin(out, bias, d[BIAS] != 0, column, num)
            for k in range(0, num_inputs, DEPTH):
                size = min(DEPTH, num_inputs - k)
                if is_whole:
                    _add_products(x, whole, column, out, column, num, k, size, k)
                    continue
                for c in range(num):
                    _widen(narrow[column + c][k : k + size], wide[c], is_half)
                _add_products(x, wide, 0, out, column, num, k, size, 0)
