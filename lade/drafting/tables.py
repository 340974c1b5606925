"""Prewarmed tables: pools on disk that hold a model's likely successors and no text.

One is the user's own; another may have come with the checkpoint.
"""

import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from transformers.utils import cached_file

from lade.compat import Model, mesh_of, unwrapped
from lade.compat.fingerprint import fingerprint_of
from lade.errors import UnsupportedModelError, UserError
from ngram_pool import NGramPool

#: The name of a table beside a checkpoint's weights.
NAME = "lade.pool"


class Table(NamedTuple):
    """A prewarmed table that calls draft from."""

    path: Path
    pool: NGramPool


def tables_folder() -> Path:
    """Return the folder of the user's own tables, in the user's cache; it need not exist."""
    from platformdirs import user_cache_path  # here, as only files need it

    return user_cache_path("lade", appauthor=False) / "tables"


def table_for(model: Model) -> Table | None:
    """Return the prewarmed table of a model, to be a layer of its calls, or None.

    A table that cannot be used, for any reason, is ignored with a warning: decoding works without
    it. Tensor-parallel models use none, because each process has only a part of the weights.
    """
    try:
        # os.path never raises: an unreadable folder counts as one without tables.
        own = path_of_table(model) if os.path.isdir(tables_folder()) else ""
        path = own if os.path.isfile(own) else path_beside(model)
        if path is None:
            return None
        pool = NGramPool.load(path, read_only=True)
        if pool.model != label_of(model) or len(pool):
            raise UserError(f"{path} holds text, or the likely tokens of other weights")
        return Table(Path(path), pool)
    except UnsupportedModelError:  # the model has no fingerprint
        return None
    except Exception as error:  # of the model, or of a damaged file
        name, kind = type(unwrapped(model)).__name__, type(error).__name__
        reason = str(error) if isinstance(error, ValueError | OSError) else f"{kind}: {error}"
        warnings.warn(f"lade does not use its table for {name}: {reason}", stacklevel=2)
        return None


def path_beside(model: Model, *, fetches: bool = False) -> str | None:
    """Return the table in the folder or Hub repository that a model was loaded from, or None.

    Args:
        model: a transformers causal LM.
        fetches: whether to ask the Hub; without, nothing is looked for but on this machine.
    """
    config = unwrapped(model).config
    name = getattr(config, "name_or_path", None) or ""
    place = os.path.dirname(name) if os.path.isfile(name) else name  # of a GGUF file
    revision = getattr(config, "_commit_hash", None)
    with suppress(OSError):  # it is not there, or the Hub is not
        found: str = cached_file(place, NAME, revision=revision, local_files_only=not fetches)
        return found
    return None


def path_of_table(model: Model, folder: Path | None = None) -> Path:
    """Return the file of a model's own table, or of the one in a folder; it need not exist.

    Raises:
        UnsupportedModelError: as `label_of` does.
    """
    label = label_of(model)
    return tables_folder() / f"{label}.pool" if folder is None else folder / NAME


def label_of(model: Model) -> str:
    """Return the fingerprint of a model, by which a table is recognised.

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
    return fingerprint
