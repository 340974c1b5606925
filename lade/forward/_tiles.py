"""Matrix products of few rows, tile by tile, for linear layers, attention and compiled forwards.

y = x · Wᵀ. Each weight is read once, and used for all rows while it is in the cache. Meanwhile the
next weights are prefetched, because memory is slower than cores here. Each sum runs along a row of
the weight as the model stores it, so no weight is packed and no copy can go stale. Weights are
float32 here (`_packed.py` has all others), and values also of 16 bits, widened in registers.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, sigutils
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from lade.forward import words
from lade.machine.garbage import without_collection
from ngram_pool.caching import KernelCache

# For functions that only jobs call: wrappers for calls from Python take as long to compile as short
# functions do. A function with one caller is inlined before types are inferred: compiled alone, it
# and the functions that it calls would be optimized twice.
compiled_with = partial(
    numba.njit, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
)
compiled, inlined = compiled_with(), compiled_with(inline="always")
_one_by_one = threading.RLock()

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 30  # formats of values, by GGML's numbers

llvmlite.binding.initialize_native_asmparser()
FEATURES = llvmlite.binding.get_host_cpu_features()
LANES = 16 if FEATURES.get("avx512f") else 8
# A tile is the sums of ROWS rows and COLUMNS columns, held in registers: AVX-512 has 32, AVX2 16. A
# vector that is loaded once serves several products. DEPTH inputs of each row, as many as fit into
# the first-level cache, are summed at once.
ROWS, COLUMNS, DEPTH = 4, 4 if LANES == 16 else 3, 1024
BLOCK = 64  # keys that fit into the first-level cache
_VECTORS = 4 if LANES == 16 else 2  # vectors of values whose sums fit into registers, for ROWS rows
# The same number for a single row, and how many rows ahead values are prefetched. 8 is a tenth to a
# half faster than no prefetch, and 16 no faster, if each row lies in another page.
_OF_ONE, _AHEAD = 8, 8
_LINE = 64  # bytes of a cache line

_INT16, _INT32, _INT64, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, LANES)
_WIDTHS = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2}  # bytes of a value
_STORED = {FLOAT32: _FLOAT, BFLOAT16: _INT16, FLOAT16: ir.HalfType()}


def instruction(result: Any, given: Any = None) -> Callable[[Callable[..., Any]], Any]:
    """Make a function of one argument, for compiled code, from one that writes LLVM instructions.

    Args:
        result: type of the result.
        given: type of the argument; None to take any type.
    """

    def decorate(write: Callable[..., Any]) -> Any:
        @intrinsic  # type: ignore[untyped-decorator]
        def made(typing_context: Any, argument: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                return write(builder, arguments[0]) or context.get_dummy_value()

            return result(argument if given is None else given), generate

        return made

    return decorate


@instruction(types.voidptr, types.int64)
def pointer(builder: Any, address: Any) -> Any:
    """Return an integer as a pointer, which `numba.carray` takes."""
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


def changing(operation: str) -> Any:
    """Return a function that changes a shared integer by another one and returns the old value.

    It does so after all earlier writes.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def change(typing_context: Any, address: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            address = builder.inttoptr(arguments[0], _INT64.as_pointer())
            return builder.atomic_rmw(operation, address, arguments[1], "seq_cst")

        return types.int64(types.int64, types.int64), generate

    return change


take = changing("add")


@instruction(types.void)
def call_compiled(builder: Any, of: Any) -> None:
    """Call a function that is compiled apart, given its address and its arguments, int64."""
    function, *given = cgutils.unpack_tuple(builder, of)
    array = cgutils.alloca_once(builder, _INT64, size=len(given))
    for number, each in enumerate(given):
        builder.store(each, builder.gep(array, [_INT32(number)]))
    kind = ir.FunctionType(ir.VoidType(), [array.type])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [array])


@instruction(types.void)
def call_with(builder: Any, of: Any) -> None:
    """Call a function that is compiled apart, given its address and that of its arguments."""
    function, array = cgutils.unpack_tuple(builder, of)
    kind = ir.FunctionType(ir.VoidType(), [_INT64.as_pointer()])
    given = builder.inttoptr(array, _INT64.as_pointer())
    builder.call(builder.inttoptr(function, kind.as_pointer()), [given])


@instruction(types.void)
def _tile(builder: Any, of: Any) -> None:
    """Add the products of inputs and weights to a tile of the results.

    Each tile size has its LLVM instructions, written here one by one: a compiler of loops finds
    neither the sums to keep in registers nor the moments to prefetch.

    Args:
        builder: LLVM's.
        of: number of rows (1 to ROWS) and of columns (COLUMNS, or 1 for a single row); address of
            the first input, and bytes from one row to the next; address of the first weight, and
            bytes from one column to the next; address of the first result, and bytes from one row
            to the next; number of inputs; index of this tile among the tiles of the same columns,
            and their number.
    """
    num_rows, num_columns, *given = cgutils.unpack_tuple(builder, of)
    size = builder.add(builder.mul(num_rows, _INT64(8)), num_columns)
    sizes = [(rows, COLUMNS) for rows in range(1, ROWS + 1)] + [(1, 1)]
    cases = {
        8 * rows + columns: partial(_write_tile, builder, range(rows), range(columns), given)
        for rows, columns in sizes
    }
    by_case(builder, size, cases)


def everywhere(build: Any, number: Any, kind: Any) -> Any:
    """Write a number into all lanes of a type of vectors."""
    one = build.insert_element(ir.Constant(kind, ir.Undefined), number, _INT32(0))
    mask = ir.Constant(ir.VectorType(_INT32, kind.count), [0] * kind.count)
    return build.shuffle_vector(one, one, mask)


def fused(build: Any, first: Any, second: Any, third: Any) -> Any:
    """Write a product of two vectors plus a third, rounded once if the CPU fuses them."""
    product = build.fmul(first, second, flags=("contract",))
    return build.fadd(product, third, flags=("contract",))


def called(build: Any, name: str, result: Any, *given: Any) -> Any:
    """Write a call of one of LLVM's own functions, by its name and the type of its result."""
    kind = ir.FunctionType(result, [each.type for each in given])
    return build.call(cgutils.get_or_insert_function(build.module, kind, name), given)


def by_case(builder: Any, number: Any, cases: Mapping[int, Callable[[], object]]) -> None:
    """Write a switch: it runs the code of a number's case, and nothing for another number."""
    end = builder.append_basic_block("end")
    switch = builder.switch(number, end)
    for case, write in cases.items():
        block = builder.append_basic_block("case")
        switch.add_case(_INT64(case), block)
        builder.position_at_end(block)
        write()
        builder.branch(end)
    builder.position_at_end(end)


def _write_tile(build: Any, rows: range, columns: range, given: Any) -> None:
    """Write the code of a tile of one size; `given` is the rest of the tuple of `_tile`."""
    x, x_step, w, w_step, out, out_step, size, part, num_parts = given
    num = _LINE // 4
    inputs = [build.add(x, build.mul(x_step, _INT64(row))) for row in rows]
    weights = [build.add(w, build.mul(w_step, _INT64(column))) for column in columns]
    # Each tile of these columns prefetches other columns of the next, so memory is never idle.
    far = build.mul(w_step, _INT64(len(columns)))
    ahead = [
        build.select(
            build.icmp_unsigned("==", build.urem(_INT64(column), num_parts), part), far, _INT64(0)
        )
        for column in columns
    ]
    zero = ir.Constant(_FLOATS, [0.0] * LANES)
    sums = [[cgutils.alloca_once_value(build, zero) for _ in columns] for _ in rows]
    num_lines = build.udiv(size, _INT64(num))

    def add(sums: Any, index: Any, kind: Any) -> None:
        wide = [build.load(at(build, each, index, 4, kind), align=4) for each in weights]
        add_wide(build, sums, inputs, wide, index, kind)

    with cgutils.for_range(build, num_lines) as lines:
        start = build.mul(lines.index, _INT64(num))
        for column in columns:
            line = build.add(weights[column], build.mul(start, _INT64(4)))
            fetch(build, build.add(line, ahead[column]))
        for i in range(0, num, LANES):
            add(sums, build.add(start, _INT64(i)), _FLOATS)
    results = [build.add(out, build.mul(out_step, _INT64(row))) for row in rows]
    add_totals(build, sums, results)
    alone = [[at(build, row, _INT64(column), 4, _FLOAT) for column in columns] for row in results]
    start = build.mul(num_lines, _INT64(num))
    with cgutils.for_range(build, build.sub(size, start)) as rest:
        add(alone, build.add(start, rest.index), _FLOAT)


def add_wide(build: Any, sums: Any, inputs: Any, wide: Any, index: Any, kind: Any) -> None:
    """Write code that adds to sums the products of each row's vector with each column's."""
    for of_row, address_of_row in zip(sums, inputs, strict=True):
        values = build.load(at(build, address_of_row, index, 4, kind), align=4)
        for address, of_column in zip(of_row, wide, strict=True):
            build.store(fused(build, values, of_column, build.load(address)), address)


def add_totals(build: Any, sums: Any, addresses: Any) -> None:
    """Write code that adds up each vector, and adds the totals to numbers at one address per row.

    The numbers of a vector are always added in the same order: its two halves first, for two
    vectors at once, then the quarters, for four vectors, and so on.
    """
    nothing, num_columns = ir.Constant(_FLOATS, ir.Undefined), len(sums[0])
    per_row = 1 << (num_columns - 1).bit_length()
    vectors = []
    for row in sums:
        vectors += [*map(build.load, row), *[nothing] * (per_row - len(row))]
    num = LANES
    while num > 1:
        num //= 2
        vectors += [nothing] * (len(vectors) % 2)
        firsts = [first for first in range(2 * LANES) if first % (2 * num) < num]
        lower, upper = (
            ir.Constant(ir.VectorType(_INT32, LANES), [first + by for first in firsts])
            for by in (0, num)
        )
        vectors = [
            build.fadd(build.shuffle_vector(*pair, lower), build.shuffle_vector(*pair, upper))
            for pair in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    kind = ir.VectorType(_INT32, num_columns)
    for row, address in enumerate(addresses):
        which, first = divmod(row * per_row, LANES)
        mask = ir.Constant(kind, [first + column for column in range(num_columns)])
        totals = build.shuffle_vector(vectors[which], nothing, mask)
        result = at(build, address, _INT64(0), 4, totals.type)
        build.store(build.fadd(build.load(result, align=4), totals), result, align=4)


def fetch(build: Any, address: Any, level: int = 2) -> None:
    """Write code that prefetches the cache line at an address into a cache."""
    pointer_type = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer_type, _INT32, _INT32, _INT32])
    instruction = build.module.declare_intrinsic("llvm.prefetch", [pointer_type], kind)
    to_read, locality, data = _INT32(0), _INT32(4 - level), _INT32(1)
    build.call(instruction, [build.inttoptr(address, pointer_type), to_read, locality, data])


def at(builder: Any, address: Any, index: Any, width: int, kind: Any) -> Any:
    """Return a pointer to element `index` behind an address; elements have `width` bytes."""
    start = builder.add(address, builder.mul(index, _INT64(width)))
    return builder.inttoptr(start, kind.as_pointer())


def widened(builder: Any, loaded: Any) -> Any:
    """Return a vector of float32, float16, or bfloat16 as integers, as float32."""
    if loaded.type.element == ir.HalfType():
        return builder.fpext(loaded, _FLOATS)
    if loaded.type.element != _INT16:
        return loaded
    # A bfloat16 is the upper half of a float32.
    bits = ir.VectorType(_INT32, LANES)
    sixteen = ir.Constant(bits, [16] * LANES)
    return builder.bitcast(builder.shl(builder.zext(loaded, bits), sixteen), _FLOATS)


def job(function: Callable[[Any], None]) -> Callable[[], Any]:
    """Return what compiles a function that threads call without Python, when it is first needed.

    It gives Numba's function, which is cached on disk if possible. Numba's cache notices a change
    only of the function's file and name. So the name gets a hash of all other files whose functions
    and constants are compiled into the function.
    """
    made: list[Any] = []

    def compiled_job() -> Any:
        if not made:  # every forward asks
            with _one_by_one, without_collection():
                if not made:
                    made.append(_compile(function))
        return made[0]

    return compiled_job


def _compile(function: Callable[[Any], None]) -> Any:
    kind, options = types.void(types.voidptr), {"nogil": True, "error_model": "numpy"}
    made: Any = CFunc(function, sigutils.normalize_signature(kind), {}, options)
    with suppress(OSError):  # no source files
        names = "_packed", "_digits", "_amx", "_experts", "_kernels", "_rows", "_workers"
        beside = [Path(__file__).with_name(f"{name}.py") for name in names]
        files: list[str | Path] = [__file__, words.__file__, *beside]
        others = b"".join(Path(file).read_bytes() for file in files)
        function.__qualname__ += f"_{sha256(others).hexdigest()[:16]}"
        made._cache = KernelCache(function)
    made.compile()
    return made


@inlined
def _add_products(inputs, weights, results, size):  # type: ignore[no-untyped-def]
    x, x_step, num_rows = inputs
    w, w_step, num_columns = weights
    y, y_step = results
    column = 0
    while column < num_columns:
        width_of_tile = COLUMNS if column + COLUMNS <= num_columns else 1
        num_parts = -(-num_rows // (ROWS if width_of_tile == COLUMNS else 1))
        row = 0
        for part in range(num_parts):  # with about the same number of rows
            until = num_rows * (part + 1) // num_parts
            of_tile = (
                until - row,
                width_of_tile,
                x + row * x_step,
                x_step,
                w + column * w_step,
                w_step,
                y + row * y_step + 4 * column,
                y_step,
                size,
                part,
                num_parts,
            )
            _tile(of_tile)
            row = until
        column += width_of_tile


@instruction(types.void)
def _sum_values(builder: Any, of: Any) -> None:
    """Add values to the results of some rows, each value times the row's weight for it.

    Args:
        builder: LLVM's.
        of: format of the values; number of rows (1 to ROWS) and of vectors (_VECTORS or 1; for a
            single row also _OF_ONE); address of the first weight, float32, and bytes from one row
            to the next; address of the first value, and bytes from one value to the next; address
            of the first result, and bytes from one row to the next; number of values; address of
            the sums of the weights.
    """
    format_, num_rows, num_vectors, *given = cgutils.unpack_tuple(builder, of)
    size = builder.add(builder.mul(num_rows, _INT64(16)), num_vectors)
    sizes = [(rows, vectors) for rows in range(1, ROWS + 1) for vectors in (1, _VECTORS)]
    cases = {
        128 * of_format + 16 * rows + vectors: partial(
            _write_sums, builder, of_format, range(rows), range(vectors), given
        )
        for of_format in _WIDTHS
        for rows, vectors in (*sizes, (1, _OF_ONE))
    }
    by_case(builder, builder.add(builder.mul(format_, _INT64(128)), size), cases)


def _write_sums(build: Any, format_: int, rows: range, vectors: range, given: Any) -> None:
    """Write the code of `_sum_values` for one format and size; `given` is the rest of its tuple.

    Values are added one by one in their order. So a value of weight 0 changes no sum, wherever it
    stands.
    """
    weights, weight_step, values, value_step, results, result_step, num_values, totals = given
    addresses = [
        [
            at(build, build.add(results, build.mul(result_step, _INT64(row))), index, 4, _FLOATS)
            for index in (_INT64(LANES * vector) for vector in vectors)
        ]
        for row in rows
    ]
    sums = [
        [cgutils.alloca_once_value(build, build.load(address, align=4)) for address in of_row]
        for of_row in addresses
    ]
    of_rows = [build.add(weights, build.mul(weight_step, _INT64(row))) for row in rows]
    of_totals = [at(build, totals, _INT64(row), 4, _FLOAT) for row in rows]
    added = [
        cgutils.alloca_once_value(build, build.load(address, align=4)) for address in of_totals
    ]
    far = build.mul(value_step, _INT64(_AHEAD))
    with cgutils.for_range(build, num_values) as loop:
        line = build.add(values, build.mul(value_step, loop.index))
        for start in range(0, LANES * len(vectors) * _WIDTHS[format_], _LINE):
            fetch(build, build.add(build.add(line, far), _INT64(start)))
        width, stored = _WIDTHS[format_], ir.VectorType(_STORED[format_], LANES)
        places = [at(build, line, _INT64(LANES * each), width, stored) for each in vectors]
        wide = [widened(build, build.load(each, align=width)) for each in places]
        for of_row, total, sums_of_row in zip(of_rows, added, sums, strict=True):
            weight = build.load(at(build, of_row, loop.index, 4, _FLOAT), align=4)
            build.store(build.fadd(build.load(total), weight), total)
            alike = everywhere(build, weight, _FLOATS)
            for vector, address in zip(wide, sums_of_row, strict=True):
                build.store(fused(build, alike, vector, build.load(address)), address)
    for of_row, sums_of_row in zip(addresses, sums, strict=True):
        for address, total in zip(of_row, sums_of_row, strict=True):
            build.store(build.load(total), address, align=4)
    for address, total in zip(of_totals, added, strict=True):
        build.store(build.load(total), address, align=4)


@inlined
def _add_rows(format_, weights, values, results, size, totals):  # type: ignore[no-untyped-def]
    weight, weight_step, num_rows = weights
    value, value_step, num_values = values
    result, result_step = results
    width, start, most = 4 if format_ == FLOAT32 else 2, 0, _OF_ONE if num_rows == 1 else _VECTORS
    while start < size:
        while most > 1 and start + LANES * most > size:
            most = _VECTORS if most > _VECTORS else 1
        num_vectors = most
        for row in range(0, num_rows, ROWS):
            of_sums = (
                format_,
                min(ROWS, num_rows - row),
                num_vectors,
                weight + weight_step * row,
                weight_step,
                value + width * start,
                value_step,
                result + result_step * row + 4 * start,
                result_step,
                num_values,
                totals + 4 * (row if start == 0 else BLOCK + row),
            )
            _sum_values(of_sums)
        start += LANES * num_vectors


@job
def run_tiles(address: Any) -> None:
    """Add products or rows; takes the arguments of `add_rows`, or totals of 0, as eleven int64."""
    given = numba.carray(address, (11,), np.int64)
    inputs, weights = (given[1], given[2], given[3]), (given[4], given[5], given[6])
    results, size, totals = (given[7], given[8]), given[9], given[10]
    if totals == 0:
        _add_products(inputs, weights, results, size)
    else:
        _add_rows(given[0], inputs, weights, results, size, totals)


@compiled
def add_products(g, inputs, weights, results, size):  # type: ignore[no-untyped-def]
    """Add the products of input rows and weight rows, of `size` numbers each, to the results.

    Inputs and weights are an address, bytes from one row to the next, and the number of rows.
    Results are the first two of these; they have a row for each input row, and a column for each
    weight row. `g` is the job.
    """
    call_compiled((g[words.TILES], FLOAT32, *inputs, *weights, *results, size, 0))


@compiled
def add_rows(g, format_, weights, values, results, size, totals):  # type: ignore[no-untyped-def]
    """Add rows of values, each times its weight, to the results.

    A row has `size` numbers, a multiple of LANES; values are of a format. Weights and values are an
    address, bytes from one row to the next, and the number of rows. Results are the first two of
    these. The weights are
    also summed in the first row of totals, an address of [2, BLOCK]. The second row is scratch:
    every further vector of columns sums the weights again, since leaving that out would take code
    of another kind. `g` is the job.
    """
    call_compiled((g[words.TILES], format_, *weights, *values, *results, size, totals))
