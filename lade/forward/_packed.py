"""Matrix products with weights in the blocks of GGUF files.

y = x · Wᵀ, where a row of W is blocks of small integers, each block with a scale and maybe an
offset. For few rows of inputs, blocks are unpacked in registers: one look-up in a vector of values
unpacks 16 numbers of 4 bits. For many rows, some columns are unpacked into the first cache, once
for all rows. Sums are in float32, in an order that does not depend on the number of rows: vector by
vector, up to DEPTH inputs at a time.

Each format is compiled when a model first has it. A job calls the function by its address.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lade.forward import words
from lade.forward._tiles import (
    DEPTH,
    FEATURES,
    LANES,
    add_totals,
    add_wide,
    at,
    by_case,
    called,
    everywhere,
    fetch,
    fused,
    job,
    widened,
)

(F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, BF16, MXFP4) = (
    words.BLOCKS
)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
LEVELS = {Q4_0: range(-8, 8), IQ4_NL: _IQ4, IQ4_XS: _IQ4, MXFP4: _FP4}  # of the numbers 0 to 15
HAS_IQ4 = LANES == 16 or "avx2" in FEATURES  # its values need look-ups
STRIP = 6 * DEPTH  # numbers that are unpacked at once for many rows
NUM_GIVEN = 12  # arguments of a product

# Rows and columns of tiles: for few rows, for some more, and for unpacked numbers. Wide tiles of
# these read the inputs, which the first cache does not hold, less often.
_FEW, _TALL, _WHOLE = ((4, 4), (8, 3), (4, 6)) if LANES == 16 else ((4, 2), (4, 2), (4, 2))
_PAIR = 2  # columns of a tile of unpacked numbers where so many are left
_MOST_FUSED = 16 if LANES == 16 else 4  # rows; more are unpacked once for all
_AHEAD = 4096  # bytes, at least, that are prefetched

_INT8, _INT32, _INT64, _HALF = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.HalfType()
_FLOAT = ir.FloatType()
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT32, LANES)
_Make = Callable[[], Any]  # emits code that returns a vector of weights


def _floats(numbers: Sequence[float]) -> Any:
    return ir.Constant(_FLOATS, [float(each) for each in numbers])


def _ints(number: int) -> Any:
    return ir.Constant(_INTS, [number] * LANES)


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


class _Unpack:
    """Emits code that unpacks blocks of one format, of some columns."""

    def __init__(self, build: Any, format_: int, num_columns: int) -> None:
        self._build, self._format = build, format_
        _, self.numbers, self.bytes = words.BLOCKS[format_]
        self.num_groups = {Q4_K: 4, Q5_K: 4, Q6_K: 2, IQ4_XS: 8}.get(format_, 1)
        self._scales: dict[int, Any] = {}  # vectors of a block's scale, by column
        self._factors: list[Any] = []  # scales of a block's parts, in memory
        if format_ in (Q4_K, Q5_K, Q6_K):
            with build.goto_entry_block():
                self._factors = [build.alloca(ir.ArrayType(_FLOAT, 32)) for _ in range(num_columns)]
            for each in self._factors:
                each.align = 64

    def prepare(self, column: int, address: Any) -> None:
        """Emit code that reads the scales of a block."""
        if self._format in (Q4_1, Q5_1):
            self._scales[column] = self._halves(address)
        elif self._format in (Q4_0, Q5_0, Q8_0, IQ4_NL, IQ4_XS):
            self._scales[column] = self._half(address, 0), None
        elif self._format == MXFP4:
            self._scales[column] = self._power(address), None
        elif self._format in (Q4_K, Q5_K):
            self._store_scales(column, address)
        elif self._format == Q6_K:
            numbers = self._load(address, 192, ir.VectorType(_INT8, 16))
            scale = self._half(address, 208)
            for start in range(0, 16, LANES):
                part = self._build.sext(self._part(numbers, start), _INTS)
                wide = self._build.fmul(self._build.sitofp(part, _FLOATS), scale)
                self._store(column, start, wide)
                least = self._build.fmul(wide, _floats([-32] * LANES))
                self._store(column, 16 + start, least)

    def vectors(self, column: int, address: Any, group: Any) -> list[_Make]:
        """Return emitters of the weights of a group of a block, in their order."""
        build, starts = self._build, range(0, 32, LANES)
        if self._format in (F32, F16, BF16):
            kind = {F32: _FLOAT, F16: _HALF, BF16: ir.IntType(16)}[self._format]
            width = 4 if self._format == F32 else 2
            loaded = [self._load(address, width * i, ir.VectorType(kind, LANES)) for i in starts]
            return [partial(widened, build, each) for each in loaded]
        if self._format == Q8_0:
            ints = [self._bytes(address, _INT64(2 + i), signed=True) for i in starts]
            scale, _ = self._scales[column]
            return [partial(lambda i: build.fmul(build.sitofp(i, _FLOATS), scale), i) for i in ints]
        if self._format == Q6_K:
            return self._of_six(column, address, group)
        if self.numbers == 32:
            packed_at, num = _INT64(self.bytes - 16), 16
        elif self._format == IQ4_XS:
            packed_at, num = build.add(_INT64(8), build.mul(group, _INT64(16))), 16
        else:
            packed_at = build.add(_INT64(self.bytes - 128), build.mul(group, _INT64(32)))
            num = 32
        packed = [
            self._bytes(address, build.add(packed_at, _INT64(i))) for i in range(0, num, LANES)
        ]
        fifth = self._fifth_bits(address, group)
        made: list[_Make] = []
        for half in range(2):
            # Once for each half, when it is needed.
            scales = cache(partial(self._scales_of, column, address, group, half))
            for part, each in enumerate(packed):
                made.append(partial(self._nibbles, each, half, scales, fifth and fifth(half, part)))
        return made

    # --- numbers ----------------------------------------------------------------------------------

    def _nibbles(self, packed: Any, half: int, scales: Any, fifth: Any) -> Any:
        """Emit the values of the lower or the upper halves of bytes."""
        build = self._build
        index = build.lshr(packed, _ints(4)) if half else packed
        if not half and (LANES != 16 or fifth is not None):  # a look-up in 16 values takes 4 bits
            index = build.and_(index, _ints(15))
        if fifth is not None:
            index = build.select(fifth, build.or_(index, _ints(16)), index)
        return scales()(index)

    def _scales_of(self, column: int, address: Any, group: Any, half: int) -> Callable[[Any], Any]:
        """Return emitters of the weights of half a group's integers."""
        build = self._build
        if self._format in (Q4_K, Q5_K):
            index = build.add(build.mul(group, _INT64(2)), _INT64(half))
            scale, least = self._factor(column, index), self._factor(column, index, 8)
        elif self._format == IQ4_XS:
            scale, least = self._sixth_scale(column, address, group), None
        else:
            scale, least = self._scales[column]
        if self._format in (Q5_0, Q5_1, Q5_K):
            first = _floats([-16] * LANES)
            least = build.fmul(scale, first) if least is None else least
            return lambda of: fused(build, build.sitofp(of, _FLOATS), scale, least)
        levels = LEVELS.get(self._format, range(16))
        if LANES == 16:
            table = _floats(levels)
            table = build.fmul(table, scale) if least is None else fused(build, table, scale, least)
            return partial(self._looked_up, table)

        def by_level(index: Any) -> Any:
            if type(levels) is tuple:
                lower, upper = (
                    self._looked_up(_floats(each), index) for each in (levels[:8], levels[8:])
                )
                level = build.select(build.icmp_unsigned(">", index, _ints(7)), upper, lower)
            else:
                level = build.sitofp(build.add(index, _ints(levels[0])), _FLOATS)
            return build.fmul(level, scale) if least is None else fused(build, level, scale, least)

        return by_level

    def _fifth_bits(self, address: Any, group: Any) -> Any:
        """Return a function that gives the fifth bits of a vector of a half."""
        build = self._build
        if self._format in (Q5_0, Q5_1):
            bits = self._all(self._load(address, self.bytes - 20, _INT32))

            def of_word(half: int, part: int) -> Any:
                first = 16 * half + LANES * part
                mask = ir.Constant(_INTS, [1 << (first + i) for i in range(LANES)])
                return build.icmp_unsigned("!=", build.and_(bits, mask), _ints(0))

            return of_word
        if self._format != Q5_K:
            return None
        loaded = [self._bytes(address, _INT64(16 + i)) for i in range(0, 32, LANES)]
        bit = build.trunc(build.shl(_INT64(1), build.mul(group, _INT64(2))), _INT32)

        def of_bytes(half: int, part: int) -> Any:
            mask = self._all(build.shl(bit, _INT32(half)))
            return build.icmp_unsigned("!=", build.and_(loaded[part], mask), _ints(0))

        return of_bytes

    def _of_six(self, column: int, address: Any, group: Any) -> list[_Make]:
        """Return emitters of 128 weights of Q6_K, four quarters whose bits are interleaved."""
        build = self._build
        lower_at, upper_at = build.mul(group, _INT64(64)), build.mul(group, _INT64(32))
        lowers = [self._bytes(address, build.add(lower_at, _INT64(i))) for i in range(0, 64, LANES)]
        uppers = [
            self._bytes(address, build.add(upper_at, _INT64(128 + i))) for i in range(0, 32, LANES)
        ]

        def make(quarter: int, part: int) -> Any:
            low = lowers[quarter % 2 * (32 // LANES) + part]
            four = build.lshr(low, _ints(4)) if quarter > 1 else build.and_(low, _ints(15))
            by = 2 * quarter - 4
            shift = build.lshr if by > 0 else build.shl
            two = shift(uppers[part], _ints(abs(by))) if by else uppers[part]
            six = build.or_(four, build.and_(two, _ints(0x30)))
            index = build.mul(group, _INT64(8))
            index = build.add(index, _INT64(2 * quarter + LANES * part // 16))
            factors = self._factor(column, index), self._factor(column, index, 16)
            return fused(build, build.sitofp(six, _FLOATS), *factors)

        return [partial(make, quarter, part) for quarter in range(4) for part in range(32 // LANES)]

    def _looked_up(self, table: Any, index: Any) -> Any:
        """Emit a look-up in a vector, by the lowest bits."""
        name = "llvm.x86.avx512.permvar.sf.512" if LANES == 16 else "llvm.x86.avx2.permps"
        return called(self._build, name, _FLOATS, table, index)

    # --- scales -----------------------------------------------------------------------------------

    def _store_scales(self, column: int, address: Any) -> None:
        """Emit code that stores the 8 scales of Q4_K or Q5_K, then their 8 offsets."""
        build = self._build
        first, second, third = (self._load(address, 4 + 4 * i, _INT32) for i in range(3))
        six, four = _INT32(0x3F3F3F3F), _INT32(0x0F0F0F0F)

        def joined(lower: Any, upper: Any) -> Any:
            two = build.and_(build.lshr(upper, _INT32(6)), _INT32(0x03030303))
            return build.or_(build.and_(lower, four), build.shl(two, _INT32(4)))

        words: Any = ir.Constant(ir.VectorType(_INT32, 4), ir.Undefined)
        shifted = build.lshr(third, _INT32(4))
        firsts = build.and_(first, six), joined(third, first)
        seconds = build.and_(second, six), joined(shifted, second)
        for i, each in enumerate((*firsts, *seconds)):
            words = build.insert_element(words, each, _INT32(i))
        numbers = build.bitcast(words, ir.VectorType(_INT8, 16))
        scale, least = self._halves(address)
        factors = [scale, build.fneg(least)]
        if LANES == 16:
            mask = ir.Constant(_INTS, [0] * 8 + [16] * 8)
            factors = [build.shuffle_vector(*factors, mask)]
        for i, factor in enumerate(factors):
            part = build.uitofp(build.zext(self._part(numbers, LANES * i), _INTS), _FLOATS)
            self._store(column, LANES * i, build.fmul(part, factor))

    def _sixth_scale(self, column: int, address: Any, group: Any) -> Any:
        """Emit a scale of IQ4_XS in all lanes: the block's scale times a number of 6 bits."""
        build = self._build
        at_byte = build.add(_INT64(4), build.lshr(group, _INT64(1)))
        lower = build.zext(self._load(build.add(address, at_byte), 0, _INT8), _INT64)
        lower = build.lshr(lower, build.mul(build.and_(group, _INT64(1)), _INT64(4)))
        upper = build.zext(self._load(address, 2, ir.IntType(16)), _INT64)
        upper = build.lshr(upper, build.mul(group, _INT64(2)))
        upper = build.shl(build.and_(upper, _INT64(3)), _INT64(4))
        number = build.sub(build.or_(build.and_(lower, _INT64(15)), upper), _INT64(32))
        factor = self._all(build.sitofp(number, _FLOAT), _FLOATS)
        return build.fmul(self._scales[column][0], factor)

    def _factor(self, column: int, index: Any, start: int = 0) -> Any:
        """Emit a stored number in all lanes."""
        build = self._build
        address = build.bitcast(self._factors[column], _FLOAT.as_pointer())
        address = build.gep(address, [build.add(index, _INT64(start))])
        return self._all(build.load(address, align=4), _FLOATS)

    def _store(self, column: int, start: int, numbers: Any) -> None:
        address = self._build.gep(self._factors[column], [_INT32(0), _INT32(start)])
        address = self._build.bitcast(address, _FLOATS.as_pointer())
        self._build.store(numbers, address, align=4 * LANES)

    # --- loads ------------------------------------------------------------------------------------

    def _load(self, address: Any, offset: int, kind: Any) -> Any:
        return self._build.load(at(self._build, address, _INT64(offset), 1, kind), align=1)

    def _bytes(self, address: Any, offset: Any, *, signed: bool = False) -> Any:
        """Emit LANES bytes as integers of 32 bits."""
        loaded = self._load(self._build.add(address, offset), 0, ir.VectorType(_INT8, LANES))
        return (self._build.sext if signed else self._build.zext)(loaded, _INTS)

    def _part(self, numbers: Any, start: int) -> Any:
        mask = ir.Constant(_INTS, [*range(start, start + LANES)])
        return self._build.shuffle_vector(numbers, numbers, mask)

    def _all(self, number: Any, kind: Any = _INTS) -> Any:
        return everywhere(self._build, number, kind)

    def _half(self, address: Any, offset: int) -> Any:
        """Emit a float16 as float32 in all lanes."""
        half = self._all(self._load(address, offset, _HALF), ir.VectorType(_HALF, LANES))
        return self._build.fpext(half, _FLOATS)

    def _power(self, address: Any) -> Any:
        """Emit half of the power of 2 whose exponent is a byte, in all lanes."""
        build = self._build
        byte = build.zext(self._load(address, 0, _INT8), _INT32)
        bits = half_power(build, byte, _INT32)
        return self._all(build.bitcast(bits, _FLOAT), _FLOATS)

    def _halves(self, address: Any) -> list[Any]:
        """Emit two float16 in memory as float32, each in all lanes.

        They are loaded as one number: a load into a part of a register waits for the value that
        was there before, such as a sum.
        """
        build, kind = self._build, ir.VectorType(_INT32, LANES // 2)
        both = everywhere(build, self._load(address, 0, _INT32), kind)
        both = build.fpext(build.bitcast(both, ir.VectorType(_HALF, LANES)), _FLOATS)
        return [
            build.shuffle_vector(
                both, both, ir.Constant(_INTS, [i // 2 * 2 + j for i in range(LANES)])
            )
            for j in range(2)
        ]


# --- tiles ----------------------------------------------------------------------------------------


def _at_once(format_: int) -> int:
    """Return how many blocks one turn of a loop unpacks, whose cache lines it prefetches."""
    return 2 if words.BLOCKS[format_][1] == 32 and format_ != F32 else 1


def _over_blocks(
    build: Any, unpack: _Unpack, at_once: int, num_blocks: Any, ahead: Any, weights: Any, take: Any
) -> None:
    """Emit a loop over blocks, a whole number of turns, that prefetches.

    Args:
        build, unpack: emit the code.
        at_once: number of blocks in a turn.
        num_blocks: number of all blocks.
        ahead: distance of the prefetch in bytes, or None for no prefetch.
        weights: addresses of the first block of each column.
        take: called with the number of inputs before, and emitters of a vector of each column.
    """
    num_groups = unpack.num_groups
    of_group = unpack.numbers // num_groups
    with cgutils.for_range(build, build.udiv(num_blocks, _INT64(at_once))) as turns:
        first = build.mul(turns.index, _INT64(at_once))
        by = build.mul(first, _INT64(unpack.bytes))
        for each in weights if ahead is not None else ():
            for line in range(0, at_once * unpack.bytes, 64):
                fetch(build, build.add(build.add(each, ahead), build.add(by, _INT64(line))))
        for block in range(at_once):
            start = build.add(by, _INT64(block * unpack.bytes))
            addresses = [build.add(each, start) for each in weights]
            for column, address in enumerate(addresses):
                unpack.prepare(column, address)
            before = build.mul(build.add(first, _INT64(block)), _INT64(unpack.numbers))

            def write(group: Any, addresses: Any = addresses, before: Any = before) -> None:
                index = build.add(before, build.mul(group, _INT64(of_group)))
                columns = [unpack.vectors(i, address, group) for i, address in enumerate(addresses)]
                for number, makes in enumerate(zip(*columns, strict=True)):
                    take(build.add(index, _INT64(LANES * number)), makes)

            if num_groups == 1:
                write(_INT64(0))
            else:
                with cgutils.for_range(build, _INT64(num_groups)) as groups:
                    write(groups.index)


def _write_tile(build: Any, format_: int, num_rows: int, num_columns: int, given: Any) -> None:
    """Emit the code of a tile of one size; the arguments are those of `_tile` without the size."""
    x, x_step, w, w_step, out, out_step, num_blocks, ahead = given
    unpack = _Unpack(build, format_, num_columns)
    inputs = [build.add(x, build.mul(x_step, _INT64(row))) for row in range(num_rows)]
    zero = _floats([0] * LANES)
    sums = [[cgutils.alloca_once(build, _FLOATS) for _ in range(num_columns)] for _ in inputs]
    results = [build.add(out, build.mul(out_step, _INT64(row))) for row in range(num_rows)]
    per_piece = DEPTH // unpack.numbers
    pieces = build.udiv(build.add(num_blocks, _INT64(per_piece - 1)), _INT64(per_piece))
    with cgutils.for_range(build, pieces) as piece:
        first = build.mul(piece.index, _INT64(per_piece))
        rest = build.sub(num_blocks, first)
        is_last = build.icmp_unsigned("<", rest, _INT64(per_piece))
        size = build.select(is_last, rest, _INT64(per_piece))
        start = build.add(w, build.mul(first, _INT64(unpack.bytes)))
        weights = [build.add(start, build.mul(w_step, _INT64(i))) for i in range(num_columns)]
        before = build.mul(first, _INT64(unpack.numbers))
        for address in (address for of_row in sums for address in of_row):
            build.store(zero, address)

        def take(index: Any, makes: Any, before: Any = before) -> None:
            wide = [make() for make in makes]
            add_wide(build, sums, inputs, wide, build.add(before, index), _FLOATS)

        ahead = None if format_ == F32 else ahead  # unpacked numbers are in the cache
        _over_blocks(build, unpack, _at_once(format_), size, ahead, weights, take)
        add_totals(build, sums, results)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _tile(typing_context: Any, format_: Any, of: Any) -> Any:
    """Add the products of some inputs and blocks of a format to a tile of the results.

    Args:
        typing_context: Numba's.
        format_: a constant.
        of: in two tuples, number of rows and of columns, of a size in `_sizes`; address of the
            first input, and bytes from one row to the next; address of the first weight, and bytes
            from one column to the next; address of the first result, and bytes from one row to the
            next; number of blocks; distance of the prefetch in bytes.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        parts = [
            cgutils.unpack_tuple(builder, each)
            for each in cgutils.unpack_tuple(builder, arguments[1])
        ]
        num_rows, num_columns, *given = [each for part in parts for each in part]
        kind = format_.literal_value
        cases = {
            8 * rows + columns: partial(_write_tile, builder, kind, rows, columns, given)
            for rows, columns in _sizes(kind)
        }
        by_case(builder, builder.add(builder.mul(num_rows, _INT64(8)), num_columns), cases)
        return context.get_dummy_value()

    return types.void(format_, of), generate


def _sizes(format_: int) -> list[tuple[int, int]]:
    """Return the sizes of tiles, in rows and columns."""
    if format_ == F32:
        of_rows = range(1, _WHOLE[0] + 1)
        return [
            *sorted({(rows, columns) for rows in of_rows for columns in (_WHOLE[1], _PAIR)}),
            (1, 1),
        ]
    few = {(rows + 1, _FEW[1]) for rows in range(_FEW[0])}
    return sorted(few | {(rows, _TALL[1]) for rows in range(_FEW[0], _TALL[0] + 1)})


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _unpack_row(typing_context: Any, format_: Any, of: Any) -> Any:
    """Unpack blocks of a format, a constant, to float32.

    Args:
        typing_context: Numba's.
        format_: a constant.
        of: address of the blocks, and their number; address of the numbers; distance of the
            prefetch in bytes.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, num_blocks, target, ahead = cgutils.unpack_tuple(builder, arguments[1])
        kind = format_.literal_value

        def take(index: Any, makes: Any) -> None:
            to = at(builder, target, index, 4, _FLOATS)
            builder.store(makes[0](), to, align=4)

        unpack = _Unpack(builder, kind, 1)
        _over_blocks(builder, unpack, 1, num_blocks, ahead, [address], take)
        return context.get_dummy_value()

    return types.void(format_, of), generate


# --- products -------------------------------------------------------------------------------------


@numba.njit(inline="always")
def unpack_rows(format_, weights, results, num_columns, num_blocks):  # type: ignore[no-untyped-def]
    """Unpack the blocks of each column, given addresses and the bytes between columns."""
    (w, w_step), (y, y_step) = weights, results
    for column in range(num_columns):
        _unpack_row(format_, (w + w_step * column, num_blocks, y + y_step * column, w_step))


@numba.njit(inline="always")
def _add_rows(format_, most, inputs, weights, results, num_blocks, ahead):  # type: ignore[no-untyped-def]
    """Add products of all rows, in parts of about equal size, for the columns of a tile."""
    (rows, columns), (x, x_step, num_rows), (y, y_step) = most, inputs, results
    num_parts, row = -(-num_rows // rows), 0
    for part in range(num_parts):
        until = num_rows * (part + 1) // num_parts
        of = until - row, columns, x + x_step * row, x_step, weights[0], weights[1]
        _tile(format_, (of, (y + y_step * row, y_step, num_blocks, ahead)))
        row = until


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
    at_once, most_fused, few, tall, whole = _at_once(format_), _MOST_FUSED, _FEW, _TALL, _WHOLE

    def run(address: Any) -> None:
        given = numba.carray(address, (NUM_GIVEN,), np.int64)
        x, x_step, num_rows, w, w_step = given[0], given[1], given[2], given[3], given[4]
        num_columns, y, y_step, size, strip = given[5], given[6], given[7], given[8], given[9]
        num_blocks, num_fused = size // numbers, 0
        if x == 0:
            unpack_rows(format_, (w, w_step), (y, y_step), num_columns, num_blocks)
            return
        if num_rows <= most_fused and num_blocks % at_once == 0:
            rows, columns = few if num_rows <= few[0] else tall
            depth = size if num_rows <= few[0] else DEPTH  # fits into the first cache
            num_fused, ahead = num_columns // columns * columns, max(columns * w_step, _AHEAD)
            for k in range(0, size, depth):
                of_x, num = (x + 4 * k, x_step, num_rows), min(depth, size - k) // numbers
                for column in range(0, num_fused, columns):
                    of_w = w + w_step * column + k // numbers * in_bytes, w_step
                    of_y = y + 4 * column, y_step
                    _add_rows(format_, (rows, columns), of_x, of_w, of_y, num, ahead)
        for k in range(0, size, DEPTH):  # all inputs of a part fit into the second cache
            of_x, num = (x + 4 * k, x_step, num_rows), min(DEPTH, size - k)
            column = num_fused
            while column < num_columns:
                rest = num_columns - column
                width = whole[1] if rest >= whole[1] else min(rest, _PAIR)
                for i in range(width):
                    address = w + w_step * (column + i) + k // numbers * in_bytes
                    of_row = address, num // numbers, strip + 4 * DEPTH * i, width * w_step
                    _unpack_row(format_, of_row)
                most = whole[0] if width > 1 else 1, width
                of_w, of_y = (strip, 4 * DEPTH), (y + 4 * column, y_step)
                _add_rows(F32, most, of_x, of_w, of_y, num // 32, 0)
                column += width

    run.__qualname__ = f"product_of_{format_}"
    return job(run)()
