"""A terminal's screen, as far as rich writes to one: all that was ever there."""

import io
import re
from collections.abc import Callable


class Screen(io.StringIO):
    """A file that shows what a terminal would.

    Attributes:
        lines: all that was ever there, what scrolled out first.
        on_write: called after each write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines = [""]
        self.column = 0
        self.on_write: Callable[[], object] = bool

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        super().write(text)
        for letter in re.sub(r"\x1b\[[\d;]*m", "", text):
            if letter == "\n":
                self.lines.append("")
            elif letter != "\r":
                line = self.lines[-1].ljust(self.column)
                self.lines[-1] = line[: self.column] + letter + line[self.column + 1 :]
            self.column = 0 if letter in "\r\n" else self.column + 1
        self.on_write()
        return len(text)

    def shown(self) -> str:
        """Return all lines as text."""
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")
