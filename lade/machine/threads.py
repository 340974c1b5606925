"""How many cores there are, and torch's threads, without which small loops can do."""

import ctypes
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

_Result = TypeVar("_Result")
# Microseconds of CPU in a period, and the period: of control groups of version 2, and of version 1.
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_FIRST_QUOTA = [Path("/sys/fs/cgroup/cpu") / f"cpu.cfs_{name}_us" for name in ("quota", "period")]


def alone(call: Callable[[], _Result]) -> _Result:
    """Return what a function returns whose loops run on this thread alone.

    Torch divides loops as short as the cosines of 320 numbers. Workers of GNU's OpenMP then stay
    awake for 8 ms, and those of others for longer, on cores that run jobs meanwhile.
    """
    import torch  # here, for `lade.models.load` is imported without it

    set_number, set_number_of_mkl = _setters()
    number, of_mkl = torch.get_num_threads(), 0
    if number == 1:
        return call()
    try:
        set_number(1)
        of_mkl = set_number_of_mkl(1)
        return call()
    finally:
        set_number(number)
        set_number_of_mkl(of_mkl)


@functools.cache
def _setters() -> tuple[Callable[[int], Any], Callable[[int], Any]]:
    """Return what sets the number of OpenMP's threads, and of MKL's, for loops of this thread."""
    import torch

    library: Any = None
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            library = ctypes.CDLL(str(path))  # its dependencies are searched for symbols, too
    names = "omp_set_num_threads", "MKL_Set_Num_Threads_Local"
    of_openmp, of_mkl = (getattr(library, name, lambda number: 0) for name in names)
    return of_openmp, of_mkl


@functools.cache
def num_cores() -> int:
    """Return how many threads of this process can run at once."""
    may_ask = hasattr(os, "sched_getaffinity")
    num = len(os.sched_getaffinity(0)) if may_ask else os.cpu_count() or 1
    return max(1, math.ceil(min(num, num_cores_allowed() or num)))


def num_cores_allowed() -> float | None:
    """Return how many cores a container may use; None without a quota."""
    try:
        of_first = [*map(Path.read_text, _FIRST_QUOTA)] if not _QUOTA.exists() else []
        cpu_time, period = of_first or _QUOTA.read_text().split()
        return int(cpu_time) / int(period) if int(cpu_time) > 0 else None
    except (OSError, ValueError):  # no such file, or "max"
        return None
