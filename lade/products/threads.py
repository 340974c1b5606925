"""Jobs on torch's own threads, so that none spin against others."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

Run = Callable[[int, int, int], None]


@functools.cache
def runner() -> Run | None:
    """Return what calls a function on several threads, or None where torch has no such threads.

    It is `GOMP_parallel`, the entry point of parallel regions in the ABI of GNU's OpenMP, which
    LLVM's and Intel's have, too: called as (address of the function, address of its argument,
    number of threads). Torch's own region may have run just before, whose threads are still awake.
    """
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if not path.exists():
            continue
        # A symbol is looked for in what a library depends on, too: this is the one that torch uses.
        call = getattr(ctypes.CDLL(str(path)), "GOMP_parallel", None)
        if call is not None:
            call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            call.restype = None
            return lambda function, argument, num: call(function, argument, num, 0)
    return None
