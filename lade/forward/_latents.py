"""Every compiled function of attention to latents alone, for models that have such layers.

Source: multi-head latent attention, DeepSeek-V2 (arXiv 2405.04434), section 2.1. The cache has two
rows of a token: a latent and a key. A matrix turns latents into values and keys of each head; the
cached key has angles and is shared by all heads. A job multiplies no latent of the cache by the
matrix. Instead, a head's part of the matrix turns the query into a query for latents; attention
adds up latents, and another part of the matrix turns their sum into values. Attention itself, and
what it caches, are those of other models, in the phases between.
"""

from typing import Any

import numpy as np

from lade.forward import words as w
from lade.forward._kernels import _add_across, _copy, _fill, _multiply, _row, given_to_job
from lade.forward._tiles import FLOAT32, inlined, job
from lade.forward._workers import pieces

_F = np.float32


@inlined
def _write_queries(g, phase, of, scratch):  # type: ignore[no-untyped-def]
    """Write queries for latents and for keys; a piece is a head of all tokens."""
    num, rank, num_heads = g[w.NUM_TOKENS], of[w.HEAD_SIZE], of[w.NUM_HEADS]
    straight, turning, step = of[w.STRAIGHT], of[w.TURNING], 4 * of[w.QUERIES_SIZE]
    width = 4 if of[w.OF_EXPAND] == FLOAT32 else 2
    for head, _ in pieces(g, phase, num_heads, 1):
        target = g[w.QUERIES] + 4 * (rank + turning) * head
        given = g[w.QUERIES] + 4 * ((rank + turning) * num_heads + (straight + turning) * head)
        for token in range(num):
            _fill(_row(target + step * token, rank), _F(0))
            end = _row(given + step * token + 4 * straight, turning)
            _copy(end, _row(target + step * token + 4 * rank, turning))
        of_head = width * rank * (straight + of[w.EXPANDED]) * head
        weights = of[w.EXPAND + w.WEIGHT] + of_head, width * rank, rank
        x = given, step, num
        _add_across(g, of[w.OF_EXPAND], x, weights, (target, step), straight, scratch)


@inlined
def _write_values(g, phase, of, scratch):  # type: ignore[no-untyped-def]
    """Write the values of what queries got from latents; a piece is a head of all tokens."""
    num, rank, size = g[w.NUM_TOKENS], of[w.HEAD_SIZE], of[w.EXPANDED]
    num_heads, of_expand = of[w.NUM_HEADS], of[w.EXPAND : w.EXPAND + w.PRODUCT_SIZE]
    out = scratch + 4 * rank * num
    for head, _ in pieces(g, phase, num_heads, 1):
        for token in range(num):
            got = g[w.QUERIES] + 4 * of[w.QUERIES_SIZE] * token
            got += 4 * (rank + of[w.TURNING]) * head
            _copy(_row(got, rank), _row(scratch + 4 * rank * token, rank))
        first = (of[w.STRAIGHT] + size) * head + of[w.STRAIGHT]
        x = scratch, 4 * rank, num
        _multiply(g, x, rank, (0, 0), of_expand, first, first + size, out, 4 * size)
        for token in range(num):
            target = 4 * (of[w.ATTENDED_SIZE] * token + size * head)
            _copy(_row(out + 4 * size * token, size), _row(g[w.ATTENDED] + target, size))


@job
def run_latents(address: Any) -> None:
    """Run the pieces of a phase that other threads have not taken; see `given_to_job`."""
    g, phase, step, of, _, _, scratch = given_to_job(address)
    if step == 0:
        _write_queries(g, phase, of, scratch)
    else:
        _write_values(g, phase, of, scratch)
