"""`lade prewarm`, and what `lade demo` does of it before it starts, with a progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import TimeRemainingColumn

from lade.cli.loading import bar, console, note
from lade.errors import LadeError
from lade.models.loading import LoadedModel

if TYPE_CHECKING:
    from lade.prewarming.run import Prewarmed, PrewarmProgress

# What a command does for a model once: so many tokens for each one of the vocabulary, half of them
# alone and half in texts, or as many as it can in a minute.
_TOKENS_PER_TOKEN = 2
_SECONDS = 60.0
# What is left of it is not worth the wait.
_LEAST_SECONDS = 5.0


def run(loaded: LoadedModel, seconds: float) -> None:
    """Build or extend a model's table; print what it holds, even after an interruption."""
    from lade.prewarming.run import prewarm

    console.print("[dim]Checking how the model verifies drafts …[/dim]")
    newest: Prewarmed | None = None

    def keep(progress: "PrewarmProgress") -> None:
        nonlocal newest
        newest = progress.made
        show(progress, progress.passed_sec / seconds)

    try:
        with _bar("") as show:
            newest = prewarm(loaded.model, seconds, progress=keep)
    finally:
        if newest is not None and newest.path.exists():
            Console(highlight=False).print(
                f"{newest.num_contexts:,} contexts from {newest.num_tokens:,} tokens in "
                f"{newest.seconds:,.0f} seconds of all runs; "
                f"{newest.path.stat().st_size / 10**6:.1f} MB"
            )
            console.print(
                f"[dim]kept in {newest.path}, and used with this model from now on; another run "
                "adds to it[/dim]",
                soft_wrap=True,
            )


def prewarm_once(loaded: LoadedModel, seconds: float = _SECONDS) -> None:
    """Prewarm a model for a bounded time before a command starts, unless that was done.

    Ctrl-C skips the rest of it and keeps what was made. Where no table can be made, a note says why
    and the command goes on.
    """
    from lade.prewarming.run import prewarm
    from lade.prewarming.tables import effort_of

    num_vocab = loaded.model.config.get_text_config(decoder=True).vocab_size
    newest: Prewarmed | None = None
    try:
        effort = effort_of(loaded.model)
        seconds -= effort.seconds
        num_tokens = _TOKENS_PER_TOKEN * num_vocab - effort.num_tokens
        if seconds < _LEAST_SECONDS or num_tokens <= 0:
            return

        def keep(progress: "PrewarmProgress") -> None:
            nonlocal newest
            newest = progress.made
            num_done = newest.num_tokens - effort.num_tokens
            show(progress, max(progress.passed_sec / seconds, num_done / num_tokens))

        with _bar("Prewarming once for this model, Ctrl-C skips it: ") as show:
            newest = prewarm(loaded.model, seconds, max_tokens=num_tokens, progress=keep)
    except KeyboardInterrupt:
        console.print("[dim]skipped the rest of prewarming[/dim]")
    except (LadeError, OSError, ValueError) as error:
        note(f"no table is made: {error}")
    if newest is not None:
        console.print(
            f"[dim]prewarmed: {newest.num_contexts:,} contexts in {newest.seconds:,.0f} seconds; "
            "lade prewarm adds to them[/dim]"
        )


@contextmanager
def _bar(title: str) -> Iterator[Callable[["PrewarmProgress", float], None]]:
    """Show a bar; yield a function that is told of progress, and what share of the whole it is."""
    with bar(TimeRemainingColumn()) as bars:
        task = bars.add_task(title, total=1.0)

        def show(progress: "PrewarmProgress", share: float) -> None:
            has = (
                f"{progress.made.num_contexts:,} contexts, {progress.tokens_per_sec:,.0f} tokens/s"
            )
            bars.update(task, description=f"{title}{progress.stage} ({has})", completed=share)

        yield show
