"""Wherever Python is interrupted, pool and table are whole: as before the call, or as after it."""

import copy
import ctypes
import gc
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import ngram_pool.pool
from ngram_pool import NGramPool, SuccessorTable, _kernels
from tests.grids import thinned
from tests.ngram_pool.checking import check_pool
from tests.ngram_pool.test_pool import as_tuple, noisy_text

# Kernels are left out: compiled, they have no lines to be interrupted at.
FILES = {str(path) for path in Path(ngram_pool.pool.__file__).parent.glob("*.py")}
FILES.remove(_kernels.__file__)
TEXT = noisy_text(400, seed=3, alphabet=6)
KNOWN = [[t % 5, t % 7] for t in range(30)], [[t % 6] for t in range(30)], [[0.5]] * 30


class Use:
    """A pool, a table and a handle, as a program holds them."""

    def __init__(self) -> None:
        self.pool = NGramPool(40, 3)
        self.table = SuccessorTable(1000)
        self.table.put(*(part[:20] for part in KNOWN))
        self.other = self.pool.open_sequence(self.table)
        self.sequence: Any = None
        self.pool.observe([1, 2, 1], self.other)

    def full(self) -> "Use":
        """Fill the pool so far that positions must be lowered before many more are counted."""
        self.sequence = self.pool.open_sequence(self.table)
        for start in range(0, 120, 10):
            self.pool.observe(TEXT[start : start + 5], self.sequence, start % 20 == 0)
            self.pool.observe(TEXT[start + 5 : start + 10], 0)
        return self

    def open(self) -> None:
        self.sequence = self.pool.open_sequence(self.table)

    def findings(self) -> list[Any]:
        """All that can be told of the pool and the table from outside, now and after more text."""
        found: list[Any] = [self.pool.num_open_sequences]
        for _ in range(2):
            found += [len(self.pool), self.pool._weights.tolist(), len(self.table)]
            arrays = self.table.arrays()
            by_key = np.argsort(arrays["keys"])  # the order of rows depends on how many there are
            found += [array[by_key].tolist() for array in arrays.values()]
            for sequence in (None, 0, self.other, self.sequence):
                found.append(self.drafts(sequence))
            self.pool.observe(TEXT[:5], 0)
            self.pool.observe(TEXT[5:9], self.other, is_answer=True)
        return found

    def drafts(self, sequence: int | None) -> Any:
        rng = np.random.default_rng(0)
        contexts = [TEXT[:4], TEXT[27:31]]
        try:
            drafts = [self.pool.draft(context, 12, 5, sequence) for context in contexts]
            drafts += [self.pool.sample(context, 6, rng, None, sequence) for context in contexts]
        except ValueError as error:
            return str(error)
        return [as_tuple(draft) for draft in drafts]


CALLS: dict[str, tuple[Callable[[Use], Any], Callable[[Use], Any]]] = {
    "open": (lambda use: None, Use.open),
    "open many": (
        lambda use: [use.pool.open_sequence() for _ in range(63)],  # then the dead are dropped
        Use.open,
    ),
    "grow": (Use.open, lambda use: use.pool.observe(TEXT[:30], use.sequence)),
    "overwrite": (Use.full, lambda use: use.pool.observe(TEXT[:7], use.sequence)),
    "answer": (Use.full, lambda use: use.pool.observe(TEXT[:9], use.sequence, True)),
    "lower": (Use.full, lambda use: use.pool.observe(TEXT[:35], use.other, True)),
    "draft": (Use.full, lambda use: use.pool.draft(TEXT[:5], 90, 7, use.sequence)),
    "sample": (
        Use.full,
        lambda use: use.pool.sample(TEXT[:5], 90, np.random.default_rng(0), None, use.sequence),
    ),
    "chains": (Use.full, lambda use: use.pool.draft_chains([TEXT[:9]], [9], 4)),
    "observe and draft chains": (
        Use.full,
        lambda use: use.pool.draft_chains([TEXT[:9]], [9], 4, [use.sequence], [9]),
    ),
    "grow and draft chains": (
        Use.open,
        lambda use: use.pool.draft_chains([TEXT[:30]], [30], 4, [use.sequence], [30]),
    ),
    "harvest": (Use.full, lambda use: use.pool.harvest(*KNOWN)),
    "put": (lambda use: None, lambda use: use.table.put(*KNOWN)),
    "get": (lambda use: None, lambda use: use.table.get(1, 1)),
    "to arrays": (lambda use: None, lambda use: SuccessorTable.from_arrays(use.table.arrays())),
    "forget": (Use.full, lambda use: use.pool.forget(TEXT[:1])),
    "texts": (Use.full, lambda use: list(use.pool.texts())),
    "close": (Use.full, lambda use: use.pool.close_sequence(use.sequence)),
    "close 0": (Use.full, lambda use: use.pool.close_sequence(0)),
    "copy": (Use.full, lambda use: copy.copy(use.pool)),
    "pickle": (Use.full, lambda use: pickle.loads(pickle.dumps(use.pool))),
}


def interrupted(call: Callable[[], object], line: int) -> bool:
    """Raise KeyboardInterrupt at the given line, counted as they are run; tell whether it came."""
    num_lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_lines
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            num_lines += 1
            if num_lines > line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def is_pool_free(pool: NGramPool) -> bool:
    """Whether another thread can write to it."""
    return is_free(pool._lock)


def is_free(lock: Any) -> bool:
    """Whether another thread can have it."""
    got: list[bool] = []

    def take() -> None:
        got.append(lock.acquire(timeout=5))
        if got[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got[0]


SLOW = ("pickle", "copy", "observe and draft chains", "grow and draft chains")
QUICK = [name for name in CALLS if name not in SLOW]


@pytest.mark.parametrize("name", thinned(CALLS, *QUICK))
def test_interrupted_at_any_line_all_is_as_before_or_as_after(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngram_pool.pool, "_FIRST_NUM_ROWS", 4)
    monkeypatch.setattr(ngram_pool.pool, "_POSITION_LIMIT", 140)
    prepare, call = CALLS[name]
    before, after = Use(), Use()
    prepare(before)
    prepare(after)
    call(after)
    expected = [before.findings(), after.findings()]
    line = 0
    while True:
        use = Use()
        prepare(use)
        came = interrupted(lambda use=use: call(use), line)  # type: ignore[misc]
        check_pool(use.pool)
        assert is_pool_free(use.pool), f"line {line}"
        assert is_free(use.table._lock), f"line {line}"
        assert use.findings() in expected, f"line {line}"
        check_pool(use.pool)
        if not came:
            break
        line += 1
    assert line > 2


def test_a_sequence_is_open_as_long_as_its_handle_lives() -> None:
    pool = NGramPool(100)
    first, second = pool.open_sequence(), pool.open_sequence()
    assert (first, second, pool.num_open_sequences) == (1, 2, 2)
    also_first = first
    pool.observe([1, 2], 1)  # an equal number names it
    del first
    assert pool.num_open_sequences == 2
    del also_first
    assert pool.num_open_sequences == 1
    with pytest.raises(ValueError, match="expected an open sequence, got 1"):
        pool.observe([3], 1)
    assert pool.draft([1], 2).token_ids.tolist() == [2]  # its text stays
    for copied in (copy.copy(second), copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
        assert copied == second
        assert type(copied) is int
    pool.close_sequence(second)
    assert pool.num_open_sequences == 0
    with pytest.raises(ValueError, match="expected an open sequence, got 2"):
        pool.close_sequence(second)


def test_sequences_that_nobody_holds_take_no_room() -> None:
    pool = NGramPool(100)
    held = [pool.open_sequence() for _ in range(100)]
    for _ in range(1000):
        pool.open_sequence()
    assert pool.num_open_sequences == 100
    assert len(pool._sequences) < 300
    for sequence in held:
        pool.observe([1], sequence)


def test_a_sequence_not_used_for_long_follows_when_positions_are_lowered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ngram_pool.pool, "_POSITION_LIMIT", 140)
    pool = NGramPool(40, 3)
    idle = pool.open_sequence()
    pool.observe([1, 2, 3], idle)
    pool.observe([4], idle, is_answer=True)
    for num_tokens in (30, 300):  # its tail is held yet; it is forgotten
        pool.observe(np.arange(num_tokens) + 10)
        check_pool(pool)
        pool.observe([5, 6], idle, is_answer=True)
        pool.observe([7], idle)
        check_pool(pool)
        assert pool.draft([5], 2, sequence=idle).token_ids.tolist() == [6, 7]


@pytest.mark.exhaustive
def test_a_pool_is_sound_after_asynchronous_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_pool.pool, "_FIRST_NUM_ROWS", 16)
    monkeypatch.setattr(ngram_pool.pool, "_POSITION_LIMIT", 1500)
    monkeypatch.setattr(ngram_pool.pool, "_PIECE", 64)
    rng = random.Random(0)
    pool = NGramPool(300, 3)

    def work(started: threading.Event) -> None:
        try:
            started.set()
            while True:
                sequence = pool.open_sequence()
                pool.observe(TEXT, sequence)
                pool.observe(TEXT[:9], sequence, is_answer=True)
                pool.harvest(*KNOWN)
                pool.draft(TEXT[:5], 20, None, sequence)
                pool.close_sequence(sequence)
        except KeyboardInterrupt:
            pass

    for _ in range(150):
        started = threading.Event()
        thread = threading.Thread(target=work, args=(started,))
        thread.start()
        assert started.wait(10)
        time.sleep(rng.random() * 1e-3)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
        )
        thread.join(10)
        assert not thread.is_alive()
        assert is_pool_free(pool)
        check_pool(pool)
    del thread
    gc.collect()
    assert pool.num_open_sequences == 0


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
def test_long_input_is_interrupted_between_pieces() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    pool = NGramPool(2**22)
    text = np.arange(2**22) % 50_000
    pool.observe(text[: 2**10])
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.observe(text)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    observed = len(pool) - 2**10
    assert observed < 2**22
    assert observed % 2**16 == 0
    assert pool.draft(text[:5], 1).token_ids.tolist() == [5]
