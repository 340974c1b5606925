"""`python -m benchmarks`: commands and their options. Each is `run` of the module of its name."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.prompts import Chosen, Half, choose
from lade.apps.cli import line_of
from lade.apps.cli.options import (
    DraftOptions,
    DtypeOption,
    JsonOption,
    LoadOptions,
    MaxNewTokensOption,
    ModelOption,
    SamplingOptions,
    ThreadsOption,
    grouped,
    of_drafting,
)
from lade.models.settings import Settings

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
LimitOption = Annotated[
    int | None, typer.Option(min=1, help="Use N prompts, spread over the file.")
]
HalfOption = Annotated[
    Half | None, typer.Option(help="Use one half of the file, by the ids of prompts.")
]


@dataclass(frozen=True)
class PromptChoice:
    """The prompts of a run."""

    prompts: PromptsOption
    limit: LimitOption = None
    half: HalfOption = None

    def chosen(self) -> Chosen:
        """Read them."""
        return choose(self.prompts, self.limit, self.half)


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
    loading: LoadOptions,
    sampling: SamplingOptions,
    drafting: DraftOptions,
    first_layers: Annotated[
        int | None, of_drafting(min=1, help="Let the first N layers of the model draft, too.")
    ] = None,
    max_draft_tokens: Annotated[
        int | None,
        of_drafting(min=0, help="Verify up to N in every step. Without it, measured time decides."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Compare any methods, those of lade bench and many more, on a file of prompts."""
    from benchmarks.methods import Given
    from benchmarks.run import BenchSettings, run
    from benchmarks.run import choose as choose_methods
    from lade.config import Config

    settings = BenchSettings(
        max_new_tokens,
        **{**vars(sampling), "seed": sampling.seed or 0},
        batch_size=batch_size,
        num_return_sequences=num_return_sequences,
        passes=passes,
    )
    chosen_methods = choose_methods(methods, drafting, first_layers)
    given = Given(Config(max_draft_tokens=max_draft_tokens), num_layers=first_layers)
    chosen = choose(prompts, limit, half, categories)
    run(loading.load(), chosen, chosen_methods, settings, given, json, drafting)


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
    asked: PromptChoice,
    methods: MethodsOption = None,
    max_draft_tokens: SizesOption = "8,16,32",
    max_new_tokens: MaxNewTokensOption = 96,
    costs: Annotated[
        Path | None,
        typer.Option(
            help="A result of forwards: tell tokens a second by these costs, and the best sizes.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    json: JsonOption = None,
) -> None:
    """Compare drafters live, on the same texts and with equal numbers of draft tokens.

    generate answers each prompt greedily; then every method has to write that text, so that in
    half precision, too, all draft the same. Time is not measured: the numbers depend on the
    machine only by the rounding of its arithmetic, and by the costs of forwards that are given.
    """
    from benchmarks.arena import METHODS, run
    from benchmarks.methods import named, numbers

    names, sizes = named(methods, METHODS), numbers(max_draft_tokens)
    chosen = asked.chosen()
    loaded = LoadOptions(model, dtype=dtype).load()
    run(loaded, chosen, names, sizes, Settings(max_new_tokens), json, costs)


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

    chosen = choose(prompts, limit, half)
    run(LoadOptions(model, dtype=dtype).load(), chosen, Settings(max_new_tokens), json)


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

    addresses, num_clients = read_servers(servers), numbers(clients)
    run(addresses, choose(prompts, limit, None), max_new_tokens, num_clients, json)


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
    prewarmed: TableOption = None,
    limit: LimitOption = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Run in float32, and fail unless every method's answers have plain's tokens.",
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
    from benchmarks.engines import PLAIN, EngineJob, run
    from benchmarks.engines import choose as choose_methods
    from benchmarks.methods import numbers

    names = choose_methods(methods, prewarmed)
    if check and (dtype not in (None, "float32") or not {PLAIN} < {*names}):
        raise ValueError("expected float32, and plain and another of the methods, with --check")
    chosen = [choose(path, limit, None) for path in prompts]
    job = EngineJob(
        model="",
        dtype="float32" if check else dtype or "bfloat16",
        prompts=[],
        concurrency=numbers(concurrency),
        max_new_tokens=max_new_tokens,
        table=None if prewarmed is None else str(prewarmed.resolve()),
    )
    run(model, job, chosen, names, check, threads, json)


@app.command("memory")
@grouped
def run_memory(
    *,
    prompts: PromptsOption,
    methods: MethodsOption = "plain,lade",
    max_new_tokens: MaxNewTokensOption = 128,
    limit: LimitOption = None,
    passes: PassesOption = 1,
    loading: LoadOptions,
    json: JsonOption = None,
) -> None:
    """Compare the peak memory of ways of generating, each in a fresh process.

    On a CPU, that is the most that the whole process has resident while it answers the prompts:
    weights, libraries and all. On a GPU, it is the most that torch has allocated there.
    """
    from benchmarks.memory import run
    from benchmarks.methods import METHODS, named

    known = [name for name, info in METHODS.items() if info.takes is None]
    names = named(methods, known)
    chosen, settings = choose(prompts, limit, None), Settings(max_new_tokens)
    run(vars(loading), chosen, names, settings, passes, json)


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

    options = LoadOptions(model, "cpu", dtype, threads)
    loaded = options.load() if shape is None else shaped(shape, options)
    run(loaded, context, json)


@app.command("cpu-engines")
@grouped
def run_cpu_engines(
    *,
    asked: PromptChoice,
    max_new_tokens: MaxNewTokensOption = 96,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    json: JsonOption = None,
) -> None:
    """Compare lade with transformers, OpenVINO GenAI and llama.cpp on a CPU, on the same weights.

    All decode greedily; each engine also with the prompt lookup that it has. Engines that are not
    installed are left out. A result file keeps what it has of other dtypes and threads, if code and
    prompts are the same.
    """
    from benchmarks.cpu_engines import run

    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"expected --dtype float32 or bfloat16, got {dtype}")
    chosen = asked.chosen()
    run(LoadOptions(model, "cpu", dtype, threads).load(), chosen, max_new_tokens, json)


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

    run(max_tokens, json)


@app.command("predictions")
@grouped
def run_predictions(
    *,
    rounds: PassesOption = 3,
    loading: LoadOptions,
    json: JsonOption = None,
) -> None:
    """Time edits of a text with the text as the prediction, without, and by prompt lookup."""
    from benchmarks.predictions import run

    run(loading.load(), rounds, json)


@app.command("budget")
@grouped
def run_budget(
    *,
    asked: PromptChoice,
    max_draft_tokens: SizesOption = "0,4,7,11,15,23,31",
    dtypes: Annotated[str, typer.Option(metavar="NAMES", help="Comma-separated.")] = (
        "float32,bfloat16"
    ),
    processes: Annotated[
        int, typer.Option(min=1, help="Fresh processes for each dtype, by jobs and by torch alone.")
    ] = 5,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.0, help="Begin no prompt after T minutes, shared by all processes."),
    ] = None,
    max_new_tokens: MaxNewTokensOption = 96,
    model: ModelOption = None,
    threads: ThreadsOption = None,
    json: JsonOption = None,
) -> None:
    """Compare the budget's numbers of draft tokens with fixed ones, on a CPU.

    A ratio is what the budget is of the best fixed number of its process, known afterwards; of the
    first calls, what they are of the same calls later.
    """
    from benchmarks.budget import run
    from benchmarks.methods import numbers

    names = [name.strip() for name in dtypes.split(",")]
    if wrong := {*names} - {"float32", "bfloat16"}:
        raise ValueError(f"expected --dtypes float32 or bfloat16, got {', '.join(sorted(wrong))}")
    shared = {"numbers": numbers(max_draft_tokens, 0), "max_new_tokens": max_new_tokens}
    chosen = asked.chosen()
    run(model, chosen, {**shared, "threads": threads}, names, processes, minutes, json)


@app.command("sameness")
@grouped
def run_sameness(
    *,
    asked: PromptChoice,
    max_new_tokens: MaxNewTokensOption = 128,
    loading: LoadOptions,
    json: JsonOption = None,
) -> None:
    """Count the answers of float32, whatever is drafted, batched, kept or busy."""
    from benchmarks.sameness import run

    run(loading.load(), asked.chosen(), max_new_tokens, json)


@app.command("generators")
def run_generators(
    *,
    max_new_tokens: MaxNewTokensOption = 96,
    rounds: Annotated[int, typer.Option(min=1, help="Measured runs, after one more.")] = 5,
    json: JsonOption = None,
) -> None:
    """Compare transformers' candidate generators as drafters with transformers' own loop."""
    from benchmarks.generators import run

    run(max_new_tokens, rounds, json)


@app.command("prewarming")
@grouped
def run_prewarming(
    *,
    asked: PromptChoice,
    minutes: Annotated[
        str, typer.Option(metavar="T,…", help="Comma-separated: of a table, in rising order.")
    ] = "1,2,5,10,30,60",
    max_draft_tokens: SizesOption = "7,15",
    max_new_tokens: MaxNewTokensOption = 96,
    loading: LoadOptions,
    json: JsonOption = None,
) -> None:
    """Make a table of the model's likely tokens, and tell what it brings as it grows."""
    from benchmarks.methods import numbers
    from benchmarks.prewarming import run

    totals = sorted(float(each) for each in minutes.split(","))
    chosen = asked.chosen()
    fixed = numbers(max_draft_tokens, 1)
    run(loading.load(), chosen, totals, fixed, max_new_tokens, json)


@app.command("gpu")
@grouped
def run_gpu(
    *,
    shapes: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated: 1b and 8b, of the sizes of Llama-3.2-1B and Llama-3.1-8B; "
            "tiny and 1b_short are for a CPU.",
        ),
    ] = "8b,1b",
    stages: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Comma-separated; an unknown name lists all."),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="cuda, cuda:1, …, or cpu.")] = "cuda",
    minutes: Annotated[
        float, typer.Option(min=0.0, help="End after T minutes, and list what was not run.")
    ] = 7.5,
    json: JsonOption = None,
) -> None:
    """Compare texts, steps and whole calls on a GPU with generate, with random weights.

    Nothing is downloaded. Each stage runs in a process of its own: one that crashes or hangs is
    reported, and the others go on.
    """
    from benchmarks.gpu import run

    run(shapes, stages, device, minutes, json)


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
