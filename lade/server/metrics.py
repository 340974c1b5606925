"""Counters and times for Prometheus, by vLLM's names where it has them."""

from collections.abc import Iterable
from time import perf_counter
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily

from lade.engine import Engine
from lade.server.exchange import Exchange
from lade.targets.prefixes import PrefixStore
from ngram_pool import PoolStore

# vLLM's buckets, of tokens and of requests, and longer ones: a request may wait for others.
_SEC = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_DRAFTS = "vllm:spec_decode_num_"
_COUNTERS = {
    f"{_DRAFTS}drafts": "Steps that verified a draft.",
    f"{_DRAFTS}draft_tokens": "Draft tokens that were verified.",
    f"{_DRAFTS}accepted_tokens": "Draft tokens that were accepted.",
    "vllm:prompt_tokens": "Tokens of prompts.",
    "vllm:generation_tokens": "Tokens of answers.",
    "vllm:prefix_cache_queries": "Tokens of prompts that could have been kept.",
    "vllm:prefix_cache_hits": "Tokens of prompts that were kept, and not run again.",
}
_FIRST, _WHOLE = "vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"
_PER_TOKEN = "vllm:request_time_per_output_token_seconds"
_WAITED = "vllm:request_queue_time_seconds"
_TIMES = {
    _FIRST: "Time from a request's arrival to its first token.",
    _PER_TOKEN: "Mean time between the tokens of an answer, the first left out.",
    _WAITED: "Time that a request waited for others.",
    _WHOLE: "Time from a request's arrival to the end of its answer.",
}
_LABELLED = (
    (
        f"{_DRAFTS}accepted_tokens_per_pos",
        "position",
        "Draft tokens that were accepted, by their depth in the draft.",
    ),
    ("lade:requests", "code", "Requests by the status of their answer; 499: the client left."),
)


class Metrics:
    """All metrics of a server, in a registry of its own."""

    def __init__(
        self, model_name: str, engine: Engine, store: PoolStore, prefixes: PrefixStore
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self._name, self._engine, self._store, self._prefixes = (
            model_name,
            engine,
            store,
            prefixes,
        )
        of_model: Any = {"labelnames": ("model_name",), "registry": registry}
        # With their labels, they are shown from the start.
        self._counters = {
            name: Counter(name, text, **of_model).labels(model_name)
            for name, text in _COUNTERS.items()
        }
        self._times = {
            name: Histogram(name, text, **of_model, buckets=_SEC).labels(model_name)
            for name, text in _TIMES.items()
        }
        self._accepted_at, self._requests = (
            Counter(name, text, ("model_name", label), registry=registry)
            for name, label, text in _LABELLED
        )
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        registry.register(self)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def count_request(self, status: int) -> None:
        """Count a request that was answered or sent away."""
        self._requests.labels(self._name, str(status)).inc()

    def count(self, exchange: Exchange) -> None:
        """Count an exchange that is over."""
        num_tokens, stats = len(exchange.token_ids), exchange.stats
        if exchange.admitted is not None:
            self._times[_WAITED].observe(exchange.admitted - exchange.arrived)
        if exchange.first_token is None or exchange.last_token is None:
            return
        self._times[_FIRST].observe(exchange.first_token - exchange.arrived)
        self._times[_WHOLE].observe(perf_counter() - exchange.arrived)
        if num_tokens > 1:
            sec = exchange.last_token - exchange.first_token
            self._times[_PER_TOKEN].observe(sec / (num_tokens - 1))
        self._counters["vllm:prompt_tokens"].inc(exchange.num_prompt_tokens)
        self._counters["vllm:generation_tokens"].inc(num_tokens)
        if stats is None:  # it ended early
            return
        self._counters[f"{_DRAFTS}drafts"].inc(stats.num_drafted_row_steps)
        self._counters[f"{_DRAFTS}draft_tokens"].inc(stats.num_draft_tokens)
        self._counters[f"{_DRAFTS}accepted_tokens"].inc(stats.num_accepted_tokens)
        for position, number in enumerate(stats.accepted_by_depth):
            self._accepted_at.labels(self._name, str(position)).inc(number)
        if not exchange.is_private:
            self._counters["vllm:prefix_cache_queries"].inc(exchange.num_prompt_tokens)
            self._counters["vllm:prefix_cache_hits"].inc(stats.num_reused_tokens)

    def collect(self) -> Iterable[Any]:
        """Yield the queue's and the pools' numbers, which are read when somebody asks."""
        engine, pools, prefixes = self._engine, self._store.stats, self._prefixes
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in decoding.", engine.num_running),
            ("vllm:num_requests_waiting", "Requests that wait.", engine.num_waiting()),
            ("lade:prefix_bytes", "Memory of keys and values that are kept.", prefixes.num_bytes),
            ("lade:pool_memory_bytes", "Memory of pools.", pools.memory_bytes),
            ("lade:pool_disk_bytes", "Size of their files.", pools.disk_bytes),
            ("lade:pool_in_memory", "Pools in memory.", pools.num_in_memory),
            ("lade:pool_failed", "Attempts to save one that failed.", pools.num_failed),
        ):
            family = GaugeMetricFamily(name, text, labels=("model_name",))
            family.add_metric((self._name,), value)
            yield family
