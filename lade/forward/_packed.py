"""Matrix products with weights in the blocks of GGUF files, or in 16 bits.

y = x · Wᵀ, where a row of W is blocks of small integers, each block with a scale and maybe an
offset. Blocks are unpacked into the first cache, some columns at a time, once for all rows of
inputs; for few rows, numbers of 16 bits are widened in registers. Sums are in float32, in an order
that does not depend on the number of rows: vector by vector, up to DEPTH inputs at a time.

Each format is compiled when a model first has it. A job calls the function by its address.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types

from lade.forward import words
from lade.forward._tiles import (
    COLUMNS,
    DEPTH,
    FEW,
    FLOAT32,
    LANES,
    ROWS,
    TALL,
    add_tiles,
    as_float,
    compiled,
    instruction,
    job,
    pointer,
)

(F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, BF16, MXFP4) = (
    words.BLOCKS
)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
LEVELS = {Q4_0: range(-8, 8), IQ4_NL: _IQ4, IQ4_XS: _IQ4, MXFP4: _FP4}  # of the numbers 0 to 15
STRIP = 4 * DEPTH  # numbers that are unpacked at once
NUM_GIVEN = 11  # arguments of a product
_MOST_FUSED = 16 if LANES == 16 else 4  # rows; for more, 16 bits are unpacked, too

_INT32, _FLOAT = ir.IntType(32), ir.FloatType()
_F, _I = np.float32, np.int32


# --- blocks ---------------------------------------------------------------------------------------
# Functions that unpack a block take its address, and an array of float32 for its numbers. Loops of
# its length become vectors when compiled; those of a known length would become single numbers.


def half_power(build: Any, exponents: Any, integer: Callable[[int], Any]) -> Any:
    """Emit the bits of half of the powers of 2 whose exponents are bytes, in integers of 32 bits.

    Args:
        build: the builder.
        exponents: an integer, or a vector of integers.
        integer: returns a constant of the same type.
    """
    usual = build.shl(build.sub(exponents, integer(1)), integer(23))
    least = build.shl(integer(0x200000), exponents)  # which is no normal number
    return build.select(build.icmp_unsigned("<", exponents, integer(2)), least, usual)


@instruction(types.float32, types.int32)
def _half_power(build: Any, exponent: Any) -> Any:
    return build.bitcast(half_power(build, exponent, _INT32), _FLOAT)


@instruction(types.float32, types.uint16)
def _from_half(build: Any, bits: Any) -> Any:
    """Return the float16 of some bits."""
    return build.fpext(build.bitcast(bits, ir.HalfType()), _FLOAT)


@compiled
def _half(address):  # type: ignore[no-untyped-def]
    """Return the float16 at an address."""
    return _from_half(numba.carray(pointer(address), (1,), np.uint16)[0])


@compiled
def _bytes(address, num):  # type: ignore[no-untyped-def]
    return numba.carray(pointer(address), (num,), np.uint8)


@compiled
def _bits(number, by, num):  # type: ignore[no-untyped-def]
    """Return some bits of a number, from a lowest one on."""
    return _I((_I(number) >> _I(by)) & _I((1 << num) - 1))


def _of_four(format_: int) -> Callable[..., None]:
    """Return what unpacks blocks of 32 numbers of 4 bits, and of a fifth one in some formats."""
    first, levels = words.BLOCKS[format_][2] - 16, np.array(LEVELS.get(format_, (0,)), _F)
    has_levels, is_power = format_ in (IQ4_NL, MXFP4), format_ == MXFP4
    has_least, has_fifth = format_ in (Q4_1, Q5_1), format_ in (Q5_0, Q5_1)
    middle = _I({Q4_0: 8, Q5_0: 16}.get(format_, 0))

    @compiled
    def unpack(address, out):  # type: ignore[no-untyped-def]
        packed = _bytes(address, first + 16)
        scale = _half_power(_I(packed[0])) if is_power else _half(address)
        least = _half(address + 2) if has_least else _F(0)
        num, fifths = len(out) // 2, np.uint32(0)
        if has_fifth:
            fifths = numba.carray(pointer(address + first - 4), (1,), np.uint32)[0]
        for i in range(num):
            for half in range(2):
                number = _bits(packed[first + i], 4 * half, 4)
                if has_fifth:
                    number |= _bits(fifths, 16 * half + i, 1) << 4
                level = levels[number] if has_levels else _F(_I(number - middle))
                out[num * half + i] = level * scale + least

    return unpack


def _of_eight(_: int) -> Callable[..., None]:
    @compiled
    def unpack(address, out):  # type: ignore[no-untyped-def]
        scale, numbers = _half(address), numba.carray(pointer(address + 2), (32,), np.int8)
        for i in range(len(out)):
            out[i] = _F(_I(numbers[i])) * scale

    return unpack


def _of_sixteen(format_: int) -> Callable[..., None]:
    is_half = format_ == F16

    @compiled
    def unpack(address, out):  # type: ignore[no-untyped-def]
        bits = numba.carray(pointer(address), (len(out),), np.uint16)
        for i in range(len(out)):
            out[i] = _from_half(bits[i]) if is_half else as_float(_I(bits[i]) << _I(16))

    return unpack


def _of_k(format_: int) -> Callable[..., None]:
    """Return what unpacks Q4_K or Q5_K: 8 scales and offsets of 6 bits, then 8 times 32 numbers."""
    first, has_fifth = words.BLOCKS[format_][2] - 128, format_ == Q5_K

    @compiled
    def unpack(address, out):  # type: ignore[no-untyped-def]
        packed, fifths = _bytes(address + first, 128), _bytes(address + 16, 32)
        sixes = _bytes(address + 4, 12)
        scale, least, num = _half(address), _half(address + 2), len(out) // 8
        for part in range(8):
            if part < 4:
                factor, offset = _bits(sixes[part], 0, 6), _bits(sixes[part + 4], 0, 6)
            else:
                factor = _bits(sixes[part + 4], 0, 4) | _bits(sixes[part - 4], 6, 2) << 4
                offset = _bits(sixes[part + 4], 4, 4) | _bits(sixes[part], 6, 2) << 4
            of_scale, of_least, by = scale * _F(factor), least * _F(offset), _I(part % 2 * 4)
            for i in range(num):
                number = packed[part // 2 * num + i] >> by & _I(15)
                if has_fifth:
                    number |= _I((fifths[i] >> _I(part) & _I(1)) << _I(4))
                out[num * part + i] = _F(_I(number)) * of_scale - of_least

    return unpack


def _of_six_k(_: int) -> Callable[..., None]:
    @compiled
    def unpack(address, out):  # type: ignore[no-untyped-def]
        lower, upper = _bytes(address, 128), _bytes(address + 128, 64)
        scales = numba.carray(pointer(address + 192), (16,), np.int8)
        scale, num = _half(address + 208), len(out) // 16
        for part in range(16):
            half, quarter = part // 8, part // 2 % 4
            factor = scale * _F(_I(scales[part]))
            for i in range(num):
                index = 32 * half + part % 2 * num + i
                number = _bits(lower[32 * half + quarter % 2 * 32 + index], quarter // 2 * 4, 4)
                number |= _bits(upper[index], 2 * quarter, 2) << 4
                out[num * part + i] = _F(_I(number - 32)) * factor

    return unpack


def _of_four_xs(_: int) -> Callable[..., None]:
    levels = np.array(_IQ4, _F)

    @compiled
    def unpack(address, out):  # type: ignore[no-untyped-def]
        block, scale, num = _bytes(address, 136), _half(address), len(out) // 16
        for part in range(8):
            six = _bits(block[4 + part // 2], part % 2 * 4, 4)
            six |= _bits(block[2 + part // 4], part % 4 * 2, 2) << 4
            factor = scale * _F(_I(six - 32))
            for half in range(2):
                for i in range(num):
                    number = _bits(block[8 + num * part + i], 4 * half, 4)
                    out[2 * num * part + num * half + i] = levels[number] * factor

    return unpack


_UNPACK = {Q4_K: _of_k, Q5_K: _of_k, Q6_K: _of_six_k, IQ4_XS: _of_four_xs, Q8_0: _of_eight}
_UNPACK |= {F16: _of_sixteen, BF16: _of_sixteen}


def unpacking(format_: int) -> Callable[..., None]:
    """Return what unpacks numbers, given their address, how many, and the address of float32."""
    unpack, (_, numbers, in_bytes) = _UNPACK.get(format_, _of_four)(format_), words.BLOCKS[format_]

    @compiled
    def unpack_row(address, num, target):  # type: ignore[no-untyped-def]
        num_blocks = num // numbers
        of_block = num // num_blocks
        for block in range(num_blocks):
            made = numba.carray(pointer(target + 4 * numbers * block), (of_block,), np.float32)
            unpack(address + in_bytes * block, made)

    return unpack_row  # type: ignore[no-any-return]


# --- products -------------------------------------------------------------------------------------


def product_of(format_: int) -> Any:
    """Compile products with weights of a format; return Numba's function.

    Its argument is the address of NUM_GIVEN int64: address of inputs (float32), bytes between rows,
    number of rows; address of weights, bytes between columns, number of columns; address of results
    (float32), to which products are added, bytes between rows; number of inputs, whole blocks;
    address of scratch memory for STRIP float32, on a cache line; bytes from inputs to their digits,
    which only `_digits.product_of` reads. If the address of inputs is 0, it unpacks the weights to
    the results, a row for each column.
    """
    _, numbers, in_bytes = words.BLOCKS[format_]
    unpack_row, few, tall, whole = unpacking(format_), FEW, TALL, (ROWS, COLUMNS)
    is_narrow = format_ in (F16, BF16)
    most_fused = _MOST_FUSED if is_narrow else 0

    def run(address: Any) -> None:
        given = numba.carray(address, (NUM_GIVEN,), np.int64)
        x, x_step, num_rows, w, w_step = given[0], given[1], given[2], given[3], given[4]
        num_columns, y, y_step, size, strip = given[5], given[6], given[7], given[8], given[9]
        if x == 0:
            for column in range(num_columns):
                unpack_row(w + w_step * column, size, y + y_step * column)
            return
        most = whole if num_rows > most_fused else few if num_rows <= few[0] else tall
        # Few rows of inputs fit into the first cache; of many, a part does into the second one.
        outer = size if num_rows <= few[0] else DEPTH
        for start in range(0, size, outer):
            for column in range(0, num_columns, most[1]):
                num, of_y = min(most[1], num_columns - column), (y + 4 * column, y_step)
                for k in range(start, min(start + outer, size), DEPTH):
                    of_x, depth = (x + 4 * k, x_step, num_rows), min(DEPTH, size - k)
                    first = w + w_step * column + k // numbers * in_bytes
                    if is_narrow and num_rows <= most_fused:
                        add_tiles(format_, most, of_x, (first, w_step, num), of_y, depth)
                        continue
                    for i in range(num):
                        unpack_row(first + w_step * i, depth, strip + 4 * DEPTH * i)
                    of_w = strip, 4 * DEPTH, num
                    add_tiles(FLOAT32, whole, of_x, of_w, of_y, depth)

    run.__qualname__ = f"product_of_{format_}"
    return job(run)()
