"""Files that are replaced as a whole: a reader sees the old one or the new one.

Next file: `files.py`.
"""

import os
import secrets
import time
from contextlib import suppress
from glob import escape
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Written at once: Python notices an interrupt within a few ms.
_PIECE = 2**22
# Where locks cannot tell, age does. Writing a file takes seconds; a day allows for a writer whose
# machine was suspended, and for the clock of a network folder.
_STALE_SEC = 24 * 60 * 60
_NUM_KEPT = 64  # characters of a file's name that the unfinished one begins with


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file that only its owner may read; its folder is made if there is none.

    Whenever this is interrupted, even by a power cut, the path names the old file or the new one,
    whole. Whoever has the old one open keeps it. What a killed process left of the file is removed.

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
    stem = path.stem[:_NUM_KEPT]
    made = path.with_name(f"{stem}.making-{secrets.token_hex(8)}")
    sweep(path.parent, escape(stem))
    try:
        with open(made, "xb", buffering=0, opener=_open_for_owner) as file:
            is_held = _hold(file.fileno())
            for part in parts:
                _write(file.fileno(), part)
            os.fsync(file.fileno())  # else a power cut can leave the new name without content
            if is_held:  # until it has its name
                os.replace(made, path)
        if not is_held:  # Windows renames no file that is open
            os.replace(made, path)
    finally:
        with suppress(OSError):  # it is gone, unless this was broken off
            made.unlink()
    _keep_names(path.parent)


def sweep(folder: Path, stems: str = "*") -> None:
    """Remove unfinished files that killed processes left, none that is being written; never fail.

    Args:
        folder: where to look.
        stems: pattern of the files' names, without their suffixes; at most 64 characters long.
    """
    with suppress(OSError):
        for made in folder.glob(f"{stems}.making-{'[0-9a-f]' * 16}"):
            with suppress(OSError):
                if _is_left(made):
                    made.unlink()


def _hold(descriptor: int) -> bool:
    """Have others see that a new file is being written, until it is closed; return whether."""
    is_held = False
    if fcntl is not None:
        with suppress(OSError):  # not every file system can
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = True
    return is_held


def _is_left(made: Path) -> bool:
    """Return whether nobody writes an unfinished file any more."""
    at = made.lstat()
    if fcntl is not None and at.st_size:  # an empty file may not be held yet
        with open(made, "rb+") as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:  # the file system has no locks
                pass
            else:
                return True
    return time.time() - at.st_mtime > _STALE_SEC


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
