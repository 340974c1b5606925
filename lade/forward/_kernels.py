"""Every compiled function of this package, and nothing else: a decoder's forward as one job.

All threads run the same phases in the same order. A phase is divided into pieces of work; each
thread takes pieces until none is left, and goes on when all are done. So a thread that comes late,
or not at all, delays no other. All numbers are float32, whatever weights are stored in.
"""

import math
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from lade.forward import words as w
from lade.forward._digits import write_digits
from lade.forward._experts import group, leave_groups, select
from lade.forward._packed import STRIP
from lade.forward._tiles import (
    BLOCK,
    DEPTH,
    FEATURES,
    FLOAT32,
    LANES,
    add_products,
    add_rows,
    call_compiled,
    compiled,
    compiled_with,
    inlined,
    instruction,
    job,
    pointer,
    run_tiles,  # noqa: F401 — what jobs call
    take,
)
from lade.forward._workers import end, look, next_phase, report, wait_within

_MOST_ROWS = BLOCK  # rows of queries in a piece of attention
_UNIT, _MOST_COLUMNS = (32, 192) if LANES == 16 else (48, 192)
_FEW_CHOICES = 64  # choices of experts whose results for many columns fit into the second cache
# Sums of a piece of an expert's columns that lie side by side: in rows of 11 kilobytes instead of
# 768 bytes, a core reads them at 15 GB/s instead of 10.
_WIDE = 16384
_FAST = {"contract", "reassoc", "nsz", "arcp"}
# Powers of e whose exponents of 2 float32 holds with room to spare: of numbers to about 3 million.
_ORDINARY = 2.0**22
_FLOAT = ir.FloatType()
_F = np.float32

_summing = compiled_with(fastmath=_FAST)


@instruction(types.float32)
def _fused(builder: Any, of: Any) -> Any:
    """Return the product of two numbers plus a third, rounded once if the CPU fuses them."""
    first, second, third = cgutils.unpack_tuple(builder, of)
    if "sse2" in FEATURES and not FEATURES.get("fma"):
        return builder.fadd(builder.fmul(first, second), third)
    return builder.fma(first, second, third)


@instruction(types.float32, types.int32)
def _as_float(builder: Any, bits: Any) -> Any:
    """Return the float32 of some bits."""
    return builder.bitcast(bits, _FLOAT)


# --- rows ---------------------------------------------------------------------------------------


@compiled
def _row(address, size):  # type: ignore[no-untyped-def]
    return numba.carray(pointer(address), (size,), np.float32)


@compiled
def _copy(source, target):  # type: ignore[no-untyped-def]
    for i in range(len(source)):
        target[i] = source[i]


@compiled
def _fill(numbers, by):  # type: ignore[no-untyped-def]
    for i in range(len(numbers)):
        numbers[i] = by


@compiled
def _number(words, index):  # type: ignore[no-untyped-def]
    return _as_float(np.int32(words[index]))


@_summing
def _sum(row):  # type: ignore[no-untyped-def]
    total = _F(0)
    for number in row:
        total += number
    return total


@_summing
def _sum_of_squares(row, mean):  # type: ignore[no-untyped-def]
    total = _F(0)
    for number in row:
        total += (number - mean) * (number - mean)
    return total


@compiled
def _normalize(row, of, out):  # type: ignore[no-untyped-def]
    """Normalize a row as LayerNorm or RMSNorm do."""
    size, flags = _F(len(row)), of[w.FLAGS]
    mean = _sum(row) / size if flags & w.CENTERS else _F(0)
    factor = _F(1) / np.sqrt(_sum_of_squares(row, mean) / size + _number(of, w.EPS))
    for i in range(len(row)):
        out[i] = (row[i] - mean) * factor
    if of[w.NORM_WEIGHT] != 0:
        weight = _row(of[w.NORM_WEIGHT], len(row))
        one = _F(1) if flags & w.ADDS_ONE else _F(0)
        for i in range(len(row)):
            out[i] = out[i] * (weight[i] + one)
    if of[w.NORM_BIAS] != 0:
        bias = _row(of[w.NORM_BIAS], len(row))
        for i in range(len(row)):
            out[i] = out[i] + bias[i]


@compiled
def _turn(row, cos, sin, straight, turned, how):  # type: ignore[no-untyped-def]
    """Turn the first numbers of a head by the angles of its position."""
    size = len(cos)
    half = size // 2
    if how & w.SORTS:
        for i in range(half):
            turned[i], turned[half + i] = row[2 * i], row[2 * i + 1]
        _copy(turned[:size], row)
    for i in range(size):
        straight[i] = row[i] * cos[i]
    if how & w.HALVES:
        for i in range(half):
            turned[i] = -row[half + i] * sin[i]
            turned[half + i] = row[i] * sin[half + i]
    else:
        for i in range(half):
            turned[2 * i] = -row[2 * i + 1] * sin[2 * i]
            turned[2 * i + 1] = row[2 * i] * sin[2 * i + 1]
    for i in range(size):
        row[i] = straight[i] + turned[i]


# The following functions are compiled without fast math: neither the length of a vector nor its end
# may change a bit.


@compiled
def _within(number, bound):  # type: ignore[no-untyped-def]
    """Clamp a number to a bound on both sides; NaN stays."""
    return -bound if number < -bound else bound if number > bound else number


@compiled
def _exponent(number):  # type: ignore[no-untyped-def]
    """Return the integer exponent of the power of 2 nearest to e to the power of a number."""
    return np.floor(_fused((number, _F(1.4426950408889634), _F(0.5))))


@compiled
def _mantissa(number, exponent):  # type: ignore[no-untyped-def]
    """Return e to the power of a number, divided by 2 to the power of its exponent.

    The remaining power is at most ln(2) / 2; six terms of the Taylor series give it to 1e-7.
    """
    rest = _fused((exponent, _F(-0.6931471805599453), number))
    series = _fused((_F(1 / 720), rest, _F(1 / 120)))
    for term in (_F(1 / 24), _F(1 / 6), _F(1 / 2), _F(1), _F(1)):
        series = _fused((series, rest, term))
    return series


@compiled
def _scale(exponent):  # type: ignore[no-untyped-def]
    """Return 2 to the power of an integer of at least -126; 0 for a lower one."""
    bounded = exponent if exponent > _F(-126) else _F(-126)
    power = _as_float((np.int32(bounded) + np.int32(127)) << np.int32(23))
    return _F(0) if exponent < _F(-126) else power


@compiled
def _exponential(number):  # type: ignore[no-untyped-def]
    """Return e to the power of a number of at most 89: infinity there, and 0 from -88 down."""
    number = _F(-100) if number < _F(-100) else number  # NaN stays
    exponent = _exponent(number)
    return _mantissa(number, exponent) * _scale(exponent)


@compiled
def _exponential_of_negative(number):  # type: ignore[no-untyped-def]
    """Return e to the power of minus any number, as `_exponential` has it."""
    return _exponential(-(_F(-89) if number < _F(-89) else number))


@compiled
def _power(number):  # type: ignore[no-untyped-def]
    """Return e to the power of any number: a mantissa, and an exponent of 2, float64.

    Beyond `_ORDINARY`, numbers that differ are powers of 2 apart, so mantissas need no digits.
    """
    exponent = _exponent(number)
    if abs(exponent) < _ORDINARY:
        return _mantissa(number, exponent), np.float64(exponent)
    wide = np.float64(number)
    whole = np.floor(wide * 1.4426950408889634 + 0.5)
    rest = _within(_F(wide - whole * 0.6931471805599453), _F(0.35))
    return _F(0) if wide == -np.inf else _mantissa(rest, _F(0)), whole


@compiled
def _squash(row):  # type: ignore[no-untyped-def]
    """Replace each number by its hyperbolic tangent."""
    for i in range(len(row)):
        bounded = _within(row[i], _F(10))
        power = _exponential(_F(2) * bounded)
        # Near 0, the difference would cancel digits that the series keeps.
        square = bounded * bounded
        near = bounded * (_F(1) - square * (_F(1 / 3) - square * _F(2 / 15)))
        far = (power - _F(1)) / (power + _F(1))
        row[i] = near if square < _F(1e-3) else far


@compiled
def _silu(row):  # type: ignore[no-untyped-def]
    for i in range(len(row)):
        row[i] = row[i] / (_F(1) + _exponential_of_negative(row[i]))


@compiled
def _sigmoid(row):  # type: ignore[no-untyped-def]
    for i in range(len(row)):
        row[i] = _F(1) / (_F(1) + _exponential_of_negative(row[i]))


@compiled
def _softmax(row):  # type: ignore[no-untyped-def]
    peak = row[0]
    for number in row:
        peak = max(peak, number)
    for i in range(len(row)):
        row[i] = _exponential(row[i] - peak)
    total = _sum(row)
    for i in range(len(row)):
        row[i] = row[i] / total


@compiled
def _activate(row, how, wide):  # type: ignore[no-untyped-def]
    """Apply an activation to numbers in place; `wide` is scratch of the same size."""
    if how == w.SILU:
        _silu(row)
    elif how == w.GELU:
        for i in range(len(row)):
            row[i] = _F(0.5) * row[i] * (_F(1) + _F(math.erf(row[i] * _F(0.7071067811865476))))
    elif how == w.GELU_TANH:
        for i in range(len(row)):
            number = row[i]
            cubed = _F(0.044715) * number * number * number
            wide[i] = _F(0.7978845608028654) * (number + cubed)
        _squash(wide[: len(row)])
        for i in range(len(row)):
            row[i] = _F(0.5) * row[i] * (_F(1) + wide[i])
    else:
        for i in range(len(row)):
            row[i] = max(row[i], _F(0))
        if how == w.RELU_SQUARED:
            for i in range(len(row)):
                row[i] = row[i] * row[i]


# --- a softmax, block by block -------------------------------------------------------------------
# It is renormalised with each block of keys, so that keys and values are read once, for all rows.
# Source: FlashAttention (arXiv 2205.14135), algorithm 1. But it is renormalised by powers of 2,
# which round nothing: neither the begin of blocks nor hidden keys in between change a bit.


@compiled_with(fastmath={*_FAST, "nnan"})
def _largest(scores):  # type: ignore[no-untyped-def]
    most = scores[0]
    for score in scores:
        most = max(most, score)
    return most


@compiled
def _weigh(scores, peak, total, sums):  # type: ignore[no-untyped-def]
    """Turn a row's scores of a block of keys into weights, and rescale the row's sums to them.

    Args:
        scores: scores of the block; minus infinity for hidden keys and behind the last key.
        peak: exponent of the largest weight so far, float64; all weights are divided by that power
            of 2.
        total: sum of the weights so far.
        sums: weighted sums of the values so far.
    """
    new_peak = _exponent(_largest(scores))
    new_peak = _F(peak[0]) if peak[0] > new_peak else new_peak
    if not abs(new_peak) < _F(_ORDINARY):
        _weigh_any(scores, peak, total, sums)
        return
    _raise_peak(np.float64(new_peak), peak, total, sums)
    for i in range(BLOCK):
        exponent = _exponent(scores[i])
        relative = exponent - new_peak
        bounded = relative if relative > _F(-126) else _F(-126)
        power = _as_float((np.int32(bounded) + np.int32(127)) << np.int32(23))
        weight = _mantissa(scores[i], exponent) * power
        scores[i] = _F(0) if relative < _F(-126) else weight


@compiled
def _weigh_any(scores, peak, total, sums):  # type: ignore[no-untyped-def]
    """Do as `_weigh`, slowly, for NaN, infinity and scores of any size; the same bits of others."""
    num_visible, new_peak = 0, peak[0]
    for score in scores:
        num_visible += 1 if score != -_F(np.inf) else 0
    if num_visible == 0:
        _fill(scores, _F(0))
        return
    for score in scores:
        _, exponent = _power(score)
        new_peak = exponent if exponent > new_peak else new_peak
    _raise_peak(new_peak, peak, total, sums)
    for i in range(BLOCK):
        weight, exponent = _power(scores[i])
        scores[i] = weight * _scale(_F(exponent - new_peak))


@compiled
def _raise_peak(new_peak, peak, total, sums):  # type: ignore[no-untyped-def]
    """Divide a row's sums by a higher power of 2; see `_weigh`."""
    if new_peak > peak[0]:
        shrink = _scale(_F(peak[0] - new_peak))
        total[0] *= shrink
        for i in range(len(sums)):
            sums[i] *= shrink
        peak[0] = new_peak


@compiled
def _num_seen(sees):  # type: ignore[no-untyped-def]
    """Return the number of keys that a mask shows."""
    num = 0
    for each in sees:
        num += 1 if each else 0
    return num


@compiled
def _hide(scores, sees):  # type: ignore[no-untyped-def]
    """Set the scores of hidden keys to minus infinity."""
    for i in range(len(sees)):
        score = scores[i]
        scores[i] = score if sees[i] else -_F(np.inf)


@compiled
def _are_finite(address, num):  # type: ignore[no-untyped-def]
    """Return whether no number is infinite or NaN."""
    most, highest = np.int32(0), np.int32(0x7F800000)
    for bits in numba.carray(pointer(address), (num,), np.int32):
        most = max(most, np.int32(bits & highest))
    return most < highest


# --- pieces of a phase --------------------------------------------------------------------------


@compiled
def _share(num, num_threads, unit, most):  # type: ignore[no-untyped-def]
    """Return how many units a thread takes at once: several pieces each, but none too small."""
    return min(max(num // (8 * num_threads) // unit * unit, unit), most)


@inlined
def given_to_job(address):  # type: ignore[no-untyped-def]
    """Return what a layer's job is given, seven int64.

    They are the addresses of the forward's job and of the phase, the number of the phase among the
    layer's, and the addresses of the layer, its parts, its caches, and the thread's memory.
    """
    given = numba.carray(address, (7,), np.int64)
    g = numba.carray(pointer(given[0]), (w.JOB_SIZE,), np.int64)
    layer = numba.carray(pointer(given[3]), (w.LAYER_SIZE,), np.int64)
    parts = numba.carray(pointer(given[4]), (g[w.NUM_PARTS], 4), np.int64)
    caches = numba.carray(pointer(given[5]), (g[w.NUM_PARTS], w.CACHE_SIZE), np.int64)
    return g, given[1], given[2], layer, parts, caches, given[6]


@inlined
def described(g, number):  # type: ignore[no-untyped-def]
    """Return the row that describes experts, a recurrence or latents, counted from 1."""
    address = g[w.ADDITIONS] + 8 * w.LAYER_SIZE * (number - 1)
    return numba.carray(pointer(address), (w.LAYER_SIZE,), np.int64)


@compiled
def _write_digits(g, address, num, row):  # type: ignore[no-untyped-def]
    """Write the digits of some inputs of a row of products, if these are whole blocks."""
    if g[w.DIGITS] != 0 and num % w.DIGITS_BLOCK == 0:
        target = address + g[w.DIGITS] + w.DIGITS_APART * row
        write_digits((address, target, num // w.DIGITS_BLOCK))


@compiled
def _multiply_packed(g, inputs, num_inputs, num_rows, of, first, until, out, out_step):  # type: ignore[no-untyped-def]
    """Add some columns of a product with a packed weight; see `_packed.product_of`."""
    strip = (out + out_step * (num_rows + 1) + 63) // 64 * 64
    half, step, start = of[w.HALF], of[w.ROW_BYTES], first
    while start < until:
        stop, index, apart = until, start, 1
        if half != 0:
            stop, apart = min((start // half + 1) * half, until), 2
            index = start // (2 * half) * 2 * half + start % half * 2 + start // half % 2
        weight, target = of[w.WEIGHT] + step * index, out + 4 * (start - first)
        x = inputs, 4 * num_inputs, num_rows
        packed = weight, apart * step, stop - start
        call_compiled((of[w.PACKED], *x, *packed, target, out_step, num_inputs, strip, g[w.DIGITS]))
        start = stop


@compiled
def _add_across(g, format_, inputs, weights, results, size, totals):  # type: ignore[no-untyped-def]
    """Add products with weights whose columns lie side by side, input by input.

    Each is an address, and bytes from one row to the next; inputs also have a number of rows, of
    `size` numbers, and weights of columns, in a format. `totals` is memory for BLOCK numbers, one
    for each row.
    """
    (x, x_step, num_rows), (weight, step, num) = inputs, weights
    # Few at once: a power of 2 apart, more would push each other out of the first cache.
    few = LANES if num_rows > 1 else LANES // 2
    for k in range(0, size, few):
        values = weight + step * k, step, min(few, size - k)
        add_rows(g, format_, (x + 4 * k, x_step, num_rows), values, results, num, totals)


@compiled
def _multiply_across(g, inputs, num_inputs, num_rows, of, first, num, out, out_step):  # type: ignore[no-untyped-def]
    """Add some columns of a product with a weight whose columns lie side by side, input by input.

    Sums run along the columns.
    """
    format_ = of[w.ROW_BYTES]
    weight = of[w.WEIGHT] + (4 if format_ == FLOAT32 else 2) * first
    # The kernel also sums the inputs themselves; those sums are not used.
    totals = (out + out_step * num_rows + 63) // 64 * 64
    x = inputs, 4 * num_inputs, num_rows
    _add_across(g, format_, x, (weight, of[w.ACROSS], num), (out, out_step), num_inputs, totals)


@compiled
def _multiply(g, inputs, num_inputs, num_rows, of, first, until, out, out_step):  # type: ignore[no-untyped-def]
    """Write some columns of a matrix product, plus bias."""
    num = until - first
    for row in range(num_rows):
        _fill(_row(out + out_step * row, num), _F(0))
    if of[w.PACKED] != 0:
        _multiply_packed(g, inputs, num_inputs, num_rows, of, first, until, out, out_step)
    elif of[w.ACROSS] != 0:
        _multiply_across(g, inputs, num_inputs, num_rows, of, first, num, out, out_step)
    else:
        weight = of[w.WEIGHT] + 4 * first * num_inputs
        for k in range(0, num_inputs, DEPTH):
            x = inputs + 4 * k, 4 * num_inputs, num_rows
            weights = weight + 4 * k, 4 * num_inputs, num
            add_products(g, x, weights, (out, out_step), min(DEPTH, num_inputs - k))
    if of[w.BIAS] != 0:
        bias = _row(of[w.BIAS] + 4 * first, num)
        for row in range(num_rows):
            numbers = _row(out + out_step * row, num)
            for i in range(num):
                numbers[i] += bias[i]


@inlined
def _write_between(g, phase, inputs, num_inputs, num_rows, first, until, scratch):  # type: ignore[no-untyped-def]
    """Multiply inputs by the first factors of some low-rank additions."""
    added = numba.carray(pointer(g[w.ADDITIONS]), (until, w.LAYER_SIZE), np.int64)
    piece, num_before, num_done, out_step = take(phase, 1), 0, 0, 4 * _MOST_COLUMNS
    for number in range(first, until):
        of = added[number]
        num_pieces = -(-of[w.NUM_COLUMNS] // _UNIT)
        while piece < num_before + num_pieces:
            start = (piece - num_before) * _UNIT
            stop = min(start + _UNIT, of[w.NUM_COLUMNS])
            given = inputs, num_inputs, num_rows
            _multiply(g, *given, of, start, stop, scratch, out_step)
            for row in range(num_rows):
                target = g[w.BETWEEN] + 4 * (g[w.BETWEEN_SIZE] * row + of[w.START] + start)
                _copy(_row(scratch + out_step * row, stop - start), _row(target, stop - start))
            num_done += 1
            piece = take(phase, 1)
        num_before += num_pieces
    wait_within(g, phase, num_done, num_before)


@inlined
def _add_low_rank(g, of, num_rows, first, until, out, out_step, scratch):  # type: ignore[no-untyped-def]
    """Add the low-rank additions to some columns of a product."""
    num = until - first
    added = numba.carray(pointer(g[w.ADDITIONS]), (of[w.END_ADDED], w.LAYER_SIZE), np.int64)
    sums = _row(scratch, num)
    for number in range(of[w.FIRST_ADDED], of[w.END_ADDED]):
        addition = added[number]
        rank, times = addition[w.NUM_COLUMNS], _number(addition, w.TIMES)
        # Ranks are small: sums run along the columns, for which the factor is turned.
        second = numba.carray(pointer(scratch + 4 * _MOST_COLUMNS), (rank, num), np.float32)
        for i in range(num):
            row_of_second = _row(addition[w.SECOND] + 4 * (first + i) * rank, rank)
            for k in range(rank):
                second[k, i] = row_of_second[k]
        for row in range(num_rows):
            _fill(sums, _F(0))
            start = g[w.BETWEEN] + 4 * (g[w.BETWEEN_SIZE] * row + addition[w.START])
            between = _row(start, rank)
            for k in range(rank):
                for i in range(num):
                    sums[i] += between[k] * second[k, i]
            if addition[w.SECOND + w.BIAS] != 0:
                bias = _row(addition[w.SECOND + w.BIAS] + 4 * first, num)
                for i in range(num):
                    sums[i] += bias[i]
            numbers = _row(out + out_step * row, num)
            for i in range(num):
                numbers[i] += sums[i] * times


@inlined
def _run_products(g, phase, num_rows, layer, given, products, result, num_all, scratch):  # type: ignore[no-untyped-def]
    """Run products of the same inputs.

    Args:
        g, phase: the job, and the address of the phase.
        num_rows: number of rows of inputs.
        layer: numbers of the layer, if the product belongs to an MLP or to inputs.
        given: address of the inputs, and number of inputs in a row.
        products: PRODUCT_SIZE numbers for each product.
        result: use of the columns, and their address. TO_ROWS: float32 [rows, num_all], product
            after product. TO_INNER: inner states of an MLP, the first product activated and
            multiplied by the second. TO_INPUTS: the product activated and multiplied by inputs.
        num_all: number of columns.
        scratch: the thread's scratch memory.
    """
    (inputs, num_inputs), (kind, target) = given, result
    most = _MOST_COLUMNS // 2 if kind == w.TO_INNER else _MOST_COLUMNS
    step, out_step = _share(num_all, g[w.NUM_THREADS], _UNIT, most), 4 * _MOST_COLUMNS
    beside = scratch + num_rows * out_step
    wide = _row(beside, _MOST_COLUMNS)
    first, until = products[w.FIRST_ADDED], products[len(products) - w.PRODUCT_SIZE + w.END_ADDED]
    if first < until:
        _write_between(g, phase + 128, inputs, num_inputs, num_rows, first, until, scratch)
    start, num_done = take(phase, step), 0
    while start < num_all:
        stop, before = min(start + step, num_all), 0
        for product in range(0, len(products), w.PRODUCT_SIZE):
            of = products[product : product + w.PRODUCT_SIZE]
            if kind == w.TO_INNER:
                first, until = start, stop if of[w.WEIGHT] != 0 else start
                out = scratch + 2 * _MOST_COLUMNS * (product // w.PRODUCT_SIZE)
            else:
                first, until = max(start - before, 0), min(stop - before, of[w.NUM_COLUMNS])
                out = scratch + 4 * (before + first - start)
                before += of[w.NUM_COLUMNS]
            if first < until:
                x = inputs, num_inputs, num_rows
                _multiply(g, *x, of, first, until, out, out_step)
                if of[w.FIRST_ADDED] < of[w.END_ADDED]:
                    _add_low_rank(g, of, num_rows, first, until, out, out_step, beside)
        for row in range(num_rows):
            numbers = _row(scratch + out_step * row, stop - start)
            if kind == w.TO_INNER or kind == w.TO_INPUTS:
                _activate(numbers, layer[w.ACTIVATION], wide)
                beside_it = scratch + out_step * row + out_step // 2
                if kind == w.TO_INPUTS:
                    beside_it = layer[w.INPUTS] + 4 * (num_all * row + start)
                if kind == w.TO_INPUTS or products[w.PRODUCT_SIZE + w.WEIGHT] != 0:
                    others = _row(beside_it, stop - start)
                    for i in range(stop - start):
                        numbers[i] = numbers[i] * others[i]
            written = target + 4 * (num_all * row + start)
            _copy(numbers, _row(written, stop - start))
            if kind != w.TO_ROWS:
                _write_digits(g, written, stop - start, row)
        num_done += stop - start
        start = take(phase, step)
    end(g, phase, num_done, num_all)


@compiled
def _add_to_states(g, layer, norm, token, scratch):  # type: ignore[no-untyped-def]
    """Add the result of attention, MLP or inputs to a token's states, after its norm if any."""
    size = g[w.HIDDEN]
    states, added = _row(g[w.STATES] + 4 * size * token, size), _row(scratch, size)
    given = _row(g[w.ADDED] + 4 * size * token, size)
    of = layer[norm : norm + w.NORM_SIZE]
    if of[w.FLAGS] & w.IS_NORM:
        _normalize(given, of, added)
    else:
        _copy(given, added)
    factor = _number(layer, w.FACTOR)
    if factor != _F(1):
        for i in range(size):
            added[i] = added[i] * factor
    for i in range(size):
        states[i] = states[i] + added[i]
    last = w.OF_MLP if norm == w.POST_MLP else w.OF_ATTENTION
    of = layer[last : last + w.NORM_SIZE]
    if norm != w.POST_INPUTS and of[w.FLAGS] & w.IS_NORM:
        _normalize(states, of, added)
        _copy(added, states)
    if layer[w.SCALAR] != 0 and norm == (w.POST_INPUTS if layer[w.INPUT_SIZE] > 0 else w.POST_MLP):
        scalar = _row(layer[w.SCALAR], 1)[0]
        for i in range(size):
            states[i] = states[i] * scalar


@compiled
def _norm_states(g, of, token, index):  # type: ignore[no-untyped-def]
    """Write a token's states, after a norm if there is one, as inputs of the next product."""
    size = g[w.HIDDEN]
    states, normed = (
        _row(g[w.STATES] + 4 * size * token, size),
        _row(g[w.NORMED] + 4 * size * index, size),
    )
    if of[w.FLAGS] & w.IS_NORM:
        _normalize(states, of, normed)
    else:
        _copy(states, normed)
    _write_digits(g, normed.ctypes.data, size, index)


@inlined
def _run_states(g, phase, tokens, layer, norm, of, is_parallel, scratch):  # type: ignore[no-untyped-def]
    """Add the result of the last phase to the states, and write inputs of the next phase.

    Args:
        g, phase: the job, and the address of the phase.
        tokens: numbers of the tokens.
        layer: numbers of the layer whose result is added.
        norm: position in `layer` of the norm of that result; -1 if nothing is added.
        of: the norm of the next phase's inputs.
        is_parallel: whether the next phase gets the states from before the addition.
        scratch: the thread's scratch memory.
    """
    num = len(tokens)
    step = _share(num, g[w.NUM_THREADS], 1, 8)
    start, num_done = take(phase, step), 0
    while start < num:
        stop = min(start + step, num)
        for index in range(start, stop):
            for turn in range(2):
                if (turn == 0) == is_parallel:
                    _norm_states(g, of, tokens[index], index)
                elif norm >= 0:
                    _add_to_states(g, layer, norm, tokens[index], scratch)
        num_done += stop - start
        start = take(phase, step)
    end(g, phase, num_done, num)


@inlined
def _write_head(g, head, layer, caches, part, token, scratch):  # type: ignore[no-untyped-def]
    """Norm and rotate a query or key, and write it, or a value, where attention reads it.

    Args:
        g: the job.
        head: number of the head; queries come first, then keys, then values.
        layer: the layer's numbers.
        caches: the layer's addresses in the KV cache (CACHES).
        part: the token's part, and the token's number within it.
        token: the token's number among all parts.
        scratch: the thread's scratch memory.
    """
    num_heads, num_key_heads = layer[w.NUM_HEADS], layer[w.NUM_KEY_HEADS]
    of_key = layer[w.HEAD_SIZE]
    row = g[w.MIXED] + 4 * layer[w.MIXED_SIZE] * token
    is_query, is_value = head < num_heads, head >= num_heads + num_key_heads
    number = head if is_query else (head - num_heads) % num_key_heads
    num_groups = layer[w.NUM_GROUPS]
    group, within = divmod(number, (num_heads if is_query else num_key_heads) // num_groups)
    first = layer[w.FIRST_QUERY if is_query else w.FIRST_VALUE if is_value else w.FIRST_KEY]
    first += group * (num_heads + 2 * num_key_heads) // num_groups
    within *= layer[w.QUERY_STEP] if is_query else 1
    size = layer[w.RESULT_SIZE] if is_value else of_key
    given, out = _row(row + 4 * (first * of_key + within * size), size), _row(scratch, size)
    norm = w.QUERY_NORM if is_query else w.VALUE_NORM if is_value else w.KEY_NORM
    of = layer[norm : norm + w.NORM_SIZE]
    flags = of[w.FLAGS]
    if flags & w.IS_WHOLE:
        num = num_heads if is_query else num_key_heads
        whole = _row(row + 4 * first * size, num * size)
        normed = _row(scratch + 4 * size, num * size)
        _normalize(whole, of, normed)
        _copy(normed[number * size : (number + 1) * size], out)
    elif flags & w.IS_NORM and not flags & w.AFTER_TURN:
        _normalize(given, of, out)
    else:
        _copy(given, out)
    num_turned = 0 if is_value else layer[w.TURNED]
    if num_turned > 0:
        _turn(
            out,
            _row(layer[w.COS] + 4 * num_turned * token, num_turned),
            _row(layer[w.SIN] + 4 * num_turned * token, num_turned),
            _row(scratch + 4 * size, size),
            _row(scratch + 8 * size, size),
            layer[w.TURN],
        )
    if flags & w.AFTER_TURN:
        turned = _row(scratch + 4 * size, size)
        _copy(out, turned)
        _normalize(turned, of, out)
    if is_query:
        if layer[w.SCALED] != 0:
            factor = _row(g[w.FACTORS] + 4 * token, 1)[0]
            for i in range(size):
                out[i] = out[i] * factor
        _copy(out, _row(g[w.QUERIES] + 4 * (num_heads * token + head) * size, size))
    else:
        factor = _number(layer, w.VALUE_FACTOR)
        if is_value and factor != _F(1):
            for i in range(size):
                out[i] = out[i] * factor
        cache = caches[part[0]]
        first, step = (w.VALUES, w.VALUE_HEAD) if is_value else (w.KEYS, w.KEY_HEAD)
        slot = cache[w.NUM_KEYS] - part[2] + part[1]
        target = cache[first] + number * cache[step]
        _copy(out, _row(target + 4 * slot * size, size))


@inlined
def _write_heads(g, phase, layer, parts, caches, scratch):  # type: ignore[no-untyped-def]
    num_heads = layer[w.NUM_HEADS] + (0 if layer[w.READS] else 2 * layer[w.NUM_KEY_HEADS])
    num = g[w.NUM_TOKENS] * num_heads
    step = _share(num, g[w.NUM_THREADS], 1, num_heads)
    start, num_done = take(phase, step), 0
    while start < num:
        stop, part = min(start + step, num), 0
        for each in range(start, stop):
            token = each // num_heads
            while token >= parts[part, w.FIRST] + parts[part, w.NUM_NEW]:
                part += 1
            where = part, token - parts[part, w.FIRST], parts[part, w.NUM_NEW]
            _write_head(g, each % num_heads, layer, caches, where, token, scratch)
        num_done += stop - start
        start = take(phase, step)
    end(g, phase, num_done, num)


@inlined
def _attend_from(g, layer, part, cache, head, start, stop, scratch):  # type: ignore[no-untyped-def]
    """Attend from some rows of a part; a token has a row for each head that shares a key head.

    Without a mask, a token sees the tokens before it and itself.
    """
    num_sharing, num_rows = layer[w.NUM_HEADS] // layer[w.NUM_KEY_HEADS], stop - start
    of_key, size, more = layer[w.HEAD_SIZE], layer[w.RESULT_SIZE], layer[w.MORE_SIZE]
    whole = of_key + more
    scores = numba.carray(pointer(scratch), (_MOST_ROWS, BLOCK), np.float32)
    scratch += 4 * _MOST_ROWS * BLOCK
    queries = numba.carray(pointer(scratch), (_MOST_ROWS, whole), np.float32)
    scratch += 4 * _MOST_ROWS * whole
    sums = numba.carray(pointer(scratch), (_MOST_ROWS, size), np.float32)
    scratch += 4 * _MOST_ROWS * size
    peaks = numba.carray(pointer(scratch), (_MOST_ROWS,), np.float64)
    totals = _row(scratch + 8 * _MOST_ROWS, 2 * _MOST_ROWS)
    _fill(totals, _F(0))
    scaling, softcap = _number(layer, w.SCALING), _number(layer, w.SOFTCAP)
    for row in range(num_rows):
        token, query = divmod(start + row, num_sharing)
        index = (part[w.FIRST] + token) * layer[w.NUM_HEADS] + head * num_sharing + query
        given = _row(g[w.QUERIES] + 4 * index * whole, whole)
        for i in range(whole):
            queries[row, i] = given[i] * scaling
        _fill(sums[row], _F(0))
        peaks[row] = -np.inf
        if layer[w.SINKS] != 0:
            sink = _row(layer[w.SINKS] + 4 * (head * num_sharing + query), 1)[0]
            totals[row], peaks[row] = _power(sink)
    mask, num_before = part[w.MASK], cache[w.NUM_KEYS] - part[w.NUM_NEW]
    num_seen = cache[w.NUM_KEYS]
    if mask == 0:
        num_seen = num_before + (stop - 1) // num_sharing + 1
    keys = cache[w.KEYS] + head * cache[w.KEY_HEAD]
    values = cache[w.VALUES] + head * cache[w.VALUE_HEAD]
    for key in range(0, num_seen, BLOCK):
        num, num_hidden, num_seen_now = min(BLOCK, num_seen - key), 0, 0
        for row in range(num_rows):
            _fill(scores[row], _F(0))
        x, result = (queries.ctypes.data, 4 * whole, num_rows), (scores.ctypes.data, 4 * BLOCK)
        of_keys = keys + 4 * key * of_key, 4 * of_key, num
        add_products(g, x, of_keys, result, of_key)
        if more > 0:
            x = queries.ctypes.data + 4 * of_key, 4 * whole, num_rows
            of_keys = values + 4 * key * more, 4 * more, num
            add_products(g, x, of_keys, result, more)
        for row in range(num_rows):
            of_row, token = scores[row], (start + row) // num_sharing
            if softcap != _F(0):
                for i in range(BLOCK):
                    of_row[i] = of_row[i] / softcap
                _squash(of_row)
                for i in range(BLOCK):
                    of_row[i] = of_row[i] * softcap
            until = num
            if mask != 0:
                of_token = mask + token * part[w.MASK_ROW] + key
                sees = numba.carray(pointer(of_token), (num,), np.uint8)
                if row == 0 or (start + row) % num_sharing == 0:
                    num_seen_now = _num_seen(sees)
                num_hidden += num - num_seen_now
                if num_seen_now < num:
                    _hide(of_row, sees)
            else:
                until = min(num, max(num_before + token + 1 - key, 0))
                num_hidden += num - until
            _fill(of_row[until:], -_F(np.inf))
            _weigh(of_row, peaks[row : row + 1], totals[row : row + 1], sums[row])
        of_values = (values if more == 0 else keys) + 4 * key * size
        if num_hidden == 0 or _are_finite(of_values, num * size):
            targets = (sums.ctypes.data, 4 * size), size, totals.ctypes.data
            weights = scores.ctypes.data, 4 * BLOCK, num_rows
            add_rows(g, FLOAT32, weights, (of_values, 4 * size, num), *targets)
            continue
        for row in range(num_rows):  # a weight of 0 times an infinite hidden value is NaN
            token = (start + row) // num_sharing
            for i in range(num):
                sees_it = key + i <= num_before + token
                if mask != 0:
                    of_token = mask + token * part[w.MASK_ROW] + key
                    sees_it = numba.carray(pointer(of_token), (num,), np.uint8)[i] != 0
                if sees_it:
                    weight = scores.ctypes.data + 4 * (BLOCK * row + i), 0, 1
                    value = of_values + 4 * i * size, 0, 1
                    targets = (sums[row].ctypes.data, 0), size, totals.ctypes.data + 4 * row
                    add_rows(g, FLOAT32, weight, value, *targets)
    for row in range(num_rows):
        # A row that sees no key is 0, as torch has it.
        total = totals[row] if totals[row] != _F(0) else _F(1)
        for i in range(size):
            sums[row, i] = sums[row, i] / total
        token, query = divmod(start + row, num_sharing)
        query += head * num_sharing
        if more > 0:  # the rest follows
            index = (part[w.FIRST] + token) * layer[w.NUM_HEADS] + query
            _copy(sums[row], _row(g[w.QUERIES] + 4 * index * whole, size))
            continue
        token += part[w.FIRST]
        target = g[w.ATTENDED] + 4 * layer[w.ATTENDED_SIZE] * token
        if layer[w.FIRST_GATE] >= 0:
            first = size * (layer[w.FIRST_GATE] + layer[w.QUERY_STEP] * query)
            index = layer[w.MIXED_SIZE] * token + first
            gate = queries[row]
            _copy(_row(g[w.MIXED] + 4 * index, size), gate)
            _sigmoid(gate)
            for i in range(size):
                sums[row, i] = sums[row, i] * gate[i]
        _copy(sums[row], _row(target + 4 * query * size, size))
        _write_digits(g, target + 4 * query * size, size, token)


@inlined
def _attend(g, phase, layer, parts, caches, goes_on, scratch):  # type: ignore[no-untyped-def]
    num_parts, num_key_heads = g[w.NUM_PARTS], layer[w.NUM_KEY_HEADS]
    num_sharing = layer[w.NUM_HEADS] // num_key_heads
    # Each group of rows reads keys and values again, but threads without a group would idle.
    wanted = -(-4 * g[w.NUM_THREADS] // (num_key_heads * num_parts))
    piece, num_before, num_done = take(phase, 1), 0, 0
    for part in range(num_parts):
        num_rows = num_sharing * parts[part, w.NUM_NEW]
        of_group = min(max(-(-num_rows // wanted), 1), _MOST_ROWS)
        num_groups = -(-num_rows // of_group)
        while piece < num_before + num_key_heads * num_groups:
            head, group = divmod(piece - num_before, num_groups)
            start = group * of_group
            stop = min(start + of_group, num_rows)
            _attend_from(g, layer, parts[part], caches[part], head, start, stop, scratch)
            num_done += 1
            piece = take(phase, 1)
        num_before += num_key_heads * num_groups
    if goes_on:
        wait_within(g, phase, num_done, num_before)
    else:
        end(g, phase, num_done, num_before)


@job
def run_attention(address: Any) -> None:
    """Run the pieces of a phase that other threads have not taken; see `given_to_job`."""
    g, phase, step, layer, parts, caches, scratch = given_to_job(address)
    if step == 2:
        _write_heads(g, phase, layer, parts, caches, scratch)
    else:
        _attend(g, phase, layer, parts, caches, step != 3, scratch)  # latents go on afterwards


# --- short convolutions -------------------------------------------------------------------------


@compiled
def _taps_of(layer, start, num, memory):  # type: ignore[no-untyped-def]
    """Return the weights of some channels [TAPS, num], in a memory of their size."""
    taps = layer[w.TAPS]
    lying = _row(layer[w.CONVOLUTION] + 4 * start * taps, num * taps)
    weights = numba.carray(pointer(memory), (taps, num), np.float32)
    for tap in range(taps):
        for i in range(num):
            weights[tap, i] = lying[i * taps + tap]
    return weights


@compiled
def _convolve_slot(layer, weights, inputs, slot, row, sums):  # type: ignore[no-untyped-def]
    """Write inputs of some channels into the cache, and what a convolution makes of the last ones.

    Args:
        layer, weights: of `_taps_of`.
        inputs: address of the first slot, number of all channels, and the first of these.
        slot: of the new inputs.
        row: these.
        sums: the results.
    """
    (keys, size, start), (taps, num) = inputs, weights.shape
    _copy(row, _row(keys + 4 * (size * slot + start), num))
    _fill(sums, _F(0))
    for tap in range(max(taps - 1 - slot, 0), taps):  # before the text are zeros
        given = _row(keys + 4 * (size * (slot - taps + 1 + tap) + start), num)
        for i in range(num):
            sums[i] += weights[tap, i] * given[i]
    if layer[w.CONVOLUTION_BIAS] != 0:
        bias = _row(layer[w.CONVOLUTION_BIAS] + 4 * start, num)
        for i in range(num):
            sums[i] += bias[i]


@inlined
def _convolve(g, phase, layer, parts, caches, scratch):  # type: ignore[no-untyped-def]
    """Write the inputs of a short convolution into the cache, and its gated results.

    A piece is some channels of all tokens; channels do not depend on each other.
    """
    size, taps = g[w.HIDDEN], layer[w.TAPS]
    step = _share(size, g[w.NUM_THREADS], _UNIT, _MOST_COLUMNS)
    start, num_done = take(phase, step), 0
    while start < size:
        num = min(step, size - start)
        weights = _taps_of(layer, start, num, scratch)
        row = _row(scratch + 4 * num * taps, num)
        sums = _row(scratch + 4 * num * (taps + 1), num)
        for part in range(g[w.NUM_PARTS]):
            num_new = parts[part, w.NUM_NEW]
            for new in range(num_new):
                token = parts[part, w.FIRST] + new
                mixed = g[w.MIXED] + 4 * (3 * size * token + start)
                first = _row(mixed + 4 * size * layer[w.FIRST_KEY], num)
                second = _row(mixed + 4 * size * layer[w.FIRST_VALUE], num)
                for i in range(num):
                    row[i] = first[i] * second[i]
                slot = caches[part, w.NUM_KEYS] - num_new + new
                inputs = caches[part, w.KEYS], size, start
                _convolve_slot(layer, weights, inputs, slot, row, sums)
                gate = _row(mixed + 4 * size * layer[w.FIRST_QUERY], num)
                for i in range(num):
                    sums[i] = sums[i] * gate[i]
                attended = g[w.ATTENDED] + 4 * (size * token + start)
                _copy(sums, _row(attended, num))
                _write_digits(g, attended, num, token)
        num_done += num
        start = take(phase, step)
    end(g, phase, num_done, size)


@job
def run_convolution(address: Any) -> None:
    """Run the pieces of a phase that other threads have not taken; see `given_to_job`."""
    g, phase, step, layer, parts, caches, scratch = given_to_job(address)
    if step == 2:
        _convolve(g, phase, layer, parts, caches, scratch)
    else:
        end(g, phase, 0, 0)


# --- experts ------------------------------------------------------------------------------------


@inlined
def _score_experts(g, phase, of, scratch):  # type: ignore[no-untyped-def]
    """Write the scores of a layer's router, and the gate of its shared expert."""
    num_rows, num_experts = g[w.NUM_TOKENS], of[w.ROUTER + w.NUM_COLUMNS]
    num_all, out_step = num_experts + of[w.SHARED_GATE + w.NUM_COLUMNS], 4 * _MOST_COLUMNS
    x = g[w.NORMED], g[w.HIDDEN], num_rows
    step = _share(num_all, g[w.NUM_THREADS], 4, _UNIT)
    start, num_done = take(phase, step), 0
    while start < num_all:
        stop = min(start + step, num_all)
        middle = max(start, min(stop, num_experts))
        if start < middle:
            router = of[w.ROUTER : w.ROUTER + w.PRODUCT_SIZE]
            _multiply(g, *x, router, start, middle, scratch, out_step)
        if middle < stop:
            target, gate = scratch + 4 * (middle - start), of[w.SHARED_GATE : w.NUM_CHOSEN]
            _multiply(g, *x, gate, 0, 1, target, out_step)
        for row in range(num_rows):
            target = g[w.SCORES] + 4 * (g[w.SCORES_SIZE] * row + start)
            _copy(_row(scratch + out_step * row, stop - start), _row(target, stop - start))
        num_done += stop - start
        start = take(phase, step)
    end(g, phase, num_done, num_all)


@compiled
def _mix(raw, chosen, shares, left, near, of):  # type: ignore[no-untyped-def]
    """Choose one expert after another; each shares its weight with the rest that score like it."""
    _copy(raw, left)
    for number in range(len(chosen)):
        best, total = 0, _F(0)
        for i in range(len(left)):
            best = i if left[i] > left[best] else best
        most = left[best]
        for i in range(len(left)):
            near[i] = (most - raw[i]) / max(abs(raw[i]), most)
        for i in range(len(left)):
            if left[i] > -np.inf and not near[i] > _number(of, w.ADDED_TO_SUM):
                total += _exponential(left[i] - most)
        chosen[number], shares[number], left[best] = best, _F(1) / total, -_F(np.inf)


@compiled
def _choose(g, of, token, scratch):  # type: ignore[no-untyped-def]
    """Choose the experts of a token, and the factor of each expert's result."""
    num, num_chosen, routing = of[w.ROUTER + w.NUM_COLUMNS], of[w.NUM_CHOSEN], of[w.ROUTING]
    raw = _row(g[w.SCORES] + 4 * g[w.SCORES_SIZE] * token, num + 1)
    order = numba.carray(pointer(scratch), (num,), np.int64)
    scores, values = _row(scratch + 8 * num, num), _row(scratch + 12 * num, num)
    wide = _row(scratch + 16 * num, num)
    _copy(raw[:num], scores)
    if of[w.WEIGHS] == w.BY_SOFTMAX:
        _softmax(scores)
    elif of[w.WEIGHS] == w.BY_SIGMOID:
        _sigmoid(scores)
    _copy(raw[:num] if routing & w.SELECTS_RAW else scores, values)
    if of[w.CORRECTION] != 0:
        correction = _row(of[w.CORRECTION], num)
        for i in range(num):
            values[i] = values[i] + correction[i]
    num_groups = of[w.NUM_SETS]
    if num_groups > 0:
        leave_groups(values, wide[:num_groups], order[:num_groups], of[w.NUM_SETS_CHOSEN])
    first = num_chosen * token
    chosen = numba.carray(pointer(g[w.CHOSEN] + 8 * first), (num_chosen,), np.int64)
    shares = _row(g[w.SHARES] + 4 * first, num_chosen)
    if of[w.WEIGHS] == w.BY_MIXING:
        _mix(raw[:num], chosen, shares, values, wide, of)
    else:
        select(values, order, num_chosen, routing & w.IS_SORTED != 0)
        for i in range(num_chosen):
            chosen[i], shares[i] = order[i], scores[order[i]]
    if of[w.WEIGHS] == w.BY_SOFTMAX_OF_CHOSEN:
        _softmax(shares)
    if routing & w.IS_SUMMED:
        total = max(_sum(shares) + _number(of, w.ADDED_TO_SUM), _F(1e-20))
        for i in range(num_chosen):
            shares[i] = shares[i] / total
    for i in range(num_chosen):
        shares[i] = shares[i] * _number(of, w.SHARE)
    if of[w.SHARED_GATE + w.WEIGHT] != 0:
        _sigmoid(raw[num:])


@inlined
def _choose_experts(g, phase, of, scratch):  # type: ignore[no-untyped-def]
    num, num_done, token = g[w.NUM_TOKENS], 0, take(phase, 1)
    while token < num:
        _choose(g, of, token, scratch)
        num_done += 1
        token = take(phase, 1)
    end(g, phase, num_done, num)


@compiled
def _grouped(g, of, scratch):  # type: ignore[no-untyped-def]
    """Group all choices by expert in the thread's memory; return the groups and the rest of it."""
    num, num_chosen = g[w.NUM_TOKENS] * of[w.NUM_CHOSEN], of[w.NUM_CHOSEN]
    chosen = numba.carray(pointer(g[w.CHOSEN]), (num,), np.int64)
    ends = numba.carray(pointer(scratch), (of[w.ROUTER + w.NUM_COLUMNS] + 1,), np.int64)
    scratch += 8 * len(ends)
    tokens = numba.carray(pointer(scratch), (num,), np.int64)
    slots = numba.carray(pointer(scratch + 8 * num), (num,), np.int64)
    num_hit = group(chosen, num_chosen, ends, tokens, slots)
    return num_hit, ends, tokens, slots, scratch + 16 * num


@compiled
def _add_packed(packed, inputs, weights, results, depth, strip):  # type: ignore[no-untyped-def]
    """Add products of some inputs from the k-th on with packed weights of an expert.

    Args:
        packed: address of the compiled function, k, number of all inputs, bytes to their digits.
        inputs: address of these inputs, bytes between rows, and how many rows there are.
        weights: address of the columns, bytes between them, and how many they are.
        results: address of the sums, and bytes between rows.
        depth: number of these inputs.
        strip: memory for STRIP numbers and 16 more.
    """
    (function, k, size, digits), (weight, row_bytes, num) = packed, weights
    given = weight + row_bytes * k // size, row_bytes, num
    strip = (strip + 63) // 64 * 64
    call_compiled((function, *inputs, *given, *results, depth, strip, digits))


@compiled
def _add_gathered(g, of, tokens, begin, num, out, out_step, memory):  # type: ignore[no-untyped-def]
    """Add some columns of gate and up of an expert, for the normed states of some tokens.

    Args:
        g, of: the job, and the experts' row.
        tokens: numbers of the tokens.
        begin: number of the expert, and of the first column.
        num: number of columns.
        out, out_step: address of the sums, and bytes from one row to the next.
        memory: memory for DEPTH numbers of each of these states, and DEPTH more, or STRIP + 16 if
            weights are packed.
    """
    size, (expert, column), format_ = g[w.HIDDEN], begin, of[w.OF_STACKS]
    whole, width = 2 * of[w.EXPERT_INNER], 4 if format_ == FLOAT32 else 2
    first = of[w.EXPERT_GATE_UP] + width * size * whole * expert
    part, row_in_part = divmod(column, of[w.EXPERT_INNER])  # gate and up
    by_digits = of[w.GATE_DIGITS + part] != 0
    normed = g[w.NORMED] + (g[w.DIGITS] if by_digits else 0)
    apart = 4 * size + (w.DIGITS_APART if by_digits else 0)
    for k in range(0, size, DEPTH):
        depth = min(DEPTH, size - k)
        for number in range(len(tokens)):
            row = _row(normed + apart * tokens[number] + 4 * k, depth)
            _copy(row, _row(memory + 4 * DEPTH * number, depth))
        x, rest = (memory, 4 * DEPTH, len(tokens)), memory + 4 * DEPTH * len(tokens)
        if of[w.LIES] & w.LIE_ACROSS:
            weights = first + width * (whole * k + column), width * whole, num
            _add_across(g, format_, x, weights, (out, out_step), depth, rest)
        elif of[w.GATE_PACKED] != 0:
            packed, row_bytes = (of[w.GATE_PACKED + part], k, size, 0), of[w.GATE_ROW + part]
            if of[w.EXPERT_UP] == 0:  # rows of gate and up are one stack
                address = of[w.EXPERT_GATE_UP] + row_bytes * (whole * expert + column)
            else:
                address = of[w.EXPERT_UP] if part == 1 else of[w.EXPERT_GATE_UP]
                address += row_bytes * (of[w.EXPERT_INNER] * expert + row_in_part)
            _add_packed(packed, x, (address, row_bytes, num), (out, out_step), depth, rest)
        else:
            weights = first + 4 * (size * column + k), 4 * size, num
            add_products(g, x, weights, (out, out_step), depth)


@compiled
def _add_biases(address, start, rows, num):  # type: ignore[no-untyped-def]
    """Add biases from `start` on to rows of sums, if these have an address."""
    out, out_step, num_rows = rows
    for row in range(num_rows if address != 0 else 0):
        numbers, biases = _row(out + out_step * row, num), _row(address + 4 * start, num)
        for i in range(num):
            numbers[i] += biases[i]


@compiled
def _multiply_gated(of, gate, up, wide):  # type: ignore[no-untyped-def]
    """Bound and activate the gates of an expert, and multiply them by what goes up, in place."""
    bound, alpha, added = _number(of, w.BOUND), _number(of, w.ALPHA), _number(of, w.ADDED_TO_UP)
    for i in range(len(gate)):
        gate[i] = bound if gate[i] > bound else gate[i]
        up[i] = _within(up[i], bound)
    if of[w.GATING] == w.SWISH:
        for i in range(len(gate)):
            wide[i] = gate[i] * alpha
        _sigmoid(wide)
        for i in range(len(gate)):
            gate[i] = gate[i] * wide[i]
    else:
        _activate(gate, of[w.GATING], wide)
    if added != _F(0):
        for i in range(len(gate)):
            up[i] = up[i] + added
    for i in range(len(gate)):
        gate[i] = gate[i] * up[i]


@compiled
def _inner_at_once(g, of, num_hit, num_rows):  # type: ignore[no-untyped-def]
    """Return the inner states in a piece of an expert that has so many rows."""
    most = _MOST_COLUMNS // 2
    if of[w.LIES] & w.LIE_ACROSS:
        most = max(most, _WIDE // (2 * max(num_rows, 1)) // _UNIT * _UNIT)
    return _share(num_hit * of[w.EXPERT_INNER], g[w.NUM_THREADS], _UNIT, most)


@inlined
def _run_into_experts(g, phase, of, scratch):  # type: ignore[no-untyped-def]
    """Write the inner states of all choices, expert by expert."""
    inner, lies = of[w.EXPERT_INNER], of[w.LIES]
    num_hit, ends, tokens, _, scratch = _grouped(g, of, scratch)
    piece, num_before, num_done = take(phase, 1), 0, 0
    # A late thread may have grouped the choices of the next layer: the first one tells all others
    # how many pieces there are. A thread that has a piece has grouped the right choices.
    if piece == 0:
        num_pieces = 0
        for expert in range(len(ends) - 1):
            num_rows = ends[expert + 1] - ends[expert]
            step = _inner_at_once(g, of, num_hit, num_rows)
            num_pieces += -(-inner // step) if num_rows > 0 else 0
        report(g, phase + 128, num_pieces)
    wait_within(g, phase + 64, 0, 1)
    num_all = look(phase + 128)
    for expert in range(len(ends) - 1 if piece < num_all else 0):
        first, until = ends[expert], ends[expert + 1]
        num_rows = until - first
        step = _inner_at_once(g, of, num_hit, num_rows)
        num_pieces, out_step = -(-inner // step), 8 * step
        memory = scratch + out_step * (num_rows + 1)
        while num_rows > 0 and piece < num_before + num_pieces:
            start = (piece - num_before) * step
            num = min(step, inner - start)
            wide = _row(scratch + out_step * num_rows, num)
            for row in range(num_rows):
                _fill(_row(scratch + out_step * row, 2 * step), _F(0))
            for part in range(1 if lies & w.ALTERNATE else 2):  # both, or gate and up
                column, columns = part * inner + start, num
                if lies & w.ALTERNATE:
                    column, columns = 2 * start, 2 * num
                out, begin = scratch + out_step // 2 * part, (expert, column)
                _add_gathered(g, of, tokens[first:until], begin, columns, out, out_step, memory)
                start_of_bias, rows = 2 * inner * expert + column, (out, out_step, num_rows)
                _add_biases(of[w.GATE_UP_BIAS], start_of_bias, rows, columns)
            for row in range(num_rows):
                gate = _row(scratch + out_step * row, num)
                up = _row(scratch + out_step * row + out_step // 2, num)
                if lies & w.ALTERNATE:
                    both = _row(scratch + out_step * row, 2 * num)
                    for i in range(num):
                        gate[i], wide[i] = both[2 * i], both[2 * i + 1]
                    _copy(wide, up)
                _multiply_gated(of, gate, up, wide)
                written = g[w.OF_EXPERTS] + 4 * (inner * (first + row) + start)
                _copy(gate, _row(written, num))
                _write_digits(g, written, num, first + row)
            num_done += 1
            piece = take(phase, 1)
        num_before += num_pieces if num_rows > 0 else 0
    end(g, phase, num_done, num_all)


@compiled
def _add_out_of_expert(g, of, expert, choices, start, num, out, totals):  # type: ignore[no-untyped-def]
    """Write some columns of an expert's results, float32 [choices, num].

    Args:
        g, of, expert: the job, the experts' row, and the expert's number.
        choices: the first of its choices, and the one behind the last.
        start, num: the first column, and the number of columns.
        out: address of the results, which are zeros.
        totals: memory for BLOCK numbers and one for each choice, or STRIP + 16 of packed weights.
    """
    size, inner, format_, (first, until) = g[w.HIDDEN], of[w.EXPERT_INNER], of[w.OF_STACKS], choices
    width, rows = 4 if format_ == FLOAT32 else 2, (out, 4 * num, until - first)
    weight = of[w.EXPERT_DOWN] + width * size * inner * expert
    if of[w.LIES] & w.LIE_ACROSS:
        x = g[w.OF_EXPERTS] + 4 * inner * first, 4 * inner, until - first
        weights = weight + width * start, width * size, num
        _add_across(g, format_, x, weights, (out, 4 * num), inner, totals)
    elif of[w.DOWN_PACKED] != 0:
        weight = of[w.EXPERT_DOWN] + of[w.DOWN_ROW] * (size * expert + start)
        for k in range(0, inner, DEPTH):
            x = g[w.OF_EXPERTS] + 4 * (inner * first + k), 4 * inner, until - first
            packed = of[w.DOWN_PACKED], k, inner, g[w.DIGITS] + w.DIGITS_APART * first
            weights = weight, of[w.DOWN_ROW], num
            _add_packed(packed, x, weights, (out, 4 * num), min(DEPTH, inner - k), totals)
    else:
        for k in range(0, inner, DEPTH):
            x = g[w.OF_EXPERTS] + 4 * (inner * first + k), 4 * inner, until - first
            weights = weight + 4 * (start * inner + k), 4 * inner, num
            add_products(g, x, weights, (out, 4 * num), min(DEPTH, inner - k))
    _add_biases(of[w.DOWN_BIAS], size * expert + start, rows, num)


@inlined
def _run_out_of_experts(g, phase, layer, of, scratch):  # type: ignore[no-untyped-def]
    """Write the weighted sum of the experts' results, plus the shared expert's.

    The results are added in the order of the token's choices, so other tokens change no bit.
    """
    size, num_chosen = g[w.HIDDEN], of[w.NUM_CHOSEN]
    _, ends, _, slots, scratch = _grouped(g, of, scratch)
    num_rows = len(slots)
    most = _MOST_COLUMNS if num_rows <= _FEW_CHOICES else _UNIT
    if of[w.LIES] & w.LIE_ACROSS:
        most = max(most, _WIDE // num_rows // _UNIT * _UNIT)
    step = _share(size, g[w.NUM_THREADS], _UNIT, most)
    start, num_done = take(phase, step), 0
    while start < size:
        num = min(step, size - start)
        totals = scratch + 4 * num * (num_rows + 1)
        _fill(_row(scratch, num * num_rows), _F(0))
        for expert in range(len(ends) - 1):
            first, until = ends[expert], ends[expert + 1]
            if first < until:
                out, choices = scratch + 4 * num * first, (first, until)
                _add_out_of_expert(g, of, expert, choices, start, num, out, totals)
        for token in range(g[w.NUM_TOKENS]):
            sums = _row(scratch + 4 * num * num_rows, num)
            _fill(sums, _F(0))
            for choice in range(num_chosen * token, num_chosen * (token + 1)):
                result = _row(scratch + 4 * num * slots[choice], num)
                share = _row(g[w.SHARES] + 4 * choice, 1)[0]
                for i in range(num):
                    sums[i] += result[i] * share
            added = _row(g[w.ADDED] + 4 * (size * token + start), num)
            if layer[w.INNER_SIZE] > 0:
                if of[w.SHARED_GATE + w.WEIGHT] != 0:
                    index = g[w.SCORES_SIZE] * token + of[w.ROUTER + w.NUM_COLUMNS]
                    gate = _row(g[w.SCORES] + 4 * index, 1)[0]
                    for i in range(num):
                        added[i] = added[i] * gate
                for i in range(num):
                    sums[i] = sums[i] + added[i]
            _copy(sums, added)
        num_done += num
        start = take(phase, step)
    end(g, phase, num_done, size)


@job
def run_experts(address: Any) -> None:
    """Run the pieces of a phase that other threads have not taken; see `given_to_job`."""
    g, phase, step, layer, _, _, scratch = given_to_job(address)
    of = described(g, layer[w.EXPERTS])
    if step == 8:
        _score_experts(g, phase, of, scratch)
    elif step == 9:
        _choose_experts(g, phase, of, scratch)
    elif step == 10:
        _run_into_experts(g, phase, of, scratch)
    else:
        _run_out_of_experts(g, phase, layer, of, scratch)


# --- a whole forward --------------------------------------------------------------------------


@job
def run_forward(address: Any) -> None:
    """Run the pieces of a forward that other threads have not taken, until it is over."""
    given = numba.carray(address, (3,), np.int64)
    slot, own, number_of_job = given[0], given[1], given[2]
    g = numba.carray(pointer(look(slot + 8 * w.JOB)), (w.JOB_SIZE,), np.int64)
    thread = take(g.ctypes.data + 8 * w.NEXT_THREAD, 1)
    if thread >= g[w.NUM_THREADS]:
        return
    scratch, first_phase = g[w.SCRATCH] + g[w.SCRATCH_SIZE] * thread, g[w.PHASES]
    num_layers, num_parts, num_tokens = g[w.NUM_LAYERS], g[w.NUM_PARTS], g[w.NUM_TOKENS]
    layers = numba.carray(pointer(g[w.LAYERS]), (num_layers, w.LAYER_SIZE), np.int64)
    kept = numba.carray(pointer(g[w.KEPT]), (g[w.NUM_KEPT],), np.int64)
    every = numba.carray(pointer(g[w.EVERY]), (num_tokens,), np.int64)
    phase = look(slot + 8 * w.CURRENT)
    while 0 < phase < first_phase + 256 * (num_layers * w.PHASES_OF_LAYER + 2):
        index = (phase - first_phase) // 256
        step, number = index % w.PHASES_OF_LAYER, index // w.PHASES_OF_LAYER
        is_end, has_run = number == num_layers, True
        layer = layers[
            max(number - 1, 0) if is_end else number
        ]  # without layers, only the head runs
        has_inputs = layer[w.INPUT_SIZE] > 0
        if step in (0, 5) or (step == 12 and has_inputs):
            before, norm = layer, w.POST_ATTENTION
            of = layer[w.PRE_MLP : w.PRE_MLP + w.NORM_SIZE]
            if step == 12:
                norm, of = w.POST_MLP, layer[w.NO_NORM : w.NO_NORM + w.NORM_SIZE]
            if step == 0:
                before, norm = layers[max(number - 1, 0)], -1
                if number > 0:
                    norm = w.POST_INPUTS if before[w.INPUT_SIZE] > 0 else w.POST_MLP
                of = layer[w.PRE_ATTENTION : w.PRE_ATTENTION + w.NORM_SIZE]
                if is_end:
                    of = g[w.LAST_NORM : w.LAST_NORM + w.NORM_SIZE]
            is_parallel = step == 5 and layer[w.IS_PARALLEL] != 0
            tokens = kept if is_end else every
            _run_states(g, phase, tokens, before, norm, of, is_parallel, scratch)
        elif step in (2, 3) or 8 <= step < 12:
            of_layer = layer[w.RUN_ATTENTION if step < 8 else w.RUN_EXPERTS]
            if of_layer != 0:
                of_phase = g.ctypes.data, phase, step, layer.ctypes.data
                parts = g[w.PARTS] + 32 * num_parts * layer[w.SEES]
                caches = g[w.CACHES] + 8 * w.CACHE_SIZE * num_parts * number
                call_compiled((of_layer, *of_phase, parts, caches, scratch))
            has_run = of_layer != 0
        elif has_inputs if step >= 12 else step < 6 or layer[w.INNER_SIZE] > 0:
            num_rows, given, num_all = num_tokens, (g[w.NORMED], g[w.HIDDEN]), g[w.HIDDEN]
            products, result = layer[w.QUERY : w.MORE + w.PRODUCT_SIZE], (w.TO_ROWS, g[w.ADDED])
            if is_end:
                num_rows, num_all = g[w.NUM_KEPT], g[w.VOCAB_SIZE]
                products, result = g[w.HEAD : w.HEAD + w.PRODUCT_SIZE], (w.TO_ROWS, g[w.LOGITS])
            elif step == 1:
                num_all, result = layer[w.MIXED_SIZE], (w.TO_ROWS, g[w.MIXED])
            elif step == 4:
                given = g[w.ATTENDED], layer[w.ATTENDED_SIZE]
                products = layer[w.OUT : w.OUT + w.PRODUCT_SIZE]
            elif step == 6:
                num_all, result = layer[w.INNER_SIZE], (w.TO_INNER, g[w.INNER])
                products = layer[w.GATE : w.UP + w.PRODUCT_SIZE]
            elif step == 13:
                num_all, result = layer[w.INPUT_SIZE], (w.TO_INPUTS, g[w.INNER])
                products = layer[w.INPUT_GATE : w.INPUT_GATE + w.PRODUCT_SIZE]
            elif step == 14:
                given = g[w.INNER], layer[w.INPUT_SIZE]
                products = layer[w.INPUT_OUT : w.INPUT_OUT + w.PRODUCT_SIZE]
            else:
                given = g[w.INNER], layer[w.INNER_SIZE]
                products = layer[w.DOWN : w.DOWN + w.PRODUCT_SIZE]
            _run_products(g, phase, num_rows, layer, given, products, result, num_all, scratch)
        else:
            has_run = False
        phase = next_phase((slot, own, number_of_job), phase) if has_run else phase + 256


def scratch_size(
    num_tokens: int,
    hidden: int,
    num_heads: int = 0,
    head_size: int = 0,
    between: int = 0,
    num_experts: int = 0,
    num_chosen: int = 0,
    taps: int = 0,
    of_recurrence: int = 0,
    of_latents: int = 0,
) -> int:
    """Return the bytes of scratch memory that each thread needs."""
    of_rows = 2 * max(hidden, (num_heads + 1) * head_size)
    of_attention = _MOST_ROWS * (BLOCK + 2 * head_size + 4)
    of_products = (num_tokens + 2) * _MOST_COLUMNS + between * (_MOST_COLUMNS + 1) + DEPTH
    of_products += STRIP + 16
    num_choices, of_experts = num_tokens * num_chosen, 0
    if num_experts > 0:
        of_inner = (num_tokens + 1) * (_MOST_COLUMNS + DEPTH) + 2 * _WIDE
        of_results = max((num_choices + 1) * _UNIT, (_FEW_CHOICES + 1) * _MOST_COLUMNS)
        of_results += BLOCK + num_tokens + 2 * _WIDE
        of_experts = 5 * (num_experts + 1) + 4 * num_choices + max(of_inner, of_results)
    of_convolution = 2 * (taps + 1) * _MOST_COLUMNS
    if of_latents > 0:
        of_latents = (of_latents + 1) * (num_tokens + 1) + 2 * BLOCK + STRIP + 16
    of_mixing = max(of_attention, of_convolution, of_recurrence, of_latents)
    most = max(of_rows, of_products, of_experts, of_mixing)
    return -(-4 * most // 4096) * 4096
