"""Files in the user's cache: where they are, and how they are replaced as a whole."""

import os
import secrets
from contextlib import suppress
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return a folder in the user's cache; it need not exist."""
    from platformdirs import user_cache_path  # here, as only files need it

    return user_cache_path("lade", appauthor=False) / name


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read; a reader sees the old one or the new one.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of our own rather than mkstemp's: an interruption before we know mkstemp's name would
    # leave the file behind.
    made = path.with_name(f"{path.stem}.making-{secrets.token_hex(8)}")
    try:
        with open(made, "xb", opener=_open_for_owner) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # else a power cut can leave the new name without content
        os.replace(made, path)
    except BaseException:
        with suppress(OSError):
            made.unlink()
        raise


def _open_for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
