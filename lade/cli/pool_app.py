"""`lade pool …`: commands, their options and help texts. Next file: `pool.py`."""

from pathlib import Path
from typing import Annotated

import typer

from lade.cli.options import ModelOption, TrustOption

pool = typer.Typer(
    help="Build and look after pools on disk, to draft from.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

# A pool needs a model's tokenizer alone.
PoolArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="The pool.", exists=True, dir_okay=False)
]


@pool.command("build")
def pool_build(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILES", help="Files and folders to read.", exists=True),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", metavar="FILE", help="The pool to make or add to.", dir_okay=False),
    ],
    capacity_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Hold N tokens, the newest; without it, 16,777,216. Each takes 60 bytes.",
        ),
    ] = None,
    model: ModelOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Read files into a pool, tokenised as for a model, whose weights are not needed.

    Read are text and code in UTF-8; chats in JSON lines or JSON, as messages, turns, conversations
    or prompt and response, in the model's chat template; transcripts whose turns begin with who
    speaks; and all of these gzipped. In folders, hidden files, virtual environments and what is no
    text are left out and counted.

    Ctrl-C keeps what was read. Run it again to go on: files that have not changed since they were
    read are not read again.
    """
    from lade.cli.pool import run_build

    run_build(files, out, model, capacity_tokens, trust_remote_code)


@pool.command("info")
def pool_info(file: PoolArgument) -> None:
    """Tell what a pool holds, and whose tokenizer and model it is of."""
    from lade.cli.pool import run_info

    run_info(file)


@pool.command("merge")
def pool_merge(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILES", help="The pools.", exists=True, dir_okay=False),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The pool to write.", dir_okay=False)
    ],
    capacity_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Hold N tokens, the newest; without it, what holds them all."
        ),
    ] = None,
) -> None:
    """Write all text of several pools to one, in the order they are named.

    They are of one tokenizer. What a model found likely is taken from pools of the first one's.
    """
    from lade.cli.pool import run_merge

    run_merge(files, out, capacity_tokens)


@pool.command("prune")
def pool_prune(
    file: PoolArgument,
    capacity_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Hold N tokens: the newest are kept.")
    ],
) -> None:
    """Make a pool smaller, or larger for text to come."""
    from lade.cli.pool import run_prune

    run_prune(file, capacity_tokens)


@pool.command("forget")
def pool_forget(
    file: PoolArgument,
    texts: Annotated[
        list[str], typer.Argument(metavar="TEXT", help="The text to remove, letter by letter.")
    ],
    model: ModelOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Remove every occurrence of a text for good, however it was tokenised.

    What is left is searched again until nothing is found.
    """
    from lade.cli.pool import run_forget

    run_forget(file, texts, model, trust_remote_code)


@pool.command("export")
def pool_export(
    file: PoolArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write to this file instead of standard output.",
            dir_okay=False,
        ),
    ] = None,
    model: ModelOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Write the texts of a pool as JSON lines, which `lade pool build` reads."""
    from lade.cli.pool import run_export

    run_export(file, out, model, trust_remote_code)
