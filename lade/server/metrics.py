"""Counters and times for Prometheus, by vLLM's names where it has them."""

from collections.abc import Callable, Iterable, Sequence
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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from lade.server.exchange import Exchange
from lade.server.line import Line
from lade.targets.prefixes import PrefixStore
from ngram_pool import PoolStore

#: vLLM's, and longer ones: a request may wait for others.
_FIRST_SEC = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_TOKEN_SEC = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0),
)


class Metrics:
    """All metrics of a server, in a registry of its own."""

    def __init__(
        self, model_name: str, line: Line, store: PoolStore, prefixes: PrefixStore
    ) -> None:
        self.registry = CollectorRegistry()
        self._name = model_name

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, ("model_name", *more), registry=self.registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, ("model_name",), registry=self.registry, buckets=buckets)

        self._drafts = counter("vllm:spec_decode_num_drafts", "Steps that verified a draft.")
        self._draft_tokens = counter(
            "vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified."
        )
        self._accepted = counter(
            "vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted."
        )
        self._accepted_at = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were accepted, by their depth in the draft.",
            "position",
        )
        self._prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._tokens = counter("vllm:generation_tokens", "Tokens of answers.")
        self._prefix_queries = counter(
            "vllm:prefix_cache_queries", "Tokens of prompts that could have been kept."
        )
        self._prefix_hits = counter(
            "vllm:prefix_cache_hits", "Tokens of prompts that were kept, and not run again."
        )
        self._requests = counter(
            "lade:requests", "Requests by the status of their answer; 499: the client left.", "code"
        )
        self._first = histogram(
            "vllm:time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            _FIRST_SEC,
        )
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between the tokens of an answer, the first left out.",
            _TOKEN_SEC,
        )
        self._queue_sec = histogram(
            "vllm:request_queue_time_seconds",
            "Time that a request waited for others.",
            _FIRST_SEC,
        )
        self._whole = histogram(
            "vllm:e2e_request_latency_seconds",
            "Time from a request's arrival to the end of its answer.",
            _FIRST_SEC,
        )
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(_Gauges(model_name, line, store, prefixes))
        for each in (self._drafts, self._draft_tokens, self._accepted, self._prefix_hits):
            each.labels(model_name)  # shown from the start
        for each in (self._prompt_tokens, self._tokens, self._prefix_queries):
            each.labels(model_name)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def count_request(self, status: int) -> None:
        """Count a request that was answered or sent away."""
        self._requests.labels(self._name, str(status)).inc()

    def count(self, exchange: Exchange) -> None:
        """Count an exchange that is over."""
        name, now = self._name, perf_counter()
        if exchange.admitted is not None:
            self._queue_sec.labels(name).observe(exchange.admitted - exchange.arrived)
        if exchange.first_token is None or exchange.last_token is None:
            return
        self._first.labels(name).observe(exchange.first_token - exchange.arrived)
        if exchange.num_tokens > 1:
            sec = exchange.last_token - exchange.first_token
            self._per_token.labels(name).observe(sec / (exchange.num_tokens - 1))
        self._whole.labels(name).observe(now - exchange.arrived)
        self._prompt_tokens.labels(name).inc(exchange.num_prompt_tokens)
        self._tokens.labels(name).inc(exchange.num_tokens)
        stats = exchange.stats
        if stats is None:  # ended early
            return
        self._drafts.labels(name).inc(stats.num_drafted_row_steps)
        self._draft_tokens.labels(name).inc(stats.num_draft_tokens)
        self._accepted.labels(name).inc(stats.num_accepted_tokens)
        for position, number in enumerate(stats.accepted_by_depth):
            self._accepted_at.labels(name, str(position)).inc(number)
        if not exchange.is_private:
            self._prefix_queries.labels(name).inc(exchange.num_prompt_tokens)
            self._prefix_hits.labels(name).inc(stats.num_reused_tokens)


class _Gauges:
    """What is read when somebody asks."""

    def __init__(
        self, model_name: str, line: Line, store: PoolStore, prefixes: PrefixStore
    ) -> None:
        self._name = model_name
        self._line = line
        self._store = store
        self._prefixes = prefixes

    def describe(self) -> Iterable[Any]:
        """Return nothing: names are known when values are."""
        return ()

    def collect(self) -> Iterable[Any]:
        """Yield the queue's and the pools' numbers."""

        def made(kind: Callable[..., Any], name: str, text: str, value: float) -> Any:
            family = kind(name, text, labels=("model_name",))
            family.add_metric((self._name,), value)
            return family

        line, stats = self._line, self._store.stats
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        yield made(gauge, "vllm:num_requests_running", "Requests in decoding.", line.num_running)
        yield made(gauge, "vllm:num_requests_waiting", "Requests that wait.", line.num_waiting)
        yield made(
            gauge, "lade:prefix_texts", "Texts whose keys and values are kept.", len(self._prefixes)
        )
        yield made(gauge, "lade:prefix_bytes", "Memory of these.", self._prefixes.num_bytes)
        for name, text, value in (
            ("in_memory", "Pools in memory.", stats.num_in_memory),
            ("memory_bytes", "Memory of these.", stats.memory_bytes),
            ("on_disk", "Files of pools.", stats.num_on_disk),
            ("disk_bytes", "Size of these.", stats.disk_bytes),
        ):
            yield made(gauge, f"lade:pool_{name}", text, value)
        for name, text, value in (
            ("loaded", "Pools that were read from their files.", stats.num_loaded),
            ("saved", "Pools that were saved.", stats.num_saved),
            ("failed", "Attempts to save a pool that failed.", stats.num_failed),
            ("evicted", "Pools that left memory.", stats.num_evicted),
            ("dropped", "Files removed to keep within the budget.", stats.num_dropped),
        ):
            yield made(counter, f"lade:pool_{name}", text, value)
