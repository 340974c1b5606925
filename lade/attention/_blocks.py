"""Attention of a few rows, block by block of keys: what the kernels of calls and forwards share.

Scores come in tiles, as the results of linear layers do; a softmax is renormalised with each block
of keys, so that keys and values are read once, for all rows.

Source: FlashAttention (arXiv 2205.14135), algorithm 1.
"""

from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lade.products._tiles import (
    BFLOAT16,
    FLOAT32,
    FLOATS,
    LANES,
    PER_LINE,
    ROWS,
    WIDTHS,
    at,
    by_case,
    load_wide,
)

BLOCK = 64  # keys that the first cache holds
_VECTORS = 4 if LANES == 16 else 2  # of values whose sums registers hold, for ROWS rows
_FAST = {"contract", "reassoc", "nsz", "arcp"}
_INT64, _FLOAT = ir.IntType(64), ir.FloatType()
_F = np.float32


@intrinsic  # type: ignore[untyped-decorator]
def as_float(typing_context: Any, bits: Any) -> Any:
    """Return the float32 of some bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _sum_values(typing_context: Any, of: Any) -> Any:
    """Add values to the results of some rows, each times the row's weight for it.

    Args:
        typing_context: Numba's.
        of: format of the values; number of rows, 1 to ROWS, and of vectors, _VECTORS or 1; address
            of the first weight, float32, and bytes from one row to the next; address of the first
            value, and bytes from one to the next; address of the first result, and bytes from one
            row to the next; number of values.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        format_, num_rows, num_vectors, *given = cgutils.unpack_tuple(builder, arguments[0])
        size = builder.add(builder.mul(num_rows, _INT64(8)), num_vectors)
        cases = {
            64 * of_format + 8 * rows + vectors: partial(
                _write_sums, builder, of_format, range(rows), range(vectors), given
            )
            for of_format in WIDTHS
            for rows in range(1, ROWS + 1)
            for vectors in (1, _VECTORS)
        }
        by_case(builder, builder.add(builder.mul(format_, _INT64(64)), size), cases)
        return context.get_dummy_value()

    return types.void(of), generate


def _write_sums(
    build: Any,
    format_: int,
    rows: range,
    vectors: range,
    given: Any,
) -> None:
    """Write the code of `_sum_values` for one format and size, given the rest of what it takes."""
    weights, weight_step, values, value_step, results, result_step, num_values = given
    places = [
        [
            at(build, build.add(results, build.mul(result_step, _INT64(row))), index, 4, FLOATS)
            for index in (_INT64(LANES * vector) for vector in vectors)
        ]
        for row in rows
    ]
    sums = [
        [cgutils.alloca_once_value(build, build.load(place, align=4)) for place in of_row]
        for of_row in places
    ]
    of_rows = [build.add(weights, build.mul(weight_step, _INT64(row))) for row in rows]
    nothing = ir.Constant(FLOATS, ir.Undefined)
    everywhere = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    with cgutils.for_range(build, num_values) as loop:
        line = build.add(values, build.mul(value_step, loop.index))
        wide = [
            load_wide(build, format_, line, _INT64(LANES * vector), FLOATS) for vector in vectors
        ]
        for of_row, sums_of_row in zip(of_rows, sums, strict=True):
            weight = build.load(at(build, of_row, loop.index, 4, _FLOAT), align=4)
            one = build.insert_element(nothing, weight, ir.IntType(32)(0))
            alike = build.shuffle_vector(one, nothing, everywhere)
            for vector, place in zip(wide, sums_of_row, strict=True):
                product = build.fmul(alike, vector, flags=("contract",))
                build.store(build.fadd(build.load(place), product, flags=("contract",)), place)
    for of_row, sums_of_row in zip(places, sums, strict=True):
        for place, total in zip(of_row, sums_of_row, strict=True):
            build.store(build.load(total), place, align=4)


@numba.njit(nogil=True, error_model="numpy")
def fill(numbers, by):  # type: ignore[no-untyped-def]
    for i in range(len(numbers)):
        numbers[i] = by


@numba.njit(nogil=True, error_model="numpy", fastmath={*_FAST, "nnan"})
def _largest(scores):  # type: ignore[no-untyped-def]
    most = scores[0]
    for score in scores:
        most = max(most, score)
    return most


@numba.njit(nogil=True, error_model="numpy", fastmath=_FAST)
def exponential(number):  # type: ignore[no-untyped-def]
    """Return e to the power of a number up to 87; of one below -87 about that of -87.

    2 to the power of a whole number is a float's exponent, of the rest, which is up to a half, a
    Taylor series of six terms up to 1e-7 of it.
    """
    bounded = max(number * _F(1.4426950408889634), _F(-126))
    whole = np.floor(bounded + _F(0.5))
    rest = bounded - whole
    series = _F(1.5403530e-4)
    series = series * rest + _F(1.3333558e-3)
    series = series * rest + _F(9.6181291e-3)
    series = series * rest + _F(5.5504109e-2)
    series = series * rest + _F(2.4022651e-1)
    series = series * rest + _F(6.9314718e-1)
    series = series * rest + _F(1)
    return series * as_float(np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)))


@numba.njit(nogil=True, error_model="numpy", fastmath=_FAST)
def _exponentiate(scores, peak):  # type: ignore[no-untyped-def]
    """Replace each score by e to the power of what it has above the peak; return their sum."""
    total = _F(0)
    for i in range(len(scores)):
        above = scores[i] - peak
        result = _F(0) if above < _F(-87) else exponential(above)
        scores[i] = result
        total += result
    return total


@numba.njit(nogil=True, error_model="numpy")
def take_query(source, target, format_, scaling):  # type: ignore[no-untyped-def]
    """Scale a query, and arrange it as tiles take inputs of a format: pairs of bfloat16 apart."""
    size = len(source)
    num_paired = size // PER_LINE * PER_LINE if format_ == BFLOAT16 else 0
    for start in range(0, num_paired, 2 * LANES):
        for i in range(start, start + LANES):
            target[i] = source[2 * i - start] * scaling
            target[i + LANES] = source[2 * i - start + 1] * scaling
    for i in range(num_paired, size):
        target[i] = source[i] * scaling


@numba.njit(nogil=True, error_model="numpy")
def add_values(format_, scores, num_rows, values, num_values, size, results):  # type: ignore[no-untyped-def]
    """Add values, weighted by scores [num_rows, BLOCK], to results [num_rows, size]."""
    width, start = 4 if format_ == FLOAT32 else 2, 0
    while start < size:
        num_vectors = _VECTORS if start + LANES * _VECTORS <= size else 1
        for row in range(0, num_rows, ROWS):
            of_sums = (
                format_,
                min(ROWS, num_rows - row),
                num_vectors,
                scores.ctypes.data + 4 * row * BLOCK,
                4 * BLOCK,
                values + width * start,
                width * size,
                results.ctypes.data + 4 * (row * size + start),
                4 * size,
                num_values,
            )
            _sum_values(of_sums)
        start += LANES * num_vectors


@numba.njit(nogil=True, error_model="numpy")
def weigh(scores, peak, total, sums):  # type: ignore[no-untyped-def]
    """Turn scores of a row into weights, and what it has summed so far into that of these."""
    new_peak = max(peak[0], _largest(scores))
    if new_peak == -np.inf:  # it has seen nothing yet
        fill(scores, _F(0))
        return
    if new_peak > peak[0]:
        shrink = _F(np.exp(peak[0] - new_peak))
        total[0] *= shrink
        for i in range(len(sums)):
            sums[i] *= shrink
        peak[0] = new_peak
    total[0] += _exponentiate(scores, new_peak)
