"""Tables of likely successors on disk: shared by processes, read with all sizes checked first."""

import json
import os
import warnings
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from lade._version import __version__
from lade.compat import Model, mesh_of, without_compiler
from lade.errors import UnsupportedModelError
from lade.prewarming.fingerprint import fingerprint_of
from lade.probing.profile import Known, Profile
from ngram_pool import SuccessorTable
from ngram_pool.writing import sweep, write_whole


def prewarmed_table_of(model: Model, profile: Profile) -> SuccessorTable | None:
    """Return the prewarmed table of a model, or None; looked up once per profile."""
    known = profile.prewarmed  # once: another thread may forget it
    if known is None:
        known = profile.prewarmed = Known(table_for(model))
    return known.value


def forget_prewarmed_table(model: Model) -> None:
    """Have the model's table looked up again at its next use."""
    for profile in vars(without_compiler(model)).get("_lade_profiles", ()):
        profile.prewarmed = None


DEFAULT_MAX_CONTEXTS = 2**20
_FORMAT = 2
_KEY = "lade_table"  # of the metadata
# Far above what `prewarm` writes (8, some 400, and what fits into a lifetime), yet low enough that
# a file of a few bytes cannot make us allocate much.
_MAX_SUCCESSORS = 64
_MAX_DESCRIPTION_LENGTH = 2**14
_MAX_COUNT = 2**53
# Adding to the largest table takes two seconds.
_LOCK_SEC = 60.0


@dataclass(slots=True)
class Effort:
    """What went into a table so far; another run continues from there."""

    prefix_token_id: int | None = None  # comes before lone tokens; None until it is chosen
    num_tokens: int = 0  # run through the model
    seconds: float = 0.0

    def add(self, other: "Effort") -> None:
        """Count what another process or run did."""
        if self.prefix_token_id is None:
            self.prefix_token_id = other.prefix_token_id
        self.num_tokens += other.num_tokens
        self.seconds += other.seconds


class StoredTable(NamedTuple):
    """A table, and what went into it."""

    table: SuccessorTable
    effort: Effort


def cache_folder(name: str) -> Path:
    """Return a folder in the user's cache; it need not exist."""
    from platformdirs import user_cache_path  # here, as only files need it

    return user_cache_path("lade", appauthor=False) / name


def tables_folder() -> Path:
    """Return the folder of all tables in the user's cache; it need not exist."""
    return cache_folder("tables")


def table_for(model: Model, folder: Path | None = None) -> SuccessorTable | None:
    """Return the prewarmed table of a model, or None.

    Writes nothing, and computes nothing if there is no folder of tables. A table that cannot be
    used, for whatever reason, is ignored with a warning: decoding works without it. Tensor-parallel
    models use none, because each process has only a part of the weights.
    """
    try:
        folder = tables_folder() if folder is None else folder
        # os.path never raises: a folder that we may not look into has no tables for us.
        if mesh_of(model) is not None or not os.path.isdir(folder):
            return None
        path = path_of_table(model, folder)
        return read_table(path, model).table if os.path.isfile(path) else None
    except UnsupportedModelError:  # nothing tells it from others
        return None
    except Exception as error:  # the model's, or that of a damaged file
        name, kind = type(without_compiler(model)).__name__, type(error).__name__
        reason = str(error) if isinstance(error, ValueError | OSError) else f"{kind}: {error}"
        warnings.warn(f"lade does not use its table for {name}: {reason}", stacklevel=2)
        return None


def path_of_table(model: Model, folder: Path | None = None) -> Path:
    """Return the file of a model's table, which need not exist.

    Raises:
        UnsupportedModelError: the model is tensor-parallel, or has no weights in memory to
            recognise it by.
    """
    name = type(without_compiler(model)).__name__
    if mesh_of(model) is not None:
        raise UnsupportedModelError(
            f"{name} is tensor-parallel; no process has the weights that its table is known by"
        )
    fingerprint = fingerprint_of(model)
    if fingerprint is None:
        raise UnsupportedModelError(f"{name} has no weights in memory to be recognised by")
    return (tables_folder() if folder is None else folder) / f"{fingerprint}.safetensors"


def read_table(path: Path, model: Model, capacity: int | None = None) -> StoredTable:
    """Read the table of a model; an empty one if there is no file.

    Args:
        capacity: as for `SuccessorTable.from_arrays`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, or not a table of this model.
    """
    if not path.exists():
        return StoredTable(SuccessorTable(capacity or DEFAULT_MAX_CONTEXTS), Effort())
    vocab_size = _vocab_size(model)
    try:
        with safe_open(path, framework="numpy") as file:
            described = _described(file.metadata() or {})
            if described["fingerprint"] != path.stem or described["vocab_size"] != vocab_size:
                raise ValueError("it is the table of another model")
            effort = _effort_of(described["effort"], vocab_size)
            table = _table_in(file, vocab_size, capacity)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"expected a table that lade.prewarm made for this model in {path}, remove it to begin "
            f"anew; got a file that cannot be used ({type(error).__name__}: {error})"
        ) from error
    return StoredTable(table, effort)


def merge_table(
    path: Path, model: Model, added: StoredTable, max_contexts: int = DEFAULT_MAX_CONTEXTS
) -> StoredTable:
    """Add to the table of a model in its file, which is made if there is none.

    One process at a time does so; a process that is killed meanwhile holds up none, and leaves the
    file as it was.

    Returns:
        What the file holds now.

    Raises:
        OSError: the file cannot be read or written, or another process keeps it for a minute.
        ValueError: the file is damaged, or a token is not in the model's vocabulary.
    """
    tokens = added.table.arrays()["token_ids"]
    if tokens.max(initial=0) >= (vocab_size := _vocab_size(model)):
        raise ValueError(f"expected token ids below {vocab_size}, got {tokens.max()}")
    from filelock import FileLock  # here, as only writers need it

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), timeout=_LOCK_SEC):
        stored = read_table(path, model, max_contexts)
        stored.table.update(added.table)
        stored.effort.add(added.effort)
        write_table(path, model, stored)
    return stored


def effort_of(model: Model) -> Effort:
    """Return what went into the table of a model in the user's cache; nothing, if it has none.

    Raises:
        OSError: the file cannot be read.
        UnsupportedModelError: as for `path_of_table`.
        ValueError: the file is damaged, or not a table of this model.
    """
    return read_table(path_of_table(model), model).effort


def write_table(path: Path, model: Model, stored: StoredTable) -> None:
    """Write the table of a model.

    The file is renamed into place, so a reader sees either the old one or the new one. What it had
    is lost: see `merge_table`. Unfinished files of killed processes are removed.

    Raises:
        OSError: the file cannot be written.
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
    sweep(path.parent, "[0-9a-f]" * 64)  # of any model
    write_whole(path, content)


def _vocab_size(model: Model) -> int:
    vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
    return vocab_size


def load_table(path: Path, vocab_size: int) -> SuccessorTable:
    """Read a table without its model.

    Args:
        path: of the file.
        vocab_size: all token ids of the table must be below it.

    Raises:
        ValueError: the file is damaged, not a table, or made for another vocabulary.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            return _table_in(file, vocab_size)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"expected a table that lade prewarm made in {path}: {error}") from error


def _described(metadata: dict[str, str]) -> Any:
    """Return the file's description of its table, or raise."""
    text = metadata[_KEY]
    if len(text) > _MAX_DESCRIPTION_LENGTH:
        raise ValueError(
            f"expected a description of at most {_MAX_DESCRIPTION_LENGTH} characters, "
            f"got {len(text)}"
        )
    described = json.loads(text)
    if described["format"] != _FORMAT:
        raise ValueError(f"expected format {_FORMAT}, got {described['format']!r}")
    return described


def _effort_of(described: Any, vocab_size: int) -> Effort:
    """Return what went into a table, or raise: another run continues from these numbers."""
    effort = Effort(**described)
    for name, types, most in (
        ("prefix_token_id", (int, type(None)), vocab_size - 1),
        ("num_tokens", (int,), _MAX_COUNT),
        ("seconds", (int, float), _MAX_COUNT),
    ):
        value = getattr(effort, name)
        # The type itself, since True is an instance of int. NaN fails every comparison.
        if type(value) not in types or not (value is None or 0 <= value <= most):
            raise ValueError(f"expected {name} from 0 to {most}, got {value!r}")
    return effort


def _table_in(file: Any, vocab_size: int, capacity: int | None = None) -> SuccessorTable:
    """Return the table in an open file; raise before anything large is allocated."""
    _check_header(file)
    names = file.keys()
    arrays: dict[str, NDArray[Any]] = {name: file.get_tensor(name) for name in names}
    table = SuccessorTable.from_arrays(arrays, capacity)
    if len(table) and arrays["token_ids"].max() >= vocab_size:
        raise ValueError("it has tokens that the model has not")
    return table


def _check_header(file: Any) -> None:
    """Raise unless the header of a file is that of a table.

    Safetensors itself checks that the arrays fill the file, so rows cannot be claimed without their
    bytes. Zero rows take no bytes whatever length they claim, hence the bound on that length.
    """
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    found = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    _, shape = found.get("token_ids", ("", []))
    num_rows, num_successors = shape if len(shape) == 2 else (0, 0)
    expected = {
        "keys": ("I64", [num_rows]),
        "counts": ("I32", [num_rows]),
        "token_ids": ("I32", [num_rows, num_successors]),
        "costs": ("U16", [num_rows, num_successors]),
    }
    if found != expected or not 1 <= num_successors <= _MAX_SUCCESSORS:
        raise ValueError(
            f"expected arrays {', '.join(expected)} with a row for each key, and 1 to "
            f"{_MAX_SUCCESSORS} successors in it, got others"
        )
