"""Prewarmed tables: pools on disk that hold a model's likely successors and no text."""

import os
import warnings
from pathlib import Path

from lade.compat import Model, mesh_of, unwrapped
from lade.errors import UnsupportedModelError, UserError
from lade.prewarming.fingerprint import fingerprint_of
from lade.probing.profile import Profile
from ngram_pool import NGramPool


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
        if not os.path.isfile(path):
            return None
        return NGramPool.load(path, model=path.stem, read_only=True)
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
    return (tables_folder() if folder is None else folder) / f"{fingerprint}.pool"


def seconds_of(table: NGramPool) -> float:
    """Return the seconds of all runs that wrote a table."""
    try:
        return float(table.note or 0.0)
    except ValueError:
        raise UserError(f"expected a table of lade prewarm, got a pool of {table.note!r}") from None
