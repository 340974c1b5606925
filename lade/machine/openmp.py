"""Torch's threads on a CPU, which are OpenMP's: run jobs on them, and let them end."""

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[int, int, int], None]

_PROCESS = os.getpid()
_SOFT = 1  # of `omp_pause_resource_t`: settings are kept


@functools.cache
def runner() -> Run | None:
    """Return a function that runs another one on torch's threads; None if torch has none.

    It is `GOMP_parallel`, the entry point of parallel regions in the ABI of GNU's OpenMP, which
    LLVM's and Intel's have, too. Its arguments are the address of the function, the address of that
    function's argument, and the number of threads. A region of torch's may have run just before;
    its threads are still awake.
    """
    call = getattr(_library(), "GOMP_parallel", None)
    if call is None:
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    call.restype = None
    return lambda function, argument, num: call(function, argument, num, 0)


def release_workers() -> None:
    """End the OpenMP workers of this thread; its next parallel loop starts new ones.

    Each thread that has run a loop keeps its own workers. GNU's OpenMP lets workers spin until the
    next loop, but only while the process has no more threads and workers than cores. Otherwise each
    loop must wake its workers up, which takes longer than a product of few rows. A call takes 7 µs,
    or 150 µs if there are workers.
    """
    pause = _pause()
    if pause is not None and _has_workers():
        pause(_SOFT)


def _has_workers() -> bool:
    """Return whether OpenMP's workers exist: it would wait forever for missing ones.

    A forked child has none. Loops run there only with `torch.set_num_threads(1)`.
    """
    import torch

    return os.getpid() == _PROCESS and torch.get_num_threads() > 1


@functools.cache
def _pause() -> Callable[[int], int] | None:
    library = _library()
    if hasattr(library, "kmp_get_blocktime"):
        return None  # LLVM's and Intel's would pause all threads, and have no such rule
    return getattr(library, "omp_pause_resource_all", None)


@functools.cache
def _library() -> Any:
    """Return a library that depends on the OpenMP that torch uses, or None."""
    import torch  # here, for `lade.models.load` is imported without it

    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            return ctypes.CDLL(str(path))  # its dependencies are searched for symbols, too
    return None
