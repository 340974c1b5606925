"""What pools are built from: files found, opened and cut into pieces of text.

A file is read as its name says: JSON lines, JSON, else text, each perhaps gzipped. What is no text
is left out and counted. Nothing here knows a tokenizer. Next file: `build.py`.
"""

import gzip
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO, cast

from lade.cli.chats import Message, chat_of

#: Characters of a piece, about; its last line is completed. Tokens may be others where pieces meet.
PIECE = 2**14
_HEAD = 2**13  # bytes that tell binary files, as git tells them
# JSON values are read as a whole: a line of JSON lines, or a file of JSON.
_MAX_JSON = 2**26
_JSON_LINES = (".jsonl", ".ndjson")
_MADE = ("__pycache__", "node_modules")  # folders of what tools make or fetch

Render = Callable[[list[Message]], str]


class TextPiece(NamedTuple):
    """A piece of a file's text."""

    text: str
    begins: bool  # a text of its own, such as a chat; else it goes on with the piece before


class UnreadableError(ValueError):
    """A file cannot be read as text from some place on."""


@dataclass
class FoundFiles:
    """The files to read, and what was left out, by reason."""

    files: list[Path] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def find_files(paths: Iterable[Path]) -> FoundFiles:
    """Return all files of folders in order, each once, and those that are named.

    Left out of folders are hidden files and folders such as `.git`, virtual environments, folders
    that tools make, links, and what is no file.
    """
    found = FoundFiles()
    seen: set[Path] = set()
    for path in paths:
        for file in _walk(path, found.left_out) if path.is_dir() else [path]:
            if (resolved := file.resolve()) not in seen:
                seen.add(resolved)
                found.files.append(resolved)
    return found


def _walk(folder: Path, left_out: Counter[str]) -> Iterator[Path]:
    for name, folders, files in os.walk(folder):
        here = Path(name)
        kept = [each for each in folders if _is_wanted(here / each)]
        left_out["folders, hidden or made by tools"] += len(folders) - len(kept)
        folders[:] = sorted(kept)
        for each in sorted(files):
            path = here / each
            if each.startswith("."):
                left_out["hidden files"] += 1
            elif path.is_symlink() or not path.is_file():
                left_out["links and devices"] += 1
            else:
                yield path


def _is_wanted(folder: Path) -> bool:
    is_made = folder.name.startswith(".") or folder.name in _MADE
    return not (is_made or folder.is_symlink() or (folder / "pyvenv.cfg").exists())


def opened(path: Path) -> BinaryIO:
    """Open a file, unzipping it where its name says that it is zipped."""
    return cast(BinaryIO, gzip.open(path)) if path.suffix.lower() == ".gz" else path.open("rb")


def pieces_of(path: Path, content: BinaryIO, render: Render) -> Iterator[TextPiece]:
    """Yield the text of a file in pieces, always the same ones.

    Its name says how to read its content, which is unzipped already.

    Raises:
        UnreadableError: it is no text, from here on; the message says why.
    """
    name = path.name.lower().removesuffix(".gz")
    try:
        if b"\0" in content.peek(_HEAD)[:_HEAD]:  # type: ignore[attr-defined]
            raise UnreadableError("binary")
        text = io.TextIOWrapper(content, "utf-8-sig")
        try:
            if name.endswith(_JSON_LINES):
                yield from _of_json_lines(text, render)
            elif name.endswith(".json"):
                yield from _of_json(text, render)
            else:
                yield from _cut(text)
        finally:
            with suppress(ValueError):  # it was closed, as this was broken off
                text.detach()  # else it would close the content, which is not its own
    except UnicodeDecodeError:
        raise UnreadableError("not UTF-8") from None
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise UnreadableError("damaged gzip") from None


def _of_json(text: TextIO, render: Render) -> Iterator[TextPiece]:
    whole = text.read(_MAX_JSON)
    if len(whole) == _MAX_JSON:
        raise UnreadableError(f"JSON of more than {_MAX_JSON >> 20} MB that is not JSON lines")
    try:
        value = json.loads(whole)
    except (ValueError, RecursionError):
        value = None
    entries = value if isinstance(value, list) else [value]
    chats = [chat_of(entry) for entry in entries]
    if any(chat is not None for chat in chats):
        for entry, chat in zip(entries, chats, strict=True):
            yield from _cut(json.dumps(entry) if chat is None else render(chat))
    else:
        yield from _cut(whole)


def _of_json_lines(text: TextIO, render: Render) -> Iterator[TextPiece]:
    plain = ""  # lines that are neither chat nor text make one text, as they are
    begins = True
    while line := text.readline(_MAX_JSON):
        if len(line) == _MAX_JSON:
            raise UnreadableError(f"a line of more than {_MAX_JSON >> 20} MB")
        own = _text_of_line(line, render)
        if own is None:
            plain += line
        if plain and (own is not None or len(plain) > PIECE):
            yield TextPiece(plain, begins)
            plain, begins = "", own is not None
        if own is not None:
            yield from _cut(own)
    if plain:
        yield TextPiece(plain, begins)


def _text_of_line(line: str, render: Render) -> str | None:
    """Return the text of a line of JSON lines that has one, or is a chat."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        entry = entry["text"]
    if isinstance(entry, str):
        return entry
    chat = chat_of(entry)
    return None if chat is None else render(chat)


def _cut(text: str | TextIO) -> Iterator[TextPiece]:
    """Yield a text in pieces, at the ends of lines where there are any."""
    begins = True
    stream = io.StringIO(text) if isinstance(text, str) else text
    while piece := stream.read(PIECE) + stream.readline(PIECE):
        yield TextPiece(piece, begins)
        begins = False
