"""Timings of an engine's proposer: a step's observing and drafting, by the number of requests."""

from statistics import median, quantiles
from time import thread_time
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.pool import show_timings, text_at_random
from lade.bench.tables import Sheet
from lade.cli.results import ResultFiles
from lade.engines.options import Sharing
from lade.engines.vllm import PoolProposer

_VOCAB_SIZE = 49_152
MAX_DRAFT_TOKENS = 8
_NUM_SHARED = 2**19  # tokens of ended requests that a shared pool holds
_PROMPT_TOKENS = 500
_NUM_STEPS = 200
_NUM_ACCEPTED = 3  # new tokens of each request in a step, the bonus token included
_MAX_MODEL_LEN = 2048
_SHARINGS: tuple[Sharing, ...] = ("none", "all")


class RequestTiming(NamedTuple):
    """What a step takes beside the model, in processor time of the one core that it uses."""

    num_requests: int
    sharing: Sharing
    min_probability: float
    step_ms: float  # median: finding each request, observing 3 tokens of each, drafting
    step_p95_ms: float
    drafted: float  # tokens for a request in a step


def time_requests(
    num_requests: int,
    sharing: Sharing,
    max_draft_tokens: int,
    min_probability: float | None = None,
) -> RequestTiming:
    """Let a proposer draft for requests that go on for 200 steps, after their prompts.

    The texts are those of `benchmarks.pool.time_pool`, a different one for each request; half of a
    request's copied spans are from the text that a shared pool holds already.
    """
    rng = np.random.default_rng(0)
    options: dict[str, Any] = {"sharing": sharing, "max_step_tokens": 2**20}
    if min_probability is not None:
        options["min_probability"] = min_probability
    proposer = PoolProposer(_config(num_requests, max_draft_tokens, options))
    earlier = text_at_random(_NUM_SHARED, rng).astype(np.int32)
    if sharing == "all":
        proposer.observe(earlier)
    texts = np.zeros((num_requests, _MAX_MODEL_LEN), np.int32)
    for text in texts:
        text[:] = text_at_random(_MAX_MODEL_LEN, rng)
        for start in range(200, _MAX_MODEL_LEN - 60, 400):
            source = int(rng.integers(0, len(earlier) - 60))
            text[start : start + 60] = earlier[source : source + 60]
    lengths = np.full(num_requests, _PROMPT_TOKENS + 1, np.int32)
    proposer.propose(texts[:, _PROMPT_TOKENS : _PROMPT_TOKENS + 1].tolist(), lengths, texts)
    ms, num_drafted = [], 0
    for _ in range(_NUM_STEPS):
        begin = int(lengths[0])
        lengths += _NUM_ACCEPTED
        sampled = texts[:, begin : begin + _NUM_ACCEPTED].tolist()
        start_sec = thread_time()
        drafts = proposer.propose(sampled, lengths, texts)
        ms.append((thread_time() - start_sec) * 1e3)
        num_drafted += sum(map(len, drafts))
    assert proposer.stats()["failures"] == 0
    return RequestTiming(
        num_requests,
        sharing,
        proposer.options.min_probability,
        median(ms),
        quantiles(ms, n=20)[-1],
        num_drafted / num_requests / _NUM_STEPS,
    )


def _config(num_requests: int, max_draft_tokens: int, options: dict[str, Any]) -> Any:
    """Return what a proposer reads of a vLLM config."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=max_draft_tokens),
        model_config=SimpleNamespace(
            max_model_len=_MAX_MODEL_LEN, get_vocab_size=lambda: _VOCAB_SIZE
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=num_requests),
        additional_config={"lade": options},
    )


def run(max_requests: int, files: ResultFiles) -> None:
    """Draft for 1, 4, 16, … requests in a step, up to `max_requests`."""
    time_requests(1, "all", MAX_DRAFT_TOKENS)  # compiles
    sizes = [4**power for power in range(8) if 4**power <= max_requests]
    kinds: list[tuple[int, Sharing, float | None]] = [
        (num, sharing, least) for num in sizes for sharing in _SHARINGS for least in (None, 0.0)
    ]
    title = f"A step of an engine's proposer, one core, up to {MAX_DRAFT_TOKENS} tokens a request"
    headings = (
        *("requests", "sharing", "min_probability", "step median, ms", "step p95, ms"),
        "draft tokens/request",
    )
    caption = (
        "A step finds each request by its text, observes 3 tokens of each, and drafts. Processor "
        "time."
    )

    def row(timing: RequestTiming) -> list[str]:
        words = [f"{timing.num_requests}", timing.sharing, f"{timing.min_probability:g}"]
        return words + [f"{value:.2f}" for value in timing[3:]]

    timings = (time_requests(num, sharing, MAX_DRAFT_TOKENS, x) for num, sharing, x in kinds)
    settings = {"max_draft_tokens": MAX_DRAFT_TOKENS}
    show_timings(timings, row, Sheet(title, headings, 1, [], caption), settings, files)
