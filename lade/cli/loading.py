"""Loading a model while saying so."""

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from lade.models import LoadedModel, load

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
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = None

        def show(what: str, done: int, total: int) -> None:
            nonlocal task
            if total:
                if task is None:
                    task = bars.add_task(what, total=total)
                bars.update(task, completed=done)
            else:
                console.print(f"[dim]{what} …[/dim]")

        return load(model, device=device, dtype=dtype, progress=show)
