"""What pools are built from: files found, and cut into pieces of text; chats as their messages.

What is no text is left out and counted. Nothing here knows a tokenizer. Next file: `build.py`.
"""

import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

#: Characters of a piece, about; its last line is completed. Tokens may be others where pieces meet.
PIECE = 2**14
_JSON_LINES = (".jsonl", ".ndjson")
_MADE = ("__pycache__", "node_modules")  # folders of what tools make or fetch

Message = dict[str, str]  # role and content, as chat templates take them
Render = Callable[[list[Message]], str]


class TextPiece(NamedTuple):
    """A piece of a file's text."""

    text: str
    begins: bool  # a text of its own, such as a chat; else it goes on with the piece before


class UnreadableError(ValueError):
    """A file cannot be read as text from some place on."""


def find_files(paths: Iterable[Path], left_out: Counter[str]) -> list[Path]:
    """Return all files of folders in order, each once, and those that are named.

    Left out of folders, and counted, are hidden files and folders such as `.git`, virtual
    environments, folders that tools make, links, and what is no file.
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


def pieces_of(path: Path, render: Render) -> Iterator[TextPiece]:
    """Yield the text of a file in pieces, always the same ones; its name tells JSON lines.

    Raises:
        UnreadableError: it is no text, from here on; the message says why.
    """
    with path.open("rb") as content:
        if b"\0" in content.peek():  # the first bytes tell, as for git
            raise UnreadableError("binary")
        text = io.TextIOWrapper(content, "utf-8-sig")
        is_lines = path.suffix.lower() in _JSON_LINES
        try:
            yield from _of_json_lines(text, render) if is_lines else _cut(text)
        except UnicodeDecodeError:
            raise UnreadableError("not UTF-8") from None


def _of_json_lines(text: TextIO, render: Render) -> Iterator[TextPiece]:
    plain, begins = "", True  # lines that are neither chat nor text make one text, as they are
    for line in text:
        own = _text_of(line, render)
        plain += line if own is None else ""
        if plain and (own is not None or len(plain) > PIECE):
            yield TextPiece(plain, begins)
            plain, begins = "", False
        if own is not None:
            begins = True
            yield from _cut(io.StringIO(own))
    if plain:
        yield TextPiece(plain, begins)


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


def _cut(stream: TextIO) -> Iterator[TextPiece]:
    """Yield a text in pieces, at the ends of lines where there are any."""
    begins = True
    while piece := stream.read(PIECE) + stream.readline(PIECE):
        yield TextPiece(piece, begins)
        begins = False
