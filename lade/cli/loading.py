"""Loading a model while saying so."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars

from lade.models import (
    DEFAULT_MODEL,
    EMBEDDED_MODELS,
    LoadedModel,
    Progress,
    embedded_model,
    load,
)

# What a command says of its work goes to standard error; standard output is for its results.
console = Console(stderr=True, highlight=False)


def load_with_progress(
    model: str | None, device: str | None, dtype: str | None, threads: int | None
) -> LoadedModel:
    """Load a model; show what takes long, with a bar for a download."""
    import torch
    from transformers.utils import logging

    if threads is not None:
        torch.set_num_threads(threads)
    logging.disable_progress_bar()  # the bar of loading weights, which takes a second
    with _showing_progress() as show:
        return load(model, device=device, dtype=dtype, progress=show)


def fetch_with_progress(model: str | None) -> None:
    """Make sure that an embedded model is there, if it is one, and load nothing."""
    name = DEFAULT_MODEL if model is None else model
    if name in EMBEDDED_MODELS:
        with _showing_progress() as show:
            embedded_model(name, progress=show)


@contextmanager
def _showing_progress() -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Bars(*columns, console=console, transient=True) as bars:
        task: TaskID | None = None

        def show(what: str, done: int, total: int) -> None:
            nonlocal task
            if total:
                if task is None:
                    task = bars.add_task(what, total=total)
                bars.update(task, completed=done)
            else:
                console.print(f"[dim]{what} …[/dim]")

        yield show
