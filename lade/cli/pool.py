"""`lade pool …`: commands that build and look after pools on disk."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import lade
from lade.cli.loading import console, load_tokenizer, note
from lade.cli.options import ModelOption, TrustOption, check_place, grouped

if TYPE_CHECKING:
    from lade.cli.build import Built

# A gigabyte of memory when full; arrays grow as text comes.
_BUILD_TOKENS = 2**24

app = typer.Typer(
    help="Build and look after pools on disk, to draft from.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

# A pool needs a model's tokenizer alone.
PoolArgument = Annotated[Path, typer.Argument(help="The pool.", exists=True, dir_okay=False)]


@app.command("build")
@grouped
def pool_build(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES", help="Files and folders to read.", exists=True)
    ],
    out: Annotated[Path, typer.Option(help="The pool to make or add to.", dir_okay=False)],
    capacity_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Hold N tokens, the newest; without it, 16,777,216. Each takes 60 bytes."
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
    check_place(out)
    from lade.cli.build import Built, BuiltFrom, build
    from ngram_pool import NGramPool

    tokenizer = load_tokenizer(model, trust_remote_code)
    if out.exists():
        pool = lade.load_pool(out, tokenizer=tokenizer)
        if capacity_tokens not in (None, pool.capacity_tokens):
            raise ValueError(
                f"expected no --capacity-tokens, as {out.name} exists with "
                f"{pool.capacity_tokens:,}; lade pool prune changes it"
            )
    else:
        pool = NGramPool(capacity_tokens or _BUILD_TOKENS)
    sources, built, num_before = BuiltFrom.of(out), Built(), len(pool)
    if sources.lost is not None:
        note(f"{sources.lost}; all files are read again")

    def save() -> None:
        lade.save_pool(pool, out, tokenizer=tokenizer)
        sources.save(out)

    is_whole = False
    try:
        build(
            pool,
            files,
            tokenizer,
            sources=sources,
            save=save,
            built=built,
            excluded=[out, sources.path],
        )
        is_whole = True
    finally:
        has_text = built.num_tokens or built.num_unchanged
        if built.num_tokens or (is_whole and has_text):
            save()
        _tell_built(built, out, len(pool), num_before)
        if not is_whole:
            console.print("stopped; the same command goes on from here")
    if not has_text:
        raise ValueError(f"expected text for {out.name} in the files, got none")


def _tell_built(built: "Built", out: Path, num_held: int, num_before: int) -> None:
    rate = built.num_tokens / max(built.sec, 1e-3)
    print(
        f"{built.num_tokens:,} tokens of {built.num_files:,} files in {built.sec:.1f} seconds "
        f"({rate:,.0f} a second, the tokenizer took {built.encoding_sec:.1f}); "
        f"{out.name} holds {num_held:,}"
    )
    if built.num_unchanged:
        console.print(f"[dim]unchanged since they were read: {built.num_unchanged:,} files[/dim]")
    left_out = "; ".join(f"{why}: {number:,}" for why, number in built.left_out.items() if number)
    if left_out:
        console.print(f"[dim]left out: {left_out}[/dim]", soft_wrap=True)
    if built.num_refused:
        note(
            f"chats that the chat template refuses, whose texts alone are kept: "
            f"{built.num_refused:,}"
        )
    num_forgotten = num_before + built.num_tokens - num_held
    if num_forgotten > 0:
        note(
            f"the oldest {num_forgotten:,} tokens were forgotten, as there is room for "
            f"{num_held:,}; to hold all, delete {out.name} and build it anew with a larger "
            "--capacity-tokens"
        )


@app.command("info")
@grouped
def pool_info(file: PoolArgument) -> None:
    """Tell what a pool holds, and whose tokenizer and model it is of."""
    from lade.cli.build import BuiltFrom
    from ngram_pool import NGramPool

    pool = NGramPool.load(file, read_only=True)
    num_files = sum(read.num_pieces > 0 for read in BuiltFrom.of(file).read.values())
    lines = {
        "tokens": f"{len(pool):,} of at most {pool.capacity_tokens:,}",
        "texts": f"{sum(1 for _ in pool.texts()):,}",
        "longest n-gram": str(pool.max_ngram_size),
        "file": f"{file.stat().st_size / 10**6:,.1f} MB",
        "tokenizer": pool.tokenizer or "unknown",
        "model": pool.model or "none: text alone",
    }
    if num_files:
        lines["built from"] = f"{num_files:,} files"
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name.ljust(width)}  {value}")


@app.command("merge")
@grouped
def pool_merge(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES", help="The pools.", exists=True, dir_okay=False)
    ],
    out: Annotated[Path, typer.Option(help="The pool to write.", dir_okay=False)],
    capacity_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Hold N tokens, the newest; without it, what holds them all."),
    ] = None,
) -> None:
    """Write all text of several pools to one, in the order they are named.

    They are of one tokenizer. What a model found likely is taken from pools of the first one's.
    """
    check_place(out)
    from ngram_pool import NGramPool

    pools: list[NGramPool] = []
    for path in files:
        known = {"tokenizer": pools[0].tokenizer, "model": pools[0].model} if pools else {}
        pools.append(NGramPool.load(path, read_only=True, **known))
    num_tokens = sum(map(len, pools))
    merged = NGramPool(
        capacity_tokens or max(num_tokens, *(pool.capacity_tokens for pool in pools)),
        max(pool.max_ngram_size for pool in pools),
    )
    for pool in pools:
        merged.merge(pool)
    merged.tokenizer, merged.model = pools[0].tokenizer, pools[0].model
    merged.save(out)
    print(f"{len(merged):,} of {num_tokens:,} tokens of {len(pools)} pools in {out.name}")


@app.command("prune")
@grouped
def pool_prune(
    file: PoolArgument,
    capacity_tokens: Annotated[
        int, typer.Option(min=1, help="Hold N tokens: the newest are kept.")
    ],
) -> None:
    """Make a pool smaller, or larger for text to come."""
    from lade.cli.build import BuiltFrom
    from ngram_pool import NGramPool

    sources = BuiltFrom.of(file)
    pool = NGramPool.load(file, read_only=True)
    pruned = NGramPool(capacity_tokens, pool.max_ngram_size)
    pruned.merge(pool)
    pruned.tokenizer, pruned.model = pool.tokenizer, pool.model
    pruned.save(file)
    if capacity_tokens <= pool.capacity_tokens:  # else files may be read again that it forgot
        sources.save(file)
    print(f"{len(pruned):,} of {len(pool):,} tokens left in {file.name}")


@app.command("forget")
@grouped
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
    from lade.cli.build import BuiltFrom
    from lade.cli.forgetting import forget

    stripped = [text.strip() for text in texts]
    if not all(stripped):
        raise ValueError("expected each TEXT to have more than white space, got ''")
    tokenizer = load_tokenizer(model, trust_remote_code)
    sources = BuiltFrom.of(file)
    pool = lade.load_pool(file, tokenizer=tokenizer)
    with console.status("searching"):
        counts = [forget(pool, tokenizer, text) for text in stripped]
    if any(counts):
        pool.save(file)
        sources.save(file)
    for text, count in zip(stripped, counts, strict=True):
        print(f"{count:,} of {text!r} removed from {file.name}" if count else f"no {text!r}")
    if any(counts) and sources.read:
        note("files that it was built from may still hold the text, and are read if they change")


@app.command("export")
@grouped
def pool_export(
    file: PoolArgument,
    out: Annotated[
        Path | None,
        typer.Option(help="Write to this file instead of standard output.", dir_okay=False),
    ] = None,
    model: ModelOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Write the texts of a pool as JSON lines, which `lade pool build` reads."""
    from lade.cli.forgetting import decoded

    tokenizer = load_tokenizer(model, trust_remote_code)
    pool = lade.load_pool(file, tokenizer=tokenizer, read_only=True)
    with out.open("w", encoding="utf-8") if out is not None else nullcontext(sys.stdout) as lines:
        for token_ids in pool.texts():
            line = {"text": decoded(tokenizer, token_ids.tolist())}
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")
    if out is not None:
        console.print(f"[dim]written to {out}[/dim]")
