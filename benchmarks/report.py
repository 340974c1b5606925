"""Results as tables for a terminal and as JSON for a file, kept if a run is stopped."""

import json
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from lade.apps.bench.report import empty_table
from lade.apps.cli.loading import bar, console


def sheet(
    title: str,
    headings: Sequence[str],
    sections: Sequence[Sequence[Sequence[str]]],
    caption: str | None = None,
) -> Table:
    """Return a table of sections of rows, which leaves out columns without any content.

    The first two columns are words, all others numbers. What rows next to each other have first in
    common is a line of its own above them, so that a terminal of 80 columns has room.
    """
    made = empty_table(title, caption)
    rows = [row for section in sections for row in section]
    shown = [n for n in range(2, len(headings)) if any(row[n] for row in rows)]
    made.add_column(headings[1], no_wrap=True)
    for n in shown:
        made.add_column(headings[n], justify="right", vertical="bottom")
    for section in sections:
        above = ""
        for row in section:
            if row[0] != above:
                made.add_row(Text(row[0], "bold"))
            above = row[0]
            made.add_row(Text(f"{'  ' * bool(above)}{row[1]}"), *(Text(row[n]) for n in shown))
        made.add_section()
    return made


def speedup_text(speedup: float | None) -> str:
    """Return a ratio as tables show it."""
    return "" if speedup is None else f"{speedup:.2f}x"


def share_text(share: float | None) -> str:
    """Return a share as tables show it."""
    return "" if share is None else f"{share:.0%}"


def msec_text(sec: float | None) -> str:
    """Return seconds as milliseconds, as tables show them."""
    return "" if sec is None else f"{1000 * sec:.3f}"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a result file, an entry a line, with numbers of six digits."""
    entries = (f"{json.dumps(name)}: {json.dumps(_short(v))}" for name, v in content.items())
    path.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_short, value)]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def show(file: Path | None, content: Mapping[str, Any], *tables: Table) -> None:
    """Print tables, and write the content as JSON to a file, where there is one."""
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
