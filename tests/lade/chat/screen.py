"""A terminal's screen, as far as rich writes to one: what stands there, and what scrolled out."""

import io
import re
from collections.abc import Callable

_CODE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")


class Screen(io.StringIO):
    """A file that shows what a terminal of some height would.

    Attributes:
        lines: all that was ever there, what scrolled out first.
        writes: what each write left on the screen.
        on_write: called after each write.
    """

    def __init__(self, height: int) -> None:
        super().__init__()
        self.height = height
        self.lines = [""]
        self.row = 0
        self.column = 0
        self.writes: list[list[str]] = []
        self.on_write: Callable[[], object] = bool

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        super().write(text)
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
        self.on_write()
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
