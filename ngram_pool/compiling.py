"""Compilation of the kernels, also if Numba's cache on disk is broken.

All code that depends on Numba's internals is here; the kernels are in `_kernels.py`.
"""

import logging
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher

from ngram_pool import _kernels

logger = logging.getLogger(__name__)
_FOR_ENGINES: Any = _kernels.draft_rows  # which compile it themselves


def compile_by(run_all: Callable[[], object], module: ModuleType = _kernels) -> None:
    """Compile a module's kernels, or load them from the cache, with a function that runs each.

    If a cache file is truncated or a disk is full, Numba raises any exception, and would raise it
    again in every process. So after an exception, the files are removed if possible, and this
    process compiles without them. A second exception has another cause, and is raised.

    Before the pool's kernels are compiled, a line of the log says that it takes a while.

    Warns:
        UserWarning: the cache is broken; names its folder.
    """
    if module is _kernels and is_first_run():
        logger.warning("The first run compiles kernels, for about a minute")
    try:
        run_all()
        return
    except Exception as error:  # any error of Numba's cache
        kernels: list[Any] = [k for k in vars(module).values() if isinstance(k, Dispatcher)]
        folder = cache_folder(module)
        if folder is None:  # NUMBA_DISABLE_JIT=1, or nothing is cached
            raise
        reason = f"{type(error).__name__}: {error}"
    for file in folder.glob(f"{module.__name__.rpartition('.')[2]}.*.nb[ic]"):
        with suppress(OSError):
            file.unlink()
    for kernel in kernels:
        kernel._cache = NullCache()
    run_all()
    warnings.warn(
        f"the cache of compiled code in {folder} is broken ({reason}): its files were removed, if "
        "possible, and this process compiled all kernels for itself",
        stacklevel=3,
    )


def is_first_run() -> bool:
    """Return whether a kernel that each pool needs is not kept yet, as after an interrupt."""
    kernels: list[Any] = [k for k in vars(_kernels).values() if isinstance(k, Dispatcher)]
    files = [getattr(k._cache, "_cache_file", None) for k in kernels if k is not _FOR_ENGINES]
    return any(file is None or not Path(file._index_path).is_file() for file in files)


def cache_folder(module: ModuleType = _kernels) -> Path | None:
    """Return the folder that a module's compiled kernels are kept in; None if there is none."""
    kernels: list[Any] = [k for k in vars(module).values() if isinstance(k, Dispatcher)]
    path = getattr(kernels[0]._cache, "cache_path", None) if kernels else None
    return None if path is None else Path(path)
