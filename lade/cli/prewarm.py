"""`lade prewarm`, and what `lade demo` does of it before it starts, with a progress bar."""

import math

from rich.console import Console
from rich.progress import TimeRemainingColumn

from lade.cli.loading import bar, console, note
from lade.errors import LadeError
from lade.models.loading import LoadedModel
from lade.prewarming import run as prewarming
from lade.prewarming.tables import path_of_table, read_table

# What a command does for a model once: so many tokens for each one of the vocabulary, or as many as
# it can in a minute.
_TOKENS_PER_TOKEN = 2
_SECONDS = 60.0
# What is left of it is not worth the wait.
_LEAST_SECONDS = 5.0


def run(loaded: LoadedModel, seconds: float) -> None:
    """Build or extend a model's table; print what it holds, even after an interruption."""
    console.print("[dim]Checking how the model verifies drafts …[/dim]")
    try:
        _prewarm(loaded, "", seconds)
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


def prewarm_once(loaded: LoadedModel) -> None:
    """Prewarm a model for a minute at most before a command starts, unless that was done.

    Ctrl-C skips the rest of it and keeps what was made. Where no table can be made, a note says why
    and the command goes on.
    """
    model = loaded.model
    try:
        effort = read_table(path_of_table(model), model).effort
        seconds = _SECONDS - effort.seconds
        num_vocab = model.config.get_text_config(decoder=True).vocab_size
        num_tokens = _TOKENS_PER_TOKEN * num_vocab - effort.num_tokens
        if seconds < _LEAST_SECONDS or num_tokens <= 0:
            return
        title = "Prewarming once for this model, Ctrl-C skips it: "
        try:
            _prewarm(loaded, title, seconds, num_tokens)
        finally:
            table, effort = read_table(path_of_table(model), model)
            console.print(
                f"[dim]prewarmed: {len(table):,} contexts in {effort.seconds:,.0f} seconds; "
                "lade prewarm adds to them[/dim]"
            )
    except KeyboardInterrupt:
        console.print("[dim]skipped the rest of prewarming[/dim]")
    except (LadeError, OSError, ValueError) as error:
        note(f"no table is made: {error}")


def _prewarm(
    loaded: LoadedModel, title: str, seconds: float, max_tokens: int | None = None
) -> None:
    """Prewarm, and show how far that is."""
    with bar(TimeRemainingColumn()) as bars:
        task = bars.add_task(title, total=1.0)

        def show(made: prewarming.Prewarmed) -> None:
            speed = made.num_tokens / max(made.seconds, 1e-9)
            text = f"{title}{made.num_contexts:,} contexts ({speed:,.0f} tokens/s)"
            share = max(made.seconds / seconds, made.num_tokens / (max_tokens or math.inf))
            bars.update(task, description=text, completed=share)

        prewarming.prewarm(loaded.model, seconds, max_tokens=max_tokens, progress=show)
