"""Every compiled function of this package, and nothing else: attention of several calls at once.

The rows of a call are what its tokens ask by the query heads that share keys. Scores come in tiles,
as the results of linear layers do; a softmax is renormalised with each block of keys, so that keys
and values are read once, for all rows.

Source: FlashAttention (arXiv 2205.14135), algorithm 1.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lade.products._kernels import (
    BFLOAT16,
    FLOAT32,
    FLOATS,
    LANES,
    PER_LINE,
    ROWS,
    WIDTHS,
    add_products,
    at,
    job,
    load_wide,
    pointer,
    take,
)

# A job is an int64 array: addresses of the parts and places, int64 [calls, 4 and 5]; how many
# calls, key heads, and query heads that share one; numbers of a key and of a value; their format.
# Then of queries, float32, the address, and bytes from one head and one token to the next; of
# results, float32 [tokens, query heads, numbers of a value], the address; the factor of scores, as
# the bits of a float32; the address of float32 [threads, `scratch_size`]; the next thread, and the
# next task.
PARTS, PLACES, NUM_PARTS, NUM_KEY_HEADS, NUM_SHARING, KEY_SIZE, VALUE_SIZE, FORMAT = range(8)
QUERIES, QUERY_HEAD, QUERY_TOKEN, RESULTS, SCALING, SCRATCH, NEXT_THREAD, NEXT = range(8, 16)
JOB_SIZE = 16
# What writes keys and values has the same first members, but sizes in bytes and no heads that
# share; then, of new keys, the address, and bytes from one head and one token to the next; and the
# same of values.
NEW, WRITE_SIZE = 7, 13

# A part is a call's first token, among those of all; how many tokens; the address of its mask, bool
# [tokens, keys], or 0 if they see all keys; bytes from one row of that to the next. A place is the
# address of the first key, bytes from one head to the next, both of values, and the number of keys.
FIRST, NUM_TOKENS, MASK, MASK_ROW = range(4)
KEYS, KEY_HEAD, VALUES, VALUE_HEAD, NUM_KEYS = range(5)

BLOCK = 64  # keys that the first cache holds
_MOST_ROWS = 64  # of a task
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
        end = builder.append_basic_block("end")
        size = builder.add(builder.mul(num_rows, _INT64(8)), num_vectors)
        switch = builder.switch(builder.add(builder.mul(format_, _INT64(64)), size), end)
        for of_format in WIDTHS:
            for rows in range(1, ROWS + 1):
                for vectors in (1, _VECTORS):
                    block = builder.append_basic_block("sums")
                    switch.add_case(_INT64(64 * of_format + 8 * rows + vectors), block)
                    builder.position_at_end(block)
                    _write_sums(builder, of_format, range(rows), range(vectors), given)
                    builder.branch(end)
        builder.position_at_end(end)
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


@job
def attend_job(address: Any) -> None:
    """Run what other threads leave of a job: tasks are of one call, key head and some rows."""
    d = numba.carray(address, (JOB_SIZE,), np.int64)
    num_parts, num_heads, num_sharing = d[NUM_PARTS], d[NUM_KEY_HEADS], d[NUM_SHARING]
    key_size, value_size, format_ = d[KEY_SIZE], d[VALUE_SIZE], d[FORMAT]
    parts = numba.carray(pointer(d[PARTS]), (num_parts, 4), np.int64)
    places = numba.carray(pointer(d[PLACES]), (num_parts, 5), np.int64)
    scaling = numba.carray(pointer(d.ctypes.data + 8 * SCALING), (1,), np.float32)[0]
    width = 4 if format_ == FLOAT32 else 2
    thread = take(d.ctypes.data + 8 * NEXT_THREAD, 1)
    row_size = BLOCK + key_size + value_size + 2
    scratch = d[SCRATCH] + 4 * thread * _MOST_ROWS * row_size
    scores = numba.carray(pointer(scratch), (_MOST_ROWS, BLOCK), np.float32)
    scratch += 4 * _MOST_ROWS * BLOCK
    queries = numba.carray(pointer(scratch), (_MOST_ROWS, key_size), np.float32)
    scratch += 4 * _MOST_ROWS * key_size
    sums = numba.carray(pointer(scratch), (_MOST_ROWS, value_size), np.float32)
    scratch += 4 * _MOST_ROWS * value_size
    peaks = numba.carray(pointer(scratch), (_MOST_ROWS,), np.float32)
    totals = numba.carray(pointer(scratch + 4 * _MOST_ROWS), (_MOST_ROWS,), np.float32)
    task = take(d.ctypes.data + 8 * NEXT, 1)
    num_before = 0
    for part in range(num_parts):
        first, num_tokens, mask = parts[part, FIRST], parts[part, NUM_TOKENS], parts[part, MASK]
        num_groups = -(-num_sharing * num_tokens // _MOST_ROWS)
        while task < num_before + num_heads * num_groups:
            head, group = (task - num_before) // num_groups, (task - num_before) % num_groups
            start = group * _MOST_ROWS
            num_rows = min(_MOST_ROWS, num_sharing * num_tokens - start)
            for row in range(num_rows):
                query_head = head * num_sharing + (start + row) // num_tokens
                token = first + (start + row) % num_tokens
                source = d[QUERIES] + query_head * d[QUERY_HEAD] + token * d[QUERY_TOKEN]
                query = numba.carray(pointer(source), (key_size,), np.float32)
                take_query(query, queries[row], format_, scaling)
                fill(sums[row], _F(0))
                peaks[row], totals[row] = -np.inf, _F(0)
            num_keys = places[part, NUM_KEYS]
            keys = places[part, KEYS] + head * places[part, KEY_HEAD]
            values = places[part, VALUES] + head * places[part, VALUE_HEAD]
            for key in range(0, num_keys, BLOCK):
                num = min(BLOCK, num_keys - key)
                of_block = keys + width * key * key_size
                for row in range(num_rows):
                    fill(scores[row], _F(0))
                x = queries.ctypes.data, 4 * key_size, num_rows
                y = scores.ctypes.data, 4 * BLOCK
                add_products(format_, x, (of_block, width * key_size, num), y, key_size)
                for row in range(num_rows):
                    of_row = scores[row, :num]
                    if mask != 0:
                        place = mask + (start + row) % num_tokens * parts[part, MASK_ROW] + key
                        sees = numba.carray(pointer(place), (num,), np.uint8)
                        for i in range(num):
                            of_row[i] = of_row[i] if sees[i] else -_F(np.inf)
                    weigh(of_row, peaks[row : row + 1], totals[row : row + 1], sums[row])
                of_block = values + width * key * value_size
                add_values(format_, scores, num_rows, of_block, num, value_size, sums)
            for row in range(num_rows):
                query_head = head * num_sharing + (start + row) // num_tokens
                token = first + (start + row) % num_tokens
                index = token * num_heads * num_sharing + query_head
                place = pointer(d[RESULTS] + 4 * index * value_size)
                result = numba.carray(place, (value_size,), np.float32)
                for i in range(value_size):
                    result[i] = sums[row, i] / totals[row]
            task = take(d.ctypes.data + 8 * NEXT, 1)
        num_before += num_heads * num_groups


@job
def write_job(address: Any) -> None:
    """Copy the keys and values of each call's tokens to the end of its place."""
    d = numba.carray(address, (WRITE_SIZE,), np.int64)
    num_parts, num_heads = d[NUM_PARTS], d[NUM_KEY_HEADS]
    parts = numba.carray(pointer(d[PARTS]), (num_parts, 4), np.int64)
    places = numba.carray(pointer(d[PLACES]), (num_parts, 5), np.int64)
    for what in range(2):
        size, new = d[KEY_SIZE + what], NEW + 3 * what
        for part in range(num_parts):
            num_tokens, place = parts[part, NUM_TOKENS], places[part, KEYS + 2 * what]
            place += (places[part, NUM_KEYS] - num_tokens) * size
            for head in range(num_heads):
                for token in range(num_tokens):
                    source = d[new] + head * d[new + 1]
                    source += (parts[part, FIRST] + token) * d[new + 2]
                    target = place + head * places[part, KEY_HEAD + 2 * what] + token * size
                    old = numba.carray(pointer(source), (size,), np.uint8)
                    copy = numba.carray(pointer(target), (size,), np.uint8)
                    for i in range(size):
                        copy[i] = old[i]


def scratch_size(key_size: int, value_size: int) -> int:
    """Return how many float32 each thread of a job needs."""
    return _MOST_ROWS * (BLOCK + key_size + value_size + 2)
