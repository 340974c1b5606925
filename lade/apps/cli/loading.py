"""Progress and messages of commands, beside their results."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from lade.errors import UserError

if TYPE_CHECKING:
    from lade.models.loading import LoadedModel

# What takes long to compile, each in a process beside a command.
_COMPILING = (
    "from lade.forward.linear import kernels; kernels()",
    "from ngram_pool import NGramPool; NGramPool(1);"
    "from lade.drafting.successors import compile_kernels as ranks; ranks()",
)

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


def bar(*columns: ProgressColumn, is_shown: bool = True) -> Progress:
    """Return a progress bar that disappears at its end: a task, its share, and more columns."""
    shown = (TextColumn("{task.description}"), BarColumn(), *columns)
    is_hidden = not (is_shown and console.is_terminal)
    return Progress(*shown, console=console, transient=True, disable=is_hidden)


@contextmanager
def compiling_beside() -> Iterator[None]:
    """Compile kernels in other processes meanwhile, on the first run; wait for them at the end.

    What they could not compile, this process compiles when it needs it.
    """
    from lade.machine.threads import num_cores
    from ngram_pool.pool import is_first_run

    processes: list[Popen[bytes]] = []
    try:
        if num_cores() > 1 and is_first_run():
            with suppress(OSError):
                for code in _COMPILING:
                    command = [sys.executable, "-c", code]
                    processes.append(Popen(command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL))
        yield
        if processes:
            with working("Compiling kernels, once on this machine, for about a minute"):
                for process in processes:
                    process.wait()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def check_shared() -> None:
    """Let all users read what is compiled from now on; raise a `UserError` if others may write."""
    from ngram_pool import _kernels
    from ngram_pool.caching import writable_by_others

    os.umask(0o022)
    beside = Path(_kernels.__file__).parent / "__pycache__"
    if (found := writable_by_others(str(beside), by_owner_alone=True)) is not None:
        raise UserError(
            f"others can write to {found}, and so put code there that runs as lade's users; "
            f"chmod -R go-w {found}"
        )
    folder = getattr(getattr(_kernels.row_of, "_cache", None), "cache_path", None)
    if folder != str(beside):
        raise UserError(
            f"expected to compile into {beside}, got {folder}: --shared needs no "
            "NUMBA_CACHE_DIR, and the rights of who installed lade"
        )


def check(loaded: "LoadedModel | None") -> None:
    """Do the one-time work of a model, or of all, now: it does not count for the first answer."""
    from lade.prewarming.warming import warm_up

    with working("Checking how the model verifies drafts" if loaded else "Compiling kernels"):
        warm_up(loaded and loaded.model)
