"""Of which architectures a whole forward runs as one compiled job, and what does not fit in others.

A tiny model of each is read, as one is at its first call on a CPU. Those that are read answer in
float32, by jobs alone, prompts within and beyond their windows and chunks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lade import DecodeStats
from tests.support.inside import environment, jobs_alone, why_by_torch, why_wrong
from tests.support.run import Case, Row, check_model, quiet
from tests.support.tiny import VARIANTS, CannotBuild, tiny_model

_CASES = [Case(f"greedy {num}", (num,), num, False) for num in (12, 70, 200)]
_TIE = 1e-5  # between two best logits of a token, in float32


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """What was found of one architecture."""

    name: str
    why_by_torch: str | None
    wrong: tuple[str, ...] = ()  # what is wrong in its texts

    @property
    def is_bad(self) -> bool:
        """Whether lade is at fault: a model that is run by torch is no fault."""
        return bool(self.wrong)


def run_forwards(names: Sequence[str], *, seed: int = 0) -> Iterator[ForwardRow]:
    """Read a model of each architecture of `all_names` that can be built."""
    for name in names:
        with quiet(), torch.random.fork_rng(devices=[]):
            try:
                why = why_by_torch(tiny_model(name, seed=seed, dtype=torch.float32))
            except CannotBuild:
                continue
            row = ForwardRow(name, why, () if why else (*_wrong(name, seed),))
        yield row


def _wrong(name: str, seed: int) -> Iterator[str]:
    """Yield what is wrong in the texts of a model with windows of 16 tokens and chunks of 32."""
    model = tiny_model(name, seed=seed, dtype=torch.float32, widens=True)
    row = Row(name, name, type(model).__name__)
    with jobs_alone():
        check_model(row, model, _CASES, seed, DecodeStats())
    yield from (f"{case}: {error}" for case, error in row.failures.items())
    yield from (str(each) for each in row.differences if each.gap is None or each.gap > _TIE)
    if (why := why_wrong(model)) is not None:
        yield why


def cells(row: ForwardRow) -> tuple[str, ...]:
    """Return the cells of a row as text."""
    return row.name, row.why_by_torch or "a job", *row.wrong


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
        "wrong": {row.name: [*row.wrong] for row in rows if row.is_bad},
        "by_torch": {reason: ", ".join(names) for reason, names in by_torch.items()},
    }
