"""Compilation of the kernels, whatever state Numba's cache on disk is in.

Everything that depends on Numba's internals is here; the kernels themselves are in `_kernels.py`.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from numba.core.dispatcher import Dispatcher

from ngram_pool import _kernels


def compile_by(run_all: Callable[[], object], module: ModuleType = _kernels) -> None:
    """Compile a module's kernels, or load them from the cache, with a function that runs each.

    Where a cache file is truncated or a disk is full, Numba lets any exception through, and would
    again in every process. So after an exception, what cannot be read is compiled, and written anew
    where possible. What is raised then has another cause.

    Warns:
        UserWarning: the cache is broken; names its folder.
    """
    try:
        run_all()
        return
    except Exception as error:  # whatever Numba lets through
        kernels: list[Any] = [k for k in vars(module).values() if isinstance(k, Dispatcher)]
        if not kernels:  # NUMBA_DISABLE_JIT=1
            raise
        reason = f"{type(error).__name__}: {error}"
    caches = [kernel._cache for kernel in kernels]
    for kernel, cache in zip(kernels, caches, strict=True):
        kernel._cache = _ForgivingCache(cache)
    run_all()
    warnings.warn(
        f"the cache of compiled code in {caches[0].cache_path} is broken ({reason}): what cannot "
        "be read there was compiled, and written anew where it could be",
        stacklevel=3,
    )


def cache_folder(module: ModuleType = _kernels) -> Path | None:
    """Return the folder that a module's compiled kernels are kept in; None if there is none."""
    kernels: list[Any] = [k for k in vars(module).values() if isinstance(k, Dispatcher)]
    path = getattr(kernels[0]._cache, "cache_path", None) if kernels else None
    return None if path is None else Path(path)


class _ForgivingCache:
    """Cache that takes what cannot be read as missing, and ignores errors of writing."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    @property
    def cache_path(self) -> Any:
        return self._cache.cache_path

    def flush(self) -> None:
        self._cache.flush()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return self._cache.load_overload(sig, target_context)
        except Exception:  # whatever Numba's own reading lets through
            with suppress(Exception):
                self._cache.flush()
            return None

    def save_overload(self, sig: Any, cres: Any) -> None:
        with suppress(Exception):
            self._cache.save_overload(sig, cres)
