"""Engines at forks and at the end of the process, which their threads do not survive.

A fork waits until no engine runs anything, so that no lock in the child belongs to a thread that
the child lacks. A process that ends stops its engines first: if Python ends a thread that runs
torch, the process aborts.
"""

import atexit
import ctypes
import os
import threading
from contextlib import ExitStack
from time import monotonic
from typing import TYPE_CHECKING
from weakref import WeakSet

from lade.engine.turns import TURNS

if TYPE_CHECKING:
    from lade.engine.engine import Engine

_REST_SEC = 5.0  # for which a fork waits for running forward passes
_ROUND_SEC, _NUM_ROUNDS = 0.5, 10  # for which the end of the process waits for engines
_FIRST_FORCED = 2  # round from which on calls that have not ended are broken off
_NOT_AT_REST = (
    "this process was forked during a forward pass, which may have left locks taken forever: fork "
    "earlier, or use the start method 'spawn'"
)


_engines: WeakSet["Engine"] = WeakSet()
_fork = threading.local()


def look_after(engine: "Engine") -> None:
    """Register an engine for forks and the end of the process, as long as it lives."""
    _engines.add(engine)


def _before_fork() -> None:
    elsewhere = [engine for engine in _engines if not engine.is_here]
    locks = [] if TURNS.is_held_here else [*TURNS.locks]
    locks += [lock for engine in elsewhere for lock in engine.locks]
    deadline = monotonic() + _REST_SEC
    _fork.held, _fork.is_at_rest = ExitStack(), True
    for lock in locks:
        if lock.acquire(timeout=max(0.0, deadline - monotonic())):
            _fork.held.callback(lock.release)
        else:  # a call waits for this thread, or its forward takes long
            _fork.is_at_rest = False


def _after_fork_in_child() -> None:
    TURNS.restore()
    TURNS.__init__()  # type: ignore[misc]
    for engine in [*_engines]:
        engine.begin_anew(None if _fork.is_at_rest else _NOT_AT_REST)


def _at_exit() -> None:
    for engine in [*_engines]:
        engine.end("the process ends")
    threads = [engine.thread for engine in _engines if engine.thread is not None]
    for number in range(_NUM_ROUNDS):
        deadline = monotonic() + _ROUND_SEC
        for thread in threads:
            if number >= _FIRST_FORCED and thread.is_alive():  # in user code, which it ends
                ident = ctypes.c_ulong(thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
            thread.join(max(0.0, deadline - monotonic()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=lambda: _fork.held.close(),
        after_in_child=_after_fork_in_child,
    )
atexit.register(_at_exit)
