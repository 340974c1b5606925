"""Every compiled function of attention to latents alone, for models that have such layers.

Source: multi-head latent attention, DeepSeek-V2 (arXiv 2405.04434), section 2.1. The cache has two
rows of a token: a latent and a key. A matrix turns latents into values and keys of each head; the
cached key has angles and is shared by all heads. A job multiplies no latent of the cache by the
matrix. Instead, a head's part of the matrix turns the query into a query for latents; attention
adds up latents, and another part of the matrix turns their sum into values.
"""

from typing import Any

import numpy as np

from lade.forward import words as w
from lade.forward._kernels import (
    _add_across,
    _arrange,
    _copy,
    _fill,
    _multiply,
    _normalize,
    _round,
    _row,
    _store,
    _take_query,
    _turn,
    described,
    given_to_job,
)
from lade.forward._tiles import (
    DEPTH,
    FLOAT32,
    add_products,
    call_compiled,
    compiled,
    inlined,
    job,
    take,
)
from lade.forward._workers import end, wait_within

_F = np.float32


@compiled
def _turn_token(layer, row, token, scratch, format_):  # type: ignore[no-untyped-def]
    """Turn a key, or the end of a query, by the angles of its token."""
    size = len(row)
    cos = _row(layer[w.COS] + 4 * size * token, size)
    sin = _row(layer[w.SIN] + 4 * size * token, size)
    straight, turned = _row(scratch, size), _row(scratch + 4 * size, size)
    _turn(row, cos, sin, straight, turned, layer[w.TURN], format_)


@inlined
def _write_latents(g, phase, layer, of, parts, caches, scratch):  # type: ignore[no-untyped-def]
    """Write latents and keys into the cache, and arrange what queries are made of."""
    num, format_, rank, size = g[w.NUM_TOKENS], g[w.FORMAT], layer[w.HEAD_SIZE], of[w.TURNING]
    num_inputs = layer[w.MIXED_SIZE] - rank - size  # of the product of queries, or all queries
    width, of_input = 4 if format_ == FLOAT32 else 2, 2 if g[w.ARRANGED] == w.NARROW else 4
    token, num_done, part = take(phase, 1), 0, 0
    while token < num:
        while token >= parts[part, w.FIRST] + parts[part, w.NUM_NEW]:
            part += 1
        mixed = g[w.MIXED] + 4 * layer[w.MIXED_SIZE] * token
        slot = caches[part, w.NUM_KEYS] - parts[part, w.NUM_NEW] + token - parts[part, w.FIRST]
        for is_query in range(2):
            if is_query and of[w.SECOND_QUERY + w.WEIGHT] == 0:
                continue
            numbers = num_inputs if is_query else rank
            given = _row(mixed if is_query else mixed + 4 * num_inputs, numbers)
            norm, wide = w.QUERY_NORM if is_query else w.KEY_NORM, _row(scratch, numbers)
            normed, of_norm = _row(scratch + 4 * numbers, numbers), layer[norm : norm + w.NORM_SIZE]
            if of_norm[w.FLAGS] & w.IS_NORM:
                _normalize(given, of_norm, normed, wide, format_)
            else:
                _copy(given, normed)
            if is_query:
                target = g[w.NORMED] + of_input * numbers * token
                _arrange(normed, target, 0, numbers, g[w.ARRANGED])
            else:
                _store(normed, caches[part, w.KEYS] + width * rank * slot, format_)
        key = _row(mixed + 4 * (num_inputs + rank), size)
        _turn_token(layer, key, token, scratch, format_)
        _store(key, caches[part, w.VALUES] + width * size * slot, format_)
        num_done += 1
        token = take(phase, 1)
    wait_within(g, phase, num_done, num)


@inlined
def _write_queries(g, phase, layer, of, scratch):  # type: ignore[no-untyped-def]
    """Write queries for latents and for keys; a piece is a head of all tokens."""
    num, format_, rank = g[w.NUM_TOKENS], g[w.FORMAT], layer[w.HEAD_SIZE]
    straight, turning, num_heads = of[w.STRAIGHT], of[w.TURNING], layer[w.NUM_HEADS]
    size, num_inputs = straight + turning, layer[w.MIXED_SIZE] - rank - turning
    width, step = 4 if format_ == FLOAT32 else 2, 4 * num_heads * (rank + turning)
    beside, head, num_done = scratch + 4 * size * num, take(phase, 1), 0
    while head < num_heads:
        if of[w.SECOND_QUERY + w.WEIGHT] != 0:
            given = g[w.NORMED], num_inputs, num
            of_query, first = of[w.SECOND_QUERY : w.EXPAND], size * head
            until, result = first + size, (scratch, 4 * size, format_)
            _multiply(g, format_, *given, of_query, first, until, *result)
        else:
            for token in range(num):
                mixed = g[w.MIXED] + 4 * (layer[w.MIXED_SIZE] * token + size * head)
                _copy(_row(mixed, size), _row(scratch + 4 * size * token, size))
        target = g[w.QUERIES] + 4 * (rank + turning) * head
        for token in range(num):
            turned = _row(scratch + 4 * (size * token + straight), turning)
            _turn_token(layer, turned, token, beside, format_)
            _fill(_row(target + step * token, rank), _F(0))
            _copy(turned, _row(target + step * token + 4 * rank, turning))
        of_head = width * rank * (straight + of[w.EXPANDED]) * head
        weights = of[w.EXPAND + w.WEIGHT] + of_head, width * rank, rank
        x = scratch, 4 * size, num
        _add_across(g, format_, x, weights, (target, step), straight, beside)
        num_done += 1
        head = take(phase, 1)
    end(g, phase, num_done, num_heads)


@inlined
def _write_values(g, phase, layer, of, scratch):  # type: ignore[no-untyped-def]
    """Arrange the values of what queries got from latents; a piece is a head of all tokens."""
    num, format_, rank, size = g[w.NUM_TOKENS], g[w.FORMAT], layer[w.HEAD_SIZE], of[w.EXPANDED]
    num_heads, of_result = layer[w.NUM_HEADS], 2 if g[w.ARRANGED] == w.NARROW else 4
    width, step = 4 if format_ == FLOAT32 else 2, 4 * num_heads * (rank + of[w.TURNING])
    out, head, num_done = scratch + 4 * rank * num, take(phase, 1), 0
    while head < num_heads:
        for token in range(num):
            got = g[w.QUERIES] + step * token + 4 * (rank + of[w.TURNING]) * head
            _take_query(_row(got, rank), _row(scratch + 4 * rank * token, rank), format_, _F(1))
            _fill(_row(out + 4 * size * token, size), _F(0))
        before = (of[w.STRAIGHT] + size) * head + of[w.STRAIGHT]
        weight = of[w.EXPAND + w.WEIGHT] + width * rank * before
        for k in range(0, rank, DEPTH):
            x = scratch + 4 * k, 4 * rank, num
            weights = weight + width * k, width * rank, size
            add_products(g, format_, x, weights, (out, 4 * size), min(DEPTH, rank - k))
        for token in range(num):
            made, whole = _row(out + 4 * size * token, size), layer[w.ATTENDED_SIZE]
            _round(made, format_)
            target = g[w.ATTENDED] + of_result * whole * token
            _arrange(made, target, size * head, whole, g[w.ARRANGED])
        num_done += 1
        head = take(phase, 1)
    end(g, phase, num_done, num_heads)


@job
def run_latents(address: Any) -> None:
    """Run the pieces of a phase that other threads have not taken; see `given_to_job`."""
    g, phase, step, layer, parts, caches, scratch = given_to_job(address)
    of = described(g, layer[w.LATENT])
    if step == 2:
        _write_latents(g, phase, layer, of, parts, caches, scratch)
        _write_queries(g, phase + 128, layer, of, scratch)
    else:
        of_phase = g.ctypes.data, phase, -1, layer.ctypes.data
        given = parts.ctypes.data, caches.ctypes.data, scratch
        call_compiled((of[w.ATTEND], *of_phase, *given))
        _write_values(g, phase + 128, layer, of, scratch)
