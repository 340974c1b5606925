"""Checks of files, folders and ports that a command will want, before it imports torch."""

import socket
import tempfile
from pathlib import Path


def check_place(path: Path) -> None:
    """Raise if a file could not be written at a path later.

    Raises:
        ValueError: there is no such folder.
        OSError: nothing can be written to it.
    """
    if not path.parent.is_dir():
        raise ValueError(f"no such folder: {path.parent}")
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def check_pool(path: Path) -> None:
    """Raise if a file does not begin as a pool's does.

    Raises:
        PoolFileError: it is another file, or of a newer format.
        OSError: it cannot be read.
    """
    from ngram_pool.files import check_begin  # imports Numba

    check_begin(path)


def check_port(host: str, port: int) -> None:
    """Raise if a port is taken; 0 asks for a free one.

    Raises:
        ValueError: another program listens there, or the address is none of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"cannot listen at {host}:{port}: {error.strerror}; --port names another port"
            ) from None
