"""Threads that are stopped in the middle of whatever they do."""

import ctypes
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba

_usleep = numba.types.ExternalFunction("usleep", numba.int32(numba.uint32))


@numba.cfunc("void(int32)")  # type: ignore[untyped-decorator]
def _stop(number: Any) -> None:
    _usleep(3000)


def threads() -> set[int]:
    return {*map(int, os.listdir("/proc/self/task"))}


@contextmanager
def stopped_at_random(helpers: set[int]) -> Iterator[None]:
    """Stop workers again and again, in the middle of whatever they do."""
    libc, is_over, rng = ctypes.CDLL(None), threading.Event(), random.Random(0)
    libc.signal(signal.SIGUSR2, ctypes.c_void_p(_stop.address))  # for good: signals may be late

    def run() -> None:
        while not is_over.wait(rng.random() * 1e-3):
            libc.tgkill(os.getpid(), rng.choice([*helpers]), signal.SIGUSR2)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
