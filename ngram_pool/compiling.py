"""Whether the pool's kernels were compiled before; where that is kept is in `caching.py`."""

from pathlib import Path
from typing import Any

from numba.core.dispatcher import Dispatcher

from ngram_pool import _kernels

_FOR_ENGINES: Any = _kernels.draft_rows  # which compile it themselves


def is_first_run() -> bool:
    """Return whether a kernel that each pool needs is not kept yet, as after an interrupt."""
    kernels: list[Any] = [k for k in vars(_kernels).values() if isinstance(k, Dispatcher)]
    needed = [kernel for kernel in kernels if kernel is not _FOR_ENGINES]
    return not all(getattr(kernel._cache, "has_code", False) for kernel in needed)


def cache_folder() -> Path | None:
    """Return the folder that compiled kernels are kept in; None if there is none."""
    path = getattr(getattr(_kernels.row_of, "_cache", None), "folder", None)
    return None if path is None else Path(path)
