"""The compiled jobs of attention of several calls at once, and nothing else.

The rows of a call are what its tokens ask by the query heads that share keys.
"""

from typing import Any

import numba
import numpy as np

from lade.attention._blocks import BLOCK, add_values, fill, take_query, weigh
from lade.products._tiles import FLOAT32, add_products, job, pointer, take
from lade.products._tiles import LANES as LANES

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

_MOST_ROWS = 64  # of a task
_F = np.float32


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
