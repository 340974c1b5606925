"""`lade serve`: its options and help texts. Next file: `serve.py`."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lade.cli.options import DraftOptions, LoadOptions, ModelOption, grouped, of_drafting
from lade.hosts import check_port

_of_server = partial(typer.Option, rich_help_panel="Server")
_of_limits = partial(typer.Option, rich_help_panel="Limits")


@dataclass(frozen=True)
class ServingOptions:
    """What becomes the field of that name of `lade.server.options.ServerOptions`."""

    model_name: Annotated[
        str | None,
        _of_server(
            metavar="NAME", help="What clients call the model. Without it, as it was asked for."
        ),
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        _of_server(
            "--allowed-host",
            metavar="NAME",
            help="Take requests that call the server by this name, as a proxy's do; may be "
            "repeated. A server for this machine alone takes no others.",
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        _of_server(
            "--allowed-origin",
            metavar="URL",
            help="Let pages of this site send requests; may be repeated, * for all.",
        ),
    ] = None
    metrics_host: Annotated[str, _of_server(metavar="NAME", help="Address of --metrics-port.")] = (
        "127.0.0.1"
    )
    metrics_port: Annotated[
        int | None,
        _of_server(
            min=0,
            max=65535,
            help="Serve /metrics on a port of its own. Where there are keys it is nowhere else: it "
            "tells what others ask.",
        ),
    ] = None
    certificate: Annotated[
        Path | None,
        _of_server(help="Serve by TLS with this certificate, in PEM.", exists=True, dir_okay=False),
    ] = None
    private_key: Annotated[
        Path | None, _of_server(help="The key of --certificate.", exists=True, dir_okay=False)
    ] = None
    max_connections: Annotated[int, _of_limits(min=1, help="Clients that may be connected.")] = (
        10_000
    )
    max_batch_size: Annotated[
        int, _of_limits(min=1, help="Requests that are answered at once.")
    ] = 16
    max_batch_tokens: Annotated[
        int | None,
        _of_limits(
            min=1,
            help="Tokens of all requests that are answered at once, prompts and answers. Without "
            "it, as many as half of the free memory holds.",
        ),
    ] = None
    max_queue: Annotated[
        int,
        _of_limits(
            min=0,
            help="Requests of one key, or from one address, that may wait; more are sent away "
            "with 429.",
        ),
    ] = 100
    max_prompt_tokens: Annotated[
        int | None,
        _of_limits(min=1, help="The longest prompt. Without it, what the model has positions for."),
    ] = None
    max_new_tokens: Annotated[int, _of_limits(min=1, help="The longest answer.")] = 4096
    max_body_bytes: Annotated[int, _of_limits(min=1, help="The largest request.")] = 2**22
    timeout_sec: Annotated[
        float,
        _of_limits(
            "--timeout",
            min=0.001,
            help="Seconds for a request, from its first byte to the last of its answer.",
        ),
    ] = 600.0
    chunk_interval_sec: Annotated[
        float,
        _of_server(
            "--chunk-interval",
            min=0.0,
            help="Seconds between the chunks of a stream, so that nobody on the line sees how many "
            "tokens a step has. 0 sends them as they come.",
        ),
    ] = 0.0
    grace_sec: Annotated[
        float,
        _of_limits(
            "--grace",
            min=0.0,
            help="Seconds for answers that are under way when the server is told to stop.",
        ),
    ] = 30.0
    shares_pool: Annotated[
        bool,
        of_drafting(
            "--share-pool",
            help="One pool for all, as suits a machine with one user: the speed of an answer "
            "reveals to each what the others wrote.",
        ),
    ] = False
    corpora_bytes: Annotated[
        int,
        of_drafting(
            min=0,
            help="Memory for all of --corpus, beyond which the server takes no more of them.",
        ),
    ] = 2**30
    pool_memory_bytes: Annotated[int, of_drafting(min=1, help="Memory for pools.")] = 2**30
    pool_disk_bytes: Annotated[int, of_drafting(min=1, help="Disk for pools.")] = 2**34
    save_every_sec: Annotated[
        float,
        of_drafting(
            "--save-every", min=0.0, help="Seconds after which pools that learned are saved."
        ),
    ] = 60.0


@grouped
def serve(
    *,
    host: Annotated[
        str,
        _of_server(
            metavar="NAME",
            help="Address to listen at. 0.0.0.0 lets other machines in; give them API keys.",
        ),
    ] = "127.0.0.1",
    port: Annotated[int, _of_server(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        _of_server(
            metavar="KEY",
            help="Let in only those who send this key; may be repeated. Other users of this "
            "machine can see it; a file they cannot read is better, or the variable LADE_API_KEY, "
            "with blanks between several.",
            envvar="LADE_API_KEY",
            show_envvar=False,
        ),
    ] = None,
    api_keys_file: Annotated[
        Path | None,
        _of_server(
            help="Let in those who send a key of this file, which has one a line, and behind it "
            "pools=NAME,… or pools=* for the corpora that it may name, admin to change these, "
            "alone to draft and keep nothing, so that times tell others nothing of its text; "
            "SIGHUP reads it again.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    json_logs: Annotated[
        bool, _of_server("--json-logs", help="Log a JSON object for each line.")
    ] = False,
    serving: ServingOptions,
    keeps: Annotated[
        Path | None,
        of_drafting(
            "--pools",
            metavar="FOLDER",
            help="Keep everybody's pools in this folder. Without it, they end with the server.",
            file_okay=False,
        ),
    ] = None,
    corpus: Annotated[
        list[str] | None,
        of_drafting(
            metavar="NAME=PATH",
            help='Have requests with "pools": ["NAME"] draft from this pool too, a .pool file, or '
            "texts, files and folders as lade pool build takes them. May be repeated.",
        ),
    ] = None,
    max_prefix_bytes: Annotated[
        int, of_drafting(min=1, help="Memory for keys and values of earlier prompts and answers.")
    ] = 2**30,
    drafting: DraftOptions,
    model: ModelOption = None,
    loading: LoadOptions,
) -> None:
    """Serve a model to OpenAI's clients: chats, completions and responses, streamed or not.

    Every API key, and every "user" or "cache_salt" that requests name, has a pool of its own, from
    which nothing is drafted for anybody else.
    """
    if port:
        check_port(host, port)
    from lade.cli.serve import KeySource, check_extra, corpora_of, read_corpora, run

    check_extra()
    corpora = corpora_of(corpus or [])
    from lade.server.options import ServerOptions

    keys = KeySource(api_key or [], api_keys_file)
    options = ServerOptions(
        **{name: value for name, value in vars(serving).items() if value is not None},
        api_keys=keys.read(),
        layers=drafting.pools or [],
        pools=keeps,
        config=replace(drafting.config, max_prefix_bytes=max_prefix_bytes),
    )
    loaded = loading.load(model)
    options = replace(
        options,
        drafter=drafting.drafter(loaded, loading),
        corpora=read_corpora(corpora, loaded),
    )
    run(loaded, options, keys, host, port, has_json_logs=json_logs)
