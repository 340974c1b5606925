"""Files that are replaced as a whole: a reader sees the old one or the new one.

Next file: `files.py`.
"""

import os
import secrets
import time
from contextlib import suppress
from glob import escape
from pathlib import Path

# Number of characters of a file's name that the name of its unfinished version begins with.
MAX_STEM_LENGTH = 64
# Writing a file takes seconds. A day allows for a suspended machine, and for the clock of a network
# folder.
_STALE_SEC = 24 * 60 * 60


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file that only its owner may read; its folder is made if there is none.

    After an interruption, even by a power cut, the path names the whole old file or the whole new
    one. A process that has the old file open keeps it. Unfinished files of killed processes are
    removed after a day.

    Args:
        path: the file; a link is followed.
        parts: contents, one after the other.

    Raises:
        OSError: the file cannot be written; no unfinished file is left.
    """
    path = Path(os.path.realpath(path))  # else the link would be replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not mkstemp: an interruption before it returns the name would leave the file behind.
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
        with suppress(OSError):  # exists only after an interruption or error
            made.unlink()
    # The folder's entry must survive a power cut, too: else the old file might come back.
    with suppress(OSError):  # not every system, or file system, supports this
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sweep(folder: Path, stems: str = "*") -> None:
    """Remove unfinished files that killed processes left at least a day ago; never fail.

    Args:
        folder: the folder of the files.
        stems: pattern of the files' names, without their suffixes; at most 64 characters long.
    """
    with suppress(OSError):
        for made in folder.glob(f"{stems}.making-{'[0-9a-f]' * 16}"):
            with suppress(OSError):
                if time.time() - made.lstat().st_mtime > _STALE_SEC:
                    made.unlink()
