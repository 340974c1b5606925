"""`lade pool …`, and the pools that other commands draft from: read, made and written here."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lade
from lade.cli.build import Built, Sources, build
from lade.cli.forgetting import decoded, forget
from lade.cli.loading import console, load_tokenizer, note
from lade.cli.places import check_place
from lade.models.loading import LoadedModel
from ngram_pool import NGramPool

# A gigabyte of memory when full; arrays grow as text comes.
DEFAULT_BUILD_TOKENS = 2**24


@contextmanager
def open_pools(
    loaded: LoadedModel, paths: Sequence[Path], save_path: Path | None
) -> Iterator[list[NGramPool]]:
    """Open the pools of `--pool` and `--save-pool`; save the latter at the end, however that comes.

    Yields:
        The one that learns first, loaded if its file exists, then those that are read.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    own = NGramPool()
    if save_path is not None and save_path.exists():
        own = lade.load_pool(save_path, tokenizer=tokenizer, model=model)
    kept = None if save_path is None else save_path.resolve()
    layers = [
        lade.load_pool(path, tokenizer=tokenizer, model=model, read_only=True)
        for path in dict.fromkeys(path.resolve() for path in paths)
        if path != kept
    ]
    try:
        yield [own, *layers]
    finally:
        if save_path is not None:
            lade.save_pool(own, save_path, tokenizer=tokenizer, model=model)
            console.print(f"[dim]{len(own):,} tokens kept in {save_path}[/dim]", soft_wrap=True)


def run_build(
    paths: Sequence[Path],
    out: Path,
    model: str | None,
    capacity_tokens: int | None,
    trust_remote_code: bool,
) -> None:
    """Add files to a pool on disk, or make it; keep what was read, even after an interruption."""
    check_place(out)
    tokenizer = load_tokenizer(model, trust_remote_code)
    if out.exists():
        pool = lade.load_pool(out, tokenizer=tokenizer)
        if capacity_tokens not in (None, pool.capacity_tokens):
            raise ValueError(
                f"expected no --capacity-tokens, as {out.name} exists with "
                f"{pool.capacity_tokens:,}; lade pool prune changes it"
            )
    else:
        pool = NGramPool(capacity_tokens or DEFAULT_BUILD_TOKENS)
    sources, built, num_before = Sources.of(out), Built(), len(pool)
    if sources.lost is not None:
        note(f"{sources.lost}; all files are read again")

    def save() -> None:
        lade.save_pool(pool, out, tokenizer=tokenizer)
        sources.save(out)

    is_whole = False
    try:
        build(
            pool,
            paths,
            tokenizer,
            sources=sources,
            save=save,
            built=built,
            excluded=[out, sources.path],
        )
        is_whole = True
    finally:
        if built.num_tokens or is_whole:
            save()
        _tell_built(built, out, len(pool), num_before)
        if not is_whole:
            console.print("stopped; the same command goes on from here")


def _tell_built(built: Built, out: Path, num_held: int, num_before: int) -> None:
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
            f"{num_held:,}; lade pool prune --capacity-tokens gives more"
        )


def run_info(path: Path) -> None:
    """Print what a pool on disk holds."""
    pool = NGramPool.load(path, read_only=True)
    num_files = sum(read.num_pieces > 0 for read in Sources.of(path).read.values())
    lines = {
        "tokens": f"{len(pool):,} of at most {pool.capacity_tokens:,}",
        "texts": f"{sum(1 for _ in pool.texts()):,}",
        "longest n-gram": str(pool.max_ngram_size),
        "file": f"{path.stat().st_size / 10**6:,.1f} MB",
        "tokenizer": pool.tokenizer or "unknown",
        "model": pool.model or "none: text alone",
    }
    if num_files:
        lines["built from"] = f"{num_files:,} files"
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name.ljust(width)}  {value}")


def run_merge(paths: Sequence[Path], out: Path, capacity_tokens: int | None) -> None:
    """Write all text of several pools to one; of the first one's tokenizer, and its model."""
    check_place(out)
    pools: list[NGramPool] = []
    for path in paths:
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


def run_prune(path: Path, capacity_tokens: int) -> None:
    """Give a pool on disk another capacity; its newest text stays."""
    sources = Sources.of(path)
    pool = NGramPool.load(path, read_only=True)
    pruned = NGramPool(capacity_tokens, pool.max_ngram_size)
    pruned.merge(pool)
    pruned.tokenizer, pruned.model = pool.tokenizer, pool.model
    pruned.save(path)
    if sources.read:
        sources.save(path)
    print(f"{len(pruned):,} of {len(pool):,} tokens left in {path.name}")


def run_forget(
    path: Path, texts: Sequence[str], model: str | None, trust_remote_code: bool
) -> None:
    """Remove texts from a pool on disk for good."""
    stripped = [text.strip() for text in texts]
    if not all(stripped):
        raise ValueError("expected each TEXT to have more than white space, got ''")
    tokenizer = load_tokenizer(model, trust_remote_code)
    sources = Sources.of(path)
    pool = lade.load_pool(path, tokenizer=tokenizer)
    with console.status("searching"):
        counts = [forget(pool, tokenizer, text) for text in stripped]
    if any(counts):
        pool.save(path)
        if sources.read:
            sources.save(path)
    for text, count in zip(stripped, counts, strict=True):
        print(f"{count:,} of {text!r} removed from {path.name}" if count else f"no {text!r}")
    if any(counts) and sources.read:
        note("files that it was built from may still hold the text, and are read if they change")


def run_export(path: Path, out: Path | None, model: str | None, trust_remote_code: bool) -> None:
    """Write the texts of a pool as JSON lines, oldest first."""
    tokenizer = load_tokenizer(model, trust_remote_code)
    pool = lade.load_pool(path, tokenizer=tokenizer, read_only=True)
    with out.open("w", encoding="utf-8") if out is not None else _standard_output() as file:
        for token_ids in pool.texts():
            line = {"text": decoded(tokenizer, token_ids.tolist())}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    if out is not None:
        console.print(f"[dim]written to {out}[/dim]")


@contextmanager
def _standard_output() -> Iterator[Any]:
    yield sys.stdout
