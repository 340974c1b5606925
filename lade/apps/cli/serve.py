"""`lade serve`: its options and help texts, which fit on a screen; their checks; the process."""

import logging
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Literal

import typer

from lade._version import __version__
from lade.apps.cli.loading import console, note, working
from lade.apps.cli.options import IS_FILE, LoadOptions, check_pools, grouped, of_drafting, of_model
from lade.errors import UserError

if TYPE_CHECKING:
    from lade.apps.server.options import ServerOptions
    from lade.models.loading import LoadedModel

# Defaults are in the help texts, in brackets: typer's own take a line each.
_of_server = partial(typer.Option, rich_help_panel="Server", show_default=False)
_of_drafting = partial(of_drafting, show_default=False)
_Unknown = Literal["refuse", "ignore"]
_KEY: Any = {"metavar": "KEY", "envvar": "LADE_API_KEY", "show_envvar": False}


@grouped
def serve(
    *,
    host: str = _of_server("127.0.0.1", metavar="NAME", help="Listen at this address [127.0.0.1]."),
    port: int = _of_server(8000, help="Listen at this port, 0 for any [8000]."),
    api_key: list[str] | None = _of_server(
        None, help="Let in who has this key; or $LADE_API_KEY.", **_KEY
    ),
    api_keys_file: Path | None = _of_server(
        None, help="Read keys and their rights from a file.", **IS_FILE
    ),
    allowed_host: list[str] | None = _of_server(
        None, metavar="NAME", help="Accept this Host header, such as a proxy's."
    ),
    model_name: str | None = _of_server(None, metavar="NAME", help="Call the model so in the API."),
    max_batch_size: int = _of_server(16, help="Answer so many requests at once [16]."),
    max_queue: int = _of_server(100, help="Let so many requests of a key wait [100]."),
    max_prompt_tokens: int | None = _of_server(None, help="Longest prompt [the model's context]."),
    max_new_tokens: int = _of_server(4096, help="Refuse requests for longer answers [4096]."),
    timeout: float = _of_server(600.0, help="End a request after so many seconds [600]."),
    grace_sec: float = _of_server(30.0, help="Finish answers so long at shutdown [30]."),
    unknown_fields: _Unknown = _of_server(
        "refuse", metavar="WHAT", help="Refuse or ignore unknown fields [refuse]."
    ),
    pools: Path | None = _of_drafting(
        None, metavar="FOLDER", help="Keep all users' pools in a folder.", file_okay=False
    ),
    share_pool: bool = _of_drafting(
        False, "--share-pool", help="Share one pool among all requests."
    ),
    pool_memory_bytes: int = _of_drafting(2**30, help="Use so much memory for pools [1 GiB]."),
    max_prefix_bytes: int = _of_drafting(
        2**30, min=0, help="Use so much for kept prefixes [1 GiB]."
    ),
    pool: list[Path] | None = _of_drafting(
        None, help="Also draft from a pool file.", callback=check_pools, **IS_FILE
    ),
    corpus: list[str] | None = _of_drafting(
        None, metavar="NAME=FILE", help="Let requests name this pool file."
    ),
    max_draft_tokens: int | None = _of_drafting(
        None, min=0, help="Verify at most N draft tokens a step."
    ),
    prewarm: bool = _of_drafting(False, "--prewarm", help="Prewarm the model while idle."),
    model: str | None = of_model(None, metavar="ID", help="Load a Hugging Face id or a folder."),
    device: str | None = of_model(None, metavar="NAME", help="Compute on cpu, cuda, cuda:1, …"),
    dtype: str | None = of_model(
        None, metavar="NAME", help="Compute in float32, bfloat16, float16, …"
    ),
    threads: int | None = of_model(None, help="Use N CPU threads."),
    trust_remote_code: bool = of_model(
        False, "--trust-remote-code", help="Run the model's own code."
    ),
) -> None:
    """Serve a model by an OpenAI-compatible API; each key and "user" has a pool."""
    if not 0 <= port < 2**16:
        raise UserError(f"expected a port of 0 to 65535, got {port}")
    if pools is not None:
        _check_folder(pools)
    read_keys = partial(_keys_of, api_key or [], api_keys_file)
    from lade.apps.server.access import bound, is_local
    from lade.apps.server.options import ServerOptions
    from lade.config import Config  # imports torch

    bound(host, port).close()  # an error comes before a model is loaded
    keys = read_keys()
    options = ServerOptions(
        model_name=model_name,
        api_keys=keys,
        shares_pool=share_pool,
        is_for_one=is_local(host) and not keys,
        layers=pool or [],
        corpora=_corpora_of(corpus or []),
        pools=pools,
        pool_memory_bytes=pool_memory_bytes,
        allowed_hosts=allowed_host or [],
        max_batch_size=max_batch_size,
        max_queue=max_queue,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        timeout_sec=timeout,
        grace_sec=grace_sec,
        ignores_unknown=unknown_fields == "ignore",
        prewarms=prewarm,
        config=Config(max_draft_tokens=max_draft_tokens, max_prefix_bytes=max_prefix_bytes),
    )
    loaded = LoadOptions(model, device, dtype, threads, trust_remote_code).load()
    _run(loaded, options, read_keys, host, port)


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


def _check_folder(path: Path) -> None:
    """Make a folder for pools, and check that files can be made in it.

    Raises:
        UserError: they cannot.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        TemporaryFile(dir=path).close()
    except OSError as error:
        raise UserError(f"cannot keep pools in {path}: {error.strerror}") from None


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
    from lade.apps.cli.prewarm import note_idle_prewarming
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
