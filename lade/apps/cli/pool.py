"""`lade pool build`: read files, tokenise their texts, chats as messages, and put them into a pool.

What has no text is left out and counted.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import typer
from rich.progress import MofNCompleteColumn

import lade
from lade.apps.cli.loading import bar, console, note, tell
from lade.apps.cli.options import check_writable, grouped, of_model
from lade.errors import UserError

_BATCH = 2**7  # texts that are tokenised in one call, which tokenizers do in several threads
_JSON_LINES = (".jsonl", ".ndjson")
_MADE = ("__pycache__", "node_modules")  # folders that tools write

# A pool needs a model's tokenizer alone.
app = typer.Typer(
    help="Build pools of text, to draft from by --pool.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command("build")
@grouped
def pool_build(
    files: list[Path] = typer.Argument(metavar="FILES", help="Files and folders.", exists=True),
    out: Path = typer.Option(help="The pool to make.", dir_okay=False, callback=check_writable),
    capacity_tokens: int = typer.Option(
        2**24,  # a gigabyte of memory when full; arrays grow as text comes
        min=1,
        max=2**29,
        help="Hold N tokens, the newest. Each takes 60 bytes.",
    ),
    model: str | None = of_model(
        None, metavar="ID", help="Whose tokenizer [smollm2-135m-instruct]."
    ),
    trust_remote_code: bool = of_model(
        False, "--trust-remote-code", help="Run the model's own code."
    ),
) -> None:
    """Read files into a pool, with the tokenizer of a model, whose weights are not needed.

    The command reads text and code in UTF-8, and chats in JSON lines with messages, in the model's
    chat template. In folders, it leaves out hidden files, virtual environments and binary files.

    The pool is written as a whole, at the end.
    """
    if out.exists():
        raise UserError(f"{out} already exists; choose another file name")
    from lade.models.loading import load_tokenizer
    from ngram_pool import NGramPool

    tell("Loading the tokenizer")
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code, progress=tell)
    pool, left_out = NGramPool(capacity_tokens), Counter[str]()
    num_tokens, start = 0, perf_counter()
    named = (path.resolve() for each in files for path in _files_of(each, left_out))
    found = [*dict.fromkeys(named)]  # each once
    with bar(MofNCompleteColumn()) as bars:
        shown = bars.track(found, description="reading files")
        texts = (text for path in shown for text in _texts_of(path, tokenizer, left_out))
        while batch := [*islice(texts, _BATCH)]:
            for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
                pool.observe(ids, None)
                num_tokens += len(ids)
    sec = max(perf_counter() - start, 1e-3)
    why = "; ".join(f"{why}: {number:,}" for why, number in left_out.items())
    if why:
        console.print(f"[dim]left out: {why}[/dim]", soft_wrap=True)
    if not num_tokens:
        raise UserError(f"expected text for {out.name} in the files, got none")
    lade.save_pool(pool, out, tokenizer=tokenizer)
    num_files = len(found) - left_out["no text in UTF-8"] - left_out["not readable"]
    print(
        f"{num_tokens:,} tokens of {num_files:,} files in {sec:.1f} seconds "
        f"({num_tokens / sec:,.0f} a second); {out.name} holds {len(pool):,}"
    )
    if num_tokens > len(pool):
        note(
            f"the oldest {num_tokens - len(pool):,} tokens were forgotten, as there is room for "
            f"{len(pool):,}; a larger --capacity-tokens holds all"
        )


# --- which files ----------------------------------------------------------------------------


def _files_of(path: Path, left_out: Counter[str]) -> Iterator[Path]:
    """Yield a file, or all files of a folder, in order.

    Left out of folders, and counted, are hidden files and folders such as `.git`, virtual
    environments, folders that tools write, links, and anything that is no file.
    """
    if not path.is_dir():
        yield path
    for name, folders, files in os.walk(path):
        here, num_there = Path(name), len(folders) + len(files)
        folders[:] = sorted(each for each in folders if _is_wanted(here / each))
        wanted = sorted(each for each in files if _is_wanted(here / each))
        if num_out := num_there - len(folders) - len(wanted):
            left_out["hidden, made by tools, or links"] += num_out
        yield from (here / each for each in wanted)


def _is_wanted(path: Path) -> bool:
    is_made = path.name.startswith(".") or path.name in _MADE or (path / "pyvenv.cfg").exists()
    return not (is_made or path.is_symlink()) and (path.is_dir() or path.is_file())


# --- which text -----------------------------------------------------------------------------


def _texts_of(path: Path, tokenizer: Any, left_out: Counter[str]) -> Iterator[str]:
    """Yield the texts of a file: all of it as one, or each line of JSON lines (by its name)."""
    try:
        with path.open("rb") as content:
            if b"\0" in content.peek():  # a NUL byte means binary, as for git
                raise UnicodeError("binary")
        with path.open(encoding="utf-8-sig") as lines:
            if path.suffix.lower() not in _JSON_LINES:
                yield from filter(None, [lines.read()])
                return
            for line in lines:
                yield _text_of(line, tokenizer)
    except UnicodeError:
        left_out["no text in UTF-8"] += 1
    except OSError:
        left_out["not readable"] += 1


def _text_of(line: str, tokenizer: Any) -> str:
    """Return what a line of JSON lines says: its chat, its text, or else itself."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return line
    entry = entry if isinstance(entry, dict) else {}
    messages = entry.get("messages")
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        from jinja2 import TemplateError  # comes with transformers

        chat = [{"role": each["role"], "content": each["content"]} for each in messages]
        with suppress(TemplateError):  # a template may refuse the order of roles
            if tokenizer.chat_template:
                return str(tokenizer.apply_chat_template(chat, tokenize=False))
        return "\n\n".join(each["content"] for each in chat)
    return entry["text"] if isinstance(entry.get("text"), str) else line


def _is_message(part: Any) -> bool:
    said = (part.get("role"), part.get("content")) if isinstance(part, dict) else (None,)
    return all(isinstance(each, str) for each in said)
