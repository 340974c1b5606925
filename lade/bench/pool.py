"""Timing the pool alone: what observing a token and drafting a tree cost as it fills."""

from statistics import median, quantiles
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ngram_pool import NGramPool

_NUM_DRAFTS = 1000
_CHUNK = 100_000


class PoolTiming(NamedTuple):
    """What a full pool of one size costs, on one core."""

    num_tokens: int
    observe_prompt_us: float  # per token, in long calls, the pool full and forgetting
    observe_step_us: float  # per call of three tokens, as a decoding step makes it
    draft_us: float  # median of a draft
    draft_p95_us: float
    nodes_per_draft: float
    bytes_per_token: float


def time_pool(num_tokens: int, max_nodes: int = 32, seed: int = 0) -> PoolTiming:
    """Fill a pool with synthetic text to its capacity, and time it there.

    The text draws tokens of a 49,152-token vocabulary by Zipf's law and copies a span of 60 tokens
    from anywhere before in every 400. Contexts of drafts are taken from all over the text, so
    caches of the processor help as little as they would with a pool that has served many prompts.
    """
    rng = np.random.default_rng(seed)
    text = _text(num_tokens, rng)
    pool = NGramPool(capacity_tokens=num_tokens)
    for start in range(0, num_tokens, _CHUNK):
        pool.observe(text[start : start + _CHUNK])
    more = _text(max(_CHUNK, num_tokens // 10), rng)
    start_sec = perf_counter()
    pool.observe(more)
    observe_prompt_us = (perf_counter() - start_sec) / len(more) * 1e6
    held = np.concatenate([text, more])[-num_tokens:]
    step_us, draft_us, num_nodes = [], [], []
    for end in rng.integers(10, num_tokens, _NUM_DRAFTS).tolist():
        context = held[end - 8 : end].tolist()
        start_sec = perf_counter()
        draft = pool.draft(context, max_nodes)
        draft_us.append((perf_counter() - start_sec) * 1e6)
        num_nodes.append(len(draft))
        step = held[end - 3 : end].tolist()
        start_sec = perf_counter()
        pool.observe(step)
        step_us.append((perf_counter() - start_sec) * 1e6)
    return PoolTiming(
        num_tokens=num_tokens,
        observe_prompt_us=observe_prompt_us,
        observe_step_us=median(step_us),
        draft_us=median(draft_us),
        draft_p95_us=quantiles(draft_us, n=20)[-1],
        nodes_per_draft=sum(num_nodes) / len(num_nodes),
        bytes_per_token=pool.nbytes / num_tokens,
    )


def as_json(timings: list[PoolTiming]) -> list[dict[str, Any]]:
    """Return timings, rounded, ready for JSON."""
    return [
        {name: round(value, 3) for name, value in timing._asdict().items()} for timing in timings
    ]


def _text(num_tokens: int, rng: np.random.Generator) -> NDArray[np.int64]:
    text = rng.zipf(1.2, num_tokens) % 49_152
    for start in range(400, num_tokens - 60, 400):
        source = int(rng.integers(0, start - 60))
        text[start : start + 60] = text[source : source + 60]
    return text.astype(np.int64)
