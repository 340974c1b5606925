"""Results of replays and arenas: a curve over draft sizes for each method, as table and JSON."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table

from lade.bench.environment import environment
from lade.bench.report import LOOPS, OVERALL, groups, msec_text, rounded, share_text, sheet
from lade.stats import DecodeStats

_COLUMNS = (
    *("max draft tokens", "MAT", "draft tokens/step"),
    *("accepted", "draft ms/step"),
)


class Point(NamedTuple):
    """One method with one draft size, over the answers of one group, in one pass."""

    group: str  # a category, `OVERALL` (all answers without loops) or `LOOPS`
    method: str
    max_draft_tokens: int
    num_pass: int
    num_answers: int
    num_tokens: int
    mean_accepted_tokens: float
    draft_tokens_per_step: float
    acceptance_rate: float
    draft_sec_per_step: float

    def label(self, num_passes: int) -> str:
        """Return the method's name, with the pass if there are several."""
        return self.method if num_passes == 1 else f"{self.method}, pass {self.num_pass + 1}"


def points(measured: Sequence[Any]) -> list[Point]:
    """Sum up answers of replays or of the arena by group, in the order of their methods."""
    made = []
    for group, part in groups(measured).items():
        by_run: dict[tuple[str, int, int], list[Any]] = {}
        for each in part:
            run = (each.method, each.max_draft_tokens, each.num_pass)
            by_run.setdefault(run, []).append(each)
        for run, of_run in by_run.items():
            stats = DecodeStats()
            for each in of_run:
                stats.add(each.stats)
            made.append(
                Point(
                    group,
                    *run,
                    num_answers=len(of_run),
                    num_tokens=stats.num_tokens,
                    mean_accepted_tokens=stats.mean_accepted_tokens,
                    draft_tokens_per_step=stats.draft_tokens_per_step,
                    acceptance_rate=stats.acceptance_rate,
                    draft_sec_per_step=stats.draft_sec_per_step,
                )
            )
    return made


def table(made: Sequence[Point], caption: str | None = None, what: str = "Replay") -> Table:
    """Return a table of all answers without loops and, in a section apart, of those with loops."""
    num_passes = num_passes_of(made)
    sections = [
        [_cells(point, num_passes) for point in made if point.group == group]
        for group in (OVERALL, LOOPS)
    ]
    title = f"{what}, every step verifying as many draft tokens as it may, loops apart"
    headings = ("answers", "method", *_COLUMNS)
    return sheet(title, headings, [rows for rows in sections if rows], caption)


def as_json(made: Sequence[Point], settings: dict[str, Any]) -> dict[str, Any]:
    """Return all points, ready for JSON."""
    return {
        "environment": environment(),
        "settings": settings,
        "runs": [rounded(point._asdict()) for point in made],
    }


def num_passes_of(made: Sequence[Point]) -> int:
    """Return the number of passes."""
    return 1 + max(point.num_pass for point in made)


def _cells(point: Point, num_passes: int) -> tuple[str, ...]:
    return (
        f"{point.group} ({point.num_answers})",
        point.label(num_passes),
        str(point.max_draft_tokens),
        f"{point.mean_accepted_tokens:.2f}",
        f"{point.draft_tokens_per_step:.1f}",
        share_text(point.acceptance_rate),
        msec_text(point.draft_sec_per_step),
    )
