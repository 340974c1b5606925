"""`lade serve`: a model for OpenAI's clients."""

import importlib.util
import ipaddress
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lade.cli.loading import console, note
from lade.errors import MissingExtraError
from lade.models.loading import LoadedModel
from lade.server.options import ServerOptions

# What the extra `serve` brings; each may be there without the others.
_NEEDED = ("fastapi", "openai", "prometheus_client", "uvicorn", "xgrammar")


def check_extra() -> None:
    """Raise before any work is done if a package is missing.

    Raises:
        MissingExtraError: it is; the message has the pip command.
    """
    for module in _NEEDED:
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(module, "serve")


def read_keys(keys: Sequence[str], path: Path | None) -> list[str]:
    """Return API keys given one by one, and those of a file's lines.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has none.
    """
    if path is None:
        return [*keys]
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ValueError(f"expected API keys in {path}, a line each, got none")
    return [*keys, *found]


def run(loaded: LoadedModel, options: ServerOptions, host: str, port: int) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    from lade.server.app import Server

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("lade.server").setLevel(logging.INFO)
    _allow_many_files()
    if not _is_local(host) and not options.api_keys:
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
    server.run()


def _is_local(host: str) -> bool:
    """Return whether only this machine reaches an address to listen at."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _allow_many_files() -> None:
    """Let the process have as many connections as the system lets it."""
    with suppress(ImportError, ValueError, OSError):  # none on Windows
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
