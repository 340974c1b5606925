"""Files that are replaced as a whole: a reader sees the old one or the new one.

Next file: `files.py`.
"""

import os
import secrets
import time
from contextlib import suppress
from glob import escape
from pathlib import Path

# Of a file's name, as many characters as the unfinished one begins with.
MAX_STEM_LENGTH = 64
# Writing a file takes seconds, which others wait for. A day allows for a writer whose machine was
# suspended, and for the clock of a network folder.
LOCK_SEC = 60.0
_STALE_SEC = 24 * 60 * 60


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file that only its owner may read; its folder is made if there is none.

    Whenever this is interrupted, even by a power cut, the path names the old file or the new one,
    whole. Whoever has the old one open keeps it. What a killed process left of the file is removed
    after a day.

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
    stem = path.stem[:MAX_STEM_LENGTH]
    made = path.with_name(f"{stem}.making-{secrets.token_hex(8)}")
    sweep(path.parent, escape(stem))
    try:
        with open(
            made, "xb", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600)
        ) as file:
            for part in parts:
                left = memoryview(part).cast("B")
                while left:
                    left = left[os.write(file.fileno(), left) :]
            os.fsync(file.fileno())  # else a power cut can leave the new name without content
        os.replace(made, path)
    finally:
        with suppress(OSError):  # it is gone, unless this was broken off
            made.unlink()
    # The folder's names are to outlast a power cut, too: else the old file might come back.
    with suppress(OSError):  # not every system, or file system, can
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sweep(folder: Path, stems: str = "*") -> None:
    """Remove unfinished files that killed processes left a day ago or longer; never fail.

    Args:
        folder: where to look.
        stems: pattern of the files' names, without their suffixes; at most 64 characters long.
    """
    with suppress(OSError):
        for made in folder.glob(f"{stems}.making-{'[0-9a-f]' * 16}"):
            with suppress(OSError):
                if time.time() - made.lstat().st_mtime > _STALE_SEC:
                    made.unlink()
