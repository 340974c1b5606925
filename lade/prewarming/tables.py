"""Tables of likely successors on disk: shared by processes; reading checks all sizes first."""

import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.numpy
from safetensors import SafetensorError, safe_open

from lade.compat import Model, mesh_of, without_compiler
from lade.errors import UnsupportedModelError, UserError
from lade.prewarming.fingerprint import fingerprint_of
from lade.probing.profile import Profile
from ngram_pool import SuccessorTable
from ngram_pool.writing import LOCK_SEC, sweep, write_whole

# Beyond this number, the least recent contexts are forgotten: 64 MB on disk, twice in memory.
_MAX_CONTEXTS = 2**20
_FORMAT = 2
_KEY = "lade_table"  # of the metadata
# Far above what `prewarm` writes, but too low for a file of a few bytes to claim much memory.
_MAX_SUCCESSORS, _MAX_COUNT = 64, 2**53
# Errors of reading a file that lade did not write.
_NOT_OURS = SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError


@dataclass(slots=True)
class StoredTable:
    """A table, and the work that went into it."""

    table: SuccessorTable
    num_tokens: int = 0  # run through the model
    seconds: float = 0.0


def prewarmed_table_of(model: Model, profile: Profile) -> SuccessorTable | None:
    """Return the prewarmed table of a model, or None; looked up once per profile."""
    return profile.once("prewarmed", lambda: table_for(model))


def tables_folder() -> Path:
    """Return the folder of all tables in the user's cache; it need not exist."""
    from platformdirs import user_cache_path  # here, as only files need it

    return user_cache_path("lade", appauthor=False) / "tables"


def table_for(model: Model) -> SuccessorTable | None:
    """Return the prewarmed table of a model, or None.

    A table that cannot be used, for any reason, is ignored with a warning: decoding works without
    it. Tensor-parallel models use none, because each process has only a part of the weights.
    """
    try:
        # os.path never raises: an unreadable folder counts as one without tables.
        if not os.path.isdir(tables_folder()):
            return None
        path = path_of_table(model)
        return load_table(path, _vocab_size(model)) if os.path.isfile(path) else None
    except UnsupportedModelError:  # the model has no fingerprint
        return None
    except Exception as error:  # of the model, or of a damaged file
        name, kind = type(without_compiler(model)).__name__, type(error).__name__
        reason = str(error) if isinstance(error, ValueError | OSError) else f"{kind}: {error}"
        warnings.warn(f"lade does not use its table for {name}: {reason}", stacklevel=2)
        return None


def path_of_table(model: Model, folder: Path | None = None) -> Path:
    """Return the file of a model's table, which need not exist.

    Raises:
        UnsupportedModelError: the model is tensor-parallel, or has no weights in memory.
    """
    name = type(without_compiler(model)).__name__
    if mesh_of(model) is not None:
        raise UnsupportedModelError(
            f"{name} is tensor-parallel; no process has all weights, which identify a table"
        )
    fingerprint = fingerprint_of(model)
    if fingerprint is None:
        raise UnsupportedModelError(f"{name} has no weights in memory to be recognised by")
    return (tables_folder() if folder is None else folder) / f"{fingerprint}.safetensors"


def read_table(path: Path, model: Model) -> StoredTable:
    """Read the table of a model; an empty one if there is no file. Raises as `load_table`."""
    if not path.exists():
        return StoredTable(SuccessorTable(_MAX_CONTEXTS))
    return _read(path, _vocab_size(model))


def load_table(path: Path, vocab_size: int) -> SuccessorTable:
    """Read a table without its model; all its token ids must be below `vocab_size`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, not a table, or made for another vocabulary.
    """
    return _read(path, vocab_size).table


def _read(path: Path, vocab_size: int) -> StoredTable:
    try:
        with safe_open(path, framework="numpy") as file:
            described = json.loads((file.metadata() or {})[_KEY])
            if described["format"] != _FORMAT:
                raise ValueError(f"expected format {_FORMAT}, got {described['format']!r}")
            return StoredTable(_table_in(file, vocab_size), *_effort_in(described["effort"]))
    except _NOT_OURS as error:
        raise UserError(
            f"expected a table that lade prewarm made for this model in {path}, remove it to begin "
            f"anew; got a file that cannot be used ({type(error).__name__}: {error})"
        ) from error


def merge_table(path: Path, model: Model, added: StoredTable) -> StoredTable:
    """Add to the table of a model in its file, which is made if missing; return the whole table.

    One process at a time does so. A process that is killed meanwhile blocks no other, and leaves
    the file unchanged.

    Raises:
        OSError: the file cannot be read or written, or another process keeps it for a minute.
        ValueError: the file is damaged.
    """
    from filelock import FileLock  # here, as only writers need it

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), timeout=LOCK_SEC):
        stored = read_table(path, model)
        stored.table.update(added.table)
        stored.num_tokens += added.num_tokens
        stored.seconds += added.seconds
        effort = {"num_tokens": stored.num_tokens, "seconds": stored.seconds}
        described = {"format": _FORMAT, "effort": effort}
        content = safetensors.numpy.save(stored.table.arrays(), {_KEY: json.dumps(described)})
        sweep(path.parent, "[0-9a-f]" * 64)  # leftovers of killed processes, of any model
        write_whole(path, content)
    return stored


def _vocab_size(model: Model) -> int:
    vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
    return vocab_size


def _effort_in(described: Any) -> tuple[int, float]:
    """Return the tokens and seconds of a table; raise for invalid ones, since runs add to them."""
    num_tokens, seconds = described["num_tokens"], described["seconds"]
    # The type itself, since True is an instance of int. NaN fails every comparison.
    are_numbers = type(num_tokens) is int and type(seconds) in (int, float)
    if not (are_numbers and 0 <= num_tokens <= _MAX_COUNT and 0 <= seconds <= _MAX_COUNT):
        raise ValueError(f"expected numbers from 0 to {_MAX_COUNT} as its effort")
    return num_tokens, seconds


def _table_in(file: Any, vocab_size: int) -> SuccessorTable:
    """Return the table in an open file; raise before anything large is allocated.

    Safetensors itself checks that the arrays fill the file, so rows cannot be claimed without their
    bytes. Zero rows take no bytes whatever length they claim, hence the bound on that length.
    """
    shape = file.get_slice("token_ids").get_shape()
    if len(shape) != 2 or not 1 <= shape[1] <= _MAX_SUCCESSORS:
        raise ValueError(f"expected 1 to {_MAX_SUCCESSORS} successors in each row, got {shape}")
    arrays = {name: file.get_tensor(name) for name in ("keys", "counts", "token_ids", "costs")}
    table = SuccessorTable.from_arrays(arrays, _MAX_CONTEXTS)
    if len(table) and arrays["token_ids"].max() >= vocab_size:
        raise ValueError("it has tokens beyond the model's vocabulary")
    return table
