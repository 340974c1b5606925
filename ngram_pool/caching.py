"""Where compiled kernels are kept: in a folder of the user's, or beside the code for all users.

Numba reads only from a folder that it may write to. `KernelCache` also reads what the installer
compiled beside the code, unless others can write there: who writes a cache runs code in each
process that reads it.
"""

import inspect
import os
import stat
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile
from numba.core.runtime import rtsys

_locators: list[Any] = CompileResultCacheImpl._locator_classes
[_InTree] = [each for each in _locators if each.__name__.endswith("InTreeCacheLocator")]


class _Beside(_InTree):  # type: ignore[misc, valid-type]
    """The folder beside the code, for who alone may write to it."""

    def ensure_cache_path(self) -> None:
        """Raise an `OSError` if it is another's; Numba then asks for the next folder."""
        super().ensure_cache_path()
        if writable_by_others(self.get_cache_path()) is not None:
            raise PermissionError


class _Nowhere(_InTree):  # type: ignore[misc, valid-type]
    """Stands for no folder, if none is writable."""

    def ensure_cache_path(self) -> None:
        """Do nothing."""


class _Folders(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_Beside if each is _InTree else each for each in _locators] + [_Nowhere]


class KernelCache(FunctionCache):  # type: ignore[misc]
    """The compiled code of a function: the user's, and what the installer compiled.

    A file that cannot be read or written costs a warning and the time to compile, no more.
    """

    _impl_class = _Folders

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        is_kept = not isinstance(self._impl.locator, _Nowhere)
        #: The folder that new code is kept in; None for none.
        self._cache_path: str | None = self._cache_path if is_kept else None
        self._readable = [self._cache_file] if is_kept else []
        beside = _Nowhere(function, inspect.getfile(function))
        path, stamp = beside.get_cache_path(), beside.get_source_stamp()
        shared = IndexDataCacheFile(path, self._impl.filename_base, stamp)
        if path == self._cache_path or os.name != "posix" or not Path(shared._index_path).is_file():
            return
        if (found := writable_by_others(path)) is None:
            self._readable.append(shared)
        else:
            _warn(
                f"compiled kernels beside the code are not used: others can write to {found}, and "
                f"so put code there that runs as you (chmod -R go-w {found})"
            )

    @property
    def has_code(self) -> bool:
        """Whether code is kept, for a CPU of any kind."""
        return any(Path(files._index_path).is_file() for files in self._readable)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function for a signature, or None."""
        rtsys.initialize(target_context)  # all that code from the disk needs of Numba
        key = self._index_key(sig, target_context.codegen())
        for files in self._readable:
            try:
                held = files.load(key)
                if held is not None:
                    return self._impl.rebuild(target_context, held)
            except Exception as error:  # a file was cut short: any error of Numba or of pickles
                _warn_broken(files._cache_path, error)
                with suppress(OSError):
                    files.flush()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled function, if that is possible."""
        if self._cache_path is None:
            _warn(
                "ngram_pool compiles anew in each process, for a minute or more: no cache folder "
                "is writable; set the variable NUMBA_CACHE_DIR to one that is"
            )
            return
        try:
            super().save_overload(sig, data)
        except Exception as error:  # the disk is full, or the folder was changed
            _warn_broken(self._cache_path, error)


@cache
def writable_by_others(folder: str, *, by_owner_alone: bool = False) -> Path | None:
    """Return the folder, or the first one around it, that others can write to; None if none is.

    Trusted are root, this user, and who owns the code, which runs in any case.

    Args:
        folder: of compiled code, in the code's folder.
        by_owner_alone: whether a group of this user's counts as others: it may be the user's own.
    """
    if os.name != "posix":  # folders have no modes
        return None
    path, me = Path(os.path.realpath(folder)), os.geteuid()
    for each in (path, *path.parents):
        found = each.stat()
        is_mine = found.st_uid == me and not by_owner_alone
        writing = stat.S_IWOTH | (0 if is_mine or found.st_gid == 0 else stat.S_IWGRP)
        # In a sticky folder, others replace nothing that is not theirs.
        is_open = found.st_mode & writing and (each == path or not found.st_mode & stat.S_ISVTX)
        if is_open or found.st_uid not in (0, me, path.parent.stat().st_uid):
            return each
    return None


def _warn_broken(folder: str, error: Exception) -> None:
    _warn(
        f"the cache of compiled code in {folder} is broken ({error}): this process compiles for "
        "itself what it can neither read nor keep there"
    )


@cache  # once for all kernels
def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)
