"""Counters and times for Prometheus, by vLLM's names where it has them."""

from collections.abc import Iterable, Sequence
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
        self._line = line
        self._store = store
        self._prefixes = prefixes

        def counter(name: str, text: str) -> Counter:
            made = Counter(name, text, ("model_name",), registry=self.registry)
            return made.labels(model_name)  # shown from the start

        def histogram(name: str, text: str, buckets: Sequence[float] = _FIRST_SEC) -> Histogram:
            labels = ("model_name",)
            made = Histogram(name, text, labels, registry=self.registry, buckets=buckets)
            return made.labels(model_name)

        drafts = "vllm:spec_decode_num_"
        self._drafts = counter(f"{drafts}drafts", "Steps that verified a draft.")
        self._draft_tokens = counter(f"{drafts}draft_tokens", "Draft tokens that were verified.")
        self._accepted = counter(f"{drafts}accepted_tokens", "Draft tokens that were accepted.")
        self._accepted_at = Counter(
            f"{drafts}accepted_tokens_per_pos",
            "Draft tokens that were accepted, by their depth in the draft.",
            ("model_name", "position"),
            registry=self.registry,
        )
        self._prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._tokens = counter("vllm:generation_tokens", "Tokens of answers.")
        self._prefix_queries = counter(
            "vllm:prefix_cache_queries", "Tokens of prompts that could have been kept."
        )
        self._prefix_hits = counter(
            "vllm:prefix_cache_hits", "Tokens of prompts that were kept, and not run again."
        )
        self._requests = Counter(
            "lade:requests",
            "Requests by the status of their answer; 499: the client left.",
            ("model_name", "code"),
            registry=self.registry,
        )
        self._first = histogram(
            "vllm:time_to_first_token_seconds", "Time from a request's arrival to its first token."
        )
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between the tokens of an answer, the first left out.",
            _TOKEN_SEC,
        )
        self._queue_sec = histogram(
            "vllm:request_queue_time_seconds", "Time that a request waited for others."
        )
        self._whole = histogram(
            "vllm:e2e_request_latency_seconds",
            "Time from a request's arrival to the end of its answer.",
        )
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(self)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def count_request(self, status: int) -> None:
        """Count a request that was answered or sent away."""
        self._requests.labels(self._name, str(status)).inc()

    def count(self, exchange: Exchange) -> None:
        """Count an exchange that is over."""
        now = perf_counter()
        if exchange.admitted is not None:
            self._queue_sec.observe(exchange.admitted - exchange.arrived)
        if exchange.first_token is None or exchange.last_token is None:
            return
        self._first.observe(exchange.first_token - exchange.arrived)
        if exchange.num_tokens > 1:
            sec = exchange.last_token - exchange.first_token
            self._per_token.observe(sec / (exchange.num_tokens - 1))
        self._whole.observe(now - exchange.arrived)
        self._prompt_tokens.inc(exchange.num_prompt_tokens)
        self._tokens.inc(exchange.num_tokens)
        stats = exchange.stats
        if stats is None:  # ended early
            return
        self._drafts.inc(stats.num_drafted_row_steps)
        self._draft_tokens.inc(stats.num_draft_tokens)
        self._accepted.inc(stats.num_accepted_tokens)
        for position, number in enumerate(stats.accepted_by_depth):
            self._accepted_at.labels(self._name, str(position)).inc(number)
        if not exchange.is_private:
            self._prefix_queries.inc(exchange.num_prompt_tokens)
            self._prefix_hits.inc(stats.num_reused_tokens)

    def collect(self) -> Iterable[Any]:
        """Yield the queue's and the pools' numbers, which are read when somebody asks."""
        line, pools, prefixes = self._line, self._store.stats, self._prefixes
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        for kind, name, text, value in (
            (gauge, "vllm:num_requests_running", "Requests in decoding.", line.num_running),
            (gauge, "vllm:num_requests_waiting", "Requests that wait.", line.num_waiting),
            (gauge, "lade:prefix_texts", "Texts whose keys and values are kept.", len(prefixes)),
            (gauge, "lade:prefix_bytes", "Memory of these.", prefixes.num_bytes),
            (gauge, "lade:pool_in_memory", "Pools in memory.", pools.num_in_memory),
            (gauge, "lade:pool_memory_bytes", "Memory of these.", pools.memory_bytes),
            (gauge, "lade:pool_on_disk", "Files of pools.", pools.num_on_disk),
            (gauge, "lade:pool_disk_bytes", "Size of these.", pools.disk_bytes),
            (counter, "lade:pool_loaded", "Pools read from their files.", pools.num_loaded),
            (counter, "lade:pool_saved", "Pools that were saved.", pools.num_saved),
            (counter, "lade:pool_failed", "Attempts to save that failed.", pools.num_failed),
            (counter, "lade:pool_evicted", "Pools that left memory.", pools.num_evicted),
            (counter, "lade:pool_dropped", "Files beyond the budget.", pools.num_dropped),
        ):
            family = kind(name, text, labels=("model_name",))
            family.add_metric((self._name,), value)
            yield family
