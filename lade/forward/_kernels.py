"""Every compiled function of this package, and nothing else: a decoder's forward as one job.

All threads run the same phases in the same order. A phase is divided into pieces of work; each
thread takes pieces until none is left, and goes on when all are done. So a thread that comes late,
or not at all, delays no other. All numbers are float32, whatever weights are stored in.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from lade.forward import words as w
from lade.forward._amx import release
from lade.forward._amx import write_digits as _write_bfloat16
from lade.forward._digits import write_digits
from lade.forward._experts import group
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
    call_with,
    compiled,
    compiled_with,
    inlined,
    instruction,
    job,
    pointer,
    run_tiles,  # noqa: F401 — what jobs call
    take,
)
from lade.forward._workers import end, look, next_phase, pieces

_MOST_ROWS = BLOCK  # rows of queries in a piece of attention
_UNIT, _MOST_COLUMNS = 48, 192  # of a piece: whole tiles
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
def _sum_of_squares(row):  # type: ignore[no-untyped-def]
    total = _F(0)
    for number in row:
        total += number * number
    return total


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
def _tanh(number):  # type: ignore[no-untyped-def]
    """Return the hyperbolic tangent of a number."""
    bounded = _within(number, _F(10))
    power = _exponential(_F(2) * bounded)
    # Near 0, the difference would cancel digits that the series keeps.
    square = bounded * bounded
    near = bounded * (_F(1) - square * (_F(1 / 3) - square * _F(2 / 15)))
    return near if square < _F(1e-3) else (power - _F(1)) / (power + _F(1))


@compiled
def _silu(x):  # type: ignore[no-untyped-def]
    return x / (_F(1) + _exponential_of_negative(x))


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
def _share(g, num, unit, most):  # type: ignore[no-untyped-def]
    """Return how many units a thread takes at once: several pieces each, but none too small."""
    return min(max(num // (8 * g[w.NUM_THREADS]) // unit * unit, unit), most)


@compiled
def _columns_at_once(g, num, most):  # type: ignore[no-untyped-def]
    """Return how many columns a thread takes at once: of whole blocks, if these have digits."""
    unit = w.DIGITS_BLOCK if g[w.KIND] == w.IN_BYTES else _UNIT
    return _share(g, num, unit if g[w.TURNED] == 0 else 2 * _UNIT, most)


@inlined
def described(g, number):  # type: ignore[no-untyped-def]
    """Return the row that describes a program, or what mixes tokens, counted from 1."""
    address = g[w.DESCRIPTIONS] + 8 * w.ROW_SIZE * (number - 1)
    return numba.carray(pointer(address), (w.ROW_SIZE,), np.int64)


@inlined
def given_to_job(address):  # type: ignore[no-untyped-def]
    """Return what a phase's own job is given, four int64.

    They are the addresses of the forward's job, of the phase's counters, of its row, and of the
    thread's memory. The row has the phase's number within its own job, and names the row that
    describes that job, its parts and its caches.
    """
    given = numba.carray(address, (4,), np.int64)
    g = numba.carray(pointer(given[0]), (w.JOB_SIZE,), np.int64)
    row = numba.carray(pointer(given[2]), (w.ROW_SIZE,), np.int64)
    num = g[w.NUM_PARTS]
    parts = numba.carray(pointer(g[w.PARTS] + 32 * num * row[w.SEES]), (num, 4), np.int64)
    address_of_caches = g[w.CACHES] + 8 * w.CACHE_SIZE * num * row[w.CACHE]
    caches = numba.carray(pointer(address_of_caches), (num, w.CACHE_SIZE), np.int64)
    return g, given[1], row[w.STEP], described(g, row[w.OF]), parts, caches, given[3]


@compiled
def _write_digits(g, address, num, row):  # type: ignore[no-untyped-def]
    """Write the digits of some inputs of a row of products, if these are whole blocks."""
    if g[w.DIGITS] != 0 and num % w.DIGITS_BLOCK == 0:
        target, num_blocks = address + g[w.DIGITS] + w.DIGITS_APART * row, num // w.DIGITS_BLOCK
        if g[w.KIND] == w.IN_BYTES:
            write_digits((address, target, num_blocks))
        else:
            _write_bfloat16((address, target, target + g[w.DIGITS], num_blocks))


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
def _add_biases(address, first, results, num_rows, num):  # type: ignore[no-untyped-def]
    """Add biases from the first column on to rows of results, if these have an address."""
    for row in range(num_rows if address != 0 else 0):
        numbers, biases = _row(results[0] + results[1] * row, num), _row(address + 4 * first, num)
        for i in range(num):
            numbers[i] += biases[i]


@compiled
def _multiply(g, x, num_inputs, digits, of, first, until, out, out_step):  # type: ignore[no-untyped-def]
    """Write some columns of a matrix product, plus bias.

    Inputs `x` are an address, bytes from one row to the next, and the number of rows. `digits` are
    so many bytes behind them, and an address where these may be turned. In a stack of matrices, the
    columns of one follow those of another. One row behind the results is memory for STRIP numbers
    and 16 more.
    """
    num, results, (inputs, x_step, num_rows) = until - first, (out, out_step), x
    strip = (out + out_step * (num_rows + 1) + 63) // 64 * 64
    for row in range(num_rows):
        _fill(_row(out + out_step * row, num), _F(0))
    if of[w.PACKED] != 0:
        packed = of[w.WEIGHT] + of[w.ROW_BYTES] * first, of[w.ROW_BYTES], num
        call_compiled((of[w.PACKED], *x, *packed, *results, num_inputs, strip, *digits))
    elif of[w.ACROSS] != 0:  # sums run along the columns
        format_, step = of[w.ROW_BYTES], of[w.ACROSS]
        width = 4 if format_ == FLOAT32 else 2
        matrix, column = divmod(first, step // width)
        weights = of[w.WEIGHT] + step * num_inputs * matrix + width * column, step, num
        # The kernel also sums the inputs themselves; those sums are not used.
        _add_across(g, format_, x, weights, results, num_inputs, strip)
    else:
        weight = of[w.WEIGHT] + 4 * first * num_inputs
        for k in range(0, num_inputs, DEPTH):
            of_x = inputs + 4 * k, x_step, num_rows
            weights = weight + 4 * k, 4 * num_inputs, num
            add_products(g, of_x, weights, results, min(DEPTH, num_inputs - k))
    _add_biases(of[w.BIAS], first, results, num_rows, num)


@inlined
def _run_products(g, phase, of_phase, scratch):  # type: ignore[no-untyped-def]
    """Run products of the same numbers, side by side, or what becomes of their columns.

    Args:
        g, phase, of_phase: the job, the address of the phase's counters, and its row.
        scratch: the thread's scratch memory.
    """
    num_rows = g[w.NUM_TOKENS] if of_phase[w.TOKENS] == w.EVERY_TOKEN else g[w.NUM_KEPT]
    inputs, x_step, num_all = g[of_phase[w.GIVEN]], 4 * of_phase[w.NUM_GIVEN], of_phase[w.NUM_MADE]
    target, columns = g[of_phase[w.TARGET]], of_phase[w.COLUMNS]
    num_products = of_phase[w.NUM_PRODUCTS]
    most = _MOST_COLUMNS // 2 if columns != 0 and num_products == 2 else _MOST_COLUMNS
    step, out_step = _columns_at_once(g, num_all, most), 4 * _MOST_COLUMNS
    if of_phase[w.TARGET] == w.SCORES:  # there are few experts
        step = _share(g, num_all, 4, most)
    memory, digits = scratch + num_rows * out_step, (g[w.DIGITS], scratch + g[w.TURNED])
    if g[w.TURNED] != 0:
        numba.carray(pointer(digits[1]), (1,), np.int64)[0] = 0  # of no inputs yet
    for start, stop in pieces(g, phase, num_all, step):
        before = 0
        for product in range(num_products):
            of = of_phase[w.PRODUCT_SIZE * product : w.PRODUCT_SIZE * (product + 1)]
            if columns != 0:
                first, until, out = start, stop, scratch + 2 * _MOST_COLUMNS * product
            else:
                first, until = max(start - before, 0), min(stop - before, of[w.NUM_COLUMNS])
                out = scratch + 4 * (before + first - start)
                before += of[w.NUM_COLUMNS]
            if first < until:
                x = inputs + 4 * of[w.START], x_step, num_rows
                of_x = x, of[w.NUM_INPUTS], digits
                _multiply(g, *of_x, of, first, until, out, out_step)
        for row in range(num_rows):
            numbers, made = scratch + out_step * row, target + 4 * (num_all * row + start)
            if columns == 0:
                _copy(_row(numbers, stop - start), _row(made, stop - start))
                continue
            given, _ = _arguments(memory)
            given[0], given[1], given[2] = stop - start, made, numbers
            given[3] = numbers + out_step // 2
            _run_program(g, columns, start, start, given, 4)
            if of_phase[w.TARGET] == w.INNER:
                _write_digits(g, made, stop - start, row)


@compiled
def _run_program(g, number, at, index, given, num_filled):  # type: ignore[no-untyped-def]
    """Run the program that a row describes, counted from 1, and return its last argument.

    Args:
        g: the job.
        number: of the row.
        at, index: number of the token, and its number in NORMED; or the first column.
        given: gets the program's arguments; so many are there.
    """
    of = described(g, number)
    for each in range(of[w.NUM_PLACES]):
        place = w.PLACES + 3 * each
        step = of[place + 2] * (index if of[place] == w.NORMED else at)
        given[num_filled + each] = g[of[place]] + of[place + 1] + step
    call_with((of[w.PROGRAM], given.ctypes.data))
    return given[num_filled + of[w.NUM_PLACES] - 1]


@compiled
def _arguments(memory):  # type: ignore[no-untyped-def]
    """Return memory for the arguments of a program, and the address of what is free behind it."""
    num = w.MOST_PLACES + 4
    return numba.carray(pointer(memory), (num,), np.int64), (memory + 8 * num + 63) // 64 * 64


@compiled
def run_rows(g, number, token, index, scratch):  # type: ignore[no-untyped-def]
    """Run a program of a token's row, and return its last result's address."""
    given, free = _arguments(scratch)
    given[0] = free
    return _run_program(g, number, token, index, given, 1)


@inlined
def _run_states(g, phase, of_phase, at_end, before, scratch):  # type: ignore[no-untyped-def]
    """Run programs of each token, given the rows of two, or 0; products read the last one."""
    tokens = of_phase[w.TOKENS]
    num = g[w.NUM_TOKENS] if tokens == w.EVERY_TOKEN else g[w.NUM_KEPT]
    kept = numba.carray(pointer(g[w.KEPT]), (num,), np.int64)
    for start, stop in pieces(g, phase, num, _share(g, num, 1, 8)):
        for index in range(start, stop):
            token = kept[index] if tokens == w.KEPT_TOKENS else index
            if at_end != 0:
                run_rows(g, at_end, token, index, scratch)
            if before != 0:
                made = run_rows(g, before, token, index, scratch)
                _write_digits(g, made, described(g, before)[w.NUM_DIGITS], index)


@inlined
def _write_heads(g, phase, layer, parts, caches, scratch):  # type: ignore[no-untyped-def]
    """Write a token's queries, and its keys and values into the cache."""
    num, num_heads, part = g[w.NUM_TOKENS], layer[w.NUM_KEY_HEADS], 0
    for token, _ in pieces(g, phase, num, 1):
        run_rows(g, layer[w.HEADS], token, token, scratch)
        while token >= parts[part, w.FIRST] + parts[part, w.NUM_NEW]:
            part += 1
        slot = caches[part, w.NUM_KEYS] - parts[part, w.NUM_NEW] + token - parts[part, w.FIRST]
        made = g[w.QUERIES] + 4 * (layer[w.QUERIES_SIZE] * token + layer[w.NUM_QUERIES])
        for kind in range(0 if layer[w.READS] else 2):
            first, step = (w.VALUES, w.VALUE_HEAD) if kind else (w.KEYS, w.KEY_HEAD)
            size = layer[w.HEAD_SIZE]
            if kind:
                size = layer[w.MORE_SIZE] if layer[w.MORE_SIZE] != 0 else layer[w.RESULT_SIZE]
            for head in range(num_heads):
                target = caches[part, first] + head * caches[part, step] + 4 * slot * size
                _copy(_row(made, size), _row(target, size))
                made += 4 * size


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
        index = layer[w.QUERIES_SIZE] * (part[w.FIRST] + token)
        index += whole * (head * num_sharing + query)
        given = _row(g[w.QUERIES] + 4 * index, whole)
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
                    of_row[i] = _tanh(of_row[i] / softcap) * softcap
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
            index = layer[w.QUERIES_SIZE] * (part[w.FIRST] + token) + whole * query
            _copy(sums[row], _row(g[w.QUERIES] + 4 * index, size))
            continue
        token += part[w.FIRST]
        target = g[w.ATTENDED] + 4 * (layer[w.ATTENDED_SIZE] * token + query * size)
        _copy(sums[row], _row(target, size))
        _write_digits(g, target, size, token)


@inlined
def _attend(g, phase, layer, parts, caches, scratch):  # type: ignore[no-untyped-def]
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
    end(g, phase, num_done, num_before)


@job
def run_attention(address: Any) -> None:
    """Run the pieces of a phase that other threads have not taken; see `given_to_job`."""
    g, phase, step, layer, parts, caches, scratch = given_to_job(address)
    if step == 0:
        _write_heads(g, phase, layer, parts, caches, scratch)
    else:
        _attend(g, phase, layer, parts, caches, scratch)


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


@job
def run_convolution(address: Any) -> None:
    """Write the inputs of a short convolution into the cache, and its results.

    A piece is some channels of all tokens; channels do not depend on each other.
    """
    g, phase, _, layer, parts, caches, scratch = given_to_job(address)
    size = layer[w.ATTENDED_SIZE]
    step = _columns_at_once(g, size, _MOST_COLUMNS)
    for start, stop in pieces(g, phase, size, step):
        num = stop - start
        weights = _taps_of(layer, start, num, scratch)
        for part in range(g[w.NUM_PARTS]):
            num_new = parts[part, w.NUM_NEW]
            for new in range(num_new):
                token = parts[part, w.FIRST] + new
                place = 4 * (size * token + start)
                slot = caches[part, w.NUM_KEYS] - num_new + new
                row, sums = _row(g[w.QUERIES] + place, num), _row(g[w.ATTENDED] + place, num)
                inputs = caches[part, w.KEYS], size, start
                _convolve_slot(layer, weights, inputs, slot, row, sums)
                _write_digits(g, g[w.ATTENDED] + place, num, token)


# --- experts ------------------------------------------------------------------------------------


@compiled
def _groups(g, of):  # type: ignore[no-untyped-def]
    """Return how many experts were chosen and how many pieces they have; then see `group`."""
    num, address = g[w.NUM_TOKENS] * of[w.NUM_CHOSEN], g[w.GROUPS]
    totals = numba.carray(pointer(address), (2,), np.int64)
    ends = numba.carray(pointer(address + 16), (of[w.NUM_EXPERTS] + 1,), np.int64)
    address += 8 * (2 + len(ends))
    tokens = numba.carray(pointer(address), (num,), np.int64)
    slots = numba.carray(pointer(address + 8 * num), (num,), np.int64)
    return totals, ends, tokens, slots


@compiled
def _inner_at_once(g, of, num_hit, num_rows):  # type: ignore[no-untyped-def]
    """Return the inner states in a piece of an expert with so many rows, and how many pieces."""
    most = _MOST_COLUMNS // 2
    if of[w.LIES] & w.LIE_ACROSS:
        most = max(most, _WIDE // (2 * max(num_rows, 1)) // _UNIT * _UNIT)
    step = _columns_at_once(g, num_hit * of[w.EXPERT_INNER], most)
    return step, -(-of[w.EXPERT_INNER] // step) if num_rows > 0 else 0


@inlined
def _run_into_experts(g, phase, of, scratch):  # type: ignore[no-untyped-def]
    """Write the inner states of all choices, expert by expert."""
    size, inner, alternate = g[w.HIDDEN], of[w.EXPERT_INNER], of[w.LIES] & w.ALTERNATE
    given, apart = g[w.NORMED], 4 * size
    if of[w.BY_DIGITS] != 0:  # which take as much memory
        given, apart = given + g[w.DIGITS], apart + w.DIGITS_APART
    totals, ends, tokens, _ = _groups(g, of)
    expert, first, num_rows, step, num_before, num_pieces = -1, 0, 0, 0, 0, 0
    for piece, _ in pieces(g, phase, totals[1], 1):
        while piece >= num_before + num_pieces:
            expert, num_before = expert + 1, num_before + num_pieces
            first, num_rows = ends[expert], ends[expert + 1] - ends[expert]
            step, num_pieces = _inner_at_once(g, of, totals[0], num_rows)
        out_step, start = 8 * step, (piece - num_before) * step
        num, results = min(step, inner - start), scratch + 4 * size * num_rows  # behind states
        for row in range(num_rows):
            states = _row(given + apart * tokens[first + row], size)
            _copy(states, _row(scratch + 4 * size * row, size))
        for part in range(1 if alternate else 2):  # both, or gate and up
            word = w.EXPERT_UP if part else w.EXPERT_GATE
            product, out = of[word : word + w.PRODUCT_SIZE], results + out_step // 2 * part
            column, columns = (2 * start, 2 * num) if alternate else (start, num)
            begin = product[w.NUM_COLUMNS] * expert + column
            x = (scratch, 4 * size, num_rows), size, (0, 0)
            _multiply(g, *x, product, begin, begin + columns, out, out_step)
            begin = inner * (2 * expert + part) + column
            _add_biases(of[w.GATE_UP_BIAS], begin, (out, out_step), num_rows, columns)
        for row in range(num_rows):
            gate, out = results + out_step * row, inner * (first + row) + start
            up = gate + 4 if alternate else gate + out_step // 2
            made = g[w.OF_EXPERTS] + 4 * out
            call_compiled((of[w.GATING], num, made, gate, up))
            _write_digits(g, made, num, first + row)


@inlined
def _run_out_of_experts(g, phase, of, scratch):  # type: ignore[no-untyped-def]
    """Write the weighted sum of the experts' results.

    The results are added in the order of the token's choices, so other tokens change no bit.
    """
    size, inner, num_chosen = g[w.HIDDEN], of[w.EXPERT_INNER], of[w.NUM_CHOSEN]
    down = of[w.EXPERT_DOWN : w.EXPERT_DOWN + w.PRODUCT_SIZE]
    _, ends, _, slots = _groups(g, of)
    num_rows = len(slots)
    most = _MOST_COLUMNS if num_rows <= _FEW_CHOICES else _UNIT
    if of[w.LIES] & w.LIE_ACROSS:
        most = max(most, _WIDE // num_rows // _UNIT * _UNIT)
    step = _columns_at_once(g, size, most)
    for start, stop in pieces(g, phase, size, step):
        num = stop - start
        for expert in range(len(ends) - 1):  # behind its results is memory of later ones
            first, until = ends[expert], ends[expert + 1]
            if first < until:
                digits = g[w.DIGITS] + w.DIGITS_APART * first, 0
                x = g[w.OF_EXPERTS] + 4 * inner * first, 4 * inner, until - first
                begin, out = size * expert + start, scratch + 4 * num * first
                _multiply(g, x, inner, digits, down, begin, begin + num, out, 4 * num)
        for token in range(g[w.NUM_TOKENS]):
            sums = _row(scratch + 4 * num * num_rows, num)
            _fill(sums, _F(0))
            for choice in range(num_chosen * token, num_chosen * (token + 1)):
                result = _row(scratch + 4 * num * slots[choice], num)
                share = _row(g[w.SHARES] + 4 * choice, 1)[0]
                for i in range(num):
                    sums[i] += result[i] * share
            _copy(sums, _row(g[w.RESULT] + 4 * (size * token + start), num))


@job
def run_experts(address: Any) -> None:
    """Run the pieces of a phase that other threads have not taken; see `given_to_job`."""
    g, phase, step, of, _, _, scratch = given_to_job(address)
    if step == 0:
        for _ in pieces(g, phase, 1, 1):
            totals, ends, tokens, slots = _groups(g, of)
            chosen = _row(g[w.CHOSEN], len(tokens))
            totals[0], totals[1] = group(chosen, of[w.NUM_CHOSEN], ends, tokens, slots), 0
            for expert in range(len(ends) - 1):
                num_rows = ends[expert + 1] - ends[expert]
                totals[1] += _inner_at_once(g, of, totals[0], num_rows)[1]
    elif step == 1:
        _run_into_experts(g, phase, of, scratch)
    else:
        _run_out_of_experts(g, phase, of, scratch)


# --- a whole forward --------------------------------------------------------------------------


@job
def run_digits(address: Any) -> None:
    """Write digits of a product's inputs where nobody has written these; see `given_to_job`."""
    given = numba.carray(address, (4,), np.int64)
    g = numba.carray(pointer(given[0]), (w.JOB_SIZE,), np.int64)
    num = numba.carray(pointer(given[2]), (w.ROW_SIZE,), np.int64)[w.NUM_GIVEN]
    for row, _ in pieces(g, given[1], g[w.NUM_TOKENS], 1):
        _write_digits(g, g[w.NORMED] + 4 * num * row, num, row)


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
    num_phases = g[w.NUM_PHASES]
    rows = numba.carray(pointer(g[w.LIST]), (num_phases, w.ROW_SIZE), np.int64)
    phase = look(slot + 8 * w.CURRENT)
    while 0 < phase < first_phase + 128 * num_phases:
        index = (phase - first_phase) // 128
        of_phase = rows[index]
        if of_phase[w.RUN] != 0:
            call_compiled((of_phase[w.RUN], g.ctypes.data, phase, of_phase.ctypes.data, scratch))
        elif of_phase[w.TARGET] != 0:
            _run_products(g, phase, of_phase, scratch)
        else:  # the last layer's end is not of this list, or what comes next is not
            at_end = of_phase[w.AT_END] if index > 0 else 0
            before = of_phase[w.BEFORE] if index < num_phases - 1 else 0
            _run_states(g, phase, of_phase, at_end, before, scratch)
        phase = next_phase((slot, own, number_of_job), phase)
    if g[w.TURNED] != 0:
        release(0)


def scratch_size(
    num_tokens: int,
    hidden: int = 0,
    num_experts: int = 0,
    num_chosen: int = 0,
    head_size: int = 0,
    taps: int = 0,
    of_recurrence: int = 0,
    of_latents: int = 0,
    of_rows: int = 0,
) -> int:
    """Return the bytes of scratch memory that each thread needs, but for TURNED."""
    of_rows += 2 * w.MOST_PLACES + 32
    of_attention = _MOST_ROWS * (BLOCK + 2 * head_size + 4)
    of_products = (num_tokens + 2) * _MOST_COLUMNS + DEPTH + STRIP + 16
    num_choices, of_experts = num_tokens * num_chosen, 0
    if num_experts > 0:
        of_inner = num_tokens * hidden + (num_tokens + 2) * _MOST_COLUMNS + 3 * _WIDE
        of_inner += STRIP + 16
        of_results = max((num_choices + 1) * _UNIT, (_FEW_CHOICES + 1) * _MOST_COLUMNS)
        of_results += BLOCK + num_tokens + 2 * _WIDE
        of_experts = max(of_inner, of_results)
    of_convolution = 2 * (taps + 1) * _MOST_COLUMNS
    if of_latents > 0:
        of_latents = (of_latents + 1) * (num_tokens + 1) + 2 * BLOCK + STRIP + 16
    of_mixing = max(of_attention, of_convolution, of_recurrence, of_latents)
    most = max(of_rows, of_products, of_experts, of_mixing)
    return -(-4 * most // 4096) * 4096
