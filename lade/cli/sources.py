"""What pools are built from: files found, and cut into pieces of text; chats as their messages.

A file is read as its name says: JSON lines, JSON, else text. What is no text is left out and
counted. Nothing here knows a tokenizer. Next file: `build.py`.
"""

import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

#: Characters of a piece, about; its last line is completed. Tokens may be others where pieces meet.
PIECE = 2**14
_HEAD = 2**13  # bytes that tell binary files, as git tells them
# JSON values are read as a whole: a line of JSON lines, or a file of JSON.
_MAX_JSON = 2**26
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
    for path in paths:
        found.files += _walk(path, found.left_out) if path.is_dir() else [path]
    found.files = [*dict.fromkeys(path.resolve() for path in found.files)]
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


def pieces_of(path: Path, render: Render) -> Iterator[TextPiece]:
    """Yield the text of a file in pieces, always the same ones; its name says how to read it.

    Raises:
        UnreadableError: it is no text, from here on; the message says why.
    """
    with path.open("rb") as content:
        if b"\0" in content.peek(_HEAD)[:_HEAD]:
            raise UnreadableError("binary")
        text = io.TextIOWrapper(content, "utf-8-sig")
        try:
            if path.name.lower().endswith(_JSON_LINES):
                yield from _of_json_lines(text, render)
            elif path.suffix.lower() == ".json":
                yield from _of_json(text, render)
            else:
                yield from _cut(text)
        except UnicodeDecodeError:
            raise UnreadableError("not UTF-8") from None


def _of_json(text: TextIO, render: Render) -> Iterator[TextPiece]:
    whole = text.read(_MAX_JSON)
    if len(whole) == _MAX_JSON:
        raise UnreadableError(f"JSON of more than {_MAX_JSON >> 20} MB that is not JSON lines")
    value = _parsed(whole)
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
        own = _text_of(_parsed(line), render)
        if own is None:
            plain += line
        if plain and (own is not None or len(plain) > PIECE):
            yield TextPiece(plain, begins)
            plain, begins = "", own is not None
        if own is not None:
            yield from _cut(own)
    if plain:
        yield TextPiece(plain, begins)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _text_of(entry: Any, render: Render) -> str | None:
    """Return the text of a line of JSON lines that has one, or is a chat."""
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


def chat_of(entry: Any) -> list[Message] | None:
    """Return the messages of a JSON value; None if it is no chat.

    Understood are `messages` (role, content), `conversations` as in ShareGPT (from, value), `turns`
    (of either kind, or texts of the user), and pairs of `prompt` and `response` or `completion`.
    """
    if not isinstance(entry, dict):
        return None
    for name in ("messages", "conversations", "turns"):
        if isinstance(entry.get(name), list):
            return _messages(entry[name])
    asked, answered = entry.get("prompt"), entry.get("response", entry.get("completion"))
    if not asked or not answered:
        return None
    before = asked if isinstance(asked, list) else [asked]
    after = answered if isinstance(answered, list) else [{"role": "assistant", "content": answered}]
    return _messages([*before, *after])


_ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT


def _messages(entries: Sequence[Any]) -> list[Message] | None:
    """Return entries as messages; None if one cannot be read as such, or there is none."""
    messages = []
    for entry in entries:
        each = {"role": "user", "content": entry} if isinstance(entry, str) else entry
        if not isinstance(each, dict):
            return None
        role, content = each.get("role", each.get("from")), each.get("content", each.get("value"))
        if isinstance(content, list):  # parts, with images among them
            texts = [part.get("text") for part in content if isinstance(part, dict)]
            content = "\n".join(text for text in texts if isinstance(text, str))
        if not isinstance(role, str) or not isinstance(content, str):
            return None
        messages.append({"role": _ROLES.get(role, role), "content": content})
    return messages or None
