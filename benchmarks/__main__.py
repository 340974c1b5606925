"""`python -m benchmarks`: commands and their options. Each is `run` of the module of its name."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from benchmarks.prompts import Chosen, Half, choose
from lade.apps.cli import line_of
from lade.apps.cli.options import (
    IS_FILE,
    JSON,
    LoadOptions,
    SamplingOptions,
    grouped,
    length,
    load_model,
    of_drafting,
    of_model,
    option,
)
from lade.models.settings import Settings

app = typer.Typer(
    help="Measure lade, its parts and its rivals.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
)

# Options of several commands; those without a default are required.
PROMPTS: Any = option(help="As for lade bench.", **IS_FILE)
LIMIT: Any = option(None, min=1, help="Use N prompts, spread over the file.")
HALF: Any = option(None, help="Use one half of the file, by the ids of prompts.")
METHODS: Any = option(None, metavar="NAMES", help="Comma-separated; an unknown name lists all.")
MODEL: Any = of_model(None, metavar="ID", help="As for lade.")
DTYPE: Any = of_model(None, metavar="NAME", help="As for lade.")
THREADS: Any = of_model(None, help="As for lade.")


def numbered(default: str, help_text: str, *names: str) -> Any:
    """Return an option of several numbers."""
    return option(default, *names, metavar="N,…", help=f"{help_text}, comma-separated [{default}].")


def sizes(default: str) -> Any:
    """Return the option of numbers of draft tokens."""
    return numbered(default, "Draft tokens of a step", "--max-draft-tokens")


@dataclass(frozen=True)
class PromptChoice:
    """The prompts of a run."""

    prompts: Path = PROMPTS
    limit: int | None = LIMIT
    half: Half | None = HALF

    def chosen(self) -> Chosen:
        """Read them."""
        return choose(self.prompts, self.limit, self.half)


@app.command("run")
@grouped
def run_methods(
    *,
    prompts: Path = PROMPTS,
    methods: str | None = METHODS,
    max_new_tokens: int = length(128),
    batch_size: int = option(1, min=1, help="Answer N prompts at once [1]."),
    num_return_sequences: int = option(1, min=1, help="Answers to a prompt [1]."),
    limit: int | None = LIMIT,
    half: Half | None = HALF,
    categories: str | None = option(None, metavar="NAMES", help="Comma-separated, of the file."),
    passes: int = option(1, min=1, help="Do everything N times [1]."),
    loading: LoadOptions,
    sampling: SamplingOptions,
    first_layers: int | None = of_drafting(
        None, min=1, help="Let the first N layers of the model draft, too."
    ),
    max_draft_tokens: int | None = of_drafting(
        None, min=0, help="Verify up to N in every step [by measured time]."
    ),
    json: Path | None = JSON,
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
    chosen_methods = choose_methods(methods, first_layers)
    given = Given(Config(max_draft_tokens=max_draft_tokens), num_layers=first_layers)
    chosen = choose(prompts, limit, half, categories)
    run(loading.load(), chosen, chosen_methods, settings, given, json)


@app.command("arena")
@grouped
def run_arena(
    *,
    asked: PromptChoice,
    methods: str | None = METHODS,
    max_draft_tokens: str = sizes("1,3,4,7,15"),
    max_new_tokens: int = length(96),
    model: str | None = MODEL,
    dtype: str | None = DTYPE,
    json: Path | None = JSON,
) -> None:
    """Replay drafters on the same texts and with equal numbers of draft tokens.

    All draft for one greedy answer to each prompt, and get the model's logits for their own draft
    tokens. Steps are counted, and no time is measured: speeds are what three machines would make of
    the steps, as multiples of standard decoding.
    """
    from benchmarks.arena import DESCRIPTIONS, run
    from benchmarks.methods import named, numbers

    names, draft_sizes = named(methods, [*DESCRIPTIONS]), numbers(max_draft_tokens)
    chosen = asked.chosen()
    loaded = load_model(model, dtype=dtype)
    run(loaded, chosen, names, draft_sizes, Settings(max_new_tokens), json)


@app.command("fit")
@grouped
def run_fit(
    *,
    prompts: Path = PROMPTS,
    max_new_tokens: int = length(128),
    limit: int | None = LIMIT,
    half: Half | None = option(Half.fit, help="Use one half of the file [fit]."),
    model: str | None = MODEL,
    dtype: str | None = DTYPE,
    json: Path | None = JSON,
) -> None:
    """Fit the weights that new pools begin with, and print them as in ngram_pool/weights.py.

    Prompts are answered once, greedily. Pools then learn from these answers in several passes,
    beginning with weights that nothing was fitted to.
    """
    from benchmarks.fit import run

    chosen = choose(prompts, limit, half)
    run(load_model(model, dtype=dtype), chosen, Settings(max_new_tokens), json)


@app.command("serve")
@grouped
def run_serve(
    *,
    servers: list[str] = typer.Argument(
        metavar="NAME=URL…",
        help="Servers that are running, as plain=http://localhost:8000; the others are compared "
        "with the first.",
    ),
    prompts: Path = PROMPTS,
    clients: str = numbered("1", "Clients that ask at once"),
    max_new_tokens: int = length(128),
    limit: int | None = LIMIT,
    json: Path | None = JSON,
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
    prompts: list[Path] = option(help="May be repeated.", **IS_FILE),
    methods: str | None = METHODS,
    concurrency: str = numbered("1,4,16,64", "Requests at once"),
    max_new_tokens: int = length(64),
    prewarmed: Path | None = option(None, help="What lade prewarm made.", **IS_FILE),
    limit: int | None = LIMIT,
    check: bool = option(
        False,
        "--check",
        help="Run in float32, and fail unless every method's answers have plain's tokens.",
    ),
    model: str | None = MODEL,
    dtype: str | None = DTYPE,
    threads: int | None = THREADS,
    json: Path | None = JSON,
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


@app.command("forwards")
@grouped
def run_forwards(
    *,
    model: str | None = MODEL,
    shape: str | None = option(None, help="A shape of random weights: 1b or 8b."),
    context: str = numbered("50,500,2000", "Tokens before"),
    dtype: str | None = DTYPE,
    threads: int | None = THREADS,
    json: Path | None = JSON,
) -> None:
    """Time forwards by their number of tokens, by torch and by lade, beside reading all weights."""
    from benchmarks.forwards import run, shaped
    from benchmarks.methods import numbers

    how: dict[str, Any] = {"dtype": dtype, "threads": threads}
    contexts = numbers(context)
    loaded = load_model(model, device="cpu", **how) if shape is None else shaped(shape, **how)
    run(loaded, contexts, json)


@app.command("cpu-engines")
@grouped
def run_cpu_engines(
    *,
    asked: PromptChoice,
    max_new_tokens: int = length(96),
    model: str | None = MODEL,
    dtype: str | None = DTYPE,
    threads: int | None = THREADS,
    json: Path | None = JSON,
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
    loaded = load_model(model, device="cpu", dtype=dtype, threads=threads)
    run(loaded, chosen, max_new_tokens, json)


@app.command("pool")
@grouped
def run_pool(
    *,
    max_tokens: int = option(10**7, min=10_000, help="The largest; from 10^4 up, by tens [10^7]."),
    json: Path | None = JSON,
) -> None:
    """Time the n-gram pool alone, observing tokens and drafting, as it fills."""
    from benchmarks.pool import run

    run(max_tokens, json)


@app.command("predictions")
@grouped
def run_predictions(
    *,
    rounds: int = option(3, min=1, help="Do everything N times [3]."),
    loading: LoadOptions,
    json: Path | None = JSON,
) -> None:
    """Time edits of a text with the text as the prediction, without, and by prompt lookup."""
    from benchmarks.predictions import run

    run(loading.load(), rounds, json)


@app.command("budget")
@grouped
def run_budget(
    *,
    asked: PromptChoice,
    max_draft_tokens: str = sizes("0,4,7,11,15,23,31"),
    processes: int = option(
        5, min=1, help="Fresh processes by jobs, and as many by torch alone [5]."
    ),
    minutes: float | None = option(
        None, min=0.0, help="Begin no prompt after T minutes, shared by all processes."
    ),
    max_new_tokens: int = length(96),
    model: str | None = MODEL,
    threads: int | None = THREADS,
    json: Path | None = JSON,
) -> None:
    """Compare the budget's numbers of draft tokens with fixed ones, in float32 on a CPU.

    A ratio is what the budget is of the best fixed number of its process, known afterwards; of the
    first calls, what they are of the same calls later.
    """
    from benchmarks.budget import run
    from benchmarks.methods import numbers

    shared = {"numbers": numbers(max_draft_tokens, 0), "max_new_tokens": max_new_tokens}
    chosen = asked.chosen()
    run(model, chosen, {**shared, "threads": threads}, processes, minutes, json)


@app.command("busy")
@grouped
def run_busy(
    *,
    asked: PromptChoice,
    dtypes: str = option("as stored,bfloat16,float32", help="Dtypes, comma between."),
    processes: int = option(5, min=1, help="Fresh processes of each dtype [5]."),
    max_new_tokens: int = length(48),
    model: str | None = MODEL,
    json: Path | None = JSON,
) -> None:
    """Compare lade and plain generate beside processes that keep cores busy."""
    from benchmarks.busy import run

    run(model, asked.chosen(), dtypes.split(","), max_new_tokens, processes, json)


@app.command("generators")
@grouped
def run_generators(
    *,
    max_new_tokens: int = length(96),
    rounds: int = option(5, min=1, help="Measured runs, after one more [5]."),
    json: Path | None = JSON,
) -> None:
    """Compare transformers' candidate generators as drafters with transformers' own loop."""
    from benchmarks.generators import run

    run(max_new_tokens, rounds, json)


@app.command("prewarming")
@grouped
def run_prewarming(
    *,
    asked: PromptChoice,
    minutes: str = option(
        "1,2,5,10,30,60", metavar="T,…", help="Of a table, comma-separated [1,2,5,10,30,60]."
    ),
    max_draft_tokens: str = sizes("7,15"),
    max_new_tokens: int = length(96),
    loading: LoadOptions,
    json: Path | None = JSON,
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
    shapes: str = option(
        "8b,1b",
        metavar="NAMES",
        help="Comma-separated: 1b and 8b, of the sizes of Llama-3.2-1B and Llama-3.1-8B; tiny is "
        "for a CPU [8b,1b].",
    ),
    stages: str | None = METHODS,
    device: str = option("cuda", metavar="NAME", help="cuda, cuda:1, …, or cpu [cuda]."),
    minutes: float = option(
        7.5, min=0.0, help="End after T minutes, and list what was not run [7.5]."
    ),
    json: Path | None = JSON,
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
