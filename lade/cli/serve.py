"""`lade serve`: a model for OpenAI's clients."""

import ctypes
import importlib.util
import logging
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lade.cli.loading import console, note
from lade.cli.options import check_pool
from lade.errors import MissingExtraError, UserError
from lade.hosts import is_local
from lade.models.loading import LoadedModel
from lade.server.options import ServerOptions

_M_ARENA_MAX = -8  # of glibc's malloc.h
# What the extra `serve` brings; each may be there without the others.
_NEEDED = ("prometheus_client", "pydantic", "starlette", "uvicorn", "llguidance")


def check_extra() -> None:
    """Raise before any work is done if a package is missing.

    Raises:
        MissingExtraError: it is; the message has the pip command.
    """
    for module in _NEEDED:
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(module, "serve")


class KeySource(NamedTuple):
    """Where API keys come from: one by one, and from the lines of a file, with their rights."""

    keys: Sequence[str]
    path: Path | None

    def read(self) -> list[str]:
        """Return the keys.

        Raises:
            OSError: the file cannot be read.
            UserError: the file has none.
        """
        if self.path is None:
            return [*self.keys]
        if os.name == "posix" and self.path.stat().st_mode & 0o077:
            note(f"other users of this machine may read {self.path}; chmod 600 keeps them off")
        lines = [line.strip() for line in self.path.read_text(encoding="utf-8").splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise UserError(f"expected API keys in {self.path}, a line each, got none")
        return [*self.keys, *found]


def corpora_of(asked: Sequence[str]) -> dict[str, Path]:
    """Return the pools of `--corpus NAME=FILE`, by name.

    Raises:
        UserError, ngram_pool.PoolFileError: one is of another form, or no pool, or two have one
            name.
    """
    paths: dict[str, Path] = {}
    for each in asked:
        name, _, path = each.partition("=")
        if not Path(path).is_file() or name in paths:
            raise UserError(f"expected --corpus NAME=FILE, once for each name, got {each!r}")
        check_pool(Path(path))
        paths[name] = Path(path)
    return paths


def run(loaded: LoadedModel, options: ServerOptions, keys: KeySource, host: str, port: int) -> None:
    """Serve until SIGTERM or Ctrl-C; SIGHUP reads the keys again."""
    from lade.server.app import Server

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("lade.server").setLevel(logging.INFO)
    _allow_many_files()
    share_arenas()
    if not is_local(host) and not options.api_keys:
        note(f"everybody who reaches {host} may use this model; --api-key lets only some")
    console.print("[dim]Checking how the model verifies drafts …[/dim]")
    server = Server(loaded, options, host=host, port=port)
    console.print(
        f"{server.name} is served at {server.url}; Ctrl-C stops it", markup=False, soft_wrap=True
    )
    if not (options.api_keys or options.shares_pool):
        console.print(
            '[dim]A request profits from earlier ones if it has a "user" or a "cache_salt"; '
            "--share-pool is for a machine with one user.[/dim]",
            soft_wrap=True,
        )

    def read_again(*_: Any) -> None:
        try:
            server.keys.replace(keys.read())
        except (OSError, ValueError) as error:
            note(f"the keys stay as they were: {error}")
        else:
            note("the keys were read again")

    if hasattr(signal, "SIGHUP") and keys.path is not None:
        signal.signal(signal.SIGHUP, read_again)
    server.run()


def share_arenas() -> None:
    """Have all threads allocate from two arenas, unless the environment says how many.

    glibc gives each of a server's many threads one of its own, and every one of them keeps what the
    largest answer in it took.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(OSError, TypeError, AttributeError):  # only glibc has arenas
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def _allow_many_files() -> None:
    """Let the process have as many connections as the system lets it."""
    with suppress(ImportError, ValueError, OSError):  # none on Windows
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
