"""Prewarmed tables: pools on disk that hold a model's likely successors and no text."""

import os
import warnings
from pathlib import Path

from lade.compat import Model, mesh_of, unwrapped
from lade.errors import UnsupportedModelError, UserError
from lade.prewarming.fingerprint import fingerprint_of
from lade.probing.profile import Profile
from ngram_pool import NGramPool

_LOCK_SEC = 60.0  # to wait for another process that saves the table
# For 2**20 contexts: 64 MB on disk and in memory. A full table forgets the least recent contexts.
_CAPACITY_TOKENS = 2**24


def prewarmed_table_of(model: Model, profile: Profile) -> NGramPool | None:
    """Return the prewarmed table of a model, or None; looked up once per profile."""
    return profile.once("prewarmed", lambda: table_for(model))


def tables_folder() -> Path:
    """Return the folder of all tables in the user's cache; it need not exist."""
    from platformdirs import user_cache_path  # here, as only files need it

    return user_cache_path("lade", appauthor=False) / "tables"


def table_for(model: Model) -> NGramPool | None:
    """Return the prewarmed table of a model, to be a layer of its calls, or None.

    A table that cannot be used, for any reason, is ignored with a warning: decoding works without
    it. Tensor-parallel models use none, because each process has only a part of the weights.
    """
    try:
        # os.path never raises: an unreadable folder counts as one without tables.
        if not os.path.isdir(tables_folder()):
            return None
        path = path_of_table(model)
        return read_table(path, read_only=True) if os.path.isfile(path) else None
    except UnsupportedModelError:  # the model has no fingerprint
        return None
    except Exception as error:  # of the model, or of a damaged file
        name, kind = type(unwrapped(model)).__name__, type(error).__name__
        reason = str(error) if isinstance(error, ValueError | OSError) else f"{kind}: {error}"
        warnings.warn(f"lade does not use its table for {name}: {reason}", stacklevel=2)
        return None


def path_of_table(model: Model, folder: Path | None = None) -> Path:
    """Return the file of a model's table, which need not exist.

    Raises:
        UnsupportedModelError: the model is tensor-parallel, or has no weights in memory.
    """
    name = type(unwrapped(model)).__name__
    if mesh_of(model) is not None:
        raise UnsupportedModelError(
            f"{name} is tensor-parallel; no process has all weights, which identify a table"
        )
    fingerprint = fingerprint_of(model)
    if fingerprint is None:
        raise UnsupportedModelError(f"{name} has no weights in memory to be recognised by")
    return (tables_folder() if folder is None else folder) / f"{fingerprint}.safetensors"


def read_table(path: Path, *, read_only: bool = False) -> NGramPool:
    """Read a table, or return an empty one if there is no file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or no table of this version.
    """
    if not path.exists():
        return new_table()
    try:
        table = NGramPool.load(path, model=path.stem, read_only=read_only)
        seconds_of(table)
        return table
    except ValueError as error:
        raise UserError(
            f"expected a table that lade prewarm made for this model, remove {path} to begin anew; "
            f"got one that cannot be used ({error})"
        ) from error


def new_table() -> NGramPool:
    """Return an empty table."""
    return NGramPool(_CAPACITY_TOKENS)


def seconds_of(table: NGramPool) -> float:
    """Return the seconds of all runs that wrote a table."""
    return float(table.note or 0.0)


def add_to_table(path: Path, added: NGramPool, seconds: float) -> NGramPool:
    """Add to a table in its file, which is made if missing; return the whole table.

    One process at a time does so. A process that is killed meanwhile blocks no other, and leaves
    the file unchanged.

    Args:
        path: the file.
        added: what was learned, a table of its own.
        seconds: how long that took.

    Raises:
        OSError: the file cannot be read or written, or another process keeps it for a minute.
        ValueError: as for `read_table`.
    """
    from filelock import FileLock  # here, as only writers need it

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), timeout=_LOCK_SEC):
        table = read_table(path)
        table.merge(added)
        table.model, table.note = path.stem, str(seconds_of(table) + seconds)
        table.save(path)
    return table
