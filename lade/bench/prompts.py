"""Reading prompt files: JSON lines as Spec-Bench has them, or one prompt a line."""

import json
from pathlib import Path
from typing import NamedTuple


class Prompt(NamedTuple):
    """One prompt to answer."""

    id: str
    category: str
    text: str


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Read a prompt file.

    A line is a JSON object with `turns` (the first is used) or `prompt`, and optionally
    `question_id` and `category`; or it is the prompt itself. Empty lines are skipped.

    Args:
        path: the file.
        limit: keep so many prompts, spread evenly over the file.

    Raises:
        ValueError: a line cannot be read, or the file has no prompt.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            prompts.append(_parse(line.strip(), number, path.name))
    if not prompts:
        raise ValueError(f"expected prompts in {path.name}, found none")
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


def _parse(line: str, number: int, name: str) -> Prompt:
    if not line.startswith("{"):
        return Prompt(str(number), "all", line)
    try:
        entry = json.loads(line)
        text = entry["turns"][0] if "turns" in entry else entry["prompt"]
    except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"expected line {number} of {name} to be a prompt, or a JSON object with 'turns' or "
            f"'prompt': {error!r}"
        ) from None
    return Prompt(str(entry.get("question_id", number)), str(entry.get("category", "all")), text)
