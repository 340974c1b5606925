"""`lade support`: check every architecture with a progress bar and print the table."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lade.cli.bench import check_writable, print_sheet, progress_bar
from lade.cli.loading import console

if TYPE_CHECKING:
    from lade.config import Execution


def run(
    names: list[str],
    seed: int,
    execution: "Execution",
    json_path: Path | None,
    markdown_path: Path | None,
) -> bool:
    """Check architectures; print and write the findings, even after an interruption.

    Returns:
        Whether none of them is wrong or failed.
    """
    from lade.support import report
    from lade.support.run import CASES, Row, all_names, run_all

    names = names or all_names()
    rows: list[Row] = []
    return _check(
        names,
        rows,
        lambda begin: run_all(names, seed=seed, execution=execution, rows=rows, on_start=begin),
        report,
        lambda stopped: report.results_of(rows, CASES, seed, stopped, execution),
        lambda results: report.markdown([results]),
        json_path,
        markdown_path,
    )


def run_formats(
    names: list[str], seed: int, json_path: Path | None, markdown_path: Path | None
) -> bool:
    """Check weight formats; print and write the findings, even after an interruption.

    Returns:
        Whether none of them is wrong or failed.
    """
    from lade.support import formats
    from lade.support import formats_report as report

    names = names or [*formats.all_formats()]
    rows: list[formats.FormatRow] = []
    return _check(
        names,
        rows,
        lambda begin: formats.run_formats(names, seed=seed, rows=rows, on_start=begin),
        report,
        lambda stopped: report.results_of(rows, seed, stopped),
        report.markdown,
        json_path,
        markdown_path,
    )


def _check(
    names: Sequence[str],
    rows: Sequence[Any],
    check: Callable[[Callable[[str], None]], object],
    report: ModuleType,
    results_of: Callable[[bool], Any],
    markdown: Callable[[Any], str],
    json_path: Path | None,
    markdown_path: Path | None,
) -> bool:
    """Check names in turn with a progress bar; print and write what was found.

    Args:
        names: what is checked.
        rows: filled by `check` as findings are made.
        check: checks all names; is given what to call with each as it begins.
        report: the module that presents such rows.
        results_of: returns the results, given whether the run was stopped.
        markdown: returns the results as a document.
        json_path, markdown_path: where to write them, if at all.
    """
    import torch

    check_writable(json_path)
    check_writable(markdown_path)
    stopped_by: BaseException | None = None
    num_started = 0

    def begin(name: str) -> None:
        nonlocal num_started
        bars.update(task, description=name, completed=num_started)
        num_started += 1

    num_threads = torch.get_num_threads()
    # For models so small, more threads would wait for each other; and so times can be compared.
    torch.set_num_threads(1)
    with progress_bar() as bars:
        task = bars.add_task("", total=len(names))
        try:
            check(begin)
        except BaseException as error:  # still show and write what was found so far
            stopped_by = error
        finally:
            torch.set_num_threads(num_threads)
    if stopped_by is not None and not rows:
        raise stopped_by
    results = results_of(stopped_by is not None)
    print_sheet(report.table(rows))
    Console().print(report.summary(rows), highlight=False)
    if stopped_by is not None:
        console.print(f"stopped after {num_started - 1} of {len(names)}")
    _write(json_path, lambda path: report.write_json(path, results))
    _write(markdown_path, lambda path: path.write_text(markdown(results), encoding="utf-8"))
    if stopped_by is not None:
        raise stopped_by
    return not any(row.is_bad for row in rows)


def show(paths: list[Path], markdown_path: Path | None) -> bool:
    """Print result files, and write them all as one document, weight formats last.

    Returns:
        Whether none of their rows is wrong or failed.
    """
    from lade.support import formats_report, report

    of_formats = [path for path in paths if formats_report.is_of_formats(path)]
    runs = [report.read_json(path) for path in paths if path not in of_formats]
    made = [formats_report.read_json(path) for path in of_formats]
    check_writable(markdown_path)
    out = Console()
    for results in runs:
        out.print(f"transformers {results.transformers}", highlight=False)
        print_sheet(report.table(results.rows))
        out.print(report.summary(results.rows), highlight=False)
    for found in made:
        print_sheet(formats_report.table(found.rows))
        out.print(formats_report.summary(found.rows), highlight=False)
    parts = [report.markdown(runs)] if runs else []
    document = "\n".join([*parts, *map(formats_report.markdown, made)])
    _write(markdown_path, lambda path: path.write_text(document, encoding="utf-8"))
    bad = [row.is_bad for results in runs for row in results.rows]
    return not any([*bad, *(row.is_bad for found in made for row in found.rows)])


def _write(path: Path | None, write: Callable[[Path], object]) -> None:
    """Write a file if a path is given, and say so."""
    if path is not None:
        write(path)
        console.print(f"[dim]written to {path}[/dim]")
