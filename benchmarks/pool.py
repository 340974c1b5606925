"""Timings of the pool: observing a token, drafting a tree and a whole step, by pool size."""

from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.environment import environment
from benchmarks.report import Keeping, sheet, show
from lade.apps.cli.loading import console
from lade.budget.budget import Budget
from lade.drafting.sources import PoolDrafter
from lade.drafting.successors import Successors
from ngram_pool import NGramPool

MAX_DRAFT_TOKENS = 32
_NUM_DRAFTS = 1000
_CHUNK = 100_000
_VOCAB_SIZE = 49_152
_NUM_VERIFIED = 8  # nodes per draft whose successors are harvested, besides the root
_TABLE_CONTEXTS = 2**16  # in the prewarmed table


class PoolTiming(NamedTuple):
    """Timings of a full pool of one size, on one core."""

    num_tokens: int
    observe_prompt_us: float  # per token, in long calls to a full pool that forgets
    observe_step_us: float  # per call of three tokens, as a decoding step makes it
    draft_us: float  # median per draft
    draft_p95_us: float
    step_us: float  # median: drafting with a table, budget, harvesting 9 nodes, observing 2 tokens
    step_p95_us: float
    nodes_per_draft: float
    bytes_per_token: float
    save_ms: float  # to a file, fsync included
    load_ms: float  # median: loading that file and the first draft


def time_pool(num_tokens: int, max_draft_tokens: int) -> PoolTiming:
    """Fill a pool to its capacity with synthetic text and time it.

    The text draws tokens of a 49,152-token vocabulary by Zipf's law; in every 400 tokens, it copies
    a span of 60 from anywhere before. The contexts of drafts are taken from all over the text, so
    processor caches help as little as with a pool that has served many prompts. The target's
    successors are drawn at random.
    """
    rng = np.random.default_rng(0)
    text = text_at_random(num_tokens, rng)
    pool = NGramPool(capacity_tokens=num_tokens, seed=0)
    for start in range(0, num_tokens, _CHUNK):
        pool.observe(text[start : start + _CHUNK])
    more = text_at_random(max(_CHUNK, num_tokens // 10), rng)
    start_sec = perf_counter()
    pool.observe(more)
    observe_prompt_us = (perf_counter() - start_sec) / len(more) * 1e6
    held = np.concatenate([text, more])[-num_tokens:]
    step_us, draft_us, num_nodes = [], [], []
    for end in rng.integers(10, num_tokens, _NUM_DRAFTS).tolist():
        context = held[end - 8 : end].tolist()
        start_sec = perf_counter()
        draft = pool.draft(context, max_draft_tokens)
        draft_us.append((perf_counter() - start_sec) * 1e6)
        num_nodes.append(len(draft))
        step = held[end - 3 : end].tolist()
        start_sec = perf_counter()
        pool.observe(step)
        step_us.append((perf_counter() - start_sec) * 1e6)
    steps = _time_steps(pool, held, max_draft_tokens, rng)
    save_ms, load_ms = _time_file(pool, held[-8:].tolist(), max_draft_tokens)
    return PoolTiming(
        num_tokens=num_tokens,
        observe_prompt_us=observe_prompt_us,
        observe_step_us=median(step_us),
        draft_us=median(draft_us),
        draft_p95_us=quantiles(draft_us, n=20)[-1],
        step_us=median(steps),
        step_p95_us=quantiles(steps, n=20)[-1],
        nodes_per_draft=sum(num_nodes) / len(num_nodes),
        bytes_per_token=pool.nbytes / num_tokens,
        save_ms=save_ms,
        load_ms=load_ms,
    )


def _time_steps(
    pool: NGramPool, held: NDArray[np.int64], max_draft_tokens: int, rng: np.random.Generator
) -> list[float]:
    """Return the times of steps without the target's forward, in microseconds."""
    table = NGramPool(32 * _TABLE_CONTEXTS)
    last = np.arange(_TABLE_CONTEXTS) % (len(held) - 1)
    pairs = np.stack([np.where(last % 3 == 0, -1, held[last]), held[last + 1]], axis=1)
    table.harvest(pairs, *successors_at_random(len(pairs), rng))
    drafter, budget = PoolDrafter(pool, layers=[table.as_read_only()]), Budget()
    sequence = drafter.open(held[:300].tolist())
    us: list[float] = []
    for end in rng.integers(100, len(held), _NUM_DRAFTS).tolist():
        committed = held[end - 100 : end].tolist()
        emitted = held[end - 2 : end].tolist()
        successors = successors_at_random(1 + _NUM_VERIFIED, rng)
        start_sec = perf_counter()
        draft = drafter.draft(sequence, committed, max_draft_tokens)
        budget.nums_of_nodes({0: draft.probs})
        verified = draft.first(_NUM_VERIFIED)
        token_ids = [committed[-1], *verified.token_ids.tolist()]
        parents = [-1, *(verified.parents + 1).tolist()]
        num_run = len(token_ids)
        known = Successors(successors.token_ids[:num_run], successors.probs[:num_run])
        drafter.harvest(sequence, committed, token_ids, parents, known)
        drafter.observe(sequence, emitted)
        budget.learn({0: (draft, emitted)}, {0: len(us)})
        budget.record(1, len(verified), 0.03)
        us.append((perf_counter() - start_sec) * 1e6)
    drafter.close(sequence)
    return us


def successors_at_random(num_nodes: int, rng: np.random.Generator) -> Successors:
    """Return successors of nodes, each with falling probabilities."""
    shape = (num_nodes, PoolDrafter.num_successors)
    probs = -np.sort(-rng.random(shape), axis=1) / shape[1]
    ids = rng.integers(0, _VOCAB_SIZE, shape, dtype=np.int32)
    return Successors(ids, probs.astype(np.float32))


def text_at_random(num_tokens: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return synthetic text; see `time_pool`."""
    text = rng.zipf(1.2, num_tokens) % _VOCAB_SIZE
    for start in range(400, num_tokens - 60, 400):
        source = int(rng.integers(0, start - 60))
        text[start : start + 60] = text[source : source + 60]
    return text.astype(np.int64)


def _time_file(pool: NGramPool, context: list[int], max_draft_tokens: int) -> tuple[float, float]:
    """Return the times of saving a pool, and of loading it and drafting once, in milliseconds.

    The file was just written, so it is in the memory of the system, as that of a pool in use is.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "timed.pool"
        start_sec = perf_counter()
        pool.save(path)
        save_ms = (perf_counter() - start_sec) * 1e3
        load_ms = []
        for _ in range(5):
            start_sec = perf_counter()
            loaded = NGramPool.load(path)
            loaded.draft(context, max_draft_tokens)
            load_ms.append((perf_counter() - start_sec) * 1e3)
            del loaded  # before the next one takes as much memory
    return save_ms, median(load_ms)


def run(max_tokens: int, file: Path | None) -> None:
    """Time pools of 10^4, 10^5, … tokens, up to `max_tokens`."""
    time_pool(10_000, MAX_DRAFT_TOKENS)  # compiles
    sizes = [10**power for power in range(4, 10) if 10**power <= max_tokens]
    title = f"NGramPool, full, one core, up to {MAX_DRAFT_TOKENS} draft tokens; times in µs"
    headings = (
        *("", "tokens held", "prompt/token", "observe 3 tokens", "draft median", "draft p95"),
        *("step median", "step p95", "draft tokens", "bytes/token", "save, ms", "load, ms"),
    )
    caption = (
        "prompt: observing a long one. step: all of a decoding step but the forward. load: of the "
        "saved file, with the first draft."
    )

    done: list[PoolTiming] = []
    with Keeping(done) as kept, console.status(title):
        done.extend(time_pool(size, MAX_DRAFT_TOKENS) for size in sizes)
    rows = [("", f"{each.num_tokens:,}", *(f"{value:.2f}" for value in each[1:])) for each in done]
    settings = {"max_draft_tokens": MAX_DRAFT_TOKENS, "interrupted": kept.by is not None}
    content: dict[str, Any] = {"environment": environment(), "settings": settings}
    content["timings"] = [each._asdict() for each in done]
    show(file, content, sheet(title, headings, [rows], caption))
    kept.end(f"stopped after {len(done)}")
