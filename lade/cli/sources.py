"""The files that pools are built from, and their texts; chats as messages.

Files without text are left out and counted. Nothing here knows a tokenizer. Next file: `build.py`.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_JSON_LINES = (".jsonl", ".ndjson")
_MADE = ("__pycache__", "node_modules")  # folders that tools write

Message = dict[str, str]  # role and content, as chat templates take them
Render = Callable[[list[Message]], str]


def find_files(paths: Iterable[Path], left_out: Counter[str]) -> list[Path]:
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


def texts_of(path: Path, render: Render) -> Iterator[str]:
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
