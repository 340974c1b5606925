"""Progress and messages of commands, beside their results."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from lade.models.loading import LoadedModel

# Progress and notes go to standard error; standard output is for results.
console = Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """Print something that the user should know but that is no error."""
    console.print(f"note: {text}", markup=False, soft_wrap=True)


def tell(what: str) -> None:
    """Print what is being done."""
    console.print(f"{what} …", style="dim", markup=False, soft_wrap=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Print what is being done; in a terminal, also show the seconds since it began."""
    tell(what)
    with bar(TimeElapsedColumn()) as shown:
        shown.add_task("", total=None)
        yield


def bar(*columns: ProgressColumn) -> Progress:
    """Return a progress bar that disappears at its end: a task, its share, and more columns."""
    shown = (TextColumn("{task.description}"), BarColumn(), *columns)
    return Progress(*shown, console=console, transient=True, disable=not console.is_terminal)


def check(loaded: "LoadedModel") -> None:
    """Do the one-time work of a model now, so that it does not count for the first answer."""
    from lade.prewarming.warming import warm_up

    with working("Checking how the model verifies drafts"):
        warm_up(loaded.model)
