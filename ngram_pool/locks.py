"""Locks that a forked child finds free; a pool and a table have one each. Next file: `pool.py`."""

import os
import threading
from typing import Any
from weakref import WeakSet

_locks: WeakSet[Any] = WeakSet()


def new_lock() -> Any:
    """Return a new lock, reentrant: a signal handler may call in the middle of a method."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _free_all() -> None:
    # The other threads, which may have held some, are not in the child; what they were writing is
    # rebuilt.
    for lock in _locks:
        if not lock._is_owned():
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_all)
