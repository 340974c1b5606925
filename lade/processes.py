"""Forks and ends of the process: what becomes of engines, whose threads neither outlives.

A fork waits until no engine runs anything, so that its child finds no lock taken by a thread that
it does not have. A process that ends stops its engines first: a thread that Python ends while it
runs torch aborts the process.
"""

import atexit
import ctypes
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from time import monotonic
from typing import Protocol
from weakref import WeakSet

from lade.turns import TURNS

_REST_SEC = 5.0  # that a fork waits for forwards that run
_ROUND_SEC, _NUM_ROUNDS = 0.5, 10  # that the end of the process waits for engines
_FIRST_FORCED = 2  # round in which calls that have not ended before their next token are broken off
_NOT_AT_REST = (
    "this process was forked while a forward ran, which may have left locks taken that nobody here "
    "gives back: fork earlier, or use the start method 'spawn'"
)


class EngineThread(Protocol):
    """What is asked of an engine."""

    @property
    def thread(self) -> threading.Thread | None:
        """The one that runs its calls, while there are any."""

    @property
    def is_here(self) -> bool:
        """Whether the current thread is the engine's."""

    @property
    def locks(self) -> Sequence[threading.Lock]:
        """Those that the engine's thread holds only while it runs something."""

    def end(self, refusal: str | None = None) -> None:
        """Have all calls end, and refuse others for a reason."""

    def begin_anew(self, refusal: str | None) -> None:
        """Be an engine without thread and calls, in a child."""


_engines: WeakSet[EngineThread] = WeakSet()
_fork = threading.local()


def look_after(engine: EngineThread) -> None:
    """Look after an engine as long as it lives."""
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


def _after_fork_in_parent() -> None:
    _fork.held.close()


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
            if number >= _FIRST_FORCED and thread.is_alive():  # in code that is not lade's
                _raise_in(thread, SystemExit)
            thread.join(max(0.0, deadline - monotonic()))


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise an error in another thread as soon as that runs Python code."""
    ident = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(error))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
atexit.register(_at_exit)
