"""An answer in a terminal: text appears as it comes, for good, its lines broken between words."""

import re
from math import inf
from typing import Any

from rich.console import Console
from rich.text import Text

from lade.apps.chat.pieces import Piece
from lade.models.stream import without_controls

DRAFTED = "bold green"
THINKING = "dim"
# Of Markdown, as far as the beginning of a line tells: headings, and code between two fences.
_HEADING, _CODE, _FENCE = "bold", "cyan", "```"
# After so many characters, a word is shown before its end, and at once if some of them are wide:
# a line may break between Chinese ones.
_LONGEST = 16


class AnswerView:
    """Shows an answer while it comes, or text with drafted tokens marked.

    Use it as a context manager, and add pieces as they come.

    Args:
        shows_drafted: whether to show who wrote each token, instead of headings and code.
    """

    def __init__(self, console: Console, shows_drafted: bool = False) -> None:
        self._console, self._shows_drafted = console, shows_drafted
        # A pipe takes lines as they are. A terminal's last column stays free: some wait there.
        self._width = console.width - 1 if console.is_terminal else inf
        self._longest = int(min(_LONGEST, self._width))
        self._is_thinking: bool | None = None  # None before the first piece
        self._num_cells = 0  # of the line so far
        self._word = Text()  # not shown yet: the line may break before it
        self._begin = ""  # of the line, as it was written
        self._last = ""  # two characters
        self._is_code = False

    def __enter__(self) -> "AnswerView":
        if self._console.is_terminal and not self._console.record:
            self._console.print("…", end="\r")  # the answer is written over it
        return self

    def __exit__(self, *_: Any) -> None:
        if self._num_cells or self._word:
            self.write("\n")
        elif self._is_thinking is None and self._console.is_terminal:
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
        styles += [DRAFTED if piece.is_drafted else ""] * self._shows_drafted
        self.write(text, " ".join(styles) if styles else None)

    def write(self, text: str, style: str | None = None) -> None:
        """Show text, up to the word that may go on; without a style, headings and code have one."""
        shown, self._last = Text(), (self._last + text)[-2:]
        for part in re.findall(rf"\s|\S{{1,{self._longest}}}", without_controls(text)):
            if not part.isspace():
                if len(self._word) + len(part) > self._longest:
                    self._end_word(shown, style)
                self._begin = (self._begin + part)[: len(_FENCE)]
                self._word.append(part, style)
                if self._word.cell_len > len(self._word):
                    self._end_word(shown, style)
                continue
            self._end_word(shown, style)
            if part == "\n":
                self._is_code ^= self._begin == _FENCE
                self._begin, self._num_cells = "", 0
            else:
                part = "    " if part == "\t" else part
                self._begin += part if self._begin else ""
                self._num_cells += len(part)
            shown.append(part)
        if shown:
            self._console.print(shown, end="", soft_wrap=True)

    def _end_word(self, shown: Text, style: str | None) -> None:
        """Show the word, in the next line if there is no room for it."""
        if self._word and self._num_cells and self._num_cells + self._word.cell_len > self._width:
            shown.append("\n")
            self._num_cells = 0
        if style is None and (self._is_code or self._begin == _FENCE):
            self._word.stylize(_CODE)
        elif style is None and self._begin.startswith("#"):
            self._word.stylize(_HEADING)
        shown.append_text(self._word)
        self._num_cells += self._word.cell_len
        self._word = Text()
