"""An answer in a terminal: its text as it comes, for good."""

from typing import Any

from rich.console import Console
from rich.text import Text

from lade.apps.chat.pieces import Piece
from lade.models.stream import without_controls

DRAFTED = "bold green"
THINKING = "dim"


class AnswerView:
    """Shows an answer while it comes, thoughts dim.

    Use it as a context manager, and add pieces as they come.

    Args:
        shows_drafted: whether to mark drafted tokens.
    """

    def __init__(self, console: Console, shows_drafted: bool = False) -> None:
        self._console, self._shows_drafted = console, shows_drafted
        self._is_thinking: bool | None = None  # None before the first piece
        self._last = ""  # two characters

    def __enter__(self) -> "AnswerView":
        if self._console.is_terminal and not self._console.record:
            self._console.print("…", end="\r")  # the answer is written over it
        return self

    def __exit__(self, *_: Any) -> None:
        if self._is_thinking is not None:
            self.write("\n" * (not self._last.endswith("\n")))
        elif self._console.is_terminal:
            self._console.print(" ", end="\r")

    def add(self, piece: Piece) -> None:
        """Show one more piece."""
        text = piece.text
        if self._is_thinking != piece.is_thinking:
            text = text.lstrip("\n")
            if not text:
                return
            if self._is_thinking is not None:  # an empty line between thoughts and answer
                self.write("\n" * (2 - len(self._last) + len(self._last.rstrip("\n"))))
            self._is_thinking = piece.is_thinking
        styles = [THINKING] * piece.is_thinking
        styles += [DRAFTED] * (self._shows_drafted and piece.is_drafted)
        self.write(text, " ".join(styles))

    def write(self, text: str, style: str = "") -> None:
        """Show text without its control characters; the terminal breaks its lines."""
        text = without_controls(text)
        self._last = (self._last + text)[-2:]
        self._console.print(Text(text, style), end="", soft_wrap=True)
