"""Locks that no interrupt leaves held, and that a fork waits for.

A pool has a `PoolLock`: any number of threads read at once, one alone writes. A table has a plain
lock. Next file: `pool.py`.
"""

import functools
import os
import sys
import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

from ngram_pool.errors import ReadOnlyPoolError

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Locked(Protocol):
    """An object with its own lock, `_lock`, from `lock_of_table`."""

    _lock: Any


class Pool(Protocol):
    """An object with its own lock, `_lock`, from `lock_of_pool`; none is needed to read frozen."""

    _lock: "PoolLock"
    _is_read_only: bool


_L = TypeVar("_L", bound=Locked)
_Q = TypeVar("_Q", bound=Pool)


def alone(method: Callable[Concatenate[_L, _P], _T]) -> Callable[Concatenate[_L, _P], _T]:
    """Serialize calls of a method with those of all decorated methods of the same object."""

    @functools.wraps(method)
    def locked(self: _L, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        # One line, because on the way back to a line above, a tracer may raise before the release.
        with self._lock: return method(self, *args, **kwargs)  # noqa: E701  # fmt: skip

    return locked


# --- readers and writers ----------------------------------------------------------------------
#
# Only a `with` of a lock that is written in C is released wherever Python is interrupted. So each
# reading thread has a lock of its own, which it holds while it reads, and a writer holds the gate
# and waits for each of these once. What else is noted may be stale after an interrupt: that costs
# time, never exclusion.

_FIRST_PURGE = 64  # reading threads known before those that have ended are first dropped
_NOT_READ: Any = object()


class PoolLock:
    """Lets any number of threads read, or one write.

    Fair enough that nobody starves: new readers queue behind a writer that waits, and having waited
    for two writers, a reader holds up the next. Reentrant in every combination: a signal handler
    runs in the middle of a method of its own thread, and may call any other.
    """

    def __init__(self) -> None:
        self.gate: Any = threading.RLock()
        #: By thread, held while it reads. Entries are made under the gate.
        self.readers: dict[int, Any] = {}
        #: Whether a writer is at work or waits for readers; readers then queue at the gate. Whoever
        #: holds the gate and does not write may clear it.
        self.is_writing = False
        self._purge_at = _FIRST_PURGE

    def of_thread(self) -> Any:
        """Return the reading lock of this thread."""
        mine = self.readers.get(get_ident())
        if mine is None:
            with self.gate: mine = self._register()  # noqa: E701  # fmt: skip
        return mine

    def _register(self) -> Any:
        if len(self.readers) >= self._purge_at:
            living = sys._current_frames()
            self.readers = {k: lock for k, lock in self.readers.items() if k in living}
            self._purge_at = 2 * len(self.readers) + _FIRST_PURGE
        return self.readers.setdefault(get_ident(), threading.RLock())

    def write(self, call: Callable[[], _T]) -> _T:
        """Call while no other thread reads or writes."""
        if self.gate._is_owned() and self.is_writing:
            return call()  # in the middle of a write of this thread
        mine = self.readers.get(get_ident())
        if mine is None or not mine._is_owned():
            with self.gate: return self._write(call)  # noqa: E701  # fmt: skip
        # In the middle of a read of this thread, which other writers wait for: let them go on, and
        # hold it again before the next one can begin.
        mine.release()
        try:
            with self.gate: return self._write_and_hold(call, mine)  # noqa: E701  # fmt: skip
        except BaseException:
            if not mine._is_owned():  # interrupted at the gate
                mine.acquire()
            raise

    def _write_and_hold(self, call: Callable[[], _T], mine: Any) -> _T:
        try:
            return self._write(call)
        finally:
            mine.acquire()

    def _write(self, call: Callable[[], _T]) -> _T:
        try:
            self.is_writing = True
            for reader in list(self.readers.values()):
                with reader: pass  # noqa: E701  # fmt: skip
            return call()
        finally:
            self.is_writing = False


def reading(method: Callable[Concatenate[_Q, _P], _T]) -> Callable[Concatenate[_Q, _P], _T]:
    """Let calls of a method run beside each other, but not beside those of writing methods."""

    @functools.wraps(method)
    def locked(self: _Q, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if self._is_read_only:
            return method(self, *args, **kwargs)
        lock = self._lock
        mine = lock.of_thread()
        if mine._is_owned() or lock.gate._is_owned():  # in the middle of another method
            return method(self, *args, **kwargs)
        for _ in range(2):
            with mine: found = _NOT_READ if lock.is_writing else method(self, *args, **kwargs)  # noqa: E701  # fmt: skip
            if found is not _NOT_READ:
                return found
            with lock.gate: lock.is_writing = False  # noqa: E701  # fmt: skip
        with lock.gate: return _read_at_gate(lock, method, self, *args, **kwargs)  # noqa: E701  # fmt: skip

    return locked


def _read_at_gate(
    lock: PoolLock,
    method: Callable[Concatenate[_Q, _P], _T],
    pool: _Q,
    *args: _P.args,
    **kwargs: _P.kwargs,
) -> _T:
    lock.is_writing = False  # others may read beside
    return method(pool, *args, **kwargs)


def writing(method: Callable[Concatenate[_Q, _P], _T]) -> Callable[Concatenate[_Q, _P], _T]:
    """Let a method run alone, and refuse it for a pool that is only read.

    Raises:
        ReadOnlyPoolError: the pool is read-only.
    """

    @functools.wraps(method)
    def locked(self: _Q, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if self._is_read_only:
            name = method.__name__.lstrip("_")
            raise ReadOnlyPoolError(f"expected a pool that learns for {name}, got {self!r}")
        return self._lock.write(lambda: method(self, *args, **kwargs))

    return locked


# --- forks ------------------------------------------------------------------------------------
#
# A child process has only the thread that forked. What another thread was writing would stay half
# written there, and its lock held for ever. So a fork waits until all locks are free.

_making = threading.RLock()
# All live locks. A thread that holds a pool's lock may wait for a table's, never the other way
# round, and never for another pool's. All are reentrant: a signal handler runs in the middle of a
# method of its own thread, and may fork.
_of_pools: WeakSet[PoolLock] = WeakSet()
_of_tables: WeakSet[Any] = WeakSet()
# Locks taken for a fork; those of reads that the forking thread is in the middle of stay with it.
_taken: list[Any] = []
_kept: list[Any] = []


def lock_of_pool() -> PoolLock:
    """Return a new lock for a pool."""
    lock = PoolLock()
    with _making: _of_pools.add(lock)  # noqa: E701  # fmt: skip
    return lock


def lock_of_table() -> Any:
    """Return a new lock for a table."""
    lock: Any = threading.RLock()
    with _making: _of_tables.add(lock)  # noqa: E701  # fmt: skip
    return lock


def _take_all() -> None:
    _take(_making)  # first, so that no lock is made meanwhile
    for pool in list(_of_pools):
        mine = pool.readers.get(get_ident())
        if mine is not None and mine._is_owned():  # a writer may hold the gate and wait for it
            _kept.append(mine)
            mine.release()
        _take(pool.gate)
        for reader in list(pool.readers.values()):
            _take(reader)
    for lock in list(_of_tables):
        _take(lock)


def _take(lock: Any) -> None:
    lock.acquire()
    _taken.append(lock)


def _give_back() -> None:
    # Empty the lists first: once a lock is free, another thread may fork and fill them.
    taken, kept = _taken[::-1], [*_kept]
    _taken.clear()
    _kept.clear()
    for lock in taken:
        if lock in kept:
            kept.remove(lock)
        else:
            lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_take_all, after_in_parent=_give_back, after_in_child=_give_back)
