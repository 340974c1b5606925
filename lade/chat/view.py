"""How an answer appears in a terminal: finished parts are printed once, only the last one changes.

A terminal cannot take back what has scrolled out of its window, so no more than a window's height
is ever drawn anew: lines above it are printed for good as they are.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from time import perf_counter
from types import TracebackType
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Heading, Markdown, MarkdownElement
from rich.segment import Segment, SegmentLines
from rich.spinner import Spinner
from rich.text import Text
from rich.theme import Theme

from lade.chat.pieces import Piece, split, without_controls

DRAFTED = "green"
DRAFTED_WITHOUT_COLOUR = "underline"
THINKING = "dim"
# Without rich's black behind inline code, which stands out of light windows.
THEME = Theme({"markdown.code": "bold cyan"})

_REFRESHES_PER_SEC = 12
_SHARE_OF_DRAWING = 0.1  # of one core's time, at most; long code takes long to draw


def _keep_line_breaks(state: StateCore) -> None:
    """Break lines where the model did, which Markdown would join: poems, lists without marks."""
    for token in state.tokens:
        for part in token.children or ():
            if part.type == "softbreak":
                part.type = "hardbreak"


# As rich's own parser, but with HTML as text, which it would leave out.
_parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
_parser.core.ruler.push("line_breaks", _keep_line_breaks)

_Line = list[Segment]


@dataclass(slots=True)
class _Open:
    """The part of an answer that may still change."""

    is_thinking: bool
    width: int
    has_gap: bool  # whether an empty line stands before it
    pieces: list[Piece] = field(default_factory=list)
    num_printed: int = 0  # lines of it that are printed for good


class AnswerView:
    """Shows an answer while it comes, as Markdown, or as text with drafted tokens marked.

    Use it as a context manager, and add pieces as they come.

    Args:
        shows_drafted: whether to show who wrote each token, instead of Markdown.
    """

    def __init__(self, console: Console, shows_drafted: bool = False) -> None:
        self._console = console
        self._shows_drafted = shows_drafted
        self._open: _Open | None = None
        self._has_printed = False  # anything of the answer
        self._drawn: list[_Line] = []  # of the open part
        self._spinner = Spinner("line", style="dim")
        # A recording would hold every state that it went through.
        is_live = console.is_terminal and not console.is_dumb_terminal and not console.record
        self._live = (
            Live(get_renderable=self._tail, console=console, auto_refresh=False, transient=True)
            if is_live
            else None
        )

        # Of all that draws. Live's own thread would know nothing of what is printed meanwhile.
        self._lock = threading.Lock()
        self._has_ended = threading.Event()
        self._ticker = threading.Thread(target=self._draw_regularly, daemon=True)

    def __enter__(self) -> "AnswerView":
        if self._live is not None:
            with self._lock:
                self._ticker.start()  # before the display, which would stay where it cannot start
                self._live.start(refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        if self._live is not None:
            self._ticker.join()
        try:
            self._finish()
        finally:
            if self._live is not None:
                self._live.stop()

    def add(self, piece: Piece) -> None:
        """Show a piece more."""
        with self._lock:
            self._add(piece)

    def _add(self, piece: Piece) -> None:
        piece = piece._replace(text=without_controls(piece.text))
        opened = self._open
        if opened is None or opened.is_thinking != piece.is_thinking:
            self._finish()
            piece = piece._replace(text=piece.text.lstrip("\n"))
            if not piece.text:
                return
            opened = self._open = _Open(piece.is_thinking, self._console.width, self._has_printed)
        opened.pieces.append(piece)
        if "\n" in piece.text:
            self._settle(opened)

    # --- what is printed for good -------------------------------------------------------------

    def _finish(self) -> None:
        """Print all of the open part."""
        opened, self._open = self._open, None
        if opened is not None:
            self._print(self._lines(opened)[opened.num_printed :], then=[])

    def _settle(self, opened: _Open) -> None:
        """Print what no later text can change: all blocks but the last, or all whole lines."""
        text = "".join(piece.text for piece in opened.pieces)
        is_markdown = self._is_markdown(opened)
        cuts = _begins_of_blocks(text)[1:] if is_markdown else [text.rfind("\n") + 1]
        at = 0
        lines: list[_Line] = []
        for cut in cuts:
            before, after = split(opened.pieces, cut - at)
            settled = replace(opened, pieces=before)
            lines += self._lines(settled)[settled.num_printed :]
            opened = _Open(opened.is_thinking, self._console.width, is_markdown, after)
            self._open, at = opened, cut
        if lines:
            self._print(lines, then=self._lines(opened))

    def _print(self, lines: Sequence[_Line], then: Sequence[_Line]) -> None:
        """Print lines for good, and draw others below them."""
        self._has_printed |= bool(lines)
        with self._console:  # in one write
            if self._live is not None:
                self._drawn = [*then[-self._height :]]
                self._live.refresh()  # else printing repeats what was drawn last
            if lines:
                self._console.print(SegmentLines(lines, new_lines=True), end="")

    # --- what changes -------------------------------------------------------------------------

    @property
    def _height(self) -> int:
        """Lines that may be drawn anew; the last of the window is the cursor's."""
        return max(1, self._console.height - 2)

    def _draw_regularly(self) -> None:
        """Draw what is new, as often as it takes but a small part of the time."""
        pause = 1 / _REFRESHES_PER_SEC
        while not self._has_ended.wait(pause):
            begin = perf_counter()
            with self._lock:
                self._draw()
            pause = max(1 / _REFRESHES_PER_SEC, (perf_counter() - begin) / _SHARE_OF_DRAWING)

    def _draw(self) -> None:
        """Draw the open part anew; what is higher than the window is printed for good."""
        opened = self._open
        lines = [] if opened is None else self._lines(opened)
        num_printed = 0 if opened is None else opened.num_printed
        num_high = max(num_printed, len(lines) - self._height)
        if opened is not None:
            opened.num_printed = num_high
        self._print(lines[num_printed:num_high], then=lines[num_high:])

    def _tail(self) -> RenderableType:
        """Return what is drawn below all that is printed."""
        if self._drawn or self._has_printed:
            return SegmentLines(self._drawn, new_lines=True)
        return self._spinner

    def _lines(self, opened: _Open) -> list[_Line]:
        pieces = [*opened.pieces]
        text = "".join(piece.text for piece in pieces)
        options = self._console.options.update(width=opened.width, height=None)
        if not text:
            lines: list[_Line] = []
        elif self._is_markdown(opened):
            rendered = self._console.render_lines(_as_markdown(text), options, pad=False)
            lines = _without_blanks(rendered)
        else:
            shown = self._as_text(pieces, opened.is_thinking)
            # The last newline ends a line, as all lines do here.
            parts = shown.split("\n", allow_blank=not text.endswith("\n"))
            rows = [self._console.render_lines(part, options, pad=False) for part in parts]
            lines = [line for row in rows for line in row or [[]]]
        return [[], *lines] if opened.has_gap and lines else lines

    def _is_markdown(self, opened: _Open) -> bool:
        return not opened.is_thinking and not self._shows_drafted

    def _as_text(self, pieces: Sequence[Piece], is_thinking: bool) -> Text:
        text = Text(style=THINKING if is_thinking else "", end="")
        for is_drafted, group in groupby(pieces, key=lambda piece: piece.is_drafted):
            part = "".join(piece.text for piece in group)
            if not (is_drafted and self._shows_drafted):
                text.append(part)
            elif self._console.color_system is None:  # no styles at all
                text.append(f"[{part}]")
            else:
                text.append(part, drafted_style(self._console))
        return text


def drafted_style(console: Console) -> str:
    """Return the style of drafted tokens, which is no colour where there are none."""
    return DRAFTED_WITHOUT_COLOUR if console.no_color else DRAFTED


class _Heading(Heading):
    """A heading on the left, where those of a chat are expected."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _Markdown(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _Heading,
    }


def _as_markdown(text: str) -> Markdown:
    shown = _Markdown("", code_theme="ansi_dark", hyperlinks=False)
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
        while line and not _has_background(line[-1]):
            text, style, control = line.pop()
            if text.rstrip():
                line.append(Segment(text.rstrip(), style, control))
                break
        stripped.append(line)
    filled = [i for i, line in enumerate(stripped) if line]
    return stripped[filled[0] : filled[-1] + 1] if filled else []


def _has_background(segment: Segment) -> bool:
    colour = segment.style.bgcolor if segment.style else None
    return colour is not None and not colour.is_default
