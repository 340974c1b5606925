"""Workers of parallel loops: a thread's end with its call, and when it hands a turn on."""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import lade
from tests.lade.both import ONE
from tests.lade.tiny import tiny_model

_IS_GNUS = sys.platform == "linux" and "libgomp" in Path("/proc/self/maps").read_text()

pytestmark = pytest.mark.skipif(not _IS_GNUS, reason="torch has no OpenMP of GNU's here")


def run_loop() -> float:
    """Run a loop that torch divides among its threads."""
    return float(torch.ones(2**20).exp().sum())


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


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


def test_a_call_leaves_no_workers() -> None:
    """Else those of calls in other threads would not wait awake."""
    model, counts = tiny_model("llama", dtype=torch.float32), []
    given: dict[str, Any] = {"attention_mask": torch.ones_like(ONE), "max_new_tokens": 4}

    def note(step: lade.Step) -> None:
        run_loop()

    def run() -> None:
        before = num_threads()
        for _ in range(2):  # other workers begin with the next loop
            lade.generate(model, ONE, on_step=note, **given)
            counts.append(num_threads() - before)
            run_loop()
            counts.append(num_threads() - before)

    in_thread(run)
    assert counts == [0, 2, 0, 2]


def test_a_turn_that_is_handed_on_leaves_no_workers() -> None:
    """Else the workers of the next thread would not wait awake for its loops."""
    seen = []
    model = tiny_model("llama", dtype=torch.float32)
    torch.set_num_threads(2)

    def note(step: lade.Step) -> None:
        seen.append(num_threads())
        run_loop()

    given: dict[str, Any] = {"attention_mask": torch.ones_like(ONE), "max_new_tokens": 8}
    lade.generate(model, ONE, **given)  # which leaves no workers of this thread
    others = num_threads()
    with lade.Batcher(model, max_batch_size=4) as batcher:
        requests = [batcher.submit(ONE, on_step=note, **given) for _ in range(4)]
        for request in requests:
            request.result()
    assert len(seen) >= 4 * 2
    assert max(seen) <= others + 4 + 1  # the batcher's threads, and a worker of one of them
