"""`Sheet`: a table of results for a terminal.

Next file: `report.py`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

_NUMBER = re.compile(r"[-+]?\d")  # the start of a numeric cell


@dataclass(frozen=True)
class Sheet:
    """Content of a table; each row has a cell for every heading."""

    title: str
    headings: Sequence[str]
    num_words: int  # number of leading columns, which identify a row
    sections: Sequence[Sequence[Sequence[str]]]  # of rows
    caption: str | None = None  # may have several lines

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Draw the table for a terminal, which a few columns of numbers already fill.

        So headings are folded; all words of a row but the last are a line above the rows that share
        them; and empty columns are left out. The others are as wide
        as their content; a narrower terminal wraps their lines.
        """
        first = self.num_words - 1
        every_row = [row for rows in self.sections for row in rows]
        columns_of_all = range(first, len(self.headings))
        shown = [n for n in columns_of_all if n == first or any(row[n] for row in every_row)]
        heads = [_folded(self.headings[n]) for n in shown]
        indent = "  " * (first > 0)
        columns = [[indent * (n == first) + row[n] for row in every_row] for n in shown]
        widths = [
            max(map(cell_len, (*head, *cells))) for head, cells in zip(heads, columns, strict=True)
        ]
        is_number = [all(map(_NUMBER.match, filter(None, cells))) for cells in columns]
        is_number[0] = False

        def line(cells: Sequence[str], style: str = "") -> Text:
            padded = []
            for cell, width, goes_right in zip(cells, widths, is_number, strict=True):
                space = " " * (width - cell_len(cell))
                padded.append(space + cell if goes_right else cell + space)
            return Text(" ".join(padded).rstrip(), style, no_wrap=True, overflow="ignore")

        rule = Text("─" * (sum(widths) + len(widths) - 1), no_wrap=True, overflow="ignore")
        yield Text(self.title, "italic")
        upside_down = zip_longest(*(head[::-1] for head in heads), fillvalue="")
        yield from [line(parts, "bold") for parts in upside_down][::-1]
        for rows in self.sections:
            yield rule
            above: Sequence[str] = ()
            for row in rows:
                words = row[:first]
                if words and words != above:
                    yield Text(", ".join(words), "bold")
                above = words
                yield line([indent + row[first], *(row[n] for n in shown[1:])])
        if self.caption:
            yield rule
            yield Text(self.caption, "dim")


def _folded(heading: str) -> list[str]:
    return heading.replace("/", " /").replace("-", "- ").split()
