"""A terminal's screen, as far as rich writes to one: what stands there, and what scrolled out."""

import io
import re
from typing import Any

from rich.console import Console

_CODE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")


class Screen(io.StringIO):
    """A file that shows what a terminal of some height would.

    Attributes:
        lines: all that was ever there, what scrolled out first.
        writes: what each write left on the screen.
    """

    def __init__(self, height: int) -> None:
        super().__init__()
        self.height = height
        self.lines = [""]
        self.row = 0
        self.column = 0
        self.writes: list[list[str]] = []

    def write(self, text: str) -> int:
        at = 0
        while at < len(text):
            code = _CODE.match(text, at)
            if code is not None:
                self._control(code[1], code[2])
                at = code.end()
                continue
            self._character(text[at])
            at += 1
        self.writes.append([*self.lines])
        return len(text)

    def shown(self) -> str:
        """Return all lines as text."""
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")

    def _control(self, number: str, letter: str) -> None:
        if letter == "A":
            top = max(0, len(self.lines) - self.height)
            self.row = max(top, self.row - int(number or 1))  # what scrolled out is out of reach
        elif letter == "K":
            assert number == "2"
            self.lines[self.row] = ""
        else:
            assert letter in "mhl", letter

    def _character(self, letter: str) -> None:
        if letter == "\r":
            self.column = 0
        elif letter == "\n":
            self.row, self.column = self.row + 1, 0
            if self.row == len(self.lines):
                self.lines.append("")
        else:
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
            self.column += 1


def screen_console(width: int = 60, height: int = 12, **options: Any) -> tuple[Console, Screen]:
    """Return a console on a screen of that size, with colours unless told otherwise."""
    screen = Screen(height)
    options = {"color_system": "standard", **options}
    console = Console(
        file=screen,
        force_terminal=True,
        width=width,
        height=height,
        legacy_windows=False,
        highlight=False,
        _environ={},
        **options,
    )
    return console, screen
