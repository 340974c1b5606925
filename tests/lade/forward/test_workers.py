"""Workers of jobs: what a stopped one delays and touches, and their end with the process."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import lade
from lade.forward import linear, words, workers
from lade.forward.job import FusedForwards
from tests.grids import thinned_rows
from tests.lade.both import ONE
from tests.lade.forward.families import adapted, model_of
from tests.lade.forward.test_bits import WAYS, Texts, force
from tests.lade.stopping import stopped_at_random, threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are asked for by number")
_FAMILIES = "gemma2", "glm4_moe", "deepseek_v3", "qwen3_next", "lfm2", "adapted"
_CASES = [*(("llama", way) for way in WAYS), *((each, "float32") for each in _FAMILIES)]


def product(number: float = 1.0) -> bool:
    """Run a job; return whether it is right."""
    made = linear.kernels()
    assert made is not None
    with torch.no_grad():
        weight = torch.full((256, 128), number)
        got = linear.product(*made, torch.ones(3, 128), weight, None)
    return bool((got == 128 * number).all())


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Return the threads of a new pool of three workers, however few cores there are."""
    monkeypatch.setattr(workers, "_pools", [])
    monkeypatch.setattr(workers, "num_cores", lambda: 4)
    torch.set_num_threads(4)
    before = threads()
    assert product()
    yield threads() - before
    workers._close()


@pytest.mark.parametrize(("family", "way"), thinned_rows(_CASES, _CASES[1], _CASES[6], _CASES[8]))
def test_a_stopped_worker_changes_no_bit_and_touches_no_job_that_is_over(
    family: str, way: str, helpers: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads take pieces of other sizes, in which vectors end elsewhere."""
    force(way, monkeypatch)
    threads_of_jobs: set[int] = set()

    def spoil(function: int, job: int, num_threads: int) -> None:
        """Run a job, then make its numbers useless."""
        threads_of_jobs.add(num_threads)
        workers.run_job(function, job, num_threads)
        ctypes.memset(job, 0x7F, 8 * words.JOB_SIZE)

    monkeypatch.setattr(linear, "run_job", spoil)
    sizes = {"intermediate_size": 1000, "vocab_size": 1011} if family in ("llama", "gemma2") else {}
    model = model_of(family.replace("adapted", "llama"), WAYS[way], **sizes)
    if family == "adapted":
        adapted(model)
    torch.set_num_threads(1)
    with torch.no_grad(), stopped_at_random(helpers):
        texts = Texts(model)
        for num_threads in (2, 4):
            torch.set_num_threads(num_threads)
            assert texts.differences(num_threads) == []
    assert threads_of_jobs == {1, 2, 4}


def test_jobs_of_many_threads_run_at_once(helpers: set[int]) -> None:
    with stopped_at_random(helpers), ThreadPoolExecutor(20) as callers:
        assert all(callers.map(product, [*map(float, range(20))] * 50))


def test_a_call_wakes_no_thread_of_torch(
    helpers: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a thread would stay awake for milliseconds on a core that a worker needs."""
    monkeypatch.setattr(FusedForwards, "_are_slow", lambda *_: False)
    model, options = model_of("llama", vocab_size=2**15), dict[str, Any]()
    options |= {"attention_mask": torch.ones_like(ONE), "max_new_tokens": 24}
    options["config"] = lade.Config(max_draft_tokens=16)
    lade.generate(model, ONE, **options)

    def seen() -> tuple[int, int]:
        before = threads()
        lade.generate(model, ONE, **options)
        return len(threads() - before), torch.get_num_threads()

    with ThreadPoolExecutor(1) as caller:
        assert caller.submit(seen).result() == (0, 4)


def test_a_forked_child_makes_its_own_workers(helpers: set[int]) -> None:
    child = os.fork()
    if child == 0:
        os._exit(not (product() and len(threads()) == 4))
    assert os.waitpid(child, 0)[1] == 0
    assert product()


@pytest.mark.parametrize(
    ("sec", "most", "expected"),
    [
        ({1: [1.0], 2: [0.6]}, 2, 2),
        ({1: [1.0], 2: [0.95]}, 2, 1),  # it brings less than a tenth
        ({1: [1.0], 2: [*[0.5] * 7, 2.0]}, 2, 2),  # a quota's pauses count
        ({1: [1.0], 3: [0.4], 6: [0.25], 12: [0.23]}, 12, 6),
        ({1: [1.0], 2: [0.6], 4: [0.6], 8: [0.9], 16: [1.0]}, 16, 2),
    ],
)
def test_as_many_threads_run_forwards_as_pay(
    sec: dict[int, list[float]], most: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards are of all lengths; some are late, and later the machine is another one."""
    monkeypatch.setattr(workers, "most_threads", lambda: most)
    rng, threads, chosen = np.random.default_rng(0), workers.NumThreads(), list[int]()

    def run(num_forwards: int, sec_of: Callable[[int], list[float]]) -> None:
        chosen.clear()
        for _ in range(num_forwards):
            num_tokens = int(rng.integers(1, 9))
            chosen.append(num := threads.choose(num_tokens))
            usual = sec_of(num)[len(chosen) // 2 % len(sec_of(num))]  # trials go by turns
            late = 1 + (rng.random() < 0.02) * 5 + rng.normal() * 0.02
            threads.record(num, num_tokens, usual * (4 + num_tokens) * late)

    run(500, sec.__getitem__)
    run(2000, sec.__getitem__)
    assert chosen.count(expected) > 0.9 * len(chosen)
    assert threads.choose(100) == most  # a part of a prompt
    run(2500, lambda num: [1 / num])
    assert chosen[-1] == most
    monkeypatch.setattr(workers, "most_threads", lambda: 1)
    assert threads.choose(4) == 1
