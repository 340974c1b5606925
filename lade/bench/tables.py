"""`Sheet`: a table of results, for a terminal and as Markdown.

Next file: `report.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import HORIZONTALS
from rich.table import Table


@dataclass(frozen=True)
class Sheet:
    """What stands in a table; each row has a cell for every heading."""

    title: str
    headings: Sequence[str]
    num_words: int  # the first columns hold words, the others numbers
    sections: Sequence[Sequence[Sequence[str]]]  # of rows
    caption: str | None = None  # may have several lines

    def __rich__(self) -> Table:
        """Return the table for a terminal; all words but a row's last are lines above its rows.

        So many columns leave no room for more; headings are folded for the same reason.
        """
        made = Table(
            title=self.title,
            title_justify="left",
            caption=self.caption,
            caption_justify="left",
            box=HORIZONTALS,
            show_edge=False,
            padding=0,
        )
        for column in range(self.num_words - 1, len(self.headings)):
            is_word = column < self.num_words
            longest = max((len(row[column]) for rows in self.sections for row in rows), default=0)
            made.add_column(
                _folded(self.headings[column]),
                justify="left" if is_word else "right",
                vertical="bottom",
                overflow="fold",
                min_width=longest + 2 * is_word,
            )
        for rows in self.sections:
            above: Sequence[str] = ()
            for row in rows:
                words, cells = row[: self.num_words - 1], row[self.num_words - 1 :]
                if words and words != above:
                    made.add_row(", ".join(words), style="bold")
                above = words
                made.add_row(f"  {cells[0]}" if words else cells[0], *cells[1:])
            made.add_section()
        return made

    def as_markdown(self) -> str:
        """Return the table as Markdown, every row in full."""
        rule = ["---"] * self.num_words + ["---:"] * (len(self.headings) - self.num_words)
        rows = [row for section in self.sections for row in section]
        lines = [f"**{self.title}**", ""]
        lines += [_line(cells) for cells in (self.headings, rule, *rows)]
        if self.caption:
            lines += ["", *(f"{line}  " for line in self.caption.splitlines())]
        return "\n".join(lines).rstrip() + "\n"


def _folded(heading: str) -> str:
    return heading.replace(" ", "\n").replace("/", "\n/").replace("-", "-\n")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
