"""Counters and times for Prometheus, by vLLM's names where it has them."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import prometheus_client as prometheus

from lade.apps.server.exchange import Exchange, OneAnswer
from lade.engine.engine import Engine
from lade.targets.prefixes import PrefixStore
from ngram_pool import PoolStore

# From a millisecond to nine minutes: a request may wait for others.
_SEC = [0.001 * 2**power for power in range(20)]
_COUNTERS = {
    "spec_decode_num_drafts": "Steps that verified a draft.",
    "spec_decode_num_draft_tokens": "Draft tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
    "prompt_tokens": "Tokens of prompts.",
    "generation_tokens": "Tokens of answers.",
    "prefix_cache_queries": "Tokens of prompts that could have been kept.",
    "prefix_cache_hits": "Tokens of prompts that were kept, and not run again.",
}
_TIMES = {
    "time_to_first_token": "Time from a request's arrival to its first token.",
    "request_time_per_output_token": "Mean time between tokens of an answer but the first.",
    "request_queue_time": "Time that a request waited for others.",
    "e2e_request_latency": "Time from a request's arrival to the end of its answer.",
}


class Metrics:
    """All metrics of a server, in a registry of its own."""

    def __init__(
        self, model_name: str, engine: Engine, store: PoolStore, prefixes: PrefixStore
    ) -> None:
        self._name, self._registry = model_name, prometheus.CollectorRegistry()

        def made(kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
            return kind(name, text, ["model_name", *labels], registry=self._registry, **more)

        # With their labels, they are shown from the start.
        self._counters = {
            name: made(prometheus.Counter, f"vllm:{name}", text).labels(model_name)
            for name, text in _COUNTERS.items()
        }
        self._times = {
            name: made(prometheus.Histogram, f"vllm:{name}_seconds", text, buckets=_SEC).labels(
                model_name
            )
            for name, text in _TIMES.items()
        }
        text = "Draft tokens that were accepted, by their depth in the draft."
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        self._accepted_at = made(prometheus.Counter, name, text, "position")
        text = "Requests by the status of their answer; 499: the client left."
        self._requests = made(prometheus.Counter, "lade:requests", text, "code")
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "vllm:num_requests_running": ("Requests in decoding.", lambda: engine.num_running),
            "vllm:num_requests_waiting": ("Requests that wait.", engine.num_waiting),
            "lade:prefix_bytes": ("Keys and values that are kept.", lambda: prefixes.num_bytes),
            "lade:pool_memory_bytes": ("Memory of pools.", lambda: store.stats.memory_bytes),
            "lade:pool_disk_bytes": ("Size of their files.", lambda: store.stats.disk_bytes),
            "lade:pool_in_memory": ("Pools in memory.", lambda: store.stats.num_in_memory),
            "lade:pool_failed": ("Attempts to save that failed.", lambda: store.stats.num_failed),
        }
        for name, (text, read) in gauges.items():  # read on request
            made(prometheus.Gauge, name, text).labels(model_name).set_function(read)
        prometheus.ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return prometheus.generate_latest(self._registry)

    def count_request(self, status: int) -> None:
        """Count a request, answered or refused."""
        self._requests.labels(self._name, str(status)).inc()

    def count(self, exchange: Exchange, one: OneAnswer) -> None:
        """Count an answer of a finished exchange."""
        num_tokens, stats, times = len(one.token_ids), one.stats, self._times
        arrived, first, last = exchange.arrived, one.first_token, one.last_token
        if one.admitted is not None:
            times["request_queue_time"].observe(one.admitted - arrived)
        if first is None or last is None:
            return
        times["time_to_first_token"].observe(first - arrived)
        if num_tokens > 1:
            times["request_time_per_output_token"].observe((last - first) / (num_tokens - 1))
        counts = {"generation_tokens": num_tokens}
        if one.index == 0:  # of all, the request's and the prompts' are the same
            times["e2e_request_latency"].observe(perf_counter() - arrived)
            counts["prompt_tokens"] = exchange.num_prompt_tokens
        if stats is not None:  # None if it ended early
            counts["spec_decode_num_drafts"] = stats.num_drafted_row_steps
            counts["spec_decode_num_draft_tokens"] = stats.num_draft_tokens
            counts["spec_decode_num_accepted_tokens"] = stats.num_accepted_tokens
            for position, number in enumerate(stats.accepted_by_depth):
                self._accepted_at.labels(self._name, str(position)).inc(number)
            if not exchange.is_private:
                counts["prefix_cache_queries"] = one.num_prompt_tokens
                counts["prefix_cache_hits"] = stats.num_reused_tokens
        for name, count in counts.items():
            self._counters[name].inc(count)
