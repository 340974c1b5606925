"""Every compiled function of gated delta nets alone, for models that have such layers.

Source: Gated Delta Networks (arXiv 2412.06464), token by token. A head has a state, a matrix from
keys to values: with each token it decays, and what it gives for the token's key comes nearer to the
token's value. Single numbers are multiplied, then added, in the order of keys, as torch does it.
"""

import math
from typing import Any

import numba
import numpy as np

from lade.forward import words as w
from lade.forward._kernels import (
    _arrange,
    _convolve_slot,
    _copy,
    _fill,
    _load,
    _normalize,
    _round,
    _row,
    _sigmoid,
    _silu,
    _sum_of_squares,
    _taps_of,
    _wait,
)
from lade.forward._tiles import FLOAT32, job, pointer, take

_F = np.float32
_EPS = _F(1e-6)  # of the length of queries and keys
_MOST_SOFTENED = 20.0  # above, a softplus is the number itself, as torch has it

_compiled = numba.njit(nogil=True, error_model="numpy")
_part = numba.njit(nogil=True, error_model="numpy", inline="always")


@_compiled
def _column(of, kind, head, size):  # type: ignore[no-untyped-def]
    """Return where a head's numbers of a kind begin among the columns of MIXED."""
    sharing = of[w.VALUE_HEADS] // of[w.KEY_HEADS] if kind > 1 else 1
    group, within = divmod(head, sharing)
    return of[w.COLUMNS + kind] + of[w.COLUMN_STEPS + kind] * group + size * within


@_compiled
def _kept_size(of):  # type: ignore[no-untyped-def]
    """Return how many numbers a token adds: keys, values, and of each head two more."""
    return of[w.KEY_HEADS] * of[w.KEY_SIZE] + of[w.VALUE_HEADS] * (of[w.VALUE_SIZE] + 2)


@_part
def _convolve_heads(g, phase, layer, of, parts, places, scratch):  # type: ignore[no-untyped-def]
    """Write inputs of the convolution, and what becomes of them: queries, keys and values.

    A piece is a head of one of them, of all tokens.
    """
    num_keys, of_key, format_ = of[w.KEY_HEADS], of[w.KEY_SIZE], g[w.FORMAT]
    num_values, of_value, taps = of[w.VALUE_HEADS], of[w.VALUE_SIZE], layer[w.TAPS]
    num_heads, num_done, head = 2 * num_keys + num_values, 0, take(phase, 1)
    all_keys = num_keys * of_key
    while head < num_heads:
        kind = min(head // num_keys, 2)
        number, num = head - kind * num_keys, of_value if kind == 2 else of_key
        start = kind * all_keys + number * num
        weights = _taps_of(layer, start, num, format_, scratch)
        row = _row(scratch + 8 * num * taps, num)
        sums = _row(scratch + 4 * num * (2 * taps + 1), num)
        for part in range(g[w.NUM_PARTS]):
            num_new, place = parts[part, w.NUM_NEW], places[part]
            for new in range(num_new):
                token = parts[part, w.FIRST] + new
                column = layer[w.MIXED_SIZE] * token + _column(of, kind, number, num)
                _copy(_row(g[w.MIXED] + 4 * column, num), row)
                slot = place[w.NUM_KEYS] - num_new + new
                inputs = place[w.KEYS], 2 * all_keys + num_values * of_value, start
                _convolve_slot(layer, weights, inputs, slot, row, sums, format_)
                _silu(sums)
                _round(sums, format_)
                if kind < 2:
                    length = np.sqrt(_sum_of_squares(sums, _F(0)) + _EPS)
                    scale = _F(1) if kind == 1 else _F(1) / np.sqrt(_F(of_key))
                    for i in range(num):
                        sums[i] = sums[i] / length * scale
                if kind == 0:
                    target = g[w.QUERIES] + 4 * (all_keys * token + start)
                else:
                    target = place[w.VALUES] + 4 * (_kept_size(of) * slot + start - all_keys)
                _copy(sums, _row(target, num))
        num_done += 1
        head = take(phase, 1)
    _wait(phase, num_done, num_heads)


@_compiled
def _write_gates(g, mixed, of, head, gates, row):  # type: ignore[no-untyped-def]
    """Write how much of its state a head keeps with a token, and how much it takes."""
    of_decays, width = of[w.OF_DECAYS], 4 if of[w.OF_DECAYS] == FLOAT32 else 2
    row[0] = _row(mixed + 4 * _column(of, 4, head, 1), 1)[0]
    _sigmoid(row[:1])
    _round(row[:1], g[w.FORMAT])
    gates[1] = row[0]
    _load(of[w.DECAYS] + width * head, row[:1], of_decays)
    _load(of[w.DECAY_BIASES] + width * head, row[1:2], of_decays)
    given = _row(mixed + 4 * _column(of, 5, head, 1), 1)[0] + row[1]
    softened = math.log1p(math.exp(min(given, _MOST_SOFTENED)))
    softened = given if given > _MOST_SOFTENED else softened
    gates[0] = _F(math.exp(-math.exp(row[0]) * softened))


@_compiled
def _advance(state, key, value, gates, change):  # type: ignore[no-untyped-def]
    """Let a state decay, and take a key and its value; `change` is of as many numbers as this."""
    _fill(change, _F(0))
    decay, share = gates[0], gates[1]
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


@_compiled
def _give(g, layer, of, head, token, state, scratch):  # type: ignore[no-untyped-def]
    """Arrange what a state gives for a token's query, after its norm and its gate."""
    size, num, format_ = of[w.KEY_SIZE], of[w.VALUE_SIZE], g[w.FORMAT]
    number = head // (of[w.VALUE_HEADS] // of[w.KEY_HEADS])
    query = _row(g[w.QUERIES] + 4 * size * (of[w.KEY_HEADS] * token + number), size)
    sums, normed = _row(scratch, num), _row(scratch + 4 * num, num)
    gate = _row(scratch + 8 * num, num)
    _fill(sums, _F(0))
    for k in range(size):
        row, times = state[k], query[k]
        for i in range(num):
            sums[i] = sums[i] + row[i] * times
    _round(sums, format_)
    norm = layer[w.QUERY_NORM : w.QUERY_NORM + w.NORM_SIZE]
    _normalize(sums, norm, normed, gate, format_)
    column = layer[w.MIXED_SIZE] * token + _column(of, 3, head, num)
    _copy(_row(g[w.MIXED] + 4 * column, num), gate)
    _silu(gate)
    for i in range(num):
        normed[i] = normed[i] * gate[i]
    _round(normed, format_)
    whole, width = layer[w.ATTENDED_SIZE], 2 if g[w.ARRANGED] == w.NARROW else 4
    _arrange(normed, g[w.ATTENDED] + width * whole * token, head * num, whole, g[w.ARRANGED])


@_part
def _run_heads(g, phase, layer, of, parts, places, scratch):  # type: ignore[no-untyped-def]
    """Bring the states in the cache up to a slot, and give results of all tokens behind it.

    A piece is a head of values, of one part.
    """
    num_heads, size, num = of[w.VALUE_HEADS], of[w.KEY_SIZE], of[w.VALUE_SIZE]
    sharing, all_keys = num_heads // of[w.KEY_HEADS], of[w.KEY_HEADS] * size
    state = numba.carray(pointer(scratch), (size, num), np.float32)
    whole, memory = _row(scratch, size * num), scratch + 4 * size * num
    change, num_done, num_all = _row(memory, num), 0, num_heads * g[w.NUM_PARTS]
    piece = take(phase, 1)
    while piece < num_all:
        part, head = divmod(piece, num_heads)
        place, first_new = places[part], places[part, w.NUM_KEYS] - parts[part, w.NUM_NEW]
        _copy(_row(place[w.STATE] + 4 * size * num * head, size * num), whole)
        brought = _row(place[w.BROUGHT] + 4 * size * num * head, size * num)
        for slot in range(place[w.LACKS], place[w.NUM_KEYS]):
            if slot == place[w.UNTIL]:
                _copy(whole, brought)
            kept = place[w.VALUES] + 4 * _kept_size(of) * slot
            key = _row(kept + 4 * size * (head // sharing), size)
            value = _row(kept + 4 * (all_keys + num * head), num)
            gates = _row(kept + 4 * (all_keys + num_heads * num + 2 * head), 2)
            token = parts[part, w.FIRST] + slot - first_new
            if slot >= first_new:
                mixed = g[w.MIXED] + 4 * layer[w.MIXED_SIZE] * token
                _write_gates(g, mixed, of, head, gates, change)
            _advance(state, key, value, gates, change)
            if slot >= first_new:
                _give(g, layer, of, head, token, state, memory)
        if place[w.UNTIL] == place[w.NUM_KEYS]:
            _copy(whole, brought)
        num_done += 1
        piece = take(phase, 1)
    _wait(phase, num_done, num_all)


@job
def run_delta(address: Any) -> None:
    """Run what other threads leave of a phase; takes eight addresses, and its number as third."""
    given = numba.carray(address, (8,), np.int64)
    g = numba.carray(pointer(given[0]), (w.JOB_SIZE,), np.int64)
    layer = numba.carray(pointer(given[3]), (w.LAYER_SIZE,), np.int64)
    of = numba.carray(pointer(given[4]), (w.LAYER_SIZE,), np.int64)
    parts = numba.carray(pointer(given[5]), (g[w.NUM_PARTS], 4), np.int64)
    places = numba.carray(pointer(given[6]), (g[w.NUM_PARTS], w.PLACE_SIZE), np.int64)
    if given[2] == 2:
        _convolve_heads(g, given[1], layer, of, parts, places, given[7])
    else:
        _run_heads(g, given[1], layer, of, parts, places, given[7])
