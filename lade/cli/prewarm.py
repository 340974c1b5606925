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
    from lade.prewarming.run import Prewarmed

# What a command does for a model once: so many tokens for each one of the vocabulary, or as many as
# it can in a minute.
_TOKENS_PER_TOKEN = 2
_SECONDS = 60.0
# What is left of it is not worth the wait.
_LEAST_SECONDS = 5.0


def run(loaded: LoadedModel, seconds: float) -> None:
    """Build or extend a model's table; print what it holds, even after an interruption."""
    from lade.prewarming.run import prewarm
    from lade.prewarming.tables import path_of_table, read_table

    console.print("[dim]Checking how the model verifies drafts …[/dim]")
    try:
        with _bar("") as show:
            prewarm(loaded.model, seconds, progress=lambda made: show(made, made.seconds / seconds))
    finally:
        path = path_of_table(loaded.model)
        if path.exists():
            table, effort = read_table(path, loaded.model)
            Console(highlight=False).print(
                f"{len(table):,} contexts from {effort.num_tokens:,} tokens in "
                f"{effort.seconds:,.0f} seconds of all runs; {path.stat().st_size / 10**6:.1f} MB"
            )
            console.print(
                f"[dim]kept in {path}, and used with this model from now on; another run "
                "adds to it[/dim]",
                soft_wrap=True,
            )


def prewarm_once(loaded: LoadedModel, seconds: float = _SECONDS) -> None:
    """Prewarm a model for a bounded time before a command starts, unless that was done.

    Ctrl-C skips the rest of it and keeps what was made. Where no table can be made, a note says why
    and the command goes on.
    """
    from lade.prewarming.run import prewarm
    from lade.prewarming.tables import path_of_table, read_table

    num_vocab = loaded.model.config.get_text_config(decoder=True).vocab_size
    newest: Prewarmed | None = None
    try:
        effort = read_table(path_of_table(loaded.model), loaded.model).effort
        seconds -= effort.seconds
        num_tokens = _TOKENS_PER_TOKEN * num_vocab - effort.num_tokens
        if seconds < _LEAST_SECONDS or num_tokens <= 0:
            return

        def keep(made: "Prewarmed") -> None:
            nonlocal newest
            newest = made
            show(made, max(made.seconds / seconds, made.num_tokens / num_tokens))

        with _bar("Prewarming once for this model, Ctrl-C skips it: ") as show:
            prewarm(loaded.model, seconds, max_tokens=num_tokens, progress=keep)
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
def _bar(title: str) -> Iterator[Callable[["Prewarmed", float], None]]:
    """Show a bar; yield a function that is told of progress, and what share of the whole it is."""
    with bar(TimeRemainingColumn()) as bars:
        task = bars.add_task(title, total=1.0)

        def show(made: "Prewarmed", share: float) -> None:
            speed = made.num_tokens / max(made.seconds, 1e-9)
            text = f"{title}{made.num_contexts:,} contexts ({speed:,.0f} tokens/s)"
            bars.update(task, description=text, completed=share)

        yield show
