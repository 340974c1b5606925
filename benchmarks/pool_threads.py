"""Timings of one pool that many threads decode from: calls a second, and how long each waits."""

import threading
from statistics import median, quantiles
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.pool import show_timings, successors_at_random, text_at_random
from lade.bench.tables import Sheet
from lade.cli.results import ResultFiles
from ngram_pool import NGramPool

# The pool has room for the tokens of all steps, so that none forgets and each can be counted.
_CAPACITY = 2**18
MAX_DRAFT_TOKENS = 32
_NUM_TOKENS = 140_000
_NUM_STEPS = 2**14  # of all threads together
_NUM_OBSERVED = 3
_NUM_VERIFIED = 9  # nodes whose successors are harvested in a step


class ThreadTiming(NamedTuple):
    """What a number of threads had of one pool; a step drafts, harvests and observes."""

    num_threads: int
    steps_per_sec: float  # of all threads together
    draft_us: float  # median
    draft_p99_us: float
    write_us: float  # median of harvesting and of observing
    write_p99_us: float
    longest_us: float  # of all calls
    longest_draft_us: float
    num_lost: int  # tokens that were observed and are not held


def time_threads(num_threads: int, max_draft_tokens: int) -> ThreadTiming:
    """Let threads share a pool, each with a sequence of its own and no pause between its calls.

    There is no model: all that threads do is to call the pool, so they meet there far more often
    than those of a server.
    """
    rng = np.random.default_rng(0)
    text = text_at_random(_NUM_TOKENS, rng)
    pool = NGramPool(_CAPACITY, seed=0)
    pool.observe(text)
    draft_us: list[list[float]] = [[] for _ in range(num_threads)]
    write_us: list[list[float]] = [[] for _ in range(num_threads)]
    errors: list[BaseException] = []
    start, num_steps = threading.Barrier(num_threads + 1), _NUM_STEPS // num_threads

    def work(thread: int) -> None:
        try:
            mine = np.random.default_rng([0, thread])
            start.wait()
            _decode(
                pool, text, num_steps, max_draft_tokens, mine, draft_us[thread], write_us[thread]
            )
        except BaseException as error:
            errors.append(error)
            start.abort()

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    start.wait()
    start_sec = perf_counter()
    for thread in threads:
        thread.join()
    seconds = perf_counter() - start_sec
    if errors:
        raise errors[0]
    drafts, writes = ([us for each in of_all for us in each] for of_all in (draft_us, write_us))
    return ThreadTiming(
        num_threads,
        num_threads * num_steps / seconds,
        median(drafts),
        quantiles(drafts, n=100)[-1],
        median(writes),
        quantiles(writes, n=100)[-1],
        max(*drafts, *writes),
        max(drafts),
        _NUM_TOKENS + num_threads * num_steps * _NUM_OBSERVED - len(pool),
    )


def _decode(
    pool: NGramPool,
    text: NDArray[np.int64],
    num_steps: int,
    max_draft_tokens: int,
    rng: np.random.Generator,
    draft_us: list[float],
    write_us: list[float],
) -> None:
    """Take the steps of one thread, and append what its calls took."""
    sequence = pool.open_sequence()
    parents = np.arange(_NUM_VERIFIED) - 1
    known = successors_at_random(_NUM_VERIFIED, rng)
    for end in rng.integers(10, len(text), num_steps).tolist():
        context = text[end - 8 : end].tolist()
        times = [perf_counter()]
        pool.draft(context, max_draft_tokens, sequence=sequence)
        times.append(perf_counter())
        pool.harvest_tree(-1, text[end - 9 : end], parents, *known)
        times.append(perf_counter())
        pool.observe(text[end - _NUM_OBSERVED : end], sequence, is_answer=True)
        times.append(perf_counter())
        us = np.diff(times) * 1e6
        draft_us.append(float(us[0]))
        write_us.extend(us[1:].tolist())


def run(max_threads: int, files: ResultFiles) -> None:
    """Let 1, 4, 16, … threads share a pool, up to `max_threads`."""
    time_threads(1, MAX_DRAFT_TOKENS)  # compiles
    sizes = [4**power for power in range(8) if 4**power <= max_threads]
    title = f"One NGramPool for all threads, up to {MAX_DRAFT_TOKENS} draft tokens; times in µs"
    headings = (
        *("threads", "steps/s", "draft median", "draft p99", "write median", "write p99"),
        *("longest call", "longest draft", "lost tokens"),
    )
    caption = "A step drafts, harvests 9 nodes and observes 3 tokens; no pause between steps."

    def row(timing: ThreadTiming) -> list[str]:
        return [f"{timing.num_threads}", *(f"{value:,.0f}" for value in timing[1:])]

    timings = (time_threads(num_threads, MAX_DRAFT_TOKENS) for num_threads in sizes)
    settings = {"max_draft_tokens": MAX_DRAFT_TOKENS}
    show_timings(timings, row, Sheet(title, headings, 1, [], caption), settings, files)
