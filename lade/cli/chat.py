"""`lade chat`: a conversation in a terminal."""

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from lade.errors import MissingExtraError, UserError
from lade.models.loading import LoadedModel

if TYPE_CHECKING:
    from lade.cli.options import DraftOptions
    from lade.models.settings import Settings


def check_terminal() -> None:
    """Raise a `UserError` if there is no terminal to chat in."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(
            "expected a terminal to chat in; lade generate - answers a question from a pipe or file"
        )


def run(
    loaded: LoadedModel,
    settings: "Settings",
    system: str | None,
    drafting: "DraftOptions",
    *,
    prewarms: bool = False,
) -> None:
    """Chat until the user leaves; with `prewarms`, prewarm the model while it waits."""
    try:
        from lade.chat.terminal import Terminal, history_in
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "prompt_toolkit", "cli") from None
    from platformdirs import user_data_path
    from rich.console import Console

    from lade.chat.conversation import Conversation
    from lade.cli.loading import check
    from lade.cli.prewarm import note_idle_prewarming
    from lade.prewarming.idle import IdlePrewarming

    check(loaded)
    with drafting.open_pools(loaded) as pools:
        conversation = Conversation(loaded, settings=settings, pool=pools, system=system)
        history = history_in(user_data_path("lade", appauthor=False))
        terminal = Terminal(conversation, Console(highlight=False), history)
        with ExitStack() as stack:
            if prewarms:
                idle = IdlePrewarming(loaded.model, lambda: terminal.is_waiting)
                stack.callback(idle.close)
                note_idle_prewarming(idle)
            terminal.run()
