"""Of which architectures a whole forward runs as one compiled job, and what does not fit in others.

A tiny model of each is read, as one is at its first call on a CPU; nothing is generated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.inside import environment, why_by_torch
from tests.support.run import quiet
from tests.support.tiny import VARIANTS, CannotBuild, tiny_model


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """What was found of one architecture."""

    name: str
    why_by_torch: str | None

    @property
    def is_bad(self) -> bool:
        """Whether lade is at fault: a model that is run by torch is no fault."""
        return False


def run_forwards(names: Sequence[str], *, seed: int = 0) -> Iterator[ForwardRow]:
    """Read a model of each architecture of `all_names` that can be built."""
    for name in names:
        with quiet(), torch.random.fork_rng(devices=[]):
            try:
                model = tiny_model(name, seed=seed, dtype=torch.float32)
            except CannotBuild:
                continue
            yield ForwardRow(name, why_by_torch(model))


def cells(row: ForwardRow) -> tuple[str, ...]:
    """Return the cells of a row as text."""
    return row.name, row.why_by_torch or "a job"


def summary(rows: Sequence[ForwardRow]) -> dict[str, int]:
    """Return how many architectures were built, and how many of them a job is read from."""
    whole = [row for row in rows if row.name not in VARIANTS]
    return {"all": len(whole), "jobs": sum(row.why_by_torch is None for row in whole)}


def content_of(rows: Sequence[ForwardRow], seed: int, stopped: bool) -> dict[str, Any]:
    """Return what a result file has."""
    by_torch: dict[str, list[str]] = {}
    for row in rows:
        if row.why_by_torch is not None:
            by_torch.setdefault(row.why_by_torch, []).append(row.name)
    return {
        "environment": environment(),
        "settings": {"seed": seed, "interrupted": stopped},
        "summary": summary(rows),
        "jobs": [row.name for row in rows if row.why_by_torch is None],
        "by_torch": {reason: ", ".join(names) for reason, names in by_torch.items()},
    }
