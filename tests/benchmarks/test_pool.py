"""Timings of the pool alone."""

import pytest

from benchmarks.pool import time_pool
from benchmarks.pool_requests import time_requests
from benchmarks.pool_threads import time_threads
from lade.engines.options import PoolOptions, Sharing


def test_threads_that_share_a_pool_lose_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.pool_threads._NUM_STEPS", 256)
    timing = time_threads(64, max_draft_tokens=8)
    assert timing.num_lost == 0
    assert 0 < timing.draft_us <= timing.draft_p99_us <= timing.longest_us


@pytest.mark.parametrize("sharing", ["none", "all"])
def test_a_proposers_steps_are_timed(sharing: Sharing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.pool_requests._NUM_STEPS", 20)
    monkeypatch.setattr("benchmarks.pool_requests._NUM_SHARED", 20_000)
    likely = time_requests(4, sharing, 8)
    whole = time_requests(4, sharing, 8, min_probability=0.0)
    assert 0 < likely.step_ms <= likely.step_p95_ms
    assert likely.drafted < whole.drafted <= 8
    assert (likely.min_probability, whole.min_probability) == (PoolOptions().min_probability, 0.0)


def test_pool_timing_measures_a_full_pool() -> None:
    timing = time_pool(40_000, max_draft_tokens=16)
    assert timing.num_tokens == 40_000
    assert 0 < timing.nodes_per_draft <= 16
    assert 0 < timing.bytes_per_token <= 64
    assert 0 < timing.draft_us < timing.draft_p95_us
    assert timing.load_ms > 0
    assert timing.save_ms > 0
