"""Matrix products with weights in blocks by sums of integers, as exact as products in float32.

A block of 32 inputs is written as three signed digits of 8 bits per number, times one scale: 23
bits and a sign beside the largest number of the block. The CPU multiplies a digit by the weights'
small integers, 32 or 64 at once, and their sums are exact. Only when a sum joins the others is it
rounded, to float32: results are as near to the exact ones as float32's, for any number of rows.

16 columns are the lanes of a vector; a lane takes 4 inputs at once. Blocks are read where they are:
16 bytes of each column are turned so that a lane has its column's.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lade.forward import words
from lade.forward._packed import (
    IQ4_NL,
    IQ4_XS,
    LEVELS,
    MXFP4,
    NUM_GIVEN,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    half_power,
    unpack_rows,
)
from lade.forward._tiles import (
    DEPTH,
    FEATURES,
    at,
    called,
    everywhere,
    fetch,
    fused,
    instruction,
    job,
)

# How bytes are multiplied: 64 or 32 at once into sums of four, or 32 into sums of two of 16 bits.
_DOT = next((each for each in ("avx512vnni", "avxvnni", "avx2") if FEATURES.get(each)), None)
# What the numbers of each format lie around, so that bytes without a sign stand for them.
AROUND = {Q4_0: 8, Q4_1: 8, Q4_K: 8, Q5_0: 16, Q5_1: 16, Q5_K: 16, MXFP4: 16, Q6_K: 32}
AROUND |= dict.fromkeys((Q8_0, IQ4_NL, IQ4_XS), 128)
#: Formats whose products are by digits on this CPU. Sums of two with 8 bits may not fit into 16.
FORMATS = tuple(
    each for each, around in AROUND.items() if _DOT and (_DOT != "avx2" or around < 128)
)
# A block takes as many bytes as its float32: the digits, highest first; the scale; the sum of the
# numbers; and what integer sums begin with: for weights around 8; for those around 32, of each
# half, for the higher digits and for the lowest. Those around 16 begin with the mean of both, those
# around 128 with four times their sum.
_BYTES, _NUM_DIGITS = 128, 3
_SCALE, _TOTAL, _OF_FOUR, _OF_SIX = 96, 100, 104, 108
# What the largest number becomes: its first digit is 127 at most, also if it is rounded up, and
# sums of 32 products with 4 bits, around 8, fit into 32 bits.
_TOP = 8355000
_LEAST = 1e-30  # blocks of smaller numbers are zero: their scale would be no normal number
_MOST_ROWS = 128  # at once: their sums fit into the scratch memory
_FEW_ROWS = 4  # whose inputs stay in the first cache, however many they are

_INT8, _INT16, _INT32, _INT64 = (ir.IntType(8 << i) for i in range(4))
_FLOAT, _INTS = ir.FloatType(), ir.VectorType(_INT32, 16)
_FLOATS = ir.VectorType(_FLOAT, 16)


def _ints(number: int) -> Any:
    return ir.Constant(_INTS, [number] * 16)


def _floats(number: float) -> Any:
    return ir.Constant(_FLOATS, [float(number)] * 16)


@instruction(types.void)
def write_digits(build: Any, of: Any) -> None:
    """Write float32 as digits, given the addresses of both and the number of blocks."""
    source, target, num_blocks = cgutils.unpack_tuple(build, of)
    if not FORMATS:
        return
    with cgutils.for_range(build, num_blocks) as blocks:
        start = build.mul(blocks.index, _INT64(_BYTES))
        numbers = [
            build.load(at(build, source, build.add(start, _INT64(64 * i)), 1, _FLOATS), align=4)
            for i in range(2)
        ]
        # As integers, NaN and infinity are the largest; then the scale is NaN or infinite, too.
        bits = [build.and_(build.bitcast(each, _INTS), _ints(0x7FFFFFFF)) for each in numbers]
        larger = build.select(build.icmp_unsigned(">", *bits), *bits)
        top = called(build, "llvm.vector.reduce.umax.v16i32", _INT32, larger)
        top = build.bitcast(top, _FLOAT)
        is_least = build.fcmp_ordered("<=", top, _FLOAT(_LEAST))
        factor = build.select(is_least, _FLOAT(0.0), build.fdiv(_FLOAT(float(_TOP)), top))
        scale = build.select(is_least, _FLOAT(0.0), build.fmul(top, _FLOAT(1 / _TOP)))
        wide, name = everywhere(build, factor, _FLOATS), "llvm.x86.avx.cvt.ps2dq.256"
        made = [_by_halves(build, name, build.fmul(each, wide)) for each in numbers]

        def total(vector: Any) -> Any:
            return called(build, "llvm.vector.reduce.add.v16i32", _INT32, vector)

        def store(offset: int, number: Any) -> None:
            address = at(build, target, build.add(start, _INT64(offset)), 1, number.type)
            build.store(number, address, align=4)

        of_halves = [*map(total, made)]
        of_all = build.add(*of_halves)
        store(_SCALE, scale)
        store(_TOTAL, build.fmul(scale, build.sitofp(of_all, _FLOAT)))
        store(_OF_FOUR, build.mul(of_all, _INT32(-8)))
        for digit in reversed(range(_NUM_DIGITS)):
            for i, each in enumerate(made):
                store(32 * digit + 16 * i, build.trunc(each, ir.VectorType(_INT8, 16)))
            made = [build.ashr(build.add(each, _ints(128)), _ints(8)) for each in made]
            if digit == _NUM_DIGITS - 1:
                for i, (higher, whole) in enumerate(zip(map(total, made), of_halves, strict=True)):
                    lowest = build.sub(whole, build.shl(higher, _INT32(8)))
                    store(_OF_SIX + 8 * i, build.mul(higher, _INT32(-32)))
                    store(_OF_SIX + 8 * i + 4, build.mul(lowest, _INT32(-32)))


def _by_halves(build: Any, name: str, *given: Any, bits: int = 32) -> Any:
    """Emit an instruction of 256 bits for each half of vectors; return vectors of integers."""
    size = 256 // bits

    def half(vector: Any, number: int) -> Any:
        num = vector.type.count // 2
        mask = [*range(num * number, num * number + num)]
        mask = ir.Constant(ir.VectorType(_INT32, num), mask)
        return build.shuffle_vector(vector, vector, mask)

    kind = ir.VectorType(ir.IntType(bits), size)
    made = [called(build, name, kind, *(half(each, i) for each in given)) for i in range(2)]
    both = ir.Constant(ir.VectorType(_INT32, 2 * size), [*range(2 * size)])
    return build.shuffle_vector(*made, both)


def add_columns(build: Any, address: Any, sums: Any, is_one: Any) -> None:
    """Emit the addition of the sums of 16 columns, or of the first one's alone, to a row."""
    of_first = build.extract_element(sums, _INT32(0))
    with build.if_else(is_one) as branches:
        for branch, each in zip(branches, (of_first, sums), strict=True):
            with branch:
                to = build.inttoptr(address, each.type.as_pointer())
                build.store(build.fadd(build.load(to, align=4), each), to, align=4)


class _Strip:
    """Emits code for the products of 16 columns and all rows, whose sums are in memory."""

    def __init__(self, build: Any, format_: int, given: Any) -> None:
        self._build, self._format = build, format_
        self._x, self._x_step, self._rows, w, w_step, self._sums, self._ahead = given
        _, _, self._bytes = words.BLOCKS[format_]
        self._middle = _floats(AROUND[format_])
        # Vectors of weights whose products of 4, 5 or 6 bits and a digit fit into 16 bits.
        self._num_short = {Q6_K: 2, Q5_0: 4, Q5_1: 4, Q5_K: 4}.get(format_, 8)
        # 16 addresses would not stay in registers.
        self._bases = [build.add(w, build.mul(w_step, _INT64(4 * i))) for i in range(4)]
        self._steps = [build.mul(w_step, _INT64(i)) for i in range(4)]
        with cgutils.for_range(build, self._rows) as rows:
            address = at(build, self._sums, rows.index, 64, _FLOATS)
            build.store(_floats(0), address, align=64)

    def give(self, y: Any, y_step: Any, is_one: Any) -> None:
        """Emit the addition of the sums, or of the first column's alone, to results."""
        build = self._build
        with cgutils.for_range(build, self._rows) as rows:
            address = build.add(y, build.mul(y_step, rows.index))
            sums = build.load(at(build, self._sums, rows.index, 64, _FLOATS), align=64)
            add_columns(build, address, sums, is_one)

    def add_blocks(self, num_blocks: Any) -> None:
        """Emit a loop over the blocks of the columns."""
        build, first = self._build, _INT64(0)
        large = {Q4_K: self._add_k, Q5_K: self._add_k, Q6_K: self._add_six_k, IQ4_XS: self._add_xs}
        if self._format in large:
            write = large[self._format]
            with cgutils.for_range(build, num_blocks) as blocks:
                offset = build.mul(blocks.index, _INT64(self._bytes))
                write(offset, build.mul(blocks.index, _INT64(8)))
            return
        if self._format == Q4_1:  # four blocks are five times 16 bytes
            num_groups = build.lshr(num_blocks, _INT64(2))
            with cgutils.for_range(build, num_groups) as groups:
                offset = build.mul(groups.index, _INT64(80))
                loaded = [each for i in range(5) for each in self._turned(offset, 16 * i)]
                for i in range(4):
                    index = build.add(build.mul(groups.index, _INT64(4)), _INT64(i))
                    self._fetch(offset, 80, i, 4)
                    self._add_small(index, loaded[5 * i : 5 * i + 1], loaded[5 * i + 1 : 5 * i + 5])
            first = build.shl(num_groups, _INT64(2))
        with cgutils.for_range(build, build.sub(num_blocks, first)) as rest:
            index = build.add(first, rest.index)
            offset = build.mul(index, _INT64(self._bytes))
            self._fetch(offset, self._bytes)
            header, packed = self._turned(offset, 0), self._turned(offset, self._bytes - 16)
            if self._format == Q8_0:
                packed = [*self._turned(offset, 2), *packed]
            self._add_small(index, header, packed)

    def _add_small(self, index: Any, header: list[Any], packed: list[Any]) -> None:
        build, least = self._build, None
        if self._format == MXFP4:
            exponents = build.and_(header[0], _ints(255))
            scale = build.bitcast(half_power(build, exponents, _ints), _FLOATS)
        else:
            scale = self._half(header[0])
        if self._format in (Q4_1, Q5_1):
            least = fused(build, scale, self._middle, self._half(header[0], 16))
        if self._format == Q8_0:
            weights = [build.xor(each, _ints(0x80808080)) for each in packed]
        else:
            weights = self._levels(packed)
        if self._format in (Q5_0, Q5_1):
            bits = header[1]
            if self._format == Q5_0:  # halves of two words
                upper = build.shl(bits, _ints(16))
                bits = build.or_(build.lshr(header[0], _ints(16)), upper)
            for i, each in enumerate(weights):
                four = build.and_(build.lshr(bits, _ints(4 * i)), _ints(15))
                # Each of four bits to the lowest of a byte, and from there to the fifth.
                spread = build.and_(build.mul(four, _ints(0x00204081)), _ints(0x01010101))
                weights[i] = build.or_(each, build.shl(spread, _ints(4)))
        self._add(index, weights, [scale], least)

    def _add_xs(self, offset: Any, index: Any) -> None:
        build, (header, fours, *_) = self._build, self._turned(offset, 0)
        scale = self._half(header)
        for number in range(8):
            packed = self._turned(offset, 8 + 16 * number)
            self._fetch(offset, self._bytes, number, 8)
            four = build.and_(build.lshr(fours, _ints(4 * number)), _ints(15))
            two = build.and_(build.lshr(header, _ints(16 + 2 * number)), _ints(3))
            six = build.sub(build.or_(four, build.shl(two, _ints(4))), _ints(32))
            of_scale = build.fmul(scale, build.sitofp(six, _FLOATS))
            self._add(build.add(index, _INT64(number)), self._levels(packed), [of_scale])

    def _add_k(self, offset: Any, index: Any) -> None:
        build = self._build
        header, first, second, third = self._turned(offset, 0)
        scale, least = self._half(header), build.fneg(self._half(header, 16))
        six, two = _ints(0x3F3F3F3F), _ints(0x30303030)

        def joined(lower: Any, upper: Any) -> Any:
            return build.or_(lower, build.and_(build.lshr(upper, _ints(2)), two))

        scales = build.and_(first, six), joined(self._low(third), first)
        leasts = build.and_(second, six), joined(self._low(third, 4), second)
        fifths = self._turned(offset, 16) + self._turned(offset, 32)
        for number in range(8):
            if number % 2 == 0:
                place = self._bytes - 128 + 16 * number
                packed = self._turned(offset, place) + self._turned(offset, place + 16)
            self._fetch(offset, self._bytes, number, 8)
            of_scale = build.fmul(scale, self._byte(scales[number // 4], number % 4))
            of_least = build.fmul(least, self._byte(leasts[number // 4], number % 4))
            of_least = fused(build, of_scale, self._middle, of_least)
            weights = [self._low(each, 4 * (number % 2)) for each in packed]
            if self._format == Q5_K:
                shift = build.shl if number < 4 else build.lshr
                moved = (shift(each, _ints(abs(number - 4))) for each in fifths)
                bits = (build.and_(each, _ints(0x10101010)) for each in moved)
                weights = [*map(build.or_, weights, bits)]
            self._add(build.add(index, _INT64(number)), weights, [of_scale], of_least)

    def _add_six_k(self, offset: Any, index: Any) -> None:
        build = self._build
        numbers, scale = self._turned(offset, 192), self._half(self._turned(offset, 194)[3], 16)

        def scale_of(number: int) -> Any:
            word = build.shl(numbers[number // 4], _ints(24 - 8 * (number % 4)))
            return build.fmul(scale, build.sitofp(build.ashr(word, _ints(24)), _FLOATS))

        def turned(place: int) -> list[Any]:
            return self._turned(offset, place) + self._turned(offset, place + 16)

        for half in range(2):
            uppers, both = turned(128 + 32 * half), [turned(64 * half + 32 * i) for i in range(2)]
            for quarter in (0, 2, 1, 3):
                by = 2 * quarter - 4
                shift = build.lshr if by > 0 else build.shl
                moved = [shift(each, _ints(abs(by))) if by else each for each in uppers]
                twos = [build.and_(each, _ints(0x30303030)) for each in moved]
                fours = [self._low(each, 4 * (quarter // 2)) for each in both[quarter % 2]]
                number = 4 * half + quarter
                self._fetch(offset, self._bytes, number, 8)
                scales = [scale_of(2 * number), scale_of(2 * number + 1)]
                self._add(build.add(index, _INT64(number)), [*map(build.or_, fours, twos)], scales)

    def _add(self, block: Any, weights: list[Any], scales: list[Any], least: Any = None) -> None:
        """Emit the products of a block of inputs: 8 vectors of weights, scales of equal parts."""
        build = self._build
        start = build.add(self._x, build.mul(block, _INT64(_BYTES)))
        with cgutils.for_range(build, self._rows) as rows:
            row = build.add(start, build.mul(rows.index, self._x_step))
            for line in (_BYTES, _BYTES + 64):  # of the next block: no CPU expects it behind others
                fetch(build, build.add(row, _INT64(line)), 1)

            def load(offset: int, kind: Any = _INTS) -> Any:
                number = build.load(at(build, row, _INT64(offset), 1, kind.element), align=4)
                return everywhere(build, number, kind)

            address = at(build, self._sums, rows.index, 64, _FLOATS)
            result, scale = build.load(address, align=64), load(_SCALE, _FLOATS)
            size = 8 // len(scales)
            for part, of_part in enumerate(scales):
                is_four = AROUND[self._format] == 8
                begins = [load(_OF_SIX + 8 * part), load(_OF_SIX + 8 * part + 4)]
                if len(scales) == 1 and not is_four:
                    both = map(build.add, begins, (load(_OF_SIX + 8), load(_OF_SIX + 12)))
                    is_small = AROUND[self._format] == 16
                    change, by = (build.ashr, 1) if is_small else (build.shl, 2)
                    begins = [change(each, _ints(by)) for each in both]
                sums = [
                    _ints(0),
                    _ints(0) if is_four else begins[0],
                    load(_OF_FOUR) if is_four else begins[1],
                ]
                self._add_products(sums, weights[size * part : size * (part + 1)], row, size * part)
                higher = build.add(build.shl(sums[0], _ints(8)), sums[1])
                if is_four:
                    wide = build.sitofp(build.add(build.shl(higher, _ints(8)), sums[2]), _FLOATS)
                else:
                    higher, lowest = (build.sitofp(each, _FLOATS) for each in (higher, sums[2]))
                    wide = fused(build, higher, _floats(256), lowest)
                result = fused(build, build.fmul(of_part, scale), wide, result)
            if least is not None:
                result = fused(build, least, load(_TOTAL, _FLOATS), result)
            build.store(result, address, align=64)

    def _add_products(self, sums: list[Any], weights: list[Any], row: Any, first: int) -> None:
        """Emit products of weights and the digits of a row, added to the sums of each digit."""
        build, bytes_, shorts = self._build, ir.VectorType(_INT8, 64), ir.VectorType(_INT16, 32)
        for start in range(0, len(weights), self._num_short):
            of_two = [ir.Constant(shorts, [0] * 32)] * _NUM_DIGITS
            # By turns, as an instruction waits for the one before that adds to the same sums.
            for i, weight in enumerate(weights[start : start + self._num_short], first + start):
                for digit in range(_NUM_DIGITS):
                    four = build.load(
                        at(build, row, _INT64(32 * digit + 4 * i), 1, _INT32), align=4
                    )
                    given = weight, everywhere(build, four, _INTS)
                    if _DOT == "avx512vnni":
                        name = "llvm.x86.avx512.vpdpbusd.512"
                        sums[digit] = called(build, name, _INTS, sums[digit], *given)
                    elif _DOT == "avxvnni":
                        name = "llvm.x86.avx512.vpdpbusd.256"
                        sums[digit] = _by_halves(build, name, sums[digit], *given)
                    else:
                        name = "llvm.x86.avx2.pmadd.ub.sw"
                        pair = (build.bitcast(each, bytes_) for each in given)
                        two = _by_halves(build, name, *pair, bits=16)
                        of_two[digit] = build.add(of_two[digit], two)
            for digit, two in enumerate(of_two if _DOT == "avx2" else ()):
                ones = ir.Constant(shorts, [1] * 32)
                four = _by_halves(build, "llvm.x86.avx2.pmadd.wd", two, ones)
                sums[digit] = build.add(sums[digit], four)

    def _column(self, number: int, offset: Any) -> Any:
        base = self._build.add(self._bases[number // 4], offset)
        return self._build.add(base, self._steps[number % 4])

    def _fetch(self, offset: Any, size: int, part: int = 0, num_parts: int = 1) -> None:
        """Emit prefetches for some of the columns: all at once would fill the queue."""
        build = self._build
        for column in range(16 * part // num_parts, 16 * (part + 1) // num_parts):
            address = build.add(self._column(column, offset), self._ahead)
            for line in range(0, size, 64):
                fetch(build, build.add(address, _INT64(line)))

    def _turned(self, offset: Any, by: int) -> list[Any]:
        """Emit 4 vectors: the words of 16 bytes of each column."""
        build, kind, quarters, made = self._build, ir.VectorType(_INT32, 4), [], []

        def shuffled(pair: list[Any], *which: int, num: int = 1) -> Any:
            mask = [4 * part + i for part in range(num) for i in which]
            return build.shuffle_vector(*pair, ir.Constant(ir.VectorType(_INT32, len(mask)), mask))

        for j in range(4):
            parts = [
                build.load(at(build, self._column(column, offset), _INT64(by), 1, kind), align=1)
                for column in range(j, 16, 4)
            ]
            pairs = [shuffled(parts[i : i + 2], *range(8)) for i in (0, 2)]
            quarters.append(shuffled(pairs, *range(16)))
        for which in ((0, 16, 1, 17), (2, 18, 3, 19)):
            pairs = [shuffled(quarters[i : i + 2], *which, num=4) for i in (0, 2)]
            made += [shuffled(pairs, *w, num=4) for w in ((0, 1, 16, 17), (2, 3, 18, 19))]
        return made

    def _half(self, vector: Any, by: int = 0) -> Any:
        """Emit float16 in the lower or upper halves of words as float32."""
        build = self._build
        narrow = build.trunc(build.lshr(vector, _ints(by)), ir.VectorType(_INT16, 16))
        return build.fpext(build.bitcast(narrow, ir.VectorType(ir.HalfType(), 16)), _FLOATS)

    def _levels(self, packed: list[Any]) -> list[Any]:
        """Emit bytes that stand for the lower halves of bytes, and then for the upper halves."""
        build = self._build
        halves = [*map(self._low, packed), *(self._low(each, 4) for each in packed)]
        if self._format not in (IQ4_NL, IQ4_XS, MXFP4):
            return halves
        kind = ir.VectorType(_INT8, 64)
        levels = [each + AROUND[self._format] for each in LEVELS[self._format]]
        table = ir.Constant(kind, 4 * levels)
        given = [(table, build.bitcast(each, kind)) for each in halves]
        if _DOT == "avx512vnni":
            name = "llvm.x86.avx512.pshuf.b.512"
            made = [called(build, name, kind, *each) for each in given]
        else:
            made = [_by_halves(build, "llvm.x86.avx2.pshuf.b", *each, bits=8) for each in given]
        return [build.bitcast(each, _INTS) for each in made]

    def _low(self, vector: Any, by: int = 0) -> Any:
        """Emit the lower or upper halves of bytes."""
        return self._build.and_(self._build.lshr(vector, _ints(by)), _ints(0x0F0F0F0F))

    def _byte(self, vector: Any, number: int) -> Any:
        """Emit a byte of words as float32."""
        build = self._build
        byte = build.and_(build.lshr(vector, _ints(8 * number)), _ints(255))
        return build.sitofp(byte, _FLOATS)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _strip(typing_context: Any, format_: Any, of: Any) -> Any:
    """Add the products of 16 columns, or of one, to results.

    Args:
        typing_context: Numba's.
        format_: a constant.
        of: address of the first row's digits, bytes between rows, and number of rows; address of
            the first weight, and bytes from one column to the next, or 0 for one column; address
            of scratch memory for the sums; distance of the prefetch in bytes; number of blocks;
            address of the first result, and bytes from one row to the next.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *given, num_blocks, y, y_step = cgutils.unpack_tuple(builder, arguments[1])
        strip = _Strip(builder, format_.literal_value, given)
        strip.add_blocks(num_blocks)
        strip.give(y, y_step, builder.icmp_unsigned("==", given[4], _INT64(0)))
        return context.get_dummy_value()

    return types.void(format_, of), generate


def product_of(format_: int) -> Any:
    """Compile products with weights of a format in FORMATS; return Numba's function.

    Its argument is that of `_packed.product_of`, but it reads digits alone, whose rows are longer
    (DIGITS_APART). If they are 0 bytes behind inputs, they are in the place of these.
    """
    _, per_block, in_bytes = words.BLOCKS[format_]

    def run(address: Any) -> None:
        given = numba.carray(address, (NUM_GIVEN,), np.int64)
        x, x_step, num_rows, w, w_step = given[0], given[1], given[2], given[3], given[4]
        num_columns, y, y_step, size, sums = given[5], given[6], given[7], given[8], given[9]
        if x == 0:
            unpack_rows(format_, (w, w_step), (y, y_step), num_columns, size // per_block)
            return
        if given[10] != 0:
            x, x_step = x + given[10], x_step + words.DIGITS_APART
        for row in range(0, num_rows, _MOST_ROWS):
            num = min(num_rows - row, _MOST_ROWS)
            outer = size if num <= _FEW_ROWS else DEPTH
            for start in range(0, size, outer):
                until = min(start + outer, size)
                column = 0
                while column < num_columns:
                    is_one = num_columns - column < 16
                    step = 0 if is_one else w_step
                    for k in range(start, until, DEPTH):
                        of_x = x + x_step * row + 4 * k, x_step, num
                        of_w = w + w_step * column + k // per_block * in_bytes, step
                        of_y = y + y_step * row + 4 * column, y_step
                        num_blocks = min(DEPTH, until - k) // per_block
                        _strip(format_, (*of_x, *of_w, sums, 16 * w_step, num_blocks, *of_y))
                    column += 1 if is_one else 16

    run.__qualname__ = f"product_of_digits_{format_}_{_DOT}"
    return job(run)()
