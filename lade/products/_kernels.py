"""The compiled job of a linear layer for few rows, and nothing else.

A job is run by any number of threads at once: each takes the next few columns until none are left,
so that a thread that was interrupted delays the others by no more than these.
"""

from typing import Any

import numba
import numpy as np

from lade.products._tiles import DEPTH, FLOAT32, LANES, PER_LINE, add_products, job, pointer, take

# A job is an int64 array: addresses of inputs [rows, K], in bfloat16 if weights are, else float32;
# weights [N, K], bias float32 [N] or 0, and results float32 [rows, N]; then rows, K and N, the
# format of the weights, columns that are taken at once, and the next column; for bfloat16, the
# address of float32 [threads, rows but at most `MOST_ROWS`, K], and the next thread.
INPUTS, WEIGHTS, BIAS, RESULTS, NUM_ROWS, NUM_INPUTS, NUM_COLUMNS, FORMAT, CHUNK, NEXT = range(10)
SCRATCH, NEXT_THREAD, JOB_SIZE = range(10, 13)
MOST_ROWS = 64  # that are taken at once


@numba.njit(nogil=True, error_model="numpy")
def _widen(source, target, size):  # type: ignore[no-untyped-def]
    """Widen a row as `_add_pairs` takes it: of as many pairs as there are lanes, the firsts."""
    pairs = numba.carray(pointer(source), (size // 2,), np.uint32)
    wide = numba.carray(pointer(target), (size,), np.uint32)
    num_pairs = size // PER_LINE * (PER_LINE // 2)  # what is left of a row comes one by one
    for start in range(0, num_pairs, LANES):
        for i in range(LANES):
            wide[2 * start + i] = pairs[start + i] << np.uint32(16)
        for i in range(LANES):
            wide[2 * start + LANES + i] = pairs[start + i] & np.uint32(0xFFFF0000)
    narrow = numba.carray(pointer(source), (size,), np.uint16)
    for i in range(2 * num_pairs, size):
        wide[i] = np.uint32(narrow[i]) << np.uint32(16)


@job
def run_job(address: Any) -> None:
    """Run what other threads leave of a job."""
    d = numba.carray(address, (JOB_SIZE,), np.int64)
    num_rows, num_inputs, num_columns = d[NUM_ROWS], d[NUM_INPUTS], d[NUM_COLUMNS]
    out = numba.carray(pointer(d[RESULTS]), (num_rows, num_columns), np.float32)
    bias = numba.carray(pointer(d[BIAS]), (num_columns,), np.float32)
    width = 4 if d[FORMAT] == FLOAT32 else 2
    scratch, widened = d[SCRATCH], -1
    if scratch != 0:
        thread = take(d.ctypes.data + 8 * NEXT_THREAD, 1)
        scratch += 4 * thread * min(num_rows, MOST_ROWS) * num_inputs
    while True:
        start = take(d.ctypes.data + 8 * NEXT, d[CHUNK])
        if start >= num_columns:
            break
        stop = min(start + d[CHUNK], num_columns)
        for row in range(num_rows):
            for column in range(start, stop):
                out[row, column] = bias[column] if d[BIAS] != 0 else np.float32(0)
        for first in range(0, num_rows, MOST_ROWS):
            num = min(MOST_ROWS, num_rows - first)
            inputs = d[INPUTS] + 4 * first * num_inputs
            if scratch != 0:
                inputs = scratch
                if first != widened:
                    for row in range(num):
                        source = d[INPUTS] + 2 * (first + row) * num_inputs
                        _widen(source, scratch + 4 * row * num_inputs, num_inputs)
                    widened = first
            for k in range(0, num_inputs, DEPTH):
                x = inputs + 4 * k, 4 * num_inputs, num
                w = d[WEIGHTS] + width * (start * num_inputs + k), width * num_inputs, stop - start
                y = d[RESULTS] + 4 * (first * num_columns + start), 4 * num_columns
                add_products(d[FORMAT], x, w, y, min(DEPTH, num_inputs - k))
