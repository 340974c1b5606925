"""Every compiled function of recurrences alone, for models that have such layers.

Source: Gated Delta Networks (arXiv 2412.06464), and Mamba 2 (arXiv 2405.21060), token by token. A
head has a state, a matrix from keys to values: with each token it decays, and takes the token's key
and value; in a delta net, what it gives for the key comes nearer to the value. Single numbers are
multiplied, then added, in the order of keys, as torch does it.
"""

import math
from typing import Any

import numba
import numpy as np

from lade.forward import words as w
from lade.forward._kernels import (
    _convolve_slot,
    _copy,
    _fill,
    _row,
    _silu,
    _sum_of_squares,
    _taps_of,
    given_to_job,
)
from lade.forward._tiles import compiled, inlined, job, pointer
from lade.forward._workers import pieces

_F = np.float32
_EPS = _F(1e-6)  # of the length of queries and keys


@compiled
def _kept_size(of):  # type: ignore[no-untyped-def]
    """Return how many numbers a token adds: keys, values, and of each head two more."""
    return of[w.KEY_HEADS] * of[w.KEY_SIZE] + of[w.VALUE_HEADS] * (of[w.VALUE_SIZE] + 2)


@inlined
def _convolve_heads(g, phase, of, parts, caches, scratch):  # type: ignore[no-untyped-def]
    """Write inputs of the convolution, and what becomes of them: queries, keys and values.

    A piece is a head of one of them, of all tokens.
    """
    num_keys, of_key = of[w.KEY_HEADS], of[w.KEY_SIZE]
    num_values, of_value, taps = of[w.VALUE_HEADS], of[w.VALUE_SIZE], of[w.TAPS]
    num_heads, all_keys = 2 * num_keys + num_values, num_keys * of_key
    for head, _ in pieces(g, phase, num_heads, 1):
        kind = min(head // num_keys, 2)
        number, num = head - kind * num_keys, of_value if kind == 2 else of_key
        start = of[w.CHANNELS + kind] + number * num
        weights = _taps_of(of, start, num, scratch)
        sums = _row(scratch + 4 * num * taps, num)
        for part in range(g[w.NUM_PARTS]):
            num_new, cache = parts[part, w.NUM_NEW], caches[part]
            for new in range(num_new):
                token = parts[part, w.FIRST] + new
                row = _row(g[w.INNER] + 4 * (of[w.GIVEN_SIZE] * token + start), num)
                slot = cache[w.NUM_KEYS] - num_new + new
                inputs = cache[w.KEYS], 2 * all_keys + num_values * of_value, start
                _convolve_slot(of, weights, inputs, slot, row, sums)
                for i in range(num):
                    sums[i] = _silu(sums[i])
                if kind < 2 and of[w.IS_DELTA] != 0:
                    length = np.sqrt(_sum_of_squares(sums) + _EPS)
                    scale = _F(1) if kind == 1 else _F(1) / np.sqrt(_F(of_key))
                    for i in range(num):
                        sums[i] = sums[i] / length * scale
                if kind == 0:
                    target = g[w.QUERIES] + 4 * (all_keys * token + number * num)
                else:
                    first = _kept_size(of) * slot + (all_keys if kind == 2 else 0)
                    target = cache[w.VALUES] + 4 * (first + number * num)
                _copy(sums, _row(target, num))


@compiled
def _advance(state, key, value, gates, change, is_delta):  # type: ignore[no-untyped-def]
    """Let a state decay, and take a key and its value; `change` is of as many numbers as this."""
    decay, share = gates[0], gates[1]
    if not is_delta:
        for i in range(len(value)):
            change[i] = value[i] * share
        for k in range(len(key)):
            row, number = state[k], key[k]
            for i in range(len(row)):
                row[i] = row[i] * decay + number * change[i]
        return
    _fill(change, _F(0))
    for k in range(len(key)):
        row, number = state[k], key[k]
        for i in range(len(row)):
            row[i] = row[i] * decay
            change[i] = change[i] + row[i] * number
    for i in range(len(value)):
        change[i] = (value[i] - change[i]) * share
    for k in range(len(key)):
        row, number = state[k], key[k]
        for i in range(len(row)):
            row[i] = row[i] + number * change[i]


@compiled
def _give(g, of, head, token, state, value, sums):  # type: ignore[no-untyped-def]
    """Write what a state gives for a token's query."""
    size, num = of[w.KEY_SIZE], of[w.VALUE_SIZE]
    number = head // (of[w.VALUE_HEADS] // of[w.KEY_HEADS])
    query = _row(g[w.QUERIES] + 4 * size * (of[w.KEY_HEADS] * token + number), size)
    _fill(sums, _F(0))
    for k in range(size):
        row, times = state[k], query[k]
        for i in range(num):
            sums[i] = sums[i] + row[i] * times
    result = _row(g[w.ATTENDED] + 4 * (of[w.ATTENDED_SIZE] * token + num * head), num)
    if of[w.IS_DELTA] != 0:
        _copy(sums, result)
        return
    factor = _row(of[w.SKIPS] + 4 * head, 1)[0]
    for i in range(num):
        result[i] = sums[i] + value[i] * factor


@inlined
def _run_heads(g, phase, of, parts, caches, scratch):  # type: ignore[no-untyped-def]
    """Bring the states in the cache up to a slot, and give results of all tokens behind it.

    A piece is a head of values, of one part.
    """
    num_heads, size, num = of[w.VALUE_HEADS], of[w.KEY_SIZE], of[w.VALUE_SIZE]
    sharing, all_keys = num_heads // of[w.KEY_HEADS], of[w.KEY_HEADS] * size
    state = numba.carray(pointer(scratch), (size, num), np.float32)
    whole, change = _row(scratch, size * num), _row(scratch + 4 * size * num, num)
    is_delta = of[w.IS_DELTA] != 0
    for piece, _ in pieces(g, phase, num_heads * g[w.NUM_PARTS], 1):
        part, head = divmod(piece, num_heads)
        cache, first_new = caches[part], caches[part, w.NUM_KEYS] - parts[part, w.NUM_NEW]
        _copy(_row(cache[w.STATE] + 4 * size * num * head, size * num), whole)
        brought = _row(cache[w.BROUGHT] + 4 * size * num * head, size * num)
        for slot in range(cache[w.LACKS], cache[w.NUM_KEYS]):
            if slot == cache[w.UNTIL]:
                _copy(whole, brought)
            kept = cache[w.VALUES] + 4 * _kept_size(of) * slot
            key = _row(kept + 4 * size * (head // sharing), size)
            value = _row(kept + 4 * (all_keys + num * head), num)
            gates = _row(kept + 4 * (all_keys + num_heads * num + 2 * head), 2)
            token = parts[part, w.FIRST] + slot - first_new
            if slot >= first_new:
                given = _row(g[w.INNER] + 4 * of[w.GIVEN_SIZE] * token, of[w.GIVEN_SIZE])
                gates[0] = _F(math.exp(given[head - 2 * num_heads]))
                gates[1] = given[head - num_heads]
            _advance(state, key, value, gates, change, is_delta)
            if slot >= first_new:
                _give(g, of, head, token, state, value, change)
        if cache[w.UNTIL] == cache[w.NUM_KEYS]:
            _copy(whole, brought)


@job
def run_recurrence(address: Any) -> None:
    """Run the pieces of a phase that other threads have not taken; see `given_to_job`."""
    g, phase, step, of, parts, caches, scratch = given_to_job(address)
    if step == 0:
        _convolve_heads(g, phase, of, parts, caches, scratch)
    else:
        _run_heads(g, phase, of, parts, caches, scratch)
