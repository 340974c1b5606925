"""Checks of files and folders that a command will want, before it imports torch."""

import tempfile
from pathlib import Path


def check_place(path: Path) -> None:
    """Raise if a file could not be written at a path later.

    Raises:
        ValueError: there is no such folder.
        OSError: nothing can be written to it.
    """
    if not path.parent.is_dir():
        raise ValueError(f"no such folder: {path.parent}")
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def check_pool(path: Path) -> None:
    """Raise if a file does not begin as a pool's does.

    Raises:
        PoolFileError: it is another file, or of a newer format.
        OSError: it cannot be read.
    """
    from ngram_pool.files import check_begin  # imports Numba

    check_begin(path)
