"""`lade serve`: a model for OpenAI's clients."""

import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from lade._version import __version__
from lade.cli.loading import console, note, working
from lade.cli.options import check_pools
from lade.errors import UserError
from lade.models.loading import LoadedModel
from lade.server.access import is_local
from lade.server.options import ServerOptions


def keys_of(keys: Sequence[str], path: Path | None) -> list[str]:
    """Return API keys with their rights, from options and from the lines of a file.

    Raises:
        OSError: the file cannot be read.
        UserError: the file has none, or is no text in UTF-8.
    """
    if path is None:
        return [*keys]
    if os.name == "posix" and path.stat().st_mode & 0o077:
        note(f"other users of this machine may read {path}; chmod 600 keeps them off")
    try:
        text = path.read_text(encoding="utf-8-sig")  # with a byte order mark or without
    except UnicodeDecodeError:
        raise UserError(f"expected API keys in {path} as UTF-8, got another encoding") from None
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise UserError(f"expected API keys in {path}, a line each, got none")
    return [*keys, *found]


def check_folder(path: Path) -> None:
    """Make a folder for pools, and check that files can be made in it.

    Raises:
        UserError: they cannot.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        TemporaryFile(dir=path).close()
    except OSError as error:
        raise UserError(f"cannot keep pools in {path}: {error.strerror}") from None


def corpora_of(asked: Sequence[str]) -> dict[str, Path]:
    """Return the pools of `--corpus NAME=FILE`, by name.

    Raises:
        UserError, ngram_pool.PoolFileError: one is of another form, or no pool, or two have one
            name.
    """
    paths: dict[str, Path] = {}
    for each in asked:
        name, _, path = each.partition("=")
        if not (name and path) or name in paths:
            raise UserError(f"expected --corpus NAME=FILE, once for each name, got {each!r}")
        if not Path(path).is_file():
            raise UserError(f"no such file: {path}")
        paths[name] = Path(path)
    check_pools([*paths.values()])
    return paths


def run(
    loaded: LoadedModel,
    options: ServerOptions,
    read_keys: Callable[[], Sequence[str]],
    host: str,
    port: int,
) -> None:
    """Serve until SIGTERM or Ctrl-C; SIGHUP reads the keys again."""
    from lade.cli.bench import describe_model
    from lade.cli.prewarm import note_idle_prewarming
    from lade.models.prompts import num_positions
    from lade.probing.plan import probe
    from lade.server.app import Server

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("lade.server").setLevel(logging.INFO)
    if not is_local(host) and not options.api_keys:
        note(f"everybody who reaches {host} may use this model; --api-key lets only some")
    with working("Checking how the model verifies drafts"):
        server = Server(loaded, options, host=host, port=port)
    console.print(
        f"{server.name} is served at {server.url}; Ctrl-C stops it", markup=False, soft_wrap=True
    )
    described, context = describe_model(loaded), num_positions(loaded.model)
    console.print(
        f"[dim]lade {__version__}; {described.get('weights', described['dtype'])} on "
        f"{described['device']}, {described['threads']} threads; a context of "
        f"{f'{context:,}' if context else 'any number of'} tokens; drafts verified by "
        f"{probe(loaded.model).verification}[/dim]",
        soft_wrap=True,
    )
    if server.idle is not None:
        note_idle_prewarming(server.idle)
    if options.is_for_one and not options.shares_pool:
        console.print(
            '[dim]One user is assumed: requests without a "user" share a pool and kept prefixes, '
            "which speeds up later ones. --api-key separates users.[/dim]",
            soft_wrap=True,
        )
    elif not (options.api_keys or options.shares_pool):
        console.print(
            '[dim]A request profits from earlier ones if it has a "user" or a "cache_salt"; '
            "--share-pool is for a machine with one user.[/dim]",
            soft_wrap=True,
        )

    def read_again(*_: Any) -> None:
        try:
            server.keys.replace(read_keys())
        except (OSError, ValueError) as error:
            note(f"the keys stay as they were: {error}")
        else:
            note("the keys were read again")

    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, read_again)
    server.run()
