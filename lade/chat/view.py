"""How an answer appears in a terminal: finished parts are printed once, only the last one changes.

A terminal cannot take back what has scrolled out of its window, so no more than a window's height
is ever drawn anew: lines above it are printed for good as they are.
"""

import io
from collections.abc import Sequence
from itertools import accumulate
from time import perf_counter
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, SegmentLines
from rich.text import Text
from rich.theme import Theme

from lade.chat.pieces import Piece
from lade.models.stream import without_controls

DRAFTED = "bold green"
THINKING = "dim"
# Without rich's black behind inline code, which stands out of light windows.
THEME = Theme({"markdown.code": "bold cyan"})

_PAUSE_SEC = 1 / 12  # between two drawings, or longer:
_PAUSES = 10  # times as long as the last drawing took, since long code takes long

_Line = list[Segment]


def _keep_line_breaks(state: StateCore) -> None:
    """Break lines where the model did, which Markdown would join: poems, lists without marks."""
    for token in state.tokens:
        for part in token.children or ():
            if part.type == "softbreak":
                part.type = "hardbreak"


# As rich's own parser, but with HTML as text, which it would leave out.
_parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
_parser.core.ruler.push("line_breaks", _keep_line_breaks)


class AnswerView:
    """Shows an answer while it comes, as Markdown, or as text with drafted tokens marked.

    Use it as a context manager, and add pieces as they come.

    Args:
        shows_drafted: whether to show who wrote each token, instead of Markdown.
    """

    def __init__(self, console: Console, shows_drafted: bool = False) -> None:
        self._console = console
        self._shows_drafted = shows_drafted
        self._open = Text()  # the end of a part, which later text may change
        self._is_thinking: bool | None = None  # whether that part is thinking; None without a part
        self._num_printed = 0  # lines of that part that are printed for good
        self._has_gap = False  # whether an empty line stands before it
        self._has_printed = False  # whether any text of the answer is printed
        self._drawn: list[_Line] = [[Segment("…")]]  # until the first piece comes
        self._drawn_at, self._pause = 0.0, 0.0
        self._live = Live(
            get_renderable=lambda: SegmentLines(self._drawn, new_lines=True),
            # A recording would hold every state of the drawing.
            console=Console(file=io.StringIO()) if console.record else console,
            auto_refresh=False,
            transient=True,
        )

    def __enter__(self) -> "AnswerView":
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            self._finish()
        finally:
            self._live.stop()

    def add(self, piece: Piece) -> None:
        """Show one more piece."""
        text = without_controls(piece.text)
        if self._is_thinking != piece.is_thinking:
            text = text.lstrip("\n")
            if not text:
                return
            self._finish()
            self._is_thinking, self._has_gap = piece.is_thinking, self._has_printed
            self._open = Text(style=THINKING if piece.is_thinking else "")
        self._open.append(text, DRAFTED if piece.is_drafted and self._shows_drafted else None)
        if "\n" in text:
            self._settle()
        if perf_counter() - self._drawn_at > self._pause:
            self._draw()

    # --- text that is printed for good --------------------------------------------------------

    def _finish(self) -> None:
        """Print all that is open."""
        lines = self._lines(self._open)[self._num_printed :]
        self._open, self._num_printed = Text(), 0
        self._print(lines, then=[])

    def _settle(self) -> None:
        """Print the text that later text cannot change: all blocks but the last, or whole lines."""
        text, is_markdown = self._open.plain, self._is_markdown()
        cuts = _begins_of_blocks(text)[1:] if is_markdown else [text.rfind("\n") + 1]
        *parts, self._open = self._open.divide(cuts)
        lines: list[_Line] = []
        for part in parts:
            lines += self._lines(part)[self._num_printed :]
            self._num_printed, self._has_gap = 0, is_markdown
        if lines:
            self._print(lines, then=self._lines(self._open))

    def _print(self, lines: Sequence[_Line], then: Sequence[_Line]) -> None:
        """Print lines for good, and draw others below them."""
        self._has_printed |= bool(lines)
        with self._console:  # in one write
            self._drawn = [*then[-self._height :]]
            self._live.refresh()  # else printing repeats the last drawing
            if lines:
                self._console.print(SegmentLines(lines, new_lines=True), end="")

    # --- text that may change -----------------------------------------------------------------

    @property
    def _height(self) -> int:
        """Lines that may be drawn anew; the last of the window is the cursor's."""
        return max(1, self._console.height - 2)

    def _draw(self) -> None:
        """Draw the open part anew; print its lines above the window for good."""
        begin = perf_counter()
        lines = self._lines(self._open)
        before = self._num_printed
        self._num_printed = max(before, len(lines) - self._height)
        self._print(lines[before : self._num_printed], then=lines[self._num_printed :])
        self._drawn_at = perf_counter()
        self._pause = max(_PAUSE_SEC, _PAUSES * (self._drawn_at - begin))

    def _lines(self, part: Text) -> list[_Line]:
        if not part:
            return []
        options = self._console.options.update(height=None)
        if self._is_markdown():
            rendered = self._console.render_lines(_as_markdown(part.plain), options, pad=False)
            lines = _without_blanks(rendered)
        else:
            # The last newline ends a line, as all lines do here.
            whole = part[:-1] if part.plain.endswith("\n") else part
            lines = self._console.render_lines(whole, options, pad=False)
        return [[], *lines] if self._has_gap and lines else lines

    def _is_markdown(self) -> bool:
        return not self._is_thinking and not self._shows_drafted


def _as_markdown(text: str) -> Markdown:
    shown = Markdown("", code_theme="ansi_dark", hyperlinks=False)
    shown.parsed = _parser.parse(text)
    return shown


def _begins_of_blocks(text: str) -> list[int]:
    """Return where the blocks of a Markdown text begin; those before the last are complete."""
    ends = [0, *accumulate(len(line) + 1 for line in text.split("\n"))]
    return [
        ends[token.map[0]]
        for token in _parser.parse(text)
        if token.level == 0 and token.nesting >= 0 and token.map
    ]


def _without_blanks(lines: Sequence[_Line]) -> list[_Line]:
    """Return lines without blanks at their ends, and without empty ones around them."""
    stripped = []
    for line in lines:
        line = [*line]
        while line and not (line[-1].style and line[-1].style.bgcolor):
            text, style, control = line.pop()
            if text.rstrip():
                line.append(Segment(text.rstrip(), style, control))
                break
        stripped.append(line)
    filled = [i for i, line in enumerate(stripped) if line]
    return stripped[filled[0] : filled[-1] + 1] if filled else []
