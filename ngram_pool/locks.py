"""Locks that no interrupt leaves held, and that a fork waits for.

Next file: `pool.py`.
"""

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Locked(Protocol):
    """An object with its own lock, `_lock`, from `lock_of_pool` or `lock_of_table`."""

    _lock: Any


_L = TypeVar("_L", bound=Locked)


def alone(method: Callable[Concatenate[_L, _P], _T]) -> Callable[Concatenate[_L, _P], _T]:
    """Serialize calls of a method with those of all decorated methods of the same object."""

    @functools.wraps(method)
    def locked(self: _L, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        # One line, because on the way back to a line above, a tracer may raise before the release.
        with self._lock: return method(self, *args, **kwargs)  # noqa: E701  # fmt: skip

    return locked


# --- forks ------------------------------------------------------------------------------------
#
# A child process has only the thread that forked. What another thread was writing would stay half
# written there, and its lock held for ever. So a fork waits until all locks are free.

_making = threading.RLock()
# All live locks. A thread that holds a pool's lock may wait for a table's, never the other way
# round. All are reentrant: a signal handler runs in the middle of a method of its own thread, and
# may fork.
_of_pools: WeakSet[Any] = WeakSet()
_of_tables: WeakSet[Any] = WeakSet()
_taken: list[Any] = []


def lock_of_pool() -> Any:
    """Return a new lock for a pool."""
    return _registered(_of_pools)


def lock_of_table() -> Any:
    """Return a new lock for a table."""
    return _registered(_of_tables)


def _registered(locks: WeakSet[Any]) -> Any:
    lock = threading.RLock()
    with _making: locks.add(lock)  # noqa: E701  # fmt: skip
    return lock


def _take_all() -> None:
    # In this order: the first one is held, so that no lock is made meanwhile.
    for locks in ([_making], _of_pools, _of_tables):
        for lock in list(locks):
            lock.acquire()
            _taken.append(lock)


def _give_back() -> None:
    # Empty the list first: once a lock is free, another thread may fork and fill the list.
    taken = _taken[::-1]
    _taken.clear()
    for lock in taken:
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_take_all, after_in_parent=_give_back, after_in_child=_give_back)
