"""`Sheet`: a table of results, for a terminal and as Markdown.

Next file: `report.py`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import HORIZONTALS
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.table import Table
from rich.text import Text

_NUMBER = re.compile(r"[-+]?\d")  # the start of a numeric cell
_ANY_WIDTH = 1000


@dataclass(frozen=True)
class Sheet:
    """Content of a table; each row has a cell for every heading."""

    title: str
    headings: Sequence[str]
    num_words: int  # number of leading columns, which identify a row
    sections: Sequence[Sequence[Sequence[str]]]  # of rows
    caption: str | None = None  # may have several lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the table for a terminal, which a few columns of numbers already fill.

        So headings are folded; all words of a row but the last are a line above the rows that share
        them; and empty columns are left out. The others are as wide as their content; a narrower
        terminal wraps their lines.
        """
        first = self.num_words - 1
        indent = "  " * (first > 0)
        every_row = [row for rows in self.sections for row in rows]
        shown = [n for n in range(first, len(self.headings)) if any(row[n] for row in every_row)]
        table = Table(box=HORIZONTALS, show_edge=False, pad_edge=False, padding=0)
        for n in shown:
            is_number = n > first and all(_NUMBER.match(row[n]) for row in every_row if row[n])
            head = Text("\n".join(_folded(self.headings[n])))
            justify: JustifyMethod = "right" if is_number else "left"
            table.add_column(head, justify=justify, vertical="bottom", no_wrap=True)
        for rows in self.sections:
            table.add_section()
            above: Sequence[str] = ()
            for row in rows:
                words = row[:first]
                if words and words != above:
                    table.add_row(Text(", ".join(words), "bold"))
                above = words
                table.add_row(Text(indent + row[first]), *(Text(row[n]) for n in shown[1:]))
        width = console.measure(table, options=options.update(max_width=_ANY_WIDTH)).maximum
        yield Text(self.title, "italic")
        yield from console.render(table, options.update(width=width))
        if self.caption:
            yield Text("─" * width, no_wrap=True, overflow="ignore")
            yield Text(self.caption, "dim")

    def as_markdown(self) -> str:
        """Return the table as Markdown, every row in full."""
        words = ["---"] * self.num_words
        rule = [*words, *["---:"] * (len(self.headings) - self.num_words)]
        rows = [row for section in self.sections for row in section]
        lines = [f"**{self.title}**", ""]
        lines += [_line(cells) for cells in (self.headings, rule, *rows)]
        if self.caption:
            lines += ["", *(f"{line}  " for line in self.caption.splitlines())]
        return "\n".join(lines).rstrip() + "\n"


def _folded(heading: str) -> list[str]:
    return heading.replace("/", " /").replace("-", "- ").split()


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
