"""`python -m benchmarks`: commands and their options. Each is `run` of the module of its name."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.drafting import MeasuredOptions
from benchmarks.prompts import Half, choose
from lade.cli.failures import line_of
from lade.cli.options import (
    Dtype,
    DtypeOption,
    LimitOption,
    LoadOptions,
    MaxNewTokensOption,
    ModelOption,
    SamplingOptions,
    ThreadsOption,
    grouped,
)
from lade.cli.results import JsonOption, ResultFiles

app = typer.Typer(
    help="Measure lade, its parts and its rivals.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
)

PromptsOption = Annotated[
    Path, typer.Option(help="As for lade bench.", exists=True, dir_okay=False)
]
HalfOption = Annotated[
    Half | None, typer.Option(help="Use one half of the file, told by the ids of prompts.")
]
MethodsOption = Annotated[
    str | None,
    typer.Option(metavar="NAMES", help="Comma-separated; an unknown name lists all."),
]
SizesOption = Annotated[
    str,
    typer.Option(
        "--max-draft-tokens",
        metavar="N,…",
        help="Comma-separated: verify up to N draft tokens in every step.",
    ),
]
_CONTEXTS = [50, 500, 2000]
ContextOption = Annotated[list[int], typer.Option(min=1, help="Tokens before; may be repeated.")]
ShapeOption = Annotated[str | None, typer.Option(help="A shape of random weights: 1b or 8b.")]
BatchSizeOption = Annotated[
    int, typer.Option("--batch-size", min=1, help="Answer N prompts at once.")
]
PassesOption = Annotated[int, typer.Option(min=1, help="Do everything N times.")]
TableOption = Annotated[
    Path | None, typer.Option(help="What lade prewarm made.", exists=True, dir_okay=False)
]


def file_argument(metavar: str, help_text: str) -> Any:
    """Return an argument that is a file."""
    return typer.Argument(metavar=metavar, help=help_text, exists=True, dir_okay=False)


def files_of(json: Path | None) -> ResultFiles:
    """Return where results go, checked before any work is done."""
    files = ResultFiles(json)
    files.check()
    return files


@app.command("run")
@grouped
def run_methods(
    *,
    prompts: PromptsOption,
    methods: MethodsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    batch_size: BatchSizeOption = 1,
    num_return_sequences: Annotated[int, typer.Option(min=1, help="Answers to a prompt.")] = 1,
    limit: LimitOption = None,
    half: HalfOption = None,
    categories: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Comma-separated; those of the file.")
    ] = None,
    passes: PassesOption = 1,
    model: ModelOption = None,
    loading: LoadOptions,
    sampling: SamplingOptions,
    drafting: MeasuredOptions,
    files: ResultFiles,
) -> None:
    """Compare any methods, those of lade bench and many more, on a file of prompts.

    --assistant takes self as well, for the model itself; ID:int8 and self:int8 take a copy with
    8-bit weights.
    """
    from benchmarks.methods import METHODS
    from benchmarks.run import choose as choose_methods
    from benchmarks.run import load_assistant, run
    from benchmarks.settings import BenchSettings
    from lade.bench.baselines import Given

    settings = BenchSettings(
        max_new_tokens,
        **{**vars(sampling), "seed": sampling.seed or 0},
        batch_size=batch_size,
        num_return_sequences=num_return_sequences,
        passes=passes,
    )
    assistant, first_layers = drafting.assistant, drafting.first_layers
    names = choose_methods(
        *(methods, bool(drafting.pools), assistant, first_layers),
        saves=drafting.save_pool is not None,
    )
    given = Given(drafting.config, num_layers=first_layers)
    files.check()
    chosen = choose(prompts, limit, half, categories)
    loaded = loading.load(model)
    if assistant is not None:
        given = load_assistant(given, loaded, assistant, loading.trust_remote_code)
    run(
        *(loaded, chosen, {name: METHODS[name] for name in names}, settings, given, files),
        drafting=drafting,
        assistant=assistant,
    )


@app.command("publish")
@grouped
def publish_result(
    *,
    result: Annotated[Path, typer.Argument(metavar="RESULT", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Argument(help="In docs/results.")],
) -> None:
    """Write what the pages show of a result file: its summary and totals."""
    from benchmarks.publish import publish

    publish(result, out)


@app.command("arena")
@grouped
def run_arena(
    *,
    prompts: PromptsOption,
    methods: MethodsOption = None,
    max_draft_tokens: SizesOption = "8,16,32",
    max_new_tokens: MaxNewTokensOption = 96,
    limit: LimitOption = None,
    half: HalfOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    files: ResultFiles,
) -> None:
    """Compare drafters live, on the same texts and with equal numbers of draft tokens.

    generate answers each prompt greedily; then every method has to write that text, so that in
    half precision, too, all draft the same. Time does not count: the numbers depend on the
    machine only by the rounding of its arithmetic.
    """
    from benchmarks.arena import METHODS, run
    from benchmarks.methods import named, numbers
    from benchmarks.settings import BenchSettings

    names, sizes = named(methods, METHODS), numbers(max_draft_tokens)
    files.check()
    chosen = choose(prompts, limit, half)
    loaded = LoadOptions(dtype=dtype).load(model)
    run(loaded, chosen, names, sizes, BenchSettings(max_new_tokens), files)


@app.command("record")
@grouped
def run_record(
    *,
    prompts: PromptsOption,
    out: Annotated[Path, typer.Option(help="The traces, as safetensors.", dir_okay=False)],
    max_new_tokens: MaxNewTokensOption = 256,
    limit: LimitOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Answer prompts with lade, and record what replay needs.

    That is the tokens of prompts and answers, and the tokens that the model finds likeliest after
    each of them, from one more forward over the whole text.
    """
    from benchmarks.record import run
    from benchmarks.settings import BenchSettings

    files_of(out)
    chosen = choose(prompts, limit, None)
    run(LoadOptions(dtype=dtype).load(model), chosen, out, BenchSettings(max_new_tokens))


@app.command("replay")
@grouped
def run_replay(
    *,
    traces: Annotated[Path, file_argument("TRACES", "What record wrote.")],
    methods: MethodsOption = None,
    max_draft_tokens: SizesOption = "8,16,32,64",
    passes: PassesOption = 1,
    table: TableOption = None,
    files: ResultFiles,
) -> None:
    """Try drafters on recorded answers, without a model and much faster than with one.

    Every step verifies as many draft tokens as it may, so steps and accepted tokens are those of
    run with the same --max-draft-tokens and exact arithmetic. Not so for methods that learn from
    the model's logits: what it finds likely after a rejected token was not recorded.
    """
    from benchmarks.methods import named, numbers
    from benchmarks.replay import DRAFTERS, run

    names, sizes = named(methods, [*DRAFTERS]), numbers(max_draft_tokens)
    files.check()
    run(traces, names, sizes, passes, table, files)


@app.command("fit")
@grouped
def run_fit(
    *,
    prompts: PromptsOption,
    max_new_tokens: MaxNewTokensOption = 128,
    limit: LimitOption = None,
    half: HalfOption = Half.fit,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    json: JsonOption = None,
) -> None:
    """Fit the weights that new pools begin with, and print them as in ngram_pool/weights.py.

    Prompts are answered once, greedily. Pools then learn from these answers in several passes,
    beginning with weights that nothing was fitted to.
    """
    from benchmarks.fit import run
    from benchmarks.settings import BenchSettings

    files, chosen = files_of(json), choose(prompts, limit, half)
    run(LoadOptions(dtype=dtype).load(model), chosen, BenchSettings(max_new_tokens), files)


@app.command("serve")
@grouped
def run_serve(
    *,
    servers: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=URL…",
            help="Servers that are running, as plain=http://localhost:8000; the others are "
            "compared with the first.",
        ),
    ],
    prompts: PromptsOption,
    clients: Annotated[
        str, typer.Option(metavar="N,…", help="Comma-separated: clients that ask at once.")
    ] = "1",
    max_new_tokens: MaxNewTokensOption = 128,
    limit: LimitOption = None,
    json: JsonOption = None,
) -> None:
    """Compare OpenAI-compatible servers: tokens a second, time to the first token.

    They are asked in turn, greedily, with all turns of each prompt and their own earlier answers.
    """
    from benchmarks.methods import numbers
    from benchmarks.serving import read_servers, run

    addresses, files, num_clients = read_servers(servers), files_of(json), numbers(clients)
    run(addresses, choose(prompts, limit, None), max_new_tokens, num_clients, files)


@app.command("engines")
@grouped
def run_engines(
    *,
    prompts: Annotated[
        list[Path], typer.Option(help="May be repeated.", exists=True, dir_okay=False)
    ],
    methods: MethodsOption = None,
    concurrency: Annotated[
        str, typer.Option(metavar="N,…", help="Comma-separated: requests at once.")
    ] = "1,4,16,64",
    max_new_tokens: MaxNewTokensOption = 64,
    options: Annotated[
        str, typer.Option(metavar="JSON", help="Options of lade's proposer, as a JSON object.")
    ] = "{}",
    prewarmed: TableOption = None,
    limit: LimitOption = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Run in float32, also draw answers at temperature 1, and fail unless every "
            "method's greedy answers have plain's tokens and its draws plain's distribution.",
        ),
    ] = False,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    json: JsonOption = None,
) -> None:
    """Compare methods of speculative decoding in vLLM, with many requests at once.

    Each method has an engine of its own, which is sent the next prompt as soon as an answer is
    complete. With every number of requests, drafters begin anew; what they learn in the first pass
    they know in the second. The cache of prefixes is emptied between passes.
    """
    from benchmarks.engines.command import choose_dtype, choose_options, make_plan, run
    from benchmarks.engines.methods import PLAIN, check_engine, choose_methods
    from benchmarks.methods import numbers

    check_engine()
    names, left_out = choose_methods(methods, prewarmed is not None)
    if check and not {PLAIN} < {*names}:
        raise ValueError("expected plain and another of the methods with --check")
    sizes, dtype_name = numbers(concurrency), choose_dtype(dtype, check)
    of_proposer, files = choose_options(options), files_of(json)
    chosen = [choose(path, limit, None) for path in prompts]
    plan = make_plan(
        model,
        chosen,
        check,
        dtype=dtype_name,
        concurrency=sizes,
        max_new_tokens=max_new_tokens,
        options=of_proposer,
        table=None if prewarmed is None else str(prewarmed.resolve()),
    )
    run(plan, chosen, names, left_out, threads, files)


@app.command("memory")
@grouped
def run_memory(
    *,
    prompts: PromptsOption,
    methods: MethodsOption = "plain,lade",
    max_new_tokens: MaxNewTokensOption = 128,
    batch_size: BatchSizeOption = 1,
    limit: LimitOption = None,
    passes: PassesOption = 1,
    model: ModelOption = None,
    loading: LoadOptions,
    json: JsonOption = None,
) -> None:
    """Compare the peak memory of ways of generating, each in a fresh process.

    On a CPU, that is the most that the whole process has resident while it answers the prompts:
    weights, libraries and all. On a GPU, it is the most that torch has allocated there.
    """
    from benchmarks.memory import Work, run
    from benchmarks.methods import METHODS, named
    from benchmarks.settings import BenchSettings
    from lade.cli.loading import fetch_with_progress
    from lade.models.loading import device_of, find_model, native_dtype

    known = [name for name, info in METHODS.items() if info.takes is None]
    names, files = named(methods, known), files_of(json)
    settings, chosen = (
        BenchSettings(max_new_tokens, batch_size=batch_size),
        choose(prompts, limit, None),
    )
    model = find_model(model)
    # Here, not in the process: finding these out imports what a baseline should not hold.
    place = device_of(loading.device)
    dtype_name = (
        loading.dtype.value if loading.dtype else str(native_dtype(place)).removeprefix("torch.")
    )
    fetch_with_progress(model)
    texts = [prompt.text for prompt in chosen.prompts]
    work = Work(names[0], model, str(place), dtype_name, loading.threads, texts, settings)
    run(work, chosen, names, passes, files)


@app.command("forwards")
@grouped
def run_forwards(
    *,
    model: ModelOption = None,
    shape: ShapeOption = None,
    context: ContextOption = _CONTEXTS,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    json: JsonOption = None,
) -> None:
    """Time forwards by their number of tokens, by torch and by lade, beside reading all weights."""
    from benchmarks.forwards import run, shaped

    files, options = files_of(json), LoadOptions("cpu", dtype, threads)
    loaded = options.load(model) if shape is None else shaped(shape, options)
    run(loaded, context, files)


@app.command("cpu-engines")
@grouped
def run_cpu_engines(
    *,
    prompts: PromptsOption,
    max_new_tokens: MaxNewTokensOption = 96,
    limit: LimitOption = None,
    half: HalfOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    files: ResultFiles,
) -> None:
    """Compare lade with transformers, OpenVINO GenAI and llama.cpp on a CPU, on the same weights.

    All decode greedily; each engine also with the prompt lookup that it has. Engines that are not
    installed are left out. A result file keeps what it has of other dtypes and threads, if code and
    prompts are the same.
    """
    from benchmarks.cpu_engines import run

    if dtype not in (None, Dtype.float32, Dtype.bfloat16):
        raise ValueError(f"expected --dtype float32 or bfloat16, got {dtype.value}")
    files.check()
    chosen = choose(prompts, limit, half)
    run(LoadOptions("cpu", dtype, threads).load(model), chosen, max_new_tokens, files)


@app.command("pool")
@grouped
def run_pool(
    *,
    max_tokens: Annotated[
        int, typer.Option(min=10_000, help="The largest; from 10^4 up, by tens.")
    ] = 10**7,
    json: JsonOption = None,
) -> None:
    """Time the n-gram pool alone, observing tokens and drafting, as it fills."""
    from benchmarks.pool import run

    run(max_tokens, files_of(json))


@app.command("pool-threads")
@grouped
def run_pool_threads(
    *,
    max_threads: Annotated[int, typer.Option(min=1, help="The most; from 1 up, by fours.")] = 64,
    json: JsonOption = None,
) -> None:
    """Time one n-gram pool that threads share: calls a second, and how long each waits."""
    from benchmarks.pool_threads import run

    run(max_threads, files_of(json))


@app.command("pool-requests")
@grouped
def run_pool_requests(
    *,
    max_requests: Annotated[int, typer.Option(min=1, help="The most; from 1 up, by fours.")] = 256,
    json: JsonOption = None,
) -> None:
    """Time what a serving engine's proposer takes in a step, by the number of requests."""
    from benchmarks.pool_requests import run

    run(max_requests, files_of(json))


@app.command("predictions")
@grouped
def run_predictions(
    *,
    rounds: PassesOption = 3,
    model: ModelOption = None,
    loading: LoadOptions,
    json: JsonOption = None,
) -> None:
    """Time edits of a text with the text as the prediction, without, and by prompt lookup."""
    from benchmarks.predictions import run

    files = files_of(json)
    run(loading.load(model), rounds, files)


@app.command("rollouts")
@grouped
def run_rollouts(
    *,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 20,
    temperature: Annotated[float, typer.Option(help="Of the samples.")] = 1.0,
    max_new_tokens: MaxNewTokensOption = 48,
    model: ModelOption = None,
    loading: LoadOptions,
    json: JsonOption = None,
) -> None:
    """Train with TRL's GRPOTrainer; draw each sample by plain generate and by lade."""
    from benchmarks.rollouts import run

    files = files_of(json)
    run(loading.load(model), steps, temperature, max_new_tokens, files)


@app.command("gpu")
@grouped
def run_gpu(
    *,
    shapes: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated: 1b and 8b, of the sizes of Llama-3.2-1B and Llama-3.1-8B, and "
            "tiny, to try the command out.",
        ),
    ] = "8b,1b",
    stages: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Comma-separated; an unknown name lists all."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="cuda, cuda:1, …, or cpu with --shapes tiny or 1b_short."
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.0, help="End after T minutes, and list what was not run.")
    ] = 7.5,
    json: JsonOption = None,
) -> None:
    """Measure steps on a GPU against its memory bandwidth, and whole answers against generate.

    The models have random weights, so nothing is downloaded (except for the default model, where it
    can be had), and drafts are accepted as in recorded decoding. Each stage runs in a process of
    its own: one that crashes or hangs is reported, and the others go on.
    """
    from benchmarks.gpu.command import run

    run(shapes, stages, device, minutes, files_of(json))


def main() -> None:
    """Run the command line; errors meant for the user print one line, others their traceback."""
    try:
        app()
    except Exception as error:  # shown in one line where that is all there is to tell
        line = None if error.__cause__ is not None else line_of(error)
        if line is None and isinstance(error, ValueError) and error.__cause__ is None:
            line = f"error: {error}"  # as the benchmarks' own are
        if line is None:
            raise
        print(line, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
