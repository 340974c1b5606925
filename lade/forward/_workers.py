"""Every compiled function of workers: threads without Python that help callers run their jobs.

A caller runs its job whether or not workers come; workers that come take pieces. All numbers that
workers look at lie in a pool, whose memory is never freed; a job's memory may be freed as soon as
its caller has closed it. A worker enters a job by saying so in its own line of the pool and then
finding the job's number still open. The caller waits for it until the worker leaves, with nothing
left to do but to wait. A waiting worker is outside all jobs, and looks at the pool alone.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from lade.forward import words as w
from lade.forward._tiles import (
    FEATURES,
    call_compiled,
    changing,
    compiled,
    instruction,
    job,
    pointer,
    take,
)

_SPINS = 2000  # looks of a waiting thread before it sleeps: as long as a phase, 50 to 100 µs
_INT64, _VOID, _POINTER = ir.IntType(64), ir.VoidType(), ir.IntType(8).as_pointer()


@instruction(types.int64, types.int64)
def look(builder: Any, address: Any) -> Any:
    """Return a shared integer; no later read is moved before this one."""
    return builder.load_atomic(builder.inttoptr(address, _INT64.as_pointer()), "seq_cst", 8)


_swap, _raise_to = changing("xchg"), changing("max")


@instruction(types.void, types.int64)
def _pause(builder: Any, unused: Any) -> None:
    """Let the core wait for some cycles."""
    if "sse2" in FEATURES:
        kind = ir.FunctionType(_VOID, [])
        name = "llvm.x86.sse2.pause"
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])


def _of_system(name: str) -> Any:
    """Return a function that calls one of the system's, given addresses."""

    @instruction(types.void)
    def call(builder: Any, of: Any) -> None:
        given = [builder.inttoptr(each, _POINTER) for each in cgutils.unpack_tuple(builder, of)]
        kind = ir.FunctionType(ir.IntType(32), [_POINTER] * len(given))
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), given)

    return call


_lock, _unlock = _of_system("pthread_mutex_lock"), _of_system("pthread_mutex_unlock")
_yield = _of_system("sched_yield")
_sleep, _wake_all = _of_system("pthread_cond_wait"), _of_system("pthread_cond_broadcast")


# --- waiting --------------------------------------------------------------------------------------
# `until` is an address and a number that it reaches, an address and a number that it no longer has
# then; a wait ends by either. A bed is where threads sleep; who ends a wait must `wake` its bed.


@compiled
def _is_over(until):  # type: ignore[no-untyped-def]
    return look(until[0]) >= until[1] or look(until[2]) != until[3]


@compiled
def wait(bed, until):  # type: ignore[no-untyped-def]
    for _ in range(_SPINS):
        if _is_over(until):
            return
        _pause(0)
    mutex, condition = bed + 8 * w.MUTEX, bed + 8 * w.CONDITION
    take(bed, 1)  # before it looks again: else it might miss who wakes it
    _lock((mutex,))
    while not _is_over(until):
        _sleep((condition, mutex))
    _unlock((mutex,))
    take(bed, -1)


@compiled
def wake(bed):  # type: ignore[no-untyped-def]
    if look(bed) > 0:
        mutex = bed + 8 * w.MUTEX
        _lock((mutex,))
        _wake_all((bed + 8 * w.CONDITION,))
        _unlock((mutex,))


# --- a job's pieces -------------------------------------------------------------------------------


@compiled
def end(g, phase, num_done, num_pieces):  # type: ignore[no-untyped-def]
    """Report finished pieces; with the last one, the next phase begins."""
    before = take(phase + 64, num_done) if num_done > 0 else 0
    if before + num_done == num_pieces:
        slot = g[w.SLOT]
        _raise_to(slot + 8 * w.CURRENT, phase + 128)
        wake(slot + 8 * w.SLOT_BED)


@compiled
def pieces(g, phase, num, step):  # type: ignore[no-untyped-def]
    """Yield first and last end of the pieces that this thread gets; then the next phase begins.

    Args:
        g, phase: the job, and the address of the phase.
        num, step: how many units of work there are, and how many make a piece.
    """
    start, num_done = take(phase, step), 0
    while start < num:
        stop = min(start + step, num)
        yield start, stop
        num_done += stop - start
        start = take(phase, step)
    end(g, phase, num_done, num)


# --- jobs -----------------------------------------------------------------------------------------


@compiled
def _enter(own, slot, number):  # type: ignore[no-untyped-def]
    """Enter a job unless it is over; return whether the worker is inside."""
    _swap(own, slot)
    if look(slot + 8 * w.NUMBER) == number:
        return True
    _leave(own, slot)
    return False


@compiled
def _leave(own, slot):  # type: ignore[no-untyped-def]
    _swap(own, 0)
    wake(slot + 8 * w.SLOT_BED)  # its caller may wait for that


@compiled
def next_phase(given, phase):  # type: ignore[no-untyped-def]
    """Wait for the end of a phase; return the one that runs now, or 0 once the job is over."""
    slot, own, number = given
    current = slot + 8 * w.CURRENT
    until = current, phase + 1, slot + 8 * w.NUMBER, number
    if look(current) <= phase:
        if own != 0:
            _leave(own, slot)
        wait(slot + 8 * w.SLOT_BED, until)
        if own != 0 and not _enter(own, slot, number):
            return 0
    return look(current)


@job
def run_shared(address: Any) -> None:
    """Run a job, given the pool, its function, its numbers, and how many threads may take part."""
    given = numba.carray(address, (4,), np.int64)
    pool, function, of_job, num_threads = given[0], given[1], given[2], given[3]
    first = pool + 8 * w.SLOTS
    slot = first
    while _swap(slot, 1) != 0:  # others run as many jobs as there are slots
        slot = slot + 8 * w.SLOT_SIZE if slot < pool + 8 * w.LAST_SLOT else first
        _yield((0,))
    s = numba.carray(pointer(slot), (w.SLOT_SIZE,), np.int64)
    g = numba.carray(pointer(of_job), (w.JOB_SIZE,), np.int64)
    g[w.SLOT], s[w.FUNCTION], s[w.JOB], s[w.CURRENT] = slot, function, of_job, g[w.PHASES]
    number = look(slot + 8 * w.NUMBER)
    if num_threads > 1:
        number = take(slot + 8 * w.NUMBER, 1) + 1
        take(pool + 8 * w.CALLS, 1)
        wake(pool + 8 * w.POOL_BED)
    call_compiled((function, slot, 0, number))
    if num_threads > 1:
        take(slot + 8 * w.NUMBER, 1)
        until = pool + 8 * w.WORKERS + 64 * look(pool + 8 * w.NUM_WORKERS)
        for own in range(pool + 8 * w.WORKERS, until, 64):
            wait(slot + 8 * w.SLOT_BED, (pool + 8 * w.ZERO, 1, own, slot))
    _swap(slot, 0)


@job
def work(address: Any) -> None:
    """Help with every job that has begun, then sleep until the next, given a line of the pool."""
    line = numba.carray(address, (2,), np.int64)
    own, pool = line.ctypes.data, line[1]
    closed = pool + 8 * w.CLOSED
    take(pool + 8 * w.NUM_RUNNING, 1)
    while look(closed) == 0:
        calls = look(pool + 8 * w.CALLS)
        for slot in range(pool + 8 * w.SLOTS, pool + 8 * w.WORKERS, 8 * w.SLOT_SIZE):
            number = look(slot + 8 * w.NUMBER)
            if number % 2 == 1 and _enter(own, slot, number):
                call_compiled((look(slot + 8 * w.FUNCTION), slot, own, number))
                _leave(own, slot)
        wait(pool + 8 * w.POOL_BED, (pool + 8 * w.CALLS, calls + 1, closed, 0))
    take(pool + 8 * w.NUM_RUNNING, -1)


@job
def close_pool(address: Any) -> None:
    """Let all workers end."""
    pool = numba.carray(address, (1,), np.int64).ctypes.data
    _swap(pool + 8 * w.CLOSED, 1)
    wake(pool + 8 * w.POOL_BED)
