"""`lade chat`: a conversation in a terminal, or one question from a pipe."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from lade.cli.prompting import read_prompt
from lade.errors import MissingExtraError, UserError
from lade.models.loading import LoadedModel

if TYPE_CHECKING:
    from lade.chat.conversation import Conversation
    from lade.cli.options import LearningOptions
    from lade.drafting.drafter import Drafter
    from lade.models.settings import Settings


def read_question() -> str | None:
    """Return all of standard input as a question; None where it is a terminal to chat in.

    Raises:
        UserError: it is empty or not UTF-8, or answers would not appear in the terminal.
    """
    if sys.stdin.isatty():
        if not sys.stdout.isatty():
            raise UserError(
                "expected a terminal on standard output, or a question on standard input; lade "
                "generate answers one question into a file"
            )
        return None
    question = read_prompt("-").strip()
    if not question:
        raise UserError("expected a question on standard input, got nothing")
    return question


def run(
    question: str | None,
    loaded: LoadedModel,
    settings: "Settings",
    system: str | None,
    drafting: "LearningOptions",
    drafter: "Drafter | None",
) -> None:
    """Chat until the user leaves, or answer one question."""
    from lade.chat.conversation import Conversation
    from lade.cli.generate import check_verification
    from lade.models.prompts import encode

    config = replace(drafting.config, reuses_prefix=True)
    hello = encode(loaded.tokenizer, "Hi", loaded.model.device)
    check_verification(loaded.model, hello, config, drafter)
    with drafting.open_pools(loaded) as pools:
        conversation = Conversation(
            loaded, settings=settings, config=config, pool=pools, system=system, drafter=drafter
        )
        if question is None:
            _chat(conversation)
        else:
            _answer(conversation, question)


def _chat(conversation: "Conversation") -> None:
    """Chat in the terminal."""
    try:
        from lade.chat.terminal import Terminal, history_in
        from lade.chat.view import THEME
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "prompt_toolkit", "cli") from None
    from platformdirs import user_data_path
    from rich.console import Console

    history = history_in(user_data_path("lade", appauthor=False))
    Terminal(conversation, Console(highlight=False, theme=THEME), history).run()


def _answer(conversation: "Conversation", question: str) -> None:
    """Print an answer as plain text, without its thinking, and its figures to standard error."""
    from lade.cli.generate import show_text, tell_figures

    try:
        for piece in conversation.answer(question):
            if not piece.is_thinking:
                show_text(piece.text)
    finally:
        show_text("\n")
    turn = conversation.turn
    assert turn is not None, "it was answered"
    tell_figures(turn.figures(None), conversation.settings, turn.seed, turn.stats)
