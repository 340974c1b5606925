"""Read prompt files: JSON lines as in Spec-Bench, or one prompt per line."""

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple
from zlib import crc32


class Half(StrEnum):
    """One half of a file: one to fit weights to, and one to measure them on."""

    fit = "fit"
    publish = "publish"

    @classmethod
    def of(cls, prompt_id: str) -> "Half":
        """Return the half of a prompt: by its id alone, whatever else is in its file."""
        return cls.publish if crc32(prompt_id.encode()) % 2 else cls.fit


class Prompt(NamedTuple):
    """One prompt to answer."""

    id: str
    category: str
    text: str
    later: tuple[str, ...] = ()  # the turns after the first, where whole conversations are held

    @property
    def turns(self) -> tuple[str, ...]:
        """All that is said to the model."""
        return (self.text, *self.later)


class PromptFile(NamedTuple):
    """The prompts to answer from a file, and how they were chosen."""

    path: Path
    limit: int | None  # as for `read_prompts`
    half: Half | None
    prompts: list[Prompt]

    @classmethod
    def read(cls, path: Path, limit: int | None, half: Half | None = None) -> "PromptFile":
        """Read a prompt file, as `read_prompts` does."""
        return cls(path, limit, half, read_prompts(path, limit, half))


def read_prompts(path: Path, limit: int | None = None, half: Half | None = None) -> list[Prompt]:
    """Read a prompt file.

    A line is a JSON object with `turns` or `prompt`, and optionally `question_id` and `category`;
    or it is the prompt itself. Empty lines are skipped. Only servers are asked all turns; elsewhere
    the first is the prompt.

    Args:
        path: the file.
        limit: number of prompts to keep, spread evenly over the file or its half; None for all.
        half: the half to keep; None for both.

    Raises:
        ValueError: a line cannot be read, or the file or its half has no prompt.
    """
    prompts = []
    # Not by splitlines: JSON strings may contain other line-ending characters unescaped.
    for number, line in enumerate(re.split(r"\r\n?|\n", _read(path)), start=1):
        if line.strip():
            prompts.append(_parse(line.strip(), number, path.name))
    prompts = [prompt for prompt in prompts if half in (None, Half.of(prompt.id))]
    if not prompts:
        of_half = "" if half is None else f"the {half} half of "
        raise ValueError(f"expected prompts in {of_half}{path.name}, found none")
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")  # Windows editors may add a byte order mark
    except UnicodeDecodeError as error:
        byte, number = error.object[error.start], error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"expected {path.name} in UTF-8, got byte 0x{byte:02x} in line {number}"
        ) from None


def _parse(line: str, number: int, name: str) -> Prompt:
    if not line.startswith("{"):
        return Prompt(str(number), "all", line)
    expected = (
        f"expected line {number} of {name} to be a prompt, or a JSON object with 'turns', a list "
        "of texts, or 'prompt', a text"
    )
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{expected}; its JSON is broken: {error}") from None
    turns = entry["turns"] if "turns" in entry else [entry.get("prompt")]
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
        raise ValueError(f"{expected}, got {_shortened(line)}")
    return Prompt(
        str(entry.get("question_id", number)),
        str(entry.get("category", "all")),
        turns[0],
        tuple(turns[1:]),
    )


def _shortened(line: str, limit: int = 60) -> str:
    return line if len(line) <= limit else f"{line[:limit]} …"
