"""Read prompt files: JSON lines as in Spec-Bench, or one prompt per line."""

import json
from pathlib import Path
from typing import NamedTuple

from lade.errors import UserError

#: Six prompts, from free text to text that quotes its input.
DEMO_PROMPTS = Path(__file__).with_name("demo_prompts.jsonl")


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


def read_prompts(path: Path) -> list[Prompt]:
    """Read a prompt file.

    A line is a JSON object with `turns` or `prompt`, and optionally `question_id` and `category`;
    or it is the prompt itself. Empty lines are skipped. Only servers are asked all turns; elsewhere
    the first is the prompt.

    Raises:
        UserError: a line cannot be read, or the file has no prompt.
    """
    try:
        text = path.read_text("utf-8-sig")  # Windows editors may add a byte order mark
    except UnicodeDecodeError as error:
        raise UserError(f"expected {path.name} in UTF-8: {error}") from None
    # Not by splitlines: JSON strings may contain other line-ending characters unescaped.
    lines = enumerate(text.split("\n"), start=1)
    prompts = [_parse(line.strip(), number, path.name) for number, line in lines if line.strip()]
    if not prompts:
        raise UserError(f"expected prompts in {path.name}, found none")
    return prompts


def _parse(line: str, number: int, name: str) -> Prompt:
    if not line.startswith("{"):
        return Prompt(str(number), "all", line)
    expected = (
        f"expected line {number} of {name} to be a prompt, or a JSON object with 'turns', a list "
        "of texts, or 'prompt', a text"
    )
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{expected}; its JSON is broken: {error}") from None
    turns = entry["turns"] if "turns" in entry else [entry.get("prompt")]
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
        raise UserError(f"{expected}, got {line if len(line) <= 60 else f'{line[:60]} …'}")
    question_id, category = entry.get("question_id", number), entry.get("category", "all")
    return Prompt(str(question_id), str(category), turns[0], tuple(turns[1:]))
