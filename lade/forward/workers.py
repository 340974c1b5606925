"""Threads that help to run jobs: sleeping until there are some, on every core but the caller's.

They are the system's own, without Python, and outlive every call (`_workers.py`). Torch's are left
alone: a region of OpenMP ends when all its threads have arrived, and so waits for the one that has
lost its core to another process.
"""

import atexit
import ctypes
import os
from collections.abc import Callable
from statistics import fmean
from threading import Lock
from time import perf_counter, sleep

import torch

from lade.forward import words
from lade.machine.threads import num_cores

Run = Callable[[int, int, int], None]

_MOST = 1024  # workers
_FEW = 32  # tokens of forwards that threads are counted for; more tokens take all
_TRIED = 16  # forwards on each of two numbers of threads, before the better one stays
_SOON, _LATER = 32, 1000  # forwards before the next trial, after a change and without one
_PAYS = 0.9  # of the time of half as many threads: else the cores are left to others
_LONGEST = 5.0  # of the usual time that a forward counts: pauses of a quota count, and no more
_CLOSING_SEC = 1.0
_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Job = ctypes.c_int64 * 4


class _Pool:
    """Workers, and memory that is never freed, for they may look at it at any time."""

    def __init__(self) -> None:
        from lade.forward import _workers

        self._library = library = ctypes.CDLL(None)
        library.calloc.restype = ctypes.c_void_p
        self.address = (library.calloc(words.WORKERS + 8 * _MOST + 8, 8) + 63) // 64 * 64
        of_slots = range(words.SLOTS + words.SLOT_BED, words.WORKERS, words.SLOT_SIZE)
        for bed in (words.POOL_BED, *of_slots):
            library.pthread_mutex_init(self._place(bed + words.MUTEX), None)
            library.pthread_cond_init(self._place(bed + words.CONDITION), None)
        self.num_workers = self.number(words.NUM_WORKERS)
        self._work = _workers.work().address
        self.run = _Function(_workers.run_shared().address)
        self._close = _Function(_workers.close_pool().address)

    def _place(self, word: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.address + 8 * word)

    def number(self, word: int) -> ctypes.c_int64:
        """Return one of the numbers in the pool's memory."""
        return ctypes.c_int64.from_address(self.address + 8 * word)

    def grow(self, num: int) -> None:
        """Start workers until there are so many, or the system has no more threads."""
        num_workers, thread = self.num_workers, ctypes.c_void_p()
        with _making:
            while num_workers.value < min(num, _MOST):
                line = words.WORKERS + 8 * num_workers.value
                self.number(line + 1).value = self.address
                num_workers.value += 1
                given = ctypes.byref(thread), None, ctypes.c_void_p(self._work), self._place(line)
                if self._library.pthread_create(*given) != 0:
                    num_workers.value -= 1
                    return
                self._library.pthread_detach(thread)

    def close(self) -> None:
        """End the workers, which run compiled code that the interpreter may free at its end."""
        self._close(self.address)
        until = perf_counter() + _CLOSING_SEC
        while self.number(words.NUM_RUNNING).value > 0 and perf_counter() < until:
            sleep(1e-4)


_pools: list[_Pool] = []  # of this process: one, once it has been needed
_making = Lock()


def _forget() -> None:
    """Forget the workers, which a forked child does not have."""
    global _making
    _making = Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@atexit.register
def _close() -> None:
    for pool in _pools:
        pool.close()


def run_job(function: int, job: int, num_threads: int) -> None:
    """Run a job by several threads, given the addresses of its function and of its numbers."""
    if not _pools:
        with _making:
            if not _pools:
                _pools.append(_Pool())
    pool = _pools[0]
    if pool.num_workers.value < num_threads - 1:
        pool.grow(num_threads - 1)
    given = _Job(pool.address, function, job, num_threads)
    pool.run(ctypes.addressof(given))


def most_threads() -> int:
    """Return how many threads run a job: torch's number, but no more than may run at once."""
    return min(torch.get_num_threads(), num_cores())


class NumThreads:
    """How many threads run a model's forwards of few tokens: as many as pay, learned from these.

    Now and then forwards run in turn on this number, and on half of it or twice as many. Their
    seconds count relative to the usual ones of as many tokens. Many tokens take all threads.
    """

    def __init__(self) -> None:
        self._most = 1
        self._begin(1, False, _SOON)

    def choose(self, num_tokens: int) -> int:
        """Return the number of threads for a forward of so many tokens."""
        most = most_threads()
        if most != self._most:
            self._most = most
            self._begin(most, False, _SOON)
        if num_tokens > _FEW or most == 1:
            return most
        tried = self._tried
        is_next = self._wait == 0 and len(tried[self._other]) < len(tried[self._num])
        return self._other if is_next else self._num

    def _begin(self, num: int, is_more: bool, wait: int) -> None:
        """Run so many forwards on a number of threads, then try another, more if there are any."""
        twice, half = min(2 * num, self._most), num // 2
        is_more = twice > num and (is_more or half == 0)
        self._num, self._other, self._wait = num, twice if is_more else half, wait
        self._usual = dict[int, float]()  # seconds by number of tokens
        self._tried = dict[int, list[float]]({num: [], self._other: []})

    def record(self, num_threads: int, num_tokens: int, sec: float) -> None:
        """Learn how long a forward took."""
        if num_tokens > _FEW or self._most == 1 or num_threads not in self._tried:
            return
        usual = self._usual.get(num_tokens)
        if self._wait > 0:
            self._wait -= 1
            self._usual[num_tokens] = sec if usual is None else usual + (sec - usual) / 8
        elif usual is not None:
            self._tried[num_threads].append(min(sec / usual, _LONGEST))
            now, other = self._tried[self._num], self._tried[self._other]
            if min(len(now), len(other)) == _TRIED:
                is_more = self._other > self._num
                most = fmean(now) * (_PAYS if is_more else 1 / _PAYS)
                if fmean(other) < most:
                    self._begin(self._other, is_more, _SOON)
                else:
                    self._begin(self._num, not is_more, _LATER)
