"""Commands, their options and help texts; the implementations are in other modules.

Shared options are in `options.py`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lade.cli.failures import Telling
from lade.cli.options import (
    DRAFTING,
    MODEL_HELP,
    AssistantOption,
    DeviceOption,
    DtypeOption,
    FirstLayersOption,
    JsonOption,
    LearnOption,
    LimitOption,
    MarkdownOption,
    MaxDraftTokensOption,
    MaxNewTokensOption,
    ModelOption,
    PlotOption,
    PoolsOption,
    PredictionOption,
    PrewarmOption,
    PromptsOption,
    SavePoolOption,
    SeedOption,
    SystemOption,
    TemperatureOption,
    ThreadsOption,
    TopPOption,
    TrustOption,
    VerificationOption,
    check_pools,
    check_top_p,
    load,
    make_config,
    make_drafting,
)
from lade.cli.pool_app import pool


class _DebuggedAnywhere(TyperGroup):
    """Takes `--debug` behind a command's name as well, where users add it to what has failed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)  # what follows is no option
        rest = [arg for arg in args[:end] if arg != "--debug"] + args[end:]
        asks = rest and len(rest) < len(args)  # alone, it is no command, and help is shown
        return super().parse_args(ctx, ["--debug", *rest] if asks else rest)


app = typer.Typer(
    name="lade",
    help="Generate faster with any Hugging Face causal LM: no draft model, no training, same text.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",  # in which paragraphs flow
)

# Panels of the list of commands.
_USE = "Use"
_MEASURE = "Measure"
_INSPECT = "Inspect"
_WEB = "Web page"  # of the options of chat

# Panels of the help of `serve`.
_SERVER = "Server"
_LIMITS = "Limits"


@app.callback(cls=_DebuggedAnywhere, invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Show the traceback of every error; also behind a command's name."
        ),
    ] = False,
) -> None:
    """Handle the options given before a command."""
    context.ensure_object(Telling).has_tracebacks = debug
    if version:
        from lade._version import __version__

        print(__version__)
        raise typer.Exit


@app.command(rich_help_panel=_USE)
def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="What to ask; - reads it from standard input.")
    ],
    max_new_tokens: MaxNewTokensOption = 256,
    system: SystemOption = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Continue the prompt as it is, without the model's chat template."
        ),
    ] = False,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End the answer with this text; may be repeated."),
    ] = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = None,
    max_draft_tokens: MaxDraftTokensOption = None,
    verification: VerificationOption = None,
    assistant: AssistantOption = None,
    first_layers: FirstLayersOption = None,
    prediction: PredictionOption = None,
    pools: PoolsOption = None,
    save_pool: SavePoolOption = None,
    learns: LearnOption = True,
) -> None:
    """Answer one prompt; the text appears as it is generated."""
    from lade.chat.settings import Settings
    from lade.cli.prompting import AskedPrompt, new_seed

    stops = stop or []
    asked = AskedPrompt.read(prompt, system=system, is_raw=raw, stops=stops, prediction=prediction)
    seed = new_seed() if seed is None else seed
    check_top_p(temperature, top_p)
    settings = Settings(max_new_tokens, temperature, top_p, seed)
    config = make_config(max_draft_tokens, verification)
    check_pools(pools, save_pool, verification)
    drafting = make_drafting(assistant, first_layers, trust_remote_code, verification)
    loaded = load(model, device, dtype, threads, trust_remote_code)
    from lade.cli.generate import run  # imports transformers; wrong names fail before that

    drafter = drafting.make(loaded)
    run(asked, loaded, settings, config, pools or [], save_pool, learns, drafter)


@app.command(rich_help_panel=_USE)
def chat(
    max_new_tokens: MaxNewTokensOption = 1024,
    system: SystemOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = None,
    max_draft_tokens: MaxDraftTokensOption = None,
    verification: VerificationOption = None,
    assistant: AssistantOption = None,
    first_layers: FirstLayersOption = None,
    pools: PoolsOption = None,
    save_pool: SavePoolOption = None,
    learns: LearnOption = True,
    web: Annotated[
        bool,
        typer.Option(
            "--web",
            help="Chat on a page in your browser instead; needs the extra 'web'.",
            rich_help_panel=_WEB,
        ),
    ] = False,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Address to serve the page at. Without it 127.0.0.1, which only this machine "
            "reaches.",
            rich_help_panel=_WEB,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=65535,
            help="Port to serve the page at. Without it, the first free one from 7860 on.",
            rich_help_panel=_WEB,
        ),
    ] = None,
    share: Annotated[
        bool,
        typer.Option(
            "--share",
            help="Let Gradio's servers forward a public address to the page.",
            rich_help_panel=_WEB,
        ),
    ] = False,
    password: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Let in only those who give this password. Other users of this machine can see "
            "it; the variable LADE_PASSWORD is better.",
            rich_help_panel=_WEB,
        ),
    ] = None,
) -> None:
    """Chat with a model in this terminal, or with --web on a page in your browser.

    Answers appear as they come, with their speed; /help lists what else one can type, such as
    /plain, which answers by plain generate as well and compares. In a pipe, all of standard input
    is one question, and the answer is plain text.
    """
    from lade.cli.chat import read_question, run
    from lade.cli.prompting import new_seed, read_typed

    if web and save_pool:
        raise ValueError(
            "expected no --save-pool with --web, where each browser tab has a pool of its own"
        )
    if not web and (share or (host, port, password) != (None, None, None)):
        raise ValueError("expected --host, --port, --share and --password only with --web")
    if web:
        from lade.cli.web import run as serve  # a missing extra fails before the model is loaded
    question = None if web else read_question()
    check_top_p(temperature, top_p)
    system = None if system is None else read_typed(system)
    config = make_config(max_draft_tokens, verification)
    check_pools(pools, save_pool, verification)
    drafting = make_drafting(assistant, first_layers, trust_remote_code, verification)
    loaded = load(model, device, dtype, threads, trust_remote_code)
    from lade.chat.settings import Settings

    seed = new_seed() if seed is None else seed
    drafter = drafting.make(loaded)
    settings = Settings(max_new_tokens, temperature, top_p, seed)
    if web:
        address = (host or "127.0.0.1", port, share, password)
        serve(loaded, settings, config, system, pools or [], learns, *address, drafter)
    else:
        asked = (question, loaded, settings, config, system)
        run(*asked, pools or [], save_pool, learns, drafter)


@app.command(rich_help_panel=_USE)
def prewarm(
    seconds: Annotated[
        float,
        typer.Option(
            metavar="T", min=1.0, help="Work for T seconds; another run goes on from there."
        ),
    ] = 120.0,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Learn a model's likely next tokens once, to draft from the first step on.

    No text is needed: the model is asked about single tokens, those first that it names most often,
    and writes texts of its own. The table made of it is kept in your cache folder and used with
    this model from then on, also in other number formats and on other devices. The longer it runs,
    the more it helps.
    """
    from lade.cli.prewarm import run

    run(load(model, device, dtype, threads, trust_remote_code), seconds)


@app.command(name="compile", rich_help_panel=_USE)
def compile_(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Compile for this model as well: a Hugging Face model id or a local folder.",
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Compile ahead what the first answer on this machine would wait for.

    What is compiled is kept beside the installed package, or in the folder that NUMBA_CACHE_DIR
    names, and serves every later process on a CPU of the same kind. For an image, run this as it
    is built. Kernels for a GPU follow a model's sizes: name the model, where the GPU is.
    """
    from lade.cli.compile import run

    run(None if model is None else load(model, device, dtype, threads, trust_remote_code))


@app.command(rich_help_panel=_USE)
def serve(
    host: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Address to listen at. 0.0.0.0 lets other machines in; give them API keys.",
            rich_help_panel=_SERVER,
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, max=65535, help="0 takes a free one.", rich_help_panel=_SERVER
        ),
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Let in only those who send this key; may be repeated. Other users of this "
            "machine can see it; a file they cannot read is better, or the variable LADE_API_KEY, "
            "with blanks between several.",
            envvar="LADE_API_KEY",
            show_envvar=False,
            rich_help_panel=_SERVER,
        ),
    ] = None,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Let in those who send a key of this file, which has one a line; SIGHUP reads it "
            "again.",
            exists=True,
            dir_okay=False,
            rich_help_panel=_SERVER,
        ),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What clients call the model. Without it, as it was asked for.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="Take requests that call the server by this name, as a proxy's do; may be "
            "repeated. A server for this machine alone takes no others.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origin",
            metavar="URL",
            help="Let pages of this site send requests; may be repeated, * for all.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    metrics_host: Annotated[
        str,
        typer.Option(metavar="NAME", help="Address of --metrics-port.", rich_help_panel=_SERVER),
    ] = "127.0.0.1",
    metrics_port: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            max=65535,
            help="Serve /metrics on a port of its own. Where there are keys it is nowhere else: it "
            "tells what others ask.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Serve by TLS with this certificate, in PEM.",
            exists=True,
            dir_okay=False,
            rich_help_panel=_SERVER,
        ),
    ] = None,
    private_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The key of --certificate.",
            exists=True,
            dir_okay=False,
            rich_help_panel=_SERVER,
        ),
    ] = None,
    json_logs: Annotated[
        bool,
        typer.Option(
            "--json-logs", help="Log a JSON object for each line.", rich_help_panel=_SERVER
        ),
    ] = False,
    max_connections: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Clients that may be connected.", rich_help_panel=_LIMITS
        ),
    ] = 10_000,
    max_queue: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Requests of one key, or from one address, that may wait; more are sent away "
            "with 429.",
            rich_help_panel=_LIMITS,
        ),
    ] = 100,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="The longest prompt. Without it, what the model has positions for.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="The longest answer.", rich_help_panel=_LIMITS),
    ] = 4096,
    max_body_bytes: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="The largest request.", rich_help_panel=_LIMITS),
    ] = 2**22,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="T",
            min=0.001,
            help="Seconds for a request, from its first byte to the last of its answer.",
            rich_help_panel=_LIMITS,
        ),
    ] = 600.0,
    grace: Annotated[
        float,
        typer.Option(
            metavar="T",
            min=0.0,
            help="Seconds for answers that are under way when the server is told to stop.",
            rich_help_panel=_LIMITS,
        ),
    ] = 30.0,
    keeps: Annotated[
        Path | None,
        typer.Option(
            "--pools",
            metavar="FOLDER",
            help="Keep everybody's pools in this folder. Without it, they end with the server.",
            file_okay=False,
            rich_help_panel=DRAFTING,
        ),
    ] = None,
    share_pool: Annotated[
        bool,
        typer.Option(
            "--share-pool",
            help="One pool for all, as suits a machine with one user: the speed of an answer "
            "reveals to each what the others wrote.",
            rich_help_panel=DRAFTING,
        ),
    ] = False,
    max_prefix_bytes: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Memory for keys and values of earlier prompts and answers.",
            rich_help_panel=DRAFTING,
        ),
    ] = 2**30,
    pool_memory_bytes: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Memory for pools.", rich_help_panel=DRAFTING),
    ] = 2**30,
    pool_disk_bytes: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Disk for pools.", rich_help_panel=DRAFTING),
    ] = 2**34,
    save_every: Annotated[
        float,
        typer.Option(
            metavar="T",
            min=0.0,
            help="Seconds after which pools that learned are saved.",
            rich_help_panel=DRAFTING,
        ),
    ] = 60.0,
    assistant: AssistantOption = None,
    first_layers: FirstLayersOption = None,
    pools: PoolsOption = None,
    max_draft_tokens: MaxDraftTokensOption = None,
    verification: VerificationOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Serve a model to OpenAI's clients: chats, completions and responses, streamed or not.

    Every API key, and every "user" or "cache_salt" that requests name, has a pool of its own, from
    which nothing is drafted for anybody else.
    """
    from lade.cli.serve import KeySource, check_extra, run

    check_extra()
    from lade.server.options import ServerOptions

    drafting = make_drafting(assistant, first_layers, trust_remote_code, verification)
    keys = KeySource(api_key or [], api_keys_file)
    options = ServerOptions(
        model_name=model_name,
        api_keys=keys.read(),
        shares_pool=share_pool,
        layers=pools or [],
        pools=keeps,
        pool_memory_bytes=pool_memory_bytes,
        pool_disk_bytes=pool_disk_bytes,
        save_every_sec=save_every,
        allowed_hosts=allowed_hosts or [],
        allowed_origins=allowed_origins or [],
        metrics_host=metrics_host,
        metrics_port=metrics_port,
        certificate=certificate,
        private_key=private_key,
        max_connections=max_connections,
        max_queue=max_queue,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        max_body_bytes=max_body_bytes,
        timeout_sec=timeout,
        grace_sec=grace,
        config=replace(
            make_config(max_draft_tokens, verification), max_prefix_bytes=max_prefix_bytes
        ),
    )
    loaded = load(model, device, dtype, threads, trust_remote_code)
    options = replace(options, drafter=drafting.make(loaded))
    run(loaded, options, keys, host, port, has_json_logs=json_logs)


@app.command(rich_help_panel=_MEASURE)
def demo(
    max_new_tokens: MaxNewTokensOption = 128,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Use this prompt instead of the six built in; may be repeated."
        ),
    ] = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    max_draft_tokens: MaxDraftTokensOption = None,
    verification: VerificationOption = None,
    assistant: AssistantOption = None,
    first_layers: FirstLayersOption = None,
    pools: PoolsOption = None,
    save_pool: SavePoolOption = None,
    prewarms: PrewarmOption = True,
    json: JsonOption = None,
) -> None:
    """Answer six prompts with plain generate and with lade, and compare speed.

    The first time with a model, it is prewarmed before, for a minute at most.
    """
    from lade.cli.demo import run

    config = make_config(max_draft_tokens, verification)
    check_pools(pools, save_pool, verification)
    drafting = make_drafting(assistant, first_layers, trust_remote_code, verification)
    loaded = load(model, device, dtype, threads, trust_remote_code)
    given = (config, pools or [], save_pool, json, prewarms, drafting.make(loaded))
    run(loaded, prompt or [], max_new_tokens, *given)


app.add_typer(pool, name="pool", rich_help_panel=_USE)


@app.command(rich_help_panel=_MEASURE)
def bench(
    prompts: PromptsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    limit: LimitOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = None,
    max_draft_tokens: MaxDraftTokensOption = None,
    verification: VerificationOption = None,
    assistant: AssistantOption = None,
    first_layers: FirstLayersOption = None,
    prediction: PredictionOption = None,
    pools: PoolsOption = None,
    json: JsonOption = None,
    markdown: MarkdownOption = None,
    plot: PlotOption = None,
) -> None:
    """Compare lade with plain generate and with transformers' prompt lookup, on your prompts.

    All answer each prompt in turn, with the same options and seeds. lade has one pool for all
    prompts, lade_fresh an empty one for each, and no_drafts decodes one token a step, on a CPU with
    lade's own products; --pool, --prediction (of every answer), --assistant and --first-layers add
    lade with those. The columns of the table:

    - tokens/s: tokens up to the end of the answer, over the time of the whole call.
    - MAT: mean accepted tokens, those that a step adds; plain decoding is 1.00.
    - same text: the share of answers with plain's tokens. prompt_lookup draws otherwise when it
      samples, so its texts differ then and are as likely.
    - accepted: the share of draft tokens that were accepted.
    - corrected: the share of steps with a draft that ended where the model chose another token
      than those drafted there.
    """
    from lade.bench.settings import BenchSettings
    from lade.cli.bench import Chosen, ResultFiles, compare
    from lade.cli.prompting import read_prediction

    settings = BenchSettings(max_new_tokens, temperature, top_p, seed or 0)
    config = make_config(max_draft_tokens, verification)
    check_pools(pools, None, verification)
    drafting = make_drafting(assistant, first_layers, trust_remote_code, verification)
    files = ResultFiles(json, markdown, plot)
    files.check()
    chosen = Chosen.read(prompts, limit)
    predicted = None if prediction is None else read_prediction(prediction)
    loaded = load(model, device, dtype, threads, trust_remote_code)
    compare(loaded, chosen, settings, config, drafting, pools or [], files, predicted)


@app.command(rich_help_panel=_INSPECT)
def check(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None,
    seconds: Annotated[
        float,
        typer.Option(
            metavar="T",
            min=0.0,
            help="Measure speed for about T seconds; 0 leaves that out. A slow model may take "
            "longer, as one prompt is always answered in full.",
        ),
    ] = 60.0,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = None,
) -> None:
    """Tell what lade does with a model, and what that gains on this machine.

    A check of the model finds out how it can verify drafts without a change of its text, and why
    better methods are ruled out. Then the six prompts of the demo are answered by plain generate
    and by lade in turn, each with an empty pool.
    """
    from lade.cli.check import run

    run(load(model, device, dtype, threads, trust_remote_code), seconds, json)
