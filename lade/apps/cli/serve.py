"""`lade serve`: its options and help texts, which fit on a screen; their checks; the process."""

import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Literal

from lade._version import __version__
from lade.apps.cli.loading import console, note, working
from lade.apps.cli.options import IS_FILE, LoadOptions, check_pools, grouped, of_drafting, option
from lade.errors import UserError

if TYPE_CHECKING:
    from lade.apps.server.options import ServerOptions
    from lade.models.loading import LoadedModel

_Unknown = Literal["refuse", "ignore"]
_KEY: Any = {"metavar": "KEY", "envvar": "LADE_API_KEY", "show_envvar": False}


@dataclass(frozen=True)
class ServingOptions:
    """The fields of `ServerOptions` that are options as they are; None for its default."""

    allowed_hosts: list[str] | None = option(
        None, "--allowed-host", metavar="NAME", help="Accept this Host header, a proxy's."
    )
    model_name: str | None = option(None, metavar="NAME", help="Call the model so in the API.")
    max_batch_size: int = option(16, help="Answer so many requests at once [16].")
    max_queue: int = option(100, help="Let so many requests of a key wait [100].")
    max_prompt_tokens: int | None = option(None, help="Longest prompt [the model's context].")
    max_new_tokens: int = option(4096, help="Refuse requests for more tokens [4096].")
    timeout_sec: float = option(600.0, "--timeout", help="End a request after T seconds [600].")
    grace_sec: float = option(30.0, help="At a stop, finish answers for T s [30].")
    pools: Path | None = of_drafting(
        None, metavar="FOLDER", help="Keep all users' pools in a folder.", file_okay=False
    )
    shares_pool: bool = of_drafting(
        False, "--share-pool", help="Share one pool among all requests."
    )
    pool_memory_bytes: int = of_drafting(2**30, help="Use so much memory for pools [1 GiB].")
    layers: list[Path] | None = of_drafting(
        None, "--pool", help="Also draft from a pool file.", callback=check_pools, **IS_FILE
    )
    prewarms: bool = of_drafting(False, "--prewarm", help="Prewarm the model while idle.")


@grouped
def serve(
    *,
    host: str = option("127.0.0.1", metavar="NAME", help="Listen at this address [127.0.0.1]."),
    port: int = option(8000, help="Listen at this port, 0 for any [8000]."),
    api_key: list[str] | None = option(None, help="Let this key in; or $LADE_API_KEY.", **_KEY),
    api_keys_file: Path | None = option(
        None, help="Read keys and their rights from a file.", **IS_FILE
    ),
    unknown_fields: _Unknown = option(
        "refuse", metavar="WHAT", help="Refuse or ignore unknown fields [refuse]."
    ),
    serving: ServingOptions,
    max_prefix_bytes: int = of_drafting(
        2**30, min=0, help="Use so much for kept prefixes [1 GiB]."
    ),
    corpus: list[str] | None = of_drafting(
        None, metavar="NAME=FILE", help="Let requests name this pool file."
    ),
    max_draft_tokens: int | None = of_drafting(
        None, min=0, help="Verify at most N draft tokens a step."
    ),
    loading: LoadOptions,
) -> None:
    """Serve a model by an OpenAI-compatible API; each key and "user" has a pool."""
    if not 0 <= port < 2**16:
        raise UserError(f"expected a port of 0 to 65535, got {port}")
    if (pools := serving.pools) is not None:
        try:
            pools.mkdir(mode=0o700, parents=True, exist_ok=True)
            TemporaryFile(dir=pools).close()
        except OSError as error:
            raise UserError(f"cannot keep pools in {pools}: {error.strerror}") from None
    read_keys = partial(_keys_of, api_key or [], api_keys_file)
    from lade.apps.server.access import is_local, listening
    from lade.apps.server.options import ServerOptions
    from lade.config import Config  # imports torch

    listening(host, port).close()  # an error comes before a model is loaded
    keys = read_keys()
    given: dict[str, Any] = {n: value for n, value in vars(serving).items() if value is not None}
    options = ServerOptions(
        **given,
        api_keys=keys,
        is_for_one=is_local(host) and not keys,
        corpora=_corpora_of(corpus or []),
        ignores_unknown=unknown_fields == "ignore",
        config=Config(max_draft_tokens=max_draft_tokens, max_prefix_bytes=max_prefix_bytes),
    )
    _run(loading.load(), options, read_keys, host, port)


def _keys_of(keys: Sequence[str], path: Path | None) -> list[str]:
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


def _corpora_of(asked: Sequence[str]) -> dict[str, Path]:
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


def _run(
    loaded: "LoadedModel",
    options: "ServerOptions",
    read_keys: Callable[[], Sequence[str]],
    host: str,
    port: int,
) -> None:
    """Serve until SIGTERM or Ctrl-C; SIGHUP reads the keys again."""
    from lade.apps.cli.bench import describe_model
    from lade.apps.cli.generate import note_idle_prewarming
    from lade.apps.server.access import is_local
    from lade.apps.server.app import Server
    from lade.models.prompts import num_positions
    from lade.probing.plan import probe

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("lade.apps.server").setLevel(logging.INFO)
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
