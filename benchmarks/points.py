"""Results of replays and arenas: a curve over draft sizes for each method, as table and JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.plots import new_figure, save
from lade.bench.environment import environment
from lade.bench.report import LOOPS, OVERALL, groups, msec_text, rounded, share_text
from lade.bench.tables import Sheet
from lade.stats import DecodeStats

_COLUMNS = (
    *("max draft tokens", "MAT", "draft tokens/step"),
    *("accepted", "corrected", "draft ms/step"),
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
    correction_rate: float
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
                    correction_rate=stats.correction_rate,
                    draft_sec_per_step=stats.draft_sec_per_step,
                )
            )
    return made


def table(made: Sequence[Point], caption: str | None = None, what: str = "Replay") -> Sheet:
    """Return a table of all answers without loops and, in a section apart, of those with loops."""
    num_passes = num_passes_of(made)
    sections = [
        [_cells(point, num_passes) for point in made if point.group == group]
        for group in (OVERALL, LOOPS)
    ]
    title = f"{what}, every step verifying as many draft tokens as it may, loops apart"
    headings = ("answers", "method", *_COLUMNS)
    return Sheet(title, headings, 2, [rows for rows in sections if rows], caption)


def as_json(made: Sequence[Point], settings: dict[str, Any]) -> dict[str, Any]:
    """Return all points, ready for JSON."""
    return {
        "environment": environment(),
        "settings": settings,
        "runs": [rounded(point._asdict()) for point in made],
    }


def plot(folder: Path, name: str, points: Sequence[Point]) -> list[Path]:
    """Plot MAT against draft tokens, one line per method; return the files."""
    num_passes = num_passes_of(points)
    lines: dict[str, list[Point]] = {}
    for point in points:
        if point.group in (OVERALL, LOOPS):
            note = ", loops" if point.group == LOOPS else ""
            lines.setdefault(point.label(num_passes) + note, []).append(point)
    figure, axes = new_figure(width=6.0)
    for label, line in lines.items():
        in_order = sorted(line, key=lambda point: point.max_draft_tokens)
        counts = [point.max_draft_tokens for point in in_order]
        values = [point.mean_accepted_tokens for point in in_order]
        style = "--" if in_order[0].group == LOOPS else "-"
        axes.plot(counts, values, style, marker="o", label=label)
    axes.set_xlabel("draft tokens, at most")
    axes.set_ylabel("mean accepted tokens")
    return save(figure, axes, folder, name)


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
        share_text(point.correction_rate),
        msec_text(point.draft_sec_per_step),
    )
