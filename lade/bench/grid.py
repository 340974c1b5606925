"""The grid: lade against plain `generate` in every setting, to find where it is slower.

Next file: `arena.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any, NamedTuple

from lade.bench.prompts import Prompt
from lade.bench.report import OVERALL, groups, rounded, speedup_text
from lade.bench.run import Result, Summary, passes_of, run_methods, summarise, warm_up_methods
from lade.bench.settings import Settings
from lade.bench.tables import Sheet
from lade.config import Config
from lade.models.loading import LoadedModel

#: A new pool for each call: what a call costs that nothing was kept for.
METHODS = ("plain", "lade_fresh")


class Cell(NamedTuple):
    """What lade comes to in one setting."""

    dtype: str
    settings: Settings
    summary: Summary
    lowest: float  # speed-up of the slowest pass
    loops: bool  # whether all answers end in loops, so that there are no others to show


def settings_of(
    temperatures: Iterable[float],
    lengths: Iterable[int],
    batch_sizes: Iterable[int],
    num_samples: int,
) -> list[Settings]:
    """Return the settings of a grid; prompts are sampled several times at temperatures above 0."""
    found = []
    for temperature, length in product(temperatures, lengths):
        greedy = Settings(length, temperature)
        found += [replace(greedy, batch_size=size) for size in batch_sizes]
        if temperature > 0 and num_samples > 1:
            found.append(replace(greedy, num_return_sequences=num_samples))
    return found


def run_cell(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    settings: Settings,
    config: Config,
    *,
    num_passes: int = 1,
    on_answer: Callable[[], None] = lambda: None,
) -> Cell:
    """Measure one cell; where a prompt is sampled several times, as many rows take fewer prompts.

    Answers that end in loops are left out, unless there are no others.
    """
    warm_up_methods(loaded, METHODS, settings, config)
    results: list[Result] = []
    run_methods(
        loaded,
        prompts[: max(1, len(prompts) // settings.num_return_sequences)],
        METHODS,
        settings,
        num_passes=num_passes,
        config=config,
        results=results,
        on_answer=lambda name, answer: on_answer(),
    )
    clean = groups(results).get(OVERALL)
    shown = results if clean is None else clean
    _, ours = METHODS
    lowest = min(summarise(part, ours).speedup or 0.0 for part in passes_of(shown))
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    return Cell(dtype, settings, summarise(shown, ours), lowest, clean is None)


def table(cells: Sequence[Cell]) -> Sheet:
    """Return all cells, those slower than plain in red."""
    rows = [
        (
            *(cell.dtype, cell.settings.describe(), str(cell.settings.max_new_tokens)),
            *(speedup_text(cell.summary.speedup) + "*" * cell.loops, speedup_text(cell.lowest)),
            f"{cell.summary.mean_accepted_tokens:.2f}",
            f"{cell.summary.draft_tokens_per_step:.1f}",
        )
        for cell in cells
    ]
    headings = ("number format", "decoding", "new tokens")
    columns = ("speed-up", "slowest pass", "MAT", "draft tokens/step")
    caption = "A new pool for each call. *: all answers end in loops."
    return Sheet("lade against generate", (*headings, *columns), 3, [rows], caption)


def as_json(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Return all cells for a file."""
    return [
        {
            "dtype": cell.dtype,
            **asdict(cell.settings),
            **rounded(cell.summary._asdict()),
            "lowest": round(cell.lowest, 6),
            "loops": cell.loops,
        }
        for cell in cells
    ]
