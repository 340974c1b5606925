"""`lade bench grid`: measure every setting with a progress bar, print and write the table."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from lade.bench.settings import Settings
from lade.cli.bench import (
    ResultFiles,
    describe_model,
    describe_prompts,
    print_sheet,
    progress_bar,
)
from lade.cli.loading import console
from lade.cli.options import Dtype, load
from lade.cli.prompting import check_prompts
from lade.config import Config

if TYPE_CHECKING:
    from lade.bench.prompts import PromptFile


def choose_numbers(option: str, text: str) -> list[float]:
    """Return the numbers of a comma-separated list.

    Raises:
        ValueError: it is not a list of different numbers of 0 or more.
    """
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or len({*numbers}) < len(numbers) or not all(0 <= n < 1e9 for n in numbers):
        raise ValueError(f"expected {option} to be different numbers of 0 or more, got {text!r}")
    return numbers


def choose_sizes(option: str, text: str) -> list[int]:
    """Return the whole numbers of a comma-separated list.

    Raises:
        ValueError: it is not a list of different whole numbers of 1 or more.
    """
    numbers = choose_numbers(option, text)
    if not all(number >= 1 and number.is_integer() for number in numbers):
        raise ValueError(f"expected {option} to be whole numbers of 1 or more, got {text!r}")
    return [int(number) for number in numbers]


def choose_dtypes(text: str) -> list[Dtype]:
    """Return the number formats of a comma-separated list.

    Raises:
        ValueError: one is unknown, or named twice.
    """
    names = text.split(",")
    if len({*names}) < len(names) or not {*names} <= {*Dtype}:
        known = ", ".join(Dtype)
        raise ValueError(f"expected --dtypes to be different ones of {known}, got {text!r}")
    return [Dtype(name) for name in names]


def run(
    loading: tuple[str | None, str | None, int | None, bool],
    dtypes: Sequence[Dtype],
    chosen: "PromptFile",
    grid: Sequence[Settings],
    num_passes: int,
    config: Config,
    files: ResultFiles,
) -> None:
    """Measure all settings in each number format; show and write them, also when interrupted.

    Args:
        loading: model, device, threads, and whether to trust its code.
        dtypes: number formats, each loaded in turn.
        chosen: the prompts.
        grid: the settings.
        num_passes: times to measure each.
        config: of lade.
        files: where to write results.
    """
    from lade.bench.batches import in_batches
    from lade.bench.environment import environment
    from lade.bench.grid import METHODS, Cell, as_json, run_cell, table

    model, device, threads, trusts = loading
    cells: list[Cell] = []
    described = {}
    stopped_by: BaseException | None = None
    try:
        for dtype in dtypes:
            loaded = load(model, device, dtype, threads, trusts)
            described = describe_model(loaded)
            texts = [prompt.text for prompt in chosen.prompts]
            check_prompts(loaded, texts, max(settings.max_new_tokens for settings in grid))
            for number, settings in enumerate(grid, start=1):
                with progress_bar() as bars:
                    num = len(chosen.prompts) // settings.num_return_sequences
                    num_calls = len(in_batches(range(max(1, num)), settings.batch_size))
                    words = f"{dtype} {number}/{len(grid)}: {settings.describe()}"
                    total = num_calls * num_passes * len(METHODS)
                    task = bars.add_task(words, total=total)
                    cell = run_cell(
                        loaded,
                        chosen.prompts,
                        settings,
                        config,
                        num_passes=num_passes,
                        on_answer=lambda bars=bars, task=task: bars.advance(task),  # type: ignore[misc]
                    )
                cells.append(cell)
    except BaseException as error:  # still show and write what was measured so far
        if not cells:
            raise
        stopped_by = error
    sheet = table(cells)
    print_sheet(sheet)
    if stopped_by is not None:
        console.print(f"stopped after {len(cells)} of {len(grid) * len(dtypes)} settings")
    settings_made = {
        **described,
        "dtype": ", ".join(dtypes),
        "prompts": describe_prompts(chosen),
        "passes": num_passes,
        "config": asdict(config),
        "interrupted": stopped_by is not None,
    }
    content = {"environment": environment(), "settings": settings_made, "runs": as_json(cells)}
    files.write(content, sheet)
    if stopped_by is not None:
        raise stopped_by
