"""Locks that no interrupt leaves held, and that a fork waits for.

A pool and a table have one lock each. Next file: `pool.py`.
"""

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

from ngram_pool.errors import ReadOnlyPoolError

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Locked(Protocol):
    """An object with its own lock, `_lock`: reentrant, and written in C."""

    _lock: Any


class Pool(Locked, Protocol):
    """An object that needs no lock if it is read-only."""

    _is_read_only: bool


_L = TypeVar("_L", bound=Locked)
_Q = TypeVar("_Q", bound=Pool)

# Only a `with` of a lock that is written in C is released wherever Python is interrupted, and only
# if it is one line: on the way back to a line above, a tracer may raise before the release.


def alone(method: Callable[Concatenate[_L, _P], _T]) -> Callable[Concatenate[_L, _P], _T]:
    """Serialize calls of a method with those of all decorated methods of the same object.

    A signal handler runs in the middle of a method of its own thread, and may call any other.
    """

    @functools.wraps(method)
    def locked(self: _L, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self._lock: return method(self, *args, **kwargs)  # noqa: E701  # fmt: skip

    return locked


def reading(method: Callable[Concatenate[_Q, _P], _T]) -> Callable[Concatenate[_Q, _P], _T]:
    """Serialize calls of a method with all others, unless the pool is read-only.

    Letting readers in together was measured and gained nothing: each step of decoding also writes.
    """
    serialized = alone(method)

    @functools.wraps(method)
    def read(self: _Q, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return (method if self._is_read_only else serialized)(self, *args, **kwargs)

    return read


def writing(method: Callable[Concatenate[_Q, _P], _T]) -> Callable[Concatenate[_Q, _P], _T]:
    """Serialize calls of a method with all others, and refuse it for a pool that is only read.

    Raises:
        ReadOnlyPoolError: the pool is read-only.
    """
    serialized = alone(method)

    @functools.wraps(method)
    def write(self: _Q, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if self._is_read_only:
            name = method.__name__.lstrip("_")
            raise ReadOnlyPoolError(f"expected a pool that learns for {name}, got {self!r}")
        return serialized(self, *args, **kwargs)

    return write


# --- forks ------------------------------------------------------------------------------------
#
# A child process has only the thread that forked. What another thread was writing would stay half
# written there, and its lock held for ever. So a fork waits until all locks are free.

_making = threading.RLock()
# All live locks. A thread that holds a pool's lock may wait for a table's, never the other way
# round, and never for another pool's. All are reentrant: a signal handler runs in the middle of a
# method of its own thread, and may fork.
_of_pools: WeakSet[Any] = WeakSet()
_of_tables: WeakSet[Any] = WeakSet()
_taken: list[Any] = []  # for a fork


def lock_of_pool() -> Any:
    """Return a new lock for a pool."""
    return _known(threading.RLock(), _of_pools)


def lock_of_table() -> Any:
    """Return a new lock for a table."""
    return _known(threading.RLock(), _of_tables)


def _known(lock: Any, locks: WeakSet[Any]) -> Any:
    with _making: locks.add(lock)  # noqa: E701  # fmt: skip
    return lock


def _take_all() -> None:
    _take(_making)  # first, so that no lock is made meanwhile
    for lock in [*_of_pools, *_of_tables]:
        _take(lock)


def _take(lock: Any) -> None:
    lock.acquire()
    _taken.append(lock)


def _give_back() -> None:
    # Empty the list first: once a lock is free, another thread may fork and fill it.
    taken = _taken[::-1]
    _taken.clear()
    for lock in taken:
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_take_all, after_in_parent=_give_back, after_in_child=_give_back)
