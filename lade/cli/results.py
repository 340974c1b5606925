"""Results of commands: progress, tables, files, and keeping what one has found if it is stopped."""

from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from lade.cli.loading import bar, console
from lade.cli.options import check_place

if TYPE_CHECKING:
    from lade.bench.tables import Sheet

_of_results = partial(typer.Option, rich_help_panel="Results")
JsonOption = Annotated[
    Path | None, _of_results(help="Also write the results to this file.", dir_okay=False)
]


@dataclass(frozen=True)
class ResultFiles:
    """Where to write results besides the terminal, if anywhere."""

    json: JsonOption = None

    def check(self) -> None:
        """Raise now, before any work is done, if the results could not be written later."""
        if self.json is None:
            return
        if self.json.exists():
            with self.json.open("a", encoding="utf-8"):
                pass
        else:  # where a file left empty would look like results
            check_place(self.json)

    def show(self, content: dict[str, Any], *sheets: "Sheet") -> None:
        """Print tables, and write the content as JSON, where asked for."""
        from lade.bench.report import write_json

        for sheet in sheets:
            print_sheet(sheet)
        if self.json is not None:
            write_json(self.json, content)
            say_written([self.json])


def print_sheet(sheet: "Sheet") -> None:
    """Print a table uncropped; lines may wrap on a narrow terminal."""
    Console(highlight=False).print(sheet, crop=False)


def progress_bar() -> Progress:
    """Return a progress bar with a count and the time left."""
    return bar(MofNCompleteColumn(), TimeRemainingColumn())


def say_written(paths: Sequence[Path]) -> None:
    """Print where results were written."""
    for path in paths:
        console.print(f"[dim]written to {path}[/dim]")


class Stopped:
    """What broke a measurement off, if anything did."""

    by: BaseException | None = None

    def tell(self, text: str) -> None:
        """Print how far it came."""
        if self.by is not None:
            console.print(text)

    def pass_on(self) -> None:
        """Raise it now, the findings being written."""
        if self.by is not None:
            raise self.by


@contextmanager
def keeping(found: Sized) -> Iterator[Stopped]:
    """Hold back what breaks the block off, if something was found, until that is shown."""
    stopped = Stopped()
    try:
        yield stopped
    except BaseException as error:  # raised again by `pass_on`
        if not found:
            raise
        stopped.by = error
