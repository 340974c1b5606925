"""One thread at a time, whatever interrupts it."""

import os
import threading
import time
from collections.abc import Callable

import pytest

from ngram_pool.errors import ReadOnlyPoolError
from ngram_pool.locks import lock_of_pool, reading, writing
from tests.grids import thinned
from tests.ngram_pool.test_copies import status_of
from tests.ngram_pool.threads import in_threads


class Book:
    """What is read and written in these tests."""

    def __init__(self, is_read_only: bool = False) -> None:
        self._lock = lock_of_pool()
        self._is_read_only = is_read_only
        self.num_inside = self.num_written = 0

    @reading
    def read(self, inside: Callable[[], object] = lambda: None) -> int:
        before = self.num_written
        self.num_inside += 1
        inside()
        self.num_inside -= 1
        return before

    @writing
    def write(self, inside: Callable[[], object] = lambda: None) -> None:
        before = self.num_written
        self.num_inside += 1
        inside()
        self.num_inside -= 1
        self.num_written = before + 1

    @reading
    def is_alone(self) -> bool:
        """Tell whether no other thread is in the middle of a call."""
        time.sleep(1e-4)
        return self.num_inside == 0


def test_every_call_is_alone_and_no_write_is_lost() -> None:
    book = Book()
    alone: list[bool] = []

    def use() -> None:
        for _ in range(40):
            book.read(lambda: time.sleep(1e-5))
            book.write(lambda: time.sleep(1e-5))
            alone.append(book.is_alone())

    assert not in_threads(*[use] * 8)
    assert book.num_written == 8 * 40
    assert all(alone)


def test_what_is_read_only_is_read_by_all_at_once_and_never_written() -> None:
    book, together = Book(is_read_only=True), threading.Barrier(8, timeout=10)
    # Each goes on only when all are reading.
    assert not in_threads(*[lambda: book.read(together.wait)] * 8)
    with pytest.raises(ReadOnlyPoolError, match="for write"):
        book.write()


@pytest.mark.parametrize("outer", ["read", "write"])
@pytest.mark.parametrize("inner", ["read", "write"])
def test_a_call_may_come_in_the_middle_of_another_of_its_thread(outer: str, inner: str) -> None:
    """As a signal handler makes it."""
    book, done = Book(), threading.Event()

    def others() -> None:
        while not done.is_set():
            book.read()

    def use() -> None:
        for _ in range(100):
            getattr(book, outer)(getattr(book, inner))
        done.set()

    assert not in_threads(use, *[others] * 3)
    assert book.num_written == (0 if (outer, inner) == ("read", "read") else 100)
    assert not in_threads(book.write, book.read)  # all is free


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("where", thinned(["read", "write"], "write"))
def test_a_fork_in_the_middle_of_a_call_leaves_all_free(where: str) -> None:
    book, done = Book(), threading.Event()
    codes: list[int | None] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            is_sound = False
            try:
                book.write()
                # The call that forked goes on in the child, and holds its lock there.
                is_sound = book._lock._is_owned()
            finally:
                os._exit(0 if is_sound else 1)
        codes.append(status_of(child))

    def others() -> None:
        while not done.is_set():
            book.write()

    def use() -> None:
        for _ in range(10):
            getattr(book, where)(fork)
        done.set()

    assert not in_threads(use, *[others] * 3)
    assert codes == [0] * 10
    assert not in_threads(book.write, book.read)
