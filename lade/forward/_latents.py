"""Every compiled function of attention to latents alone, for models that have such layers.

Source: multi-head latent attention, DeepSeek-V2 (arXiv 2405.04434), section 2.1. The cache has two
rows of a token: a latent and a key. A matrix turns latents into values and keys of each head; the
cached key has angles and is shared by all heads. A job multiplies no latent of the cache by the
matrix. Instead, a head's part of the matrix turns the query into a query for latents; attention
adds up latents, and another part of the matrix turns their sum into values.
"""

from typing import Any

import numba
import numpy as np

from lade.forward import words as w
from lade.forward._kernels import (
    _add_across,
    _copy,
    _fill,
    _multiply,
    _row,
    described,
    given_to_job,
    given_to_rows,
    run_rows,
)
from lade.forward._tiles import FLOAT32, call_with, compiled, inlined, job
from lade.forward._workers import pieces

_F = np.float32


@compiled
def _turn(g, of, rank, token, row, target, scratch):  # type: ignore[no-untyped-def]
    """Write a key, or the end of a query, turned by the angles of its token.

    The program takes the row of what makes latents, where a key is behind the latent.
    """
    turn = described(g, of[w.TURN])
    given = given_to_rows(g, turn, token, token, scratch)
    given[1 + of[w.TURNED_PLACE]], given[turn[w.NUM_PLACES]] = row - 4 * rank, target
    call_with((turn[w.PROGRAM], given.ctypes.data))


@inlined
def _write_latents(g, phase, of, parts, caches, scratch):  # type: ignore[no-untyped-def]
    """Write latents and keys into the cache, and what queries are made of."""
    num, rank, size = g[w.NUM_TOKENS], of[w.HEAD_SIZE], of[w.TURNING]
    part = 0
    for token, _ in pieces(g, phase, num, 1, True):
        while token >= parts[part, w.FIRST] + parts[part, w.NUM_NEW]:
            part += 1
        slot = caches[part, w.NUM_KEYS] - parts[part, w.NUM_NEW] + token - parts[part, w.FIRST]
        run_rows(g, of[w.HEADS], token, token, scratch)
        latent = _row(g[w.QUERIES] + 4 * of[w.QUERIES_SIZE] * token, rank)
        _copy(latent, _row(caches[part, w.KEYS] + 4 * rank * slot, rank))
        mixed = g[w.MIXED] + 4 * of[w.MIXED_SIZE] * (token + 1)
        target = caches[part, w.VALUES] + 4 * size * slot
        _turn(g, of, rank, token, mixed - 4 * size, target, scratch)


@inlined
def _write_queries(g, phase, of, scratch):  # type: ignore[no-untyped-def]
    """Write queries for latents and for keys; a piece is a head of all tokens."""
    num, rank = g[w.NUM_TOKENS], of[w.HEAD_SIZE]
    straight, turning, num_heads = of[w.STRAIGHT], of[w.TURNING], of[w.NUM_HEADS]
    size, num_inputs = straight + turning, of[w.MIXED_SIZE] - rank - turning
    format_, step = of[w.OF_EXPAND], 4 * num_heads * (rank + turning)
    width = 4 if format_ == FLOAT32 else 2
    beside = scratch + 4 * size * num
    for head, _ in pieces(g, phase, num_heads, 1):
        if of[w.SECOND_QUERY + w.WEIGHT] != 0:
            given = g[w.NORMED], num_inputs, num, 0
            of_query, first = of[w.SECOND_QUERY : w.EXPAND], size * head
            _multiply(g, *given, of_query, first, first + size, scratch, 4 * size)
        else:
            for token in range(num):
                mixed = g[w.MIXED] + 4 * (of[w.MIXED_SIZE] * token + size * head)
                _copy(_row(mixed, size), _row(scratch + 4 * size * token, size))
        target = g[w.QUERIES] + 4 * (rank + turning) * head
        for token in range(num):
            _fill(_row(target + step * token, rank), _F(0))
            row = scratch + 4 * (size * token + straight)
            _turn(g, of, rank, token, row, target + step * token + 4 * rank, beside)
        of_head = width * rank * (straight + of[w.EXPANDED]) * head
        weights = of[w.EXPAND + w.WEIGHT] + of_head, width * rank, rank
        x = scratch, 4 * size, num
        _add_across(g, format_, x, weights, (target, step), straight, beside)


@inlined
def _write_values(g, phase, of, scratch):  # type: ignore[no-untyped-def]
    """Write the values of what queries got from latents; a piece is a head of all tokens."""
    num, rank, size = g[w.NUM_TOKENS], of[w.HEAD_SIZE], of[w.EXPANDED]
    num_heads, of_expand = of[w.NUM_HEADS], of[w.EXPAND : w.EXPAND + w.PRODUCT_SIZE]
    step = 4 * num_heads * (rank + of[w.TURNING])
    out = scratch + 4 * rank * num
    for head, _ in pieces(g, phase, num_heads, 1):
        for token in range(num):
            got = g[w.QUERIES] + step * token + 4 * (rank + of[w.TURNING]) * head
            _copy(_row(got, rank), _row(scratch + 4 * rank * token, rank))
        first = (of[w.STRAIGHT] + size) * head + of[w.STRAIGHT]
        _multiply(g, scratch, rank, num, 0, of_expand, first, first + size, out, 4 * size)
        for token in range(num):
            target = 4 * (of[w.ATTENDED_SIZE] * token + size * head)
            _copy(_row(out + 4 * size * token, size), _row(g[w.ATTENDED] + target, size))


@job
def run_latents(address: Any) -> None:
    """Run the pieces of a phase that other threads have not taken; see `given_to_job`."""
    g, phase, step, of, parts, caches, scratch = given_to_job(address)
    if step == 0:
        _write_latents(g, phase, of, parts, caches, scratch)
        _write_queries(g, phase + 128, of, scratch)
    else:
        given = numba.carray(address, (4,), np.int64)
        call_with((of[w.ATTEND], given.ctypes.data))
        _write_values(g, phase + 128, of, scratch)
