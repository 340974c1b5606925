"""Locks that no interrupt leaves taken, and that a fork waits for.

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
    """What has a lock of its own: `_lock`, one that `lock_of_pool` or `lock_of_table` made."""

    _lock: Any


_L = TypeVar("_L", bound=Locked)


def alone(method: Callable[Concatenate[_L, _P], _T]) -> Callable[Concatenate[_L, _P], _T]:
    """Let calls of a method wait for one another, and for those of its object's other ones."""

    @functools.wraps(method)
    def locked(self: _L, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        # In one line: on the way back to a line above, a tracer may raise before the lock is free.
        with self._lock: return method(self, *args, **kwargs)  # noqa: E701  # fmt: skip

    return locked


# --- forks ------------------------------------------------------------------------------------
#
# A child has no other thread than the one that forked. What another one was about to write would
# stay half written there, and its lock be taken for ever. So a fork waits until all locks are free.

_making = threading.RLock()
# Those alive. Who holds a pool's lock may wait for a table's, never the other way round. All are
# reentrant: a signal's handler runs in the midst of a method of its own thread, and may fork.
_of_pools: WeakSet[Any] = WeakSet()
_of_tables: WeakSet[Any] = WeakSet()
_taken: list[Any] = []


def lock_of_pool() -> Any:
    """Return a new lock, for a pool."""
    return _registered(_of_pools)


def lock_of_table() -> Any:
    """Return a new lock, for a table."""
    return _registered(_of_tables)


def _registered(locks: WeakSet[Any]) -> Any:
    lock = threading.RLock()
    with _making: locks.add(lock)  # noqa: E701  # fmt: skip
    return lock


def _take_all() -> None:
    # In this order; the first stays taken, so that no lock is made meanwhile.
    for locks in ([_making], _of_pools, _of_tables):
        for lock in list(locks):
            lock.acquire()
            _taken.append(lock)


def _give_back() -> None:
    # Another thread may fork, and fill the list, as soon as the first of them is free.
    taken = _taken[::-1]
    _taken.clear()
    for lock in taken:
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_take_all, after_in_parent=_give_back, after_in_child=_give_back)
