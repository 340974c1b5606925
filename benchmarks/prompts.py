"""Prompts of a run. Files have halves: one to fit weights to, and one to measure them on."""

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from lade.apps.bench.prompts import Prompt, read_prompts


class Chosen(NamedTuple):
    """The prompts of a run, and how they were chosen."""

    prompts: Sequence[Prompt]
    described: dict[str, Any]  # for result files, which do not hold their texts


class Half(StrEnum):
    """One half of a file."""

    fit = "fit"
    publish = "publish"

    @classmethod
    def of(cls, prompt_id: str) -> "Half":
        """Return the half of a prompt: by its id alone, whatever else is in its file."""
        return cls.publish if crc32(prompt_id.encode()) % 2 else cls.fit


def choose(
    path: Path, limit: int | None, half: Half | None, categories: str | None = None
) -> Chosen:
    """Read a prompt file, or a half of it, or those of some categories, comma-separated.

    Raises:
        ValueError: it cannot be read, or has no such prompt.
    """
    prompts = [each for each in read_prompts(path) if half in (None, Half.of(each.id))]
    if categories is not None:
        names = [name.strip() for name in categories.split(",")]
        if missing := {*names} - {each.category for each in prompts}:
            raise ValueError(f"expected categories of {path.name}, got {', '.join(missing)}")
        prompts = [each for each in prompts if each.category in names]
    if not prompts:
        raise ValueError(f"expected prompts in the {half} half of {path.name}, found none")
    num = min(limit or len(prompts), len(prompts))
    kept = [prompts[i * len(prompts) // num] for i in range(num)]  # spread evenly over all
    return Chosen(kept, {**fingerprint(path), "limit": limit, "half": half, "num": len(kept)})


def fingerprint(path: Path) -> dict[str, str]:
    """Return name and digest of a file that results depend on but do not include."""
    return {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
