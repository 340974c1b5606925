"""Tables of a model's own successors on disk, one file for each model.

How they are made is in `prewarming.py`.
"""

import json
import os
import tempfile
import warnings
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.numpy
from platformdirs import user_cache_path
from safetensors import SafetensorError, safe_open

from lade._version import __version__
from lade.fingerprint import fingerprint_of
from lade.internals import Model, mesh_of, without_compiler
from ngram_pool import SuccessorTable

_FORMAT = 1
_KEY = "lade_table"  # of the metadata


@dataclass(slots=True)
class Effort:
    """What has gone into a table so far; another run goes on from there."""

    prefix_token_id: int | None = None  # lone tokens stand behind it; None before it was chosen
    num_lone_tokens: int = 0  # done, from token id 0 on
    num_texts: int = 0  # batches begun; the next one's seed
    num_tokens: int = 0  # run through the model
    seconds: float = 0.0


class StoredTable(NamedTuple):
    """A table, and what has gone into it."""

    table: SuccessorTable
    effort: Effort


def tables_folder() -> Path:
    """Return the folder of all tables in the user's cache; it need not exist."""
    return user_cache_path("lade", appauthor=False) / "tables"


def table_for(model: Model, folder: Path | None = None) -> SuccessorTable | None:
    """Return the table that was made for a model, or None.

    Nothing is computed where there are no tables at all. A file that cannot be read is ignored with
    a warning. The processes of a tensor-parallel model, which have parts of the weights, use none.

    Args:
        model: the target.
        folder: of the tables; None for the user's cache.
    """
    folder = tables_folder() if folder is None else folder
    try:
        if mesh_of(model) is not None or not folder.is_dir():
            return None
        fingerprint = fingerprint_of(model)
        path = table_path(folder, fingerprint or "")
        if fingerprint is None or not path.is_file():
            return None
    except OSError:  # a folder that may not be looked into has no tables for us
        return None
    try:
        return read_table(path, model).table
    except (ValueError, OSError) as error:
        name = type(without_compiler(model)).__name__
        warnings.warn(f"lade does not use its table for {name}: {error}", stacklevel=2)
        return None


def table_path(folder: Path, fingerprint: str) -> Path:
    """Return the file of the model with this fingerprint."""
    return folder / f"{fingerprint}.safetensors"


def read_table(path: Path, model: Model, capacity: int | None = None) -> StoredTable:
    """Read the table of a model.

    Args:
        path: of the file.
        model: that the table has to be of.
        capacity: as for `SuccessorTable.from_arrays`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or no table of this model.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        described = json.loads(metadata[_KEY])
        if described["format"] != _FORMAT:
            raise ValueError(f"expected format {_FORMAT}, got {described['format']!r}")
        if described["fingerprint"] != path.stem or described["vocab_size"] != _vocab_size(model):
            raise ValueError("it is the table of another model")
        effort = Effort(**described["effort"])
        table = _table_of(arrays, described["vocab_size"], capacity)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"expected a table that lade.prewarm made for this model in {path}, remove it to begin "
            f"anew; got a file that cannot be used ({type(error).__name__}: {error})"
        ) from error
    return StoredTable(table, effort)


def write_table(path: Path, model: Model, stored: StoredTable) -> None:
    """Write the table of a model.

    The file appears whole, by a rename, so a reader sees the one before or this one; of two
    processes that write, the last one's stays.

    Args:
        path: of the file; its folder is made.
        model: that the table is of.
        stored: what to write.

    Raises:
        OSError: it cannot be written.
    """
    described: dict[str, Any] = {
        "format": _FORMAT,
        "fingerprint": path.stem,
        "model": type(without_compiler(model)).__name__,
        "vocab_size": _vocab_size(model),
        "effort": asdict(stored.effort),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "lade": __version__,
    }
    content = safetensors.numpy.save(stored.table.arrays(), {_KEY: json.dumps(described)})
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(prefix=f"{path.stem}.making-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(made, path)
    except BaseException:
        os.unlink(made)
        raise


def _vocab_size(model: Model) -> int:
    vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
    return vocab_size


def load_table(path: Path, vocab_size: int) -> SuccessorTable:
    """Read a table without the model it is of.

    Args:
        path: of the file.
        vocab_size: no token id of the table may reach it.

    Raises:
        ValueError: the file is damaged, no table, or one of another vocabulary.
    """
    try:
        return _table_of(safetensors.numpy.load_file(path), vocab_size)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"expected a table that lade prewarm made in {path}: {error}") from error


def _table_of(
    arrays: dict[str, Any], vocab_size: int, capacity: int | None = None
) -> SuccessorTable:
    table = SuccessorTable.from_arrays(arrays, capacity)
    if len(table) and arrays["token_ids"].max() >= vocab_size:
        raise ValueError("it has tokens that the model has not")
    return table
