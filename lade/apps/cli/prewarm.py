"""`lade prewarm`, with a progress bar; and the hint of other commands at it."""

from rich.console import Console
from rich.progress import TimeRemainingColumn

from lade.apps.cli.loading import bar, console, tell
from lade.models.loading import LoadedModel
from lade.prewarming.idle import IdlePrewarming
from lade.prewarming.run import Prewarmed, prewarm
from lade.prewarming.tables import path_of_table, prewarmed_table_of, seconds_of
from lade.probing.profile import profile_of
from ngram_pool import NGramPool


def run(loaded: LoadedModel, seconds: float) -> None:
    """Build or extend a model's table; print its size, even after an interruption."""
    tell("Checking how the model verifies drafts")
    try:
        with bar(TimeRemainingColumn()) as bars:
            task = bars.add_task("", total=seconds)

            def show(made: Prewarmed) -> None:
                speed = made.num_tokens / max(made.seconds, 1e-9)
                text = f"{made.num_contexts:,} contexts ({speed:,.0f} tokens/s)"
                bars.update(task, description=text, completed=made.seconds)

            prewarm(loaded.model, seconds, progress=show)
    finally:
        path = path_of_table(loaded.model)
        if path.exists():
            table = NGramPool.load(path, read_only=True)
            Console(highlight=False).print(
                f"{table.num_contexts:,} contexts in {seconds_of(table):,.0f} seconds of all runs; "
                f"{path.stat().st_size / 10**6:.1f} MB"
            )
            console.print(
                f"[dim]kept in {path}, and used with this model from now on; another run "
                "adds to it[/dim]",
                soft_wrap=True,
            )


def note_idle_prewarming(idle: IdlePrewarming) -> None:
    """Say that a model is prewarmed while it waits, and for how long."""
    text = "The table of its likely tokens is complete"
    if left := idle.minutes_left:
        text = f"While it waits, the model writes its table of likely tokens, for {left:.0f} "
        text += "minutes in all"
    console.print(f"[dim]{text}.[/dim]", soft_wrap=True)


def note_missing_table(loaded: LoadedModel) -> None:
    """Print a hint at `lade prewarm` if the model has no table."""
    if prewarmed_table_of(loaded.model, profile_of(loaded.model)) is None:
        console.print(
            "[dim]Tip: `lade prewarm` builds a table of likely next tokens for this model; `lade "
            "chat --prewarm` and `lade serve --prewarm` build it while idle. For the default "
            "model, one minute of it gave about 12 % more tokens a step.[/dim]",
            soft_wrap=True,
        )
