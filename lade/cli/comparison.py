"""Answers of plain generate and of lade to the same prompts, as a table; where their texts part."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lade.bench.baselines import Answer
from lade.bench.tables import Sheet
from lade.closeness import is_exact_in, limit_of
from lade.stats import DecodeStats

_HEADINGS = (
    *("prompt", "tokens", "plain tokens/s", "lade tokens/s", "speed-up", "MAT"),
    *("draft tokens/step", "text"),
)


class Difference(NamedTuple):
    """Where two answers diverge."""

    place: int  # of the first different token, counted from 1
    gap: float  # between the model's top two logits there, recomputed from the whole text
    is_tie: bool  # whether rounding alone may close the gap


@dataclass(slots=True)
class BothAnswers:
    """One line of the table: the answers to a prompt, or all of them."""

    title: str
    stats: DecodeStats
    num_plain: int = 0
    plain_sec: float = 0.0
    lade_sec: float = 0.0
    difference: Difference | None = None  # None if the texts are the same

    @classmethod
    def of(
        cls, title: str, model: Any, inputs: dict[str, Any], plain: Answer, lade: Answer
    ) -> "BothAnswers":
        """Compare two answers to `inputs`."""
        assert lade.stats is not None, "lade counts its steps"
        difference = find_difference(model, inputs, plain.rows[0], lade.rows[0])
        return cls(title, lade.stats, plain.num_tokens, plain.sec, lade.sec, difference)

    def add(self, other: "BothAnswers") -> None:
        """Add the counts and times of another, and its difference if there was none."""
        self.stats.add(other.stats)
        self.num_plain += other.num_plain
        self.plain_sec += other.plain_sec
        self.lade_sec += other.lade_sec
        self.difference = self.difference or other.difference

    @property
    def plain_rate(self) -> float:
        """Tokens per second of plain generate."""
        return self.num_plain / self.plain_sec

    @property
    def lade_rate(self) -> float:
        """Tokens per second of lade."""
        return self.stats.num_tokens / self.lade_sec

    @property
    def speedup(self) -> float:
        """Of lade over plain generate."""
        return self.lade_rate / self.plain_rate

    def cells(self, text: str) -> tuple[str, ...]:
        """Return the line, with what is said of the texts."""
        return (
            self.title,
            str(self.stats.num_tokens),
            f"{self.plain_rate:.1f}",
            f"{self.lade_rate:.1f}",
            f"{self.speedup:.2f}x",
            f"{self.stats.mean_accepted_tokens:.2f}",
            f"{self.stats.draft_tokens_per_step:.1f}",
            text,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the line for a result file."""
        text = "same text"
        if self.difference is not None:
            text = f"differs at token {self.difference.place}, gap {self.difference.gap:.3g}"
        return {
            "title": self.title,
            "num_plain": self.num_plain,
            "plain_sec": self.plain_sec,
            "stats": self.stats.as_dict(),
            "lade_sec": self.lade_sec,
            "speedup": self.speedup,
            "text": text,
        }


def total_of(rows: Sequence[BothAnswers]) -> BothAnswers:
    """Return the sum of some rows."""
    total = BothAnswers("overall", DecodeStats())
    for row in rows:
        total.add(row)
    return total


def table_of(rows: Sequence[BothAnswers]) -> Sheet:
    """Return a table of some rows and their sum."""
    num_same = sum(row.difference is None for row in rows)
    overall = total_of(rows).cells(f"{num_same} of {len(rows)} same")
    return Sheet(
        "Plain generate against lade, same machine, same run",
        _HEADINGS,
        1,
        [[row.cells(verdict(row.difference)) for row in rows], [overall]],
    )


def find_difference(
    model: Any, inputs: dict[str, Any], expected: list[int], got: list[int]
) -> Difference | None:
    """Return where two answers diverge and whether it was a tie; None if they are the same."""
    if expected == got:
        return None
    shared = 0
    while shared < min(len(expected), len(got)) and expected[shared] == got[shared]:
        shared += 1
    prefix = torch.tensor(
        [inputs["input_ids"][0].tolist() + expected[:shared]], device=model.device
    )
    with torch.no_grad():
        logits = model(input_ids=prefix, use_cache=False).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    gap = best - second
    return Difference(shared + 1, gap, gap <= limit_of(model) * float(logits.std()))


def why_different(model: Any) -> str:
    """Explain why two answers may differ in the model's dtype."""
    dtype = str(model.dtype).removeprefix("torch.")
    if is_exact_in(model):
        return f"The text should be the same in {dtype}: this is a fault of lade, please report it."
    return (
        f"In {dtype}, a forward over several tokens rounds differently from one over a single "
        "token, and where the model's two best tokens are nearly tied, the texts may part. "
        "--dtype float32 gives the same text."
    )


def verdict(difference: Difference | None) -> str:
    """Describe in a few words whether two answers are the same."""
    if difference is None:
        return "same"
    why = "tie" if difference.is_tie else f"gap {difference.gap:.3g}"
    return f"differs at {difference.place} ({why})"
