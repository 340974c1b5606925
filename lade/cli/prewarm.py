"""`lade prewarm`: build a model's table of successors with a progress bar."""

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lade.cli.loading import console
from lade.errors import UnsupportedModelError
from lade.models.loading import LoadedModel

if TYPE_CHECKING:
    from lade.prewarming.run import Prewarmed, PrewarmProgress


def run(loaded: LoadedModel, seconds: float) -> None:
    """Build or extend a model's table; print what it holds, even after an interruption."""
    from lade.prewarming.run import prewarm

    _refuse_plain(loaded.model)
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


def _refuse_plain(model: Any) -> None:
    """Raise, before any work is done, if lade would not draft from the table.

    Raises:
        UnsupportedModelError: the model is decoded plainly.
    """
    from lade.probing.report import probe

    console.print("[dim]Checking how the model verifies drafts …[/dim]")
    found = probe(model)
    if found.verification == "plain":
        reasons = "; ".join(
            f"{verification}: {reason}" for verification, reason in found.reasons.items()
        )
        raise UnsupportedModelError(
            f"lade decodes {found.model} plainly, so it would not use a table. {reasons}"
        )


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
