"""Files that are replaced as a whole: a reader sees the old one or the new one.

Next file: `files.py`.
"""

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

# Written at once: Python notices an interrupt within a few ms.
_PIECE = 2**22
# Writing a file takes seconds. A day allows for a writer whose machine was suspended, and for the
# clock of a network folder.
_STALE_SEC = 24 * 60 * 60
_NUM_KEPT = 64  # characters of a file's name that the unfinished one begins with


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file that only its owner may read; its folder is made if there is none.

    Whenever this is interrupted, even by a power cut, the path names the old file or the new one,
    whole. Whoever has the old one open or mapped keeps it.

    Args:
        path: of the file; a link is followed.
        parts: contents, one after the other.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    path = Path(os.path.realpath(path))  # else the link would be replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of our own rather than mkstemp's: an interruption before we know mkstemp's name would
    # leave the file behind.
    made = path.with_name(f"{path.stem[:_NUM_KEPT]}.making-{secrets.token_hex(8)}")
    try:
        with open(made, "xb", buffering=0, opener=_open_for_owner) as file:
            for part in parts:
                _write(file.fileno(), part)
            os.fsync(file.fileno())  # else a power cut can leave the new name without content
        os.replace(made, path)
    except BaseException:
        with suppress(OSError):
            made.unlink()
        raise
    _keep_names(path.parent)


def sweep(folder: Path, stems: str) -> None:
    """Remove unfinished files that killed processes left; never fail.

    Args:
        folder: where to look.
        stems: pattern of the files' names, without their suffixes; at most 64 characters long.
    """
    with suppress(OSError):
        for made in folder.glob(f"{stems}.making-{'[0-9a-f]' * 16}"):
            with suppress(OSError):
                if time.time() - made.lstat().st_mtime > _STALE_SEC:
                    made.unlink()


def _write(descriptor: int, part: bytes | memoryview) -> None:
    left = memoryview(part).cast("B")
    while left:
        left = left[os.write(descriptor, left[:_PIECE]) :]


def _keep_names(folder: Path) -> None:
    """Have a folder's names outlast a power cut; without it, the old file might come back."""
    with suppress(OSError):  # not every system, or file system, can
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open_for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
