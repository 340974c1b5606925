"""`lade prewarm`: making a model's table of successors with a progress bar."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lade.cli.loading import console
from lade.models import LoadedModel

if TYPE_CHECKING:
    from lade.prewarming import Prewarmed, PrewarmProgress


def run(loaded: LoadedModel, seconds: float) -> None:
    """Make or go on with the table of a model; say what there is, also after an interruption."""
    from lade.prewarming import prewarm

    newest: Prewarmed | None = None
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, transient=True) as bars:
            task = bars.add_task("", total=seconds)

            def show(progress: "PrewarmProgress") -> None:
                nonlocal newest
                newest = progress.made
                has = f"{newest.num_lone_tokens:,} lone tokens, {newest.num_contexts:,} contexts"
                text = f"{progress.stage} ({has}, {progress.tokens_per_sec:,.0f} tokens/s)"
                bars.update(task, description=text, completed=progress.passed_sec)

            newest = prewarm(loaded.model, seconds, progress=show)
    finally:
        if newest is not None and newest.path.exists():
            _tell(newest)


def _tell(made: "Prewarmed") -> None:
    Console(highlight=False).print(
        f"{made.num_contexts:,} contexts (asked {made.num_lone_tokens:,} of {made.vocab_size:,} "
        f"lone tokens) from {made.num_tokens:,} tokens in {made.seconds:,.0f} seconds of all runs; "
        f"{made.path.stat().st_size / 10**6:.1f} MB"
    )
    console.print(f"[dim]kept in {made.path}[/dim]", soft_wrap=True)
    console.print(
        "[dim]lade uses it with this model from now on; run this again to add to it[/dim]"
    )
