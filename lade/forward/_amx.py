"""Matrix products with weights in bfloat16 by AMX, as exact as products in float32.

An input is written as three digits, numbers in bfloat16 whose sum it is: the upper 8 bits of its
24, the next 8, and the rest. AMX multiplies a digit of up to 16 rows by the weights of 16 columns,
32 inputs at once; products of numbers of 8 bits are exact, and their sums are in float32. So a few
rows cost as much as one, and a row has the same bits beside any others.

Source: Henry, Tang and Heinecke (arXiv 1904.06376), three terms of bfloat16.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from lade.forward import words
from lade.forward._digits import _FLOATS, _INTS, _ints, add_columns
from lade.forward._packed import BF16, NUM_GIVEN, unpack_rows
from lade.forward._tiles import (
    DEPTH,
    FEATURES,
    at,
    by_case,
    called,
    instruction,
    job,
    pointer,
)

_TILE = 16  # rows of weights, and of inputs, whose sums are a tile
_LINE = 64  # bytes of a row of a tile: 32 digits
# Tiles: sums of products with the first digits, and with the others, which are 256 times smaller
# and would lose bits beside them; weights; digits. Each but digits for two strips of columns.
_FIRSTS, _OTHERS, _WEIGHTS, _DIGITS = (0, 1), (2, 3), (4, 5), (6, 7)
_CALL, _ASK, _TILE_DATA = 158, 0x1023, 18  # Linux's arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)

_INT8, _INT16, _INT32, _INT64 = (ir.IntType(8 << i) for i in range(4))


def _has_tiles() -> bool:
    """Return whether this process may use the CPU's tiles, for which Linux must be asked."""
    if not all(map(FEATURES.get, ("amx-tile", "amx-bf16"))):
        return False
    return bool(ctypes.CDLL(None).syscall(_CALL, _ASK, _TILE_DATA) == 0)


#: Inputs from which on tiles are as fast as vectors for a single row, too: of shorter columns, the
#: CPU does not fetch the next ones in time.
LEAST_INPUTS = 2048
#: Formats whose products are by tiles on this CPU.
FORMATS = (BF16,) if _has_tiles() else ()


@instruction(types.void)
def write_digits(build: Any, of: Any) -> None:
    """Write float32 as digits, given the address of the numbers, and the number of blocks.

    The first two digits of each number go to the second address, the third to the third.
    """
    source, target, last, num_blocks = cgutils.unpack_tuple(build, of)
    if not FORMATS:
        return
    with cgutils.for_range(build, num_blocks) as blocks:
        start = build.mul(blocks.index, _INT64(4 * words.DIGITS_BLOCK))
        for i in range(2):
            address = at(build, source, build.add(start, _INT64(64 * i)), 1, _FLOATS)
            rest = build.load(address, align=4)
            # No rest is infinite. NaN stays, even if its upper bits are those of infinity.
            exponent = build.and_(build.bitcast(rest, _INTS), _ints(0x7F800000))
            is_finite = build.icmp_unsigned("!=", exponent, _ints(0x7F800000))
            is_nan = build.fcmp_unordered("uno", rest, rest)
            quiet = build.select(is_nan, _ints(0x400000), _ints(0))
            for digit in range(3):
                bits = build.bitcast(rest, _INTS)
                bits = build.or_(bits, quiet) if digit == 0 else bits
                upper = build.trunc(build.lshr(bits, _ints(16)), ir.VectorType(_INT16, 16))
                by = build.add(start, _INT64(_LINE * (digit % 2) + 32 * i))
                to = at(build, last if digit == 2 else target, by, 1, upper.type)
                build.store(upper, to, align=4)
                cut = build.bitcast(build.and_(bits, _ints(0xFFFF0000)), _FLOATS)
                none = ir.Constant(_FLOATS, [0.0] * 16)
                rest = build.select(is_finite, build.fsub(rest, cut), none)


@instruction(types.void, types.int64)
def _configure(build: Any, address: Any) -> None:
    """Give this thread tiles of sizes that are described at an address."""
    called(build, "llvm.x86.ldtilecfg", ir.VoidType(), _pointer(build, address))


@instruction(types.void, types.int64)
def release(build: Any, _: Any) -> None:
    """Give back the tiles, which the system saves whenever it lets another thread run."""
    if FORMATS:
        called(build, "llvm.x86.tilerelease", ir.VoidType())


def _pointer(build: Any, address: Any) -> Any:
    return build.inttoptr(address, _INT8.as_pointer())


@instruction(types.void)
def _turn(build: Any, of: Any) -> None:
    """Write digits of up to 16 rows so that two inputs of all rows lie side by side.

    Args:
        build: the builder.
        of: address of the first row's digits, of their last ones, bytes between rows, their number,
            that of a tile, and that of blocks; address of the result, three tiles of each block.
    """
    x, last, x_step, num_rows, of_tile, num_blocks, panel = cgutils.unpack_tuple(build, of)
    width, one = build.mul(of_tile, _INT64(4)), _INT64(1)
    tile = build.mul(width, _INT64(_TILE))
    steps = []
    for i in range(_TILE):  # behind the last row, it is read again
        is_there = build.icmp_unsigned("<", _INT64(i), num_rows)
        row = build.select(is_there, _INT64(i), build.sub(num_rows, one))
        steps.append(build.mul(row, x_step))
    is_one = build.icmp_unsigned("==", of_tile, one)
    with cgutils.for_range(build, num_blocks) as blocks:
        start = build.mul(blocks.index, _INT64(4 * words.DIGITS_BLOCK))
        for digit in range(3):
            given = build.add(last if digit == 2 else x, start)
            given = build.add(given, _INT64(_LINE * (digit % 2)))
            number = build.add(build.mul(blocks.index, _INT64(3)), _INT64(digit))
            to = build.add(panel, build.mul(number, tile))
            with build.if_else(is_one) as (then, otherwise):
                with then:
                    line = build.load(at(build, given, _INT64(0), 1, _INTS), align=4)
                    build.store(line, at(build, to, _INT64(0), 1, _INTS), align=4)
                with otherwise:
                    # As long as 16 rows: the excess lies where the next vector goes.
                    lines = _turned(build, [build.add(given, each) for each in steps])
                    for i, vector in enumerate(lines):
                        address = build.add(to, build.mul(width, _INT64(i)))
                        build.store(vector, at(build, address, _INT64(0), 1, _INTS), align=4)


def _turned(build: Any, addresses: list[Any]) -> list[Any]:
    """Emit the columns of a matrix of words, given the addresses of its rows, lines of the cache.

    Each line is read at once: rows that are a power of 2 apart push each other out of the cache.
    """
    half = ir.VectorType(_INT32, _TILE // 2)

    def joined(pair: Sequence[Any], mask: list[int]) -> Any:
        constant = ir.Constant(ir.VectorType(_INT32, len(mask)), mask)
        return build.shuffle_vector(*pair, constant)

    # Halves of two rows in one vector; then squares of 1, 2 and 4 words change places.
    vectors: list[Any] = [None] * _TILE
    for i in range(8):
        for part in range(2):
            parts = [
                build.load(at(build, addresses[row], _INT64(32 * part), 1, half), align=1)
                for row in (i, i + 8)
            ]
            vectors[8 * part + i] = joined(parts, [*range(_TILE)])
    for size in (1, 2, 4):
        lower = [i for i in range(_TILE) if not i & size]
        masks = [
            [i if not i & size else _TILE + i - size for i in range(_TILE)],
            [i + size if not i & size else _TILE + i for i in range(_TILE)],
        ]
        for i in lower:
            pair = vectors[i], vectors[i + size]
            vectors[i], vectors[i + size] = (joined(pair, mask) for mask in masks)
    return vectors


@instruction(types.void)
def _multiply(build: Any, of: Any) -> None:
    """Write the sums of up to 16 rows and of one strip of 16 columns, or two.

    Args:
        build: the builder.
        of: number of strips and of rows; address of the turned digits; address of the first weight,
            bytes between columns; number of blocks; address of the sums, a tile of the first
            digits' and one of the others' for each strip.
    """
    num_strips, num_rows, panel, w, w_step, num_blocks, sums = cgutils.unpack_tuple(build, of)
    width = build.mul(num_rows, _INT64(4))
    size = build.mul(width, _INT64(_TILE))

    def tile(name: str, number: int, *given: Any) -> None:
        called(build, f"llvm.x86.{name}", ir.VoidType(), _INT8(number), *given)

    def write(num: int) -> None:
        for each in (*_FIRSTS[:num], *_OTHERS[:num]):
            tile("tilezero", each)
        with cgutils.for_range(build, num_blocks) as blocks:
            start = build.add(w, build.mul(blocks.index, _INT64(_LINE)))
            for i in range(num):
                first = build.add(start, build.mul(w_step, _INT64(_TILE * i)))
                tile("tileloadd64", _WEIGHTS[i], _pointer(build, first), w_step)
            of_block = build.add(panel, build.mul(build.mul(blocks.index, _INT64(3)), size))
            for digit in range(3):
                address = build.add(of_block, build.mul(size, _INT64(digit)))
                tile("tileloadd64", _DIGITS[digit % 2], _pointer(build, address), width)
                for i in range(num):
                    into = (_OTHERS if digit else _FIRSTS)[i]
                    tile("tdpbf16ps", into, _INT8(_WEIGHTS[i]), _INT8(_DIGITS[digit % 2]))
        for i in range(num):
            for number, each in enumerate((_FIRSTS[i], _OTHERS[i])):
                address = build.add(sums, _INT64(_LINE * _TILE * (2 * i + number)))
                tile("tilestored64", each, _pointer(build, address), width)

    by_case(build, num_strips, {1: lambda: write(1), 2: lambda: write(2)})


@instruction(types.void)
def _give(build: Any, of: Any) -> None:
    """Add a strip's sums, or those of its first column, to results.

    Args:
        build: the builder.
        of: address of the sums, number of a tile's rows, of those that are given and of columns;
            address of the first result, and bytes between rows.
    """
    sums, of_tile, num_rows, num_columns, y, y_step = cgutils.unpack_tuple(build, of)
    width = build.mul(of_tile, _INT64(4))

    def total(start: Any) -> Any:
        parts = [
            at(build, build.add(start, _INT64(1024 * i)), _INT64(0), 1, _FLOATS) for i in range(2)
        ]
        return build.fadd(*(build.load(each, align=4) for each in parts))

    def store(row: Any, sums: Any) -> None:
        address = build.add(y, build.mul(y_step, row))
        add_columns(build, address, sums, build.icmp_unsigned("==", num_columns, _INT64(1)))

    with build.if_else(build.icmp_unsigned("==", of_tile, _INT64(1))) as (then, otherwise):
        with then:
            store(_INT64(0), total(sums))
        with otherwise:
            lines = [build.add(sums, build.mul(width, _INT64(i))) for i in range(_TILE)]
            for each, numbers in zip(lines, [*map(total, lines)], strict=True):
                build.store(numbers, at(build, each, _INT64(0), 1, _FLOATS), align=4)
            for i, each in enumerate(_turned(build, lines)):
                to = at(build, sums, _INT64(_LINE * i), 1, _INTS)
                build.store(each, to, align=4)
            with cgutils.for_range(build, num_rows) as rows:
                at_row = at(build, sums, rows.index, _LINE, _FLOATS)
                store(rows.index, build.load(at_row, align=4))


def product_of(format_: int) -> Any:
    """Compile products with weights of a format in FORMATS; return Numba's function.

    Its argument is that of `_digits.product_of`, and the address of memory for turned digits, which
    begins with the address and the number of the inputs whose digits they are, and 0 for none. The
    last digits are as far behind the others as these behind the inputs.
    """

    def run(address: Any) -> None:
        given = numba.carray(address, (NUM_GIVEN,), np.int64)
        x, x_step, num_rows, w, w_step = given[0], given[1], given[2], given[3], given[4]
        num_columns, y, y_step, size, memory = given[5], given[6], given[7], given[8], given[9]
        if x == 0:
            unpack_rows(format_, (w, w_step), (y, y_step), num_columns, size // 32)
            return
        if num_rows == 0:  # a part of a prompt without logits; there are no tiles of no rows
            return
        turned, of_tile, width = given[11], min(num_rows, 16), 6 * size
        which = numba.carray(pointer(turned), (2,), np.int64)
        if which[0] != x or which[1] != size:
            which[0], which[1] = x, size
            sizes = numba.carray(pointer(turned + 64), (64,), np.uint8)
            sizes[:] = 0
            sizes[0] = 1  # of palettes
            for tile in range(8):
                is_weights = tile == 4 or tile == 5
                sizes[16 + 2 * tile] = 64 if is_weights else 4 * of_tile
                sizes[48 + tile] = 16
            _configure(turned + 64)
            for row in range(0, num_rows, 16):
                place = x + given[10] + (x_step + words.DIGITS_APART) * row
                num = min(num_rows - row, 16)
                of_x = place, place + given[10], x_step + words.DIGITS_APART, num
                _turn((*of_x, of_tile, size // 32, turned + 128 + width * row))
        sums, outer = memory, size if num_rows <= 16 else DEPTH
        for start in range(0, size, outer):
            until, column = min(start + outer, size), 0
            while column < num_columns:
                rest = num_columns - column
                num, step = (2 if rest >= 32 else 1), (w_step if rest >= 16 else 0)
                for row in range(0, num_rows, 16):
                    for k in range(start, until, DEPTH):
                        num_blocks = min(DEPTH, until - k) // 32
                        of_digits = turned + 128 + width * row + 6 * of_tile * k
                        of_w = w + w_step * column + 2 * k, step
                        _multiply((num, of_tile, of_digits, *of_w, num_blocks, sums))
                        for i in range(num):
                            of_y = y + y_step * row + 4 * (column + 16 * i), y_step
                            num_given = min(num_rows - row, 16), 16 if rest >= 16 else 1
                            _give((sums + 2048 * i, of_tile, *num_given, *of_y))
                column += 16 * num if rest >= 16 else 1

    run.__qualname__ = f"product_by_tiles_{format_}"
    return job(run)()
