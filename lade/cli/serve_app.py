"""`lade serve`: its options and help texts, which fit on a screen. Next file: `serve.py`."""

import socket
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from lade.cli.options import LoadOptions, check_pools, grouped
from lade.errors import UserError

# Defaults are in the help texts, in brackets: typer's own take a line each.
_of_server = partial(typer.Option, rich_help_panel="Server", show_default=False)
_of_drafting = partial(typer.Option, rich_help_panel="Drafting", show_default=False)
_of_model = partial(typer.Option, rich_help_panel="Model")
_Unknown = Literal["refuse", "ignore"]
_FILE = {"exists": True, "dir_okay": False}


@grouped
def serve(
    *,
    host: Annotated[
        str, _of_server(metavar="NAME", help="Address to listen at [127.0.0.1].")
    ] = "127.0.0.1",
    port: Annotated[int, _of_server(metavar="N", help="Port; 0 takes a free one [8000].")] = 8000,
    api_key: Annotated[
        list[str] | None,
        _of_server(
            metavar="KEY",
            help="Key that requests need; or $LADE_API_KEY.",
            envvar="LADE_API_KEY",
            show_envvar=False,
        ),
    ] = None,
    api_keys_file: Annotated[
        Path | None,
        _of_server(
            help="Lines of KEY [pools=NAME,…] [admin] [alone]",
            **_FILE,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        _of_server(metavar="NAME", help="Accept this Host header, such as a proxy's."),
    ] = None,
    model_name: Annotated[
        str | None, _of_server(metavar="NAME", help="The model's name in the API.")
    ] = None,
    max_batch_size: Annotated[
        int, _of_server(metavar="N", help="Answer so many requests at once [16].")
    ] = 16,
    max_queue: Annotated[
        int, _of_server(metavar="N", help="Let so many requests of a key wait [100].")
    ] = 100,
    max_prompt_tokens: Annotated[
        int | None, _of_server(help="Longest prompt [the model's context].")
    ] = None,
    max_new_tokens: Annotated[int, _of_server(metavar="N", help="Longest answer [4096].")] = 4096,
    timeout: Annotated[
        float, _of_server(metavar="T", help="End a request after so many seconds [600].")
    ] = 600.0,
    grace_sec: Annotated[
        float, _of_server(metavar="T", help="Seconds to finish answers at shutdown [30].")
    ] = 30.0,
    unknown_fields: Annotated[
        _Unknown, _of_server(metavar="WHAT", help="Refuse or ignore unknown fields [refuse].")
    ] = "refuse",
    keeps: Annotated[
        Path | None,
        _of_drafting(
            "--pools", metavar="FOLDER", help="Keep all users' pools in a folder.", file_okay=False
        ),
    ] = None,
    share_pool: Annotated[
        bool, _of_drafting("--share-pool", help="Share one pool among all requests.")
    ] = False,
    pool_memory_bytes: Annotated[
        int, _of_drafting(metavar="N", help="Memory for pools [1 GiB].")
    ] = 2**30,
    max_prefix_bytes: Annotated[
        int, _of_drafting(metavar="N", min=0, help="Memory for kept prefixes [1 GiB].")
    ] = 2**30,
    pool: Annotated[
        list[Path] | None,
        _of_drafting(help="Also draft from a pool file.", callback=check_pools, **_FILE),
    ] = None,
    corpus: Annotated[
        list[str] | None,
        _of_drafting(metavar="NAME=FILE", help="Pool file that requests may name."),
    ] = None,
    max_draft_tokens: Annotated[
        int | None, _of_drafting(min=0, help="At most so many draft tokens a step.")
    ] = None,
    prewarm: Annotated[
        bool, _of_drafting("--prewarm", help="Prewarm the model while idle.")
    ] = False,
    model: Annotated[
        str | None, _of_model(metavar="ID", help="A Hugging Face id or a folder.")
    ] = None,
    device: Annotated[str | None, _of_model(metavar="NAME", help="cpu, cuda, cuda:1, …")] = None,
    dtype: Annotated[
        str | None, _of_model(metavar="NAME", help="float32, bfloat16, float16, …")
    ] = None,
    threads: Annotated[int | None, _of_model(help="CPU threads.")] = None,
    trust_remote_code: Annotated[
        bool, _of_model("--trust-remote-code", help="Run the model's own code.")
    ] = False,
) -> None:
    """Serve a model by an OpenAI-compatible API; each key and "user" has a pool."""
    if not 0 <= port < 2**16:
        raise UserError(f"expected a port of 0 to 65535, got {port}")
    _check_port(host, port)
    from lade.cli.serve import check_folder, corpora_of, keys_of, run

    if keeps is not None:
        check_folder(keeps)
    read_keys = partial(keys_of, api_key or [], api_keys_file)
    from lade.config import Config
    from lade.server.access import is_local
    from lade.server.options import ServerOptions

    keys = read_keys()
    options = ServerOptions(
        model_name=model_name,
        api_keys=keys,
        shares_pool=share_pool,
        is_for_one=is_local(host) and not keys,
        layers=pool or [],
        corpora=corpora_of(corpus or []),
        pools=keeps,
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
    loaded = LoadOptions(device, dtype, threads, trust_remote_code).load(model)
    run(loaded, options, read_keys, host, port)


def _check_port(host: str, port: int) -> None:
    """Raise if a port is taken; 0 takes a free one.

    Raises:
        UserError: another program listens there, or the address is none of this machine.
    """
    if not host:  # which would let everybody in
        raise UserError("expected an address to listen at, got ''")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            listener.bind((host, port))
        except socket.gaierror as error:
            raise UserError(f"cannot listen at {host}: {error.strerror}") from None
        except OSError as error:
            raise UserError(
                f"cannot listen at {host}:{port}: {error.strerror}; --port names another port"
            ) from None
