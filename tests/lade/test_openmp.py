"""Workers of parallel loops: a thread's end when it is told so, and when it hands a turn on."""

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import lade
from lade.openmp import _pause, release_workers
from tests.lade.both import ONE
from tests.lade.tiny import tiny_model

_TASKS = Path("/proc/self/task")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or _pause() is None, reason="torch has no OpenMP of GNU's here"
)


def run_loop() -> float:
    """Run a loop that torch divides among its threads."""
    return float(torch.ones(2**20).exp().sum())


def num_threads() -> int:
    return len(os.listdir(_TASKS))


def in_thread(call: Callable[[], None]) -> None:
    """Call in a new thread that runs loops by three, and raise what it raises."""

    def run() -> None:
        torch.set_num_threads(3)
        call()

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(run).result()
    finally:
        torch.set_num_threads(before)  # of threads to come, which no fixture sees


def test_workers_end_and_others_begin_with_the_next_loop() -> None:
    counts = []

    def run() -> None:
        before = num_threads()
        for _ in range(2):
            expected = run_loop()
            counts.append(num_threads() - before)
            release_workers()
            release_workers()  # there are none
            counts.append(num_threads() - before)
        assert run_loop() == expected

    in_thread(run)
    assert counts == [2, 0, 2, 0]


def test_a_turn_that_is_handed_on_leaves_no_workers() -> None:
    """Else the workers of the next thread would not wait awake for its loops."""
    seen = []
    model = tiny_model("llama", dtype=torch.float32)
    torch.set_num_threads(2)

    def note(step: lade.Step) -> None:
        seen.append(num_threads())
        run_loop()

    release_workers()
    others = num_threads()
    with lade.Batcher(model, max_batch_size=4) as batcher:
        given: dict[str, Any] = {"attention_mask": torch.ones_like(ONE), "max_new_tokens": 8}
        requests = [batcher.submit(ONE, on_step=note, **given) for _ in range(4)]
        for request in requests:
            request.result()
    assert len(seen) >= 4 * 2
    assert max(seen) <= others + 4 + 1  # the batcher's threads, and a worker of one of them


def test_a_call_leaves_no_workers() -> None:
    """Else those of calls in other threads would not wait awake."""
    model, counts = tiny_model("llama", dtype=torch.float32), []

    def run() -> None:
        before = num_threads()
        given: dict[str, Any] = {"attention_mask": torch.ones_like(ONE), "max_new_tokens": 4}
        lade.generate(model, ONE, on_step=lambda _: counts.append(run_loop()), **given)
        counts[:] = [len(counts), num_threads() - before]

    in_thread(run)
    assert counts[0] > 0
    assert counts[1] == 0


@pytest.mark.parametrize("num_threads", [1, 3])
def test_nobody_waits_for_workers_that_a_fork_has_left_behind(num_threads: int) -> None:
    def run() -> None:
        run_loop()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python 3.12, about threads
            child = os.fork()
        if child == 0:
            torch.set_num_threads(num_threads)
            release_workers()
            os._exit(0)
        deadline = time.monotonic() + 20
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        if not ended[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        codes.append(ended)

    codes: list[tuple[int, int]] = []
    in_thread(run)
    ((pid, status),) = codes
    assert pid > 0
    assert status == 0
