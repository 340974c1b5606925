"""Results as tables for a terminal and as JSON for a file, kept if a run is stopped."""

import json
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from benchmarks.environment import environment
from lade.apps.bench.report import empty_table, groups
from lade.apps.bench.run import Result, Summary, stats_of, summarise
from lade.apps.cli.loading import bar, console

_DIGITS = 6  # decimal places, in files


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


def as_json(
    results: Sequence[Result],
    methods: Sequence[str],
    settings: dict[str, Any],
    summarise: Callable[[Sequence[Result], str], Summary] = summarise,
) -> dict[str, Any]:
    """Return everything that a reader needs to judge and check the numbers."""
    summary: dict[str, Any] = {}
    for group, part in groups(results).items():
        summary[group] = {}
        for method in methods:
            entry = summary[group][method] = rounded(summarise(part, method)._asdict())
            stats = stats_of(result.answers[method] for result in part)
            if stats.sources:
                entry["sources"] = {n: rounded(asdict(each)) for n, each in stats.sources.items()}
    return {
        "environment": environment(),
        "settings": settings,
        "summary": summary,
        "prompts": [_as_json(result) for result in results],
    }


def _as_json(result: Result) -> dict[str, Any]:
    plain = result.answers.get("plain")
    ids = [prompt.id for prompt in result.prompts]
    entry: dict[str, Any] = {"id": ids[0]} if len(ids) == 1 else {"ids": ids}
    entry |= {
        "category": result.category,
        "pass": result.num_pass,
        "num_prompt_tokens": result.num_prompt_tokens,
        "loops": result.loops,
    }
    for method, answer in result.answers.items():
        names = ["num_steps", "num_draft_tokens", "num_accepted_tokens"]
        names += ["num_row_steps"] * (len(answer.rows) > 1)
        if answer.stats.forward_sec:  # timed step by step
            names += ["draft_sec", "forward_sec", "overhead"]
        of_method: dict[str, Any] = {"num_tokens": answer.num_tokens, "sec": answer.sec}
        of_method |= {name: getattr(answer.stats, name) for name in names}
        if len(answer.rows) > 1:
            of_method["num_rows"] = len(answer.rows)
        if plain is not None and method != "plain":
            same = [a == b for a, b in zip(answer.rows, plain.rows, strict=True)]
            of_method |= {"same_text": all(same), "num_same_text": sum(same)}
        entry[method] = rounded(of_method)
    return entry


def rounded(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of a file with its floating-point numbers rounded."""
    return {
        name: round(value, _DIGITS) if isinstance(value, float) else value
        for name, value in entry.items()
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a result file, an entry a line; indented, it would be a quarter longer."""
    entries = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items())
    path.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")


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
