"""Readers beside each other, writers alone, whatever interrupts them."""

import os
import threading
import time
from collections.abc import Callable

import pytest

from ngram_pool.locks import PoolLock, lock_of_pool, reading, writing
from tests.ngram_pool.test_copies import status_of
from tests.ngram_pool.threads import in_threads


class Book:
    """What is read and written in these tests; it notes who was in it at once."""

    def __init__(self) -> None:
        self._lock = PoolLock()
        self._is_read_only = False
        self.num_reading = self.num_writing = 0
        self.most_reading = 0
        self.num_written = 0
        self._counting = threading.Lock()

    @reading
    def read(self, seconds: float = 0.0, inside: Callable[[], object] = lambda: None) -> int:
        with self._counting:
            self.num_reading += 1
            self.most_reading = max(self.most_reading, self.num_reading)
        assert self.num_writing == 0
        time.sleep(seconds)
        inside()
        assert self.num_writing == 0
        with self._counting:
            self.num_reading -= 1
        return self.num_written

    @writing
    def write(self, seconds: float = 0.0, inside: Callable[[], object] = lambda: None) -> None:
        assert self.num_reading == self.num_writing == 0
        self.num_writing += 1
        before = self.num_written
        time.sleep(seconds)
        inside()
        self.num_written = before + 1
        assert self.num_reading == 0
        self.num_writing -= 1


def test_readers_do_not_wait_for_readers() -> None:
    book, together = Book(), threading.Barrier(8, timeout=10)
    # Each goes on only when all are reading.
    assert not in_threads(*[lambda: book.read(0.0, together.wait)] * 8)
    assert book.most_reading == 8


def test_writers_are_alone_and_none_is_lost() -> None:
    book = Book()

    def use() -> None:
        for _ in range(40):
            book.read(1e-4)
            book.write(1e-5)

    assert not in_threads(*[use] * 12)
    assert book.num_written == 12 * 40
    assert book.most_reading > 1


@pytest.mark.parametrize("starved", ["read", "write"])
def test_nobody_starves(starved: str) -> None:
    """Others never stop; each call of the one comes between few of theirs."""
    book, done = Book(), threading.Event()
    waits: list[float] = []

    def others() -> None:
        while not done.is_set():
            (book.write if starved == "read" else book.read)(1e-3)

    def one() -> None:
        for _ in range(30):
            start = time.perf_counter()
            getattr(book, starved)()
            waits.append(time.perf_counter() - start)
        done.set()

    assert not in_threads(one, *[others] * 6)
    assert max(waits) < 1.0


class Upgrade:
    """Calls in the middle of others, as signal handlers make them; without the book's asserts."""

    def __init__(self, book: Book) -> None:
        self._lock = book._lock
        self._is_read_only = False
        self.book = book

    @reading
    def read(self) -> None:
        pass

    @writing
    def write(self) -> None:
        self.read()
        self.book.num_written += 1

    @reading
    def read_then(self, inside: Callable[[], object]) -> None:
        inside()
        assert self._lock.of_thread()._is_owned() or self._lock.gate._is_owned()

    @writing
    def write_then(self, inside: Callable[[], object]) -> None:
        inside()
        assert self._lock.is_writing


@pytest.mark.parametrize("outer", ["read_then", "write_then"])
@pytest.mark.parametrize("inner", ["read", "write"])
def test_a_call_may_come_in_the_middle_of_another_of_its_thread(outer: str, inner: str) -> None:
    book = Book()
    done = threading.Event()

    def others() -> None:
        while not done.is_set():
            book._lock.write(lambda: time.sleep(1e-4))
            Upgrade(book).read()

    def use() -> None:
        for _ in range(100):
            getattr(Upgrade(book), outer)(getattr(Upgrade(book), inner))
        done.set()

    assert not in_threads(use, *[others] * 3)
    assert book.num_written == (100 if inner == "write" else 0)
    assert not book._lock.is_writing
    assert not in_threads(book.write, book.read)  # all is free


def test_a_stale_note_of_a_writer_costs_no_reader_more_than_a_way_through_the_gate() -> None:
    book = Book()
    book._lock.is_writing = True  # as an interrupt may leave it
    together = threading.Barrier(2, timeout=10)
    assert not in_threads(*[lambda: book.read(0.0, together.wait)] * 2)
    assert not book._lock.is_writing


def test_threads_that_have_ended_are_dropped() -> None:
    book = Book()
    for _ in range(40):
        assert not in_threads(*[book.read] * 10)
    assert len(book._lock.readers) <= 150


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("where", ["read_then", "write_then"])
def test_a_fork_in_the_middle_of_a_call_leaves_all_free(where: str) -> None:
    """Also while other threads wait to write: they wait for the read that the fork is in."""
    book, done = Book(), threading.Event()
    book._lock = lock_of_pool()
    codes: list[int | None] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            is_sound = False
            try:
                Upgrade(book).write()
                # The call that forked goes on in the child, and holds its lock there.
                is_sound = book._lock.of_thread()._is_owned() or book._lock.gate._is_owned()
            finally:
                os._exit(0 if is_sound else 1)
        codes.append(status_of(child))

    def others() -> None:
        while not done.is_set():
            Upgrade(book).write()
            Upgrade(book).read()

    def use() -> None:
        for _ in range(10):
            getattr(Upgrade(book), where)(fork)
        done.set()

    assert not in_threads(use, *[others] * 3)
    assert codes == [0] * 10
    assert not in_threads(book.write, book.read)
