"""Results of commands: progress, tables, files, and keeping what one has found if it is stopped."""

from collections.abc import Sized
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from lade.cli.loading import bar, console
from lade.cli.options import check_place

if TYPE_CHECKING:
    from rich.table import Table

JsonOption = Annotated[
    Path | None,
    typer.Option(
        help="Also write the results to this file.",
        rich_help_panel="Results",
        dir_okay=False,
        callback=check_place,
    ),
]


def show(file: Path | None, content: dict[str, Any], *tables: "Table") -> None:
    """Print tables, and write the content as JSON to a file, where there is one."""
    from lade.bench.report import write_json

    for table in tables:
        Console(highlight=False).print(table, crop=False)
    if file is not None:
        write_json(file, content)
        console.print(f"[dim]written to {file}[/dim]", soft_wrap=True)


def progress_bar() -> Progress:
    """Return a progress bar with a count and the time left."""
    return bar(MofNCompleteColumn(), TimeRemainingColumn())


class Keeping:
    """Holds back what breaks a block off, if something was found, until that is shown."""

    def __init__(self, found: Sized) -> None:
        self._found = found
        self.by: BaseException | None = None

    def __enter__(self) -> "Keeping":
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self.by = error if self._found else None
        return self.by is not None

    def end(self, how_far: str) -> None:
        """Say how far it came and raise it now, the findings being written."""
        if self.by is not None:
            console.print(how_far)
            raise self.by
