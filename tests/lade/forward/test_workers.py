"""Workers of jobs: what a stopped one delays and touches, and their end with the process."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import numba
import pytest
import torch

import lade
from lade.forward import linear, words, workers
from lade.forward.job import FusedForwards
from lade.machine import threads as machine
from tests.lade.both import ONE
from tests.lade.forward.families import adapted, model_of
from tests.lade.forward.test_bits import WAYS, Texts, force

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are asked for by number")
_usleep = numba.types.ExternalFunction("usleep", numba.int32(numba.uint32))
_FAMILIES = "gemma2", "glm4_moe", "deepseek_v3", "qwen3_next", "lfm2", "adapted"


@numba.cfunc("void(int32)")  # type: ignore[untyped-decorator]
def _stop(number: Any) -> None:
    _usleep(3000)


def threads() -> set[int]:
    return {*map(int, os.listdir("/proc/self/task"))}


def product(number: float = 1.0) -> bool:
    """Run a job; return whether it is right."""
    made = linear.kernels()
    assert made is not None
    with torch.no_grad():
        weight = torch.full((256, 128), number)
        got = linear.Products(*made).by_job(torch.ones(3, 128), weight, None)
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


@contextmanager
def stopped_at_random(helpers: set[int]) -> Iterator[None]:
    """Stop workers again and again, in the middle of whatever they do."""
    libc, is_over, rng = ctypes.CDLL(None), threading.Event(), random.Random(0)
    libc.signal(signal.SIGUSR2, ctypes.c_void_p(_stop.address))  # for good: signals may be late

    def run() -> None:
        while not is_over.wait(rng.random() * 1e-3):
            libc.tgkill(os.getpid(), rng.choice([*helpers]), signal.SIGUSR2)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize(
    ("family", "way"), [("llama", way) for way in WAYS] + [(each, "float32") for each in _FAMILIES]
)
def test_a_stopped_worker_changes_no_bit_and_touches_no_job_that_is_over(
    family: str, way: str, helpers: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads take pieces of other sizes, in which vectors end elsewhere."""
    force(way, monkeypatch)
    threads_of_jobs: set[int] = set()

    def spoil(function: int, job: int, num_threads: int) -> None:
        """Run a job, then make its numbers useless."""
        threads_of_jobs.add(num_threads)
        workers._run(function, job, num_threads)
        ctypes.memset(job, 0x7F, 8 * words.JOB_SIZE)

    monkeypatch.setattr(linear, "runner", lambda: spoil)
    sizes = {"intermediate_size": 1000, "vocab_size": 1011} if family in ("llama", "gemma2") else {}
    model = model_of(family.replace("adapted", "llama"), WAYS[way][0], **sizes)
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

    def num_added() -> int:
        before = threads()
        lade.generate(model, ONE, **options)
        return len(threads() - before)

    with ThreadPoolExecutor(1) as caller:
        assert caller.submit(num_added).result() == 0


def test_loops_that_run_alone_leave_the_number_of_threads() -> None:
    torch.set_num_threads(3)
    assert machine.alone(torch.get_num_threads) == 1
    with pytest.raises(ZeroDivisionError):
        machine.alone(lambda: 1 / 0)
    assert torch.get_num_threads() == 3


def test_a_forked_child_makes_its_own_workers(helpers: set[int]) -> None:
    def answer(before: int) -> None:
        os._exit(not (product() and len(threads()) == before + 3))

    child = get_context("fork").Process(target=answer, args=(1,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert product()


def test_a_process_ends_while_a_thread_runs_jobs() -> None:
    code = (
        "import threading, time, torch; from lade.forward import workers;"
        "workers.num_cores = lambda: 4; torch.set_num_threads(4);"
        "from tests.lade.forward.test_workers import product\n"
        "def run():\n    while product(): pass\n"
        "threading.Thread(target=run, daemon=True).start(); product(); time.sleep(0.2)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
