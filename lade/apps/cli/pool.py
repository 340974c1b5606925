"""`lade pool build`: read files, tokenise their texts, chats as messages, and put them into a pool.

Files without text are left out and counted.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import MofNCompleteColumn

import lade
from lade.apps.cli.loading import bar, console, note, tell
from lade.apps.cli.options import ModelOption, TrustOption, check_writable, grouped
from lade.errors import UserError

if TYPE_CHECKING:
    from ngram_pool import NGramPool

_BATCH = 2**7  # texts that are tokenised in one call, which tokenizers do in several threads
_JSON_LINES = (".jsonl", ".ndjson")
_MADE = ("__pycache__", "node_modules")  # folders that tools write

Message = dict[str, str]  # role and content, as chat templates take them
Render = Callable[[list[Message]], str]

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
    from lade.models.loading import load_tokenizer
    from ngram_pool import NGramPool

    tell("Loading the tokenizer")
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code, progress=tell)
    pool = NGramPool(capacity_tokens)
    built = _build(pool, files, tokenizer)
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


def _show_built(built: "_Built", num_held: int) -> None:
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


@dataclass
class _Built:
    """Counts of a run."""

    num_tokens: int = 0
    num_files: int = 0
    sec: float = 0.0
    left_out: Counter[str] = field(default_factory=Counter)  # by reason
    num_refused: int = 0  # chats


def _build(pool: "NGramPool", paths: Sequence[Path], tokenizer: Any) -> _Built:
    """Add the text of files, each or each chat as a sequence of its own."""
    start = perf_counter()
    built = _Built()
    found = _find_files(paths, built.left_out)
    render = _renderer_of(tokenizer, built)
    with bar(MofNCompleteColumn()) as bars:
        texts = _texts(bars.track(found, description="reading files"), render, built)
        while batch := [*islice(texts, _BATCH)]:
            for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
                pool.observe(ids, None)
                built.num_tokens += len(ids)
    built.sec = perf_counter() - start
    return built


def _texts(files: Iterable[Path], render: Render, built: _Built) -> Iterator[str]:
    for path in files:
        has_text = False
        try:
            for text in _texts_of(path, render):
                has_text = True
                yield text
        except UnicodeError:
            built.left_out["no text in UTF-8"] += 1
        except OSError:
            built.left_out["not readable"] += 1
        built.num_files += has_text


def _renderer_of(tokenizer: Any, built: _Built) -> Render:
    """Return a function from a chat to its text, by the chat template if there is one."""
    from jinja2 import TemplateError

    def render(messages: list[Message]) -> str:
        if tokenizer.chat_template:
            try:
                text: str = tokenizer.apply_chat_template(messages, tokenize=False)
                return text
            except TemplateError:
                built.num_refused += 1
        return "\n\n".join(message["content"] for message in messages)

    return render


def _find_files(paths: Iterable[Path], left_out: Counter[str]) -> list[Path]:
    """Return the named files and all files of the named folders, in order, each once.

    Left out of folders, and counted, are hidden files and folders such as `.git`, virtual
    environments, folders that tools write, links, and anything that is no file.
    """
    found: list[Path] = []
    for path in paths:
        found += _walk(path, left_out) if path.is_dir() else [path]
    return [*dict.fromkeys(path.resolve() for path in found)]


def _walk(folder: Path, left_out: Counter[str]) -> Iterator[Path]:
    for name, folders, files in os.walk(folder):
        here, num_there = Path(name), len(folders) + len(files)
        folders[:] = sorted(each for each in folders if _is_wanted(here / each))
        wanted = sorted(each for each in files if _is_wanted(here / each))
        left_out["hidden, made by tools, or links"] += num_there - len(folders) - len(wanted)
        yield from (here / each for each in wanted)


def _is_wanted(path: Path) -> bool:
    is_made = path.name.startswith(".") or path.name in _MADE or (path / "pyvenv.cfg").exists()
    return not (is_made or path.is_symlink()) and (path.is_dir() or path.is_file())


def _texts_of(path: Path, render: Render) -> Iterator[str]:
    """Yield the texts of a file: its whole text, or each chat of JSON lines (by its name).

    Raises:
        UnicodeError: it is no text in UTF-8, from here on.
        OSError: it cannot be read.
    """
    with path.open("rb") as content:
        if b"\0" in content.peek():  # a NUL byte means binary, as for git
            raise UnicodeError("binary")
    with path.open(encoding="utf-8-sig") as lines:
        if path.suffix.lower() not in _JSON_LINES:
            yield from filter(None, [lines.read()])
            return
        rest = ""  # lines that are neither chat nor text make one text, as they are
        for line in lines:
            text = _text_of(line, render)
            if text is None:
                rest += line
            else:
                yield from filter(None, [rest, text])
                rest = ""
        yield from filter(None, [rest])


def _text_of(line: str, render: Render) -> str | None:
    """Return the text of a line of JSON lines that has one, or is a chat."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    messages = entry.get("messages")
    if not isinstance(messages, list) or not messages:
        return entry["text"] if isinstance(entry.get("text"), str) else None
    chat: list[Message] = []
    for each in messages:
        role, said = (each.get(n) if isinstance(each, dict) else None for n in ("role", "content"))
        if not isinstance(role, str) or not isinstance(said, str):
            return None
        chat.append({"role": role, "content": said})
    return render(chat)
