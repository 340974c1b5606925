"""Workers of jobs: what a stopped one delays and touches, and their end with the process."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
from lade.machine.threads import alone
from tests.lade.both import ONE
from tests.lade.forward.families import adapted, model_of
from tests.lade.forward.test_bits import Texts, force

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are asked for by number")
_usleep = numba.types.ExternalFunction("usleep", numba.int32(numba.uint32))
_STOPPED_USEC = 3000


@numba.cfunc("void(int32)")
def _stop(number: Any) -> None:
    _usleep(_STOPPED_USEC)


def threads() -> set[int]:
    return {*map(int, os.listdir("/proc/self/task"))}


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Return the threads of a new pool of three workers, however few cores there are."""
    monkeypatch.setattr(workers, "_pools", [])
    monkeypatch.setattr(workers, "num_cores", lambda: 4)
    torch.set_num_threads(4)
    before = threads()
    with torch.no_grad():
        made = linear.kernels()
        assert made is not None
        product = linear.Products(*made)
        product.by_job(torch.ones(1, 64), torch.ones(64, 64), None)
        yield threads() - before
    workers._close()


@contextmanager
def stopped_at_random(helpers: set[int]) -> Iterator[None]:
    """Stop workers again and again, in the middle of whatever they do."""
    libc, is_over, rng = ctypes.CDLL(None), threading.Event(), random.Random(0)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    before = libc.signal(signal.SIGUSR2, _stop.address)

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
        time.sleep(4e-6 * _STOPPED_USEC)
        libc.signal(signal.SIGUSR2, before)


def spoiling(run: workers.Run) -> Callable[..., None]:
    """Return a function that runs a job, and then makes its numbers useless."""

    def spoil(function: int, job: int, num_threads: int) -> None:
        assert num_threads == 4
        run(function, job, num_threads)
        ctypes.memset(job, 0x7F, 8 * words.JOB_SIZE)

    return spoil


@pytest.mark.parametrize(
    "family", ["llama", "llama-adapted", "glm4_moe", "deepseek_v3", "qwen3_next", "lfm2"]
)
def test_a_stopped_worker_changes_no_bit_and_touches_no_job_that_is_over(
    family: str, helpers: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(helpers) == 3
    force("float32", monkeypatch)
    monkeypatch.setattr(linear, "runner", lambda: spoiling(workers._run))
    model = model_of(family.removesuffix("-adapted"))
    if family.endswith("-adapted"):
        adapted(model)
    texts = Texts(model)
    with stopped_at_random(helpers):
        assert [each for seed in range(4) for each in texts.differences(seed)] == []


def test_jobs_of_several_threads_run_at_once(helpers: set[int]) -> None:
    """More than there are slots."""
    made = linear.kernels()
    assert made is not None
    products, found = linear.Products(*made), list[bool]()
    num_slots = (words.WORKERS - words.SLOTS) // words.SLOT_SIZE

    def run(number: int) -> None:
        with torch.no_grad():
            weight, inputs = torch.full((256, 128), float(number)), torch.ones(3, 128)
            for _ in range(50):
                got = products.by_job(inputs, weight, None)
                found.append(bool((got == 128.0 * number).all()))

    running = [threading.Thread(target=run, args=(number,)) for number in range(num_slots + 4)]
    with stopped_at_random(helpers):
        for each in running:
            each.start()
        for each in running:
            each.join()
    assert found == [True] * 50 * len(running)


def test_a_call_wakes_no_thread_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a thread would stay awake for milliseconds on a core that a worker needs."""
    monkeypatch.setattr(workers, "num_cores", lambda: 2)
    monkeypatch.setattr(FusedForwards, "_are_slow", lambda *_: False)
    model = model_of("llama", vocab_size=2**15)
    options: Any = {"attention_mask": torch.ones_like(ONE), "max_new_tokens": 24}
    config = lade.Config(max_draft_tokens=16)
    torch.set_num_threads(2)
    lade.generate(model, ONE, config=config, **options)
    num_added = []

    def run() -> None:
        before = threads()
        lade.generate(model, ONE, config=config, **options)
        num_added.append(len(threads() - before))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert num_added == [0]


def test_loops_that_run_alone_leave_the_number_of_threads() -> None:
    torch.set_num_threads(3)
    assert alone(torch.get_num_threads) == 1
    with pytest.raises(ZeroDivisionError):
        alone(lambda: 1 / 0)
    assert torch.get_num_threads() == 3


def _product() -> bool:
    made = linear.kernels()
    assert made is not None
    with torch.no_grad():
        got = linear.Products(*made).by_job(torch.ones(1, 64), torch.ones(64, 64), None)
    return bool((got == 64).all())


def _answer(answers: Any) -> None:
    before = threads()
    answers.put((_product(), len(threads() - before)))


def test_a_forked_child_makes_its_own_workers(helpers: set[int]) -> None:
    context = get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_answer, args=(answers,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert answers.get() == (True, 3)
    assert _product()


def test_a_process_ends_while_jobs_run() -> None:
    """Those of a thread that nobody waits for."""
    code = (
        "import threading, time, torch; from lade.forward import workers;"
        "workers.num_cores = lambda: 4; torch.set_num_threads(4);"
        "from tests.lade.forward.test_workers import _product\n"
        "def run():\n    while _product(): pass\n"
        "threading.Thread(target=run, daemon=True).start(); _product(); time.sleep(0.2)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("quota", "num"), [("max 100000", 8), ("150000 100000", 1), ("50000 100000", 1), ("1", 8)]
)
def test_a_quota_bounds_the_threads(
    quota: str, num: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(machine, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(workers, "num_cores", machine.num_cores.__wrapped__)
    torch.set_num_threads(16)
    assert workers.most_threads() == num
