"""`lade pool …`: build pools of text on disk."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import lade
from lade.cli.loading import console, note, tell
from lade.cli.options import ModelOption, TrustOption, check_writable, grouped
from lade.errors import UserError

if TYPE_CHECKING:
    from lade.cli.build import Built

# A pool needs a model's tokenizer alone.
app = typer.Typer(
    help="Build pools of text, to draft from by --pool.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command("build")
@grouped
def pool_build(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES", help="Files and folders to read.", exists=True)
    ],
    out: Annotated[
        Path, typer.Option(help="The pool to make.", dir_okay=False, callback=check_writable)
    ],
    capacity_tokens: Annotated[
        int,
        typer.Option(min=1, max=2**29, help="Hold N tokens, the newest. Each takes 60 bytes."),
    ] = 2**24,  # a gigabyte of memory when full; arrays grow as text comes
    model: ModelOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Read files into a pool, with the tokenizer of a model, whose weights are not needed.

    The command reads text and code in UTF-8, and chats in JSON lines with messages, in the model's
    chat template. In folders, it leaves out hidden files, virtual environments and binary files.

    The pool is written as a whole, at the end.
    """
    if out.exists():
        raise UserError(f"{out} already exists; choose another file name")
    from lade.cli.build import build
    from lade.models.loading import load_tokenizer
    from ngram_pool import NGramPool

    tell("Loading the tokenizer")
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code, progress=tell)
    pool = NGramPool(capacity_tokens)
    built = build(pool, files, tokenizer)
    if built.num_tokens:
        lade.save_pool(pool, out, tokenizer=tokenizer)
        rate = built.num_tokens / max(built.sec, 1e-3)
        print(
            f"{built.num_tokens:,} tokens of {built.num_files:,} files in {built.sec:.1f} seconds "
            f"({rate:,.0f} a second); {out.name} holds {len(pool):,}"
        )
    _show_built(built, len(pool))
    if not built.num_tokens:
        raise UserError(f"expected text for {out.name} in the files, got none")


def _show_built(built: "Built", num_held: int) -> None:
    left_out = "; ".join(f"{why}: {number:,}" for why, number in built.left_out.items() if number)
    if left_out:
        console.print(f"[dim]left out: {left_out}[/dim]", soft_wrap=True)
    if built.num_refused:
        note(
            f"chats that the chat template refuses, whose texts alone are kept: "
            f"{built.num_refused:,}"
        )
    num_forgotten = built.num_tokens - num_held
    if num_forgotten > 0:
        note(
            f"the oldest {num_forgotten:,} tokens were forgotten, as there is room for "
            f"{num_held:,}; a larger --capacity-tokens holds all"
        )
