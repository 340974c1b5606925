"""Turns of a chat and the sides of a race as HTML.

Everything that a model or a user wrote passes through `escaped`.
"""

import html
from collections.abc import Iterable
from itertools import groupby

from lade.chat.conversation import Turn
from lade.chat.figures import figures_of
from lade.chat.pieces import Piece

# Gradio takes values of `gr.HTML` for templates, in which these have a meaning.
_MARKS = {mark: f"&#{ord(mark)};" for mark in "$`{}\\"}
# HTML has no control characters: they are shown by their pictures.
_CONTROLS = {chr(code): chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"}
_SHOWN = str.maketrans(_MARKS | _CONTROLS | {"\x7f": "\u2421"})


def escaped(text: str) -> str:
    """Return text that is shown as it is, whatever it contains."""
    return html.escape(text.replace("\r\n", "\n")).translate(_SHOWN)


def pieces_html(pieces: Iterable[Piece]) -> str:
    """Return an answer, each run of pieces in an element that tells who wrote it."""
    parts = []
    for is_thinking, thought in groupby(pieces, key=lambda piece: piece.is_thinking):
        runs = []
        for is_drafted, run in groupby(thought, key=lambda piece: piece.is_drafted):
            text = escaped("".join(piece.text for piece in run))
            runs.append(f'<mark class="drafted">{text}</mark>' if is_drafted else text)
        style = "thinking" if is_thinking else "said"
        parts.append(f'<span class="{style}">{"".join(runs)}</span>')
    return "".join(parts)


def question_html(text: str) -> str:
    """Return a message of the user."""
    return f'<div class="question"><span class="who">You</span><p>{escaped(text)}</p></div>'


def answer_html(turn: Turn, *, is_running: bool = False) -> str:
    """Return a message of the model, with a line of figures below it."""
    style = "answer running" if is_running else "answer"
    return (
        f'<div class="{style}"><span class="who">Model</span><p>{pieces_html([*turn.pieces])}</p>'
        f'<p class="note">{_figures(turn)}</p></div>'
    )


def lane_html(name: str, style: str, turn: Turn | None) -> str:
    """Return one side of a race; without a turn it has not begun."""
    said = pieces_html([*turn.pieces]) if turn else ""
    note = _figures(turn) if turn else "waits"
    return (
        f'<section class="lane {style}"><h3>{escaped(name)}</h3><p class="note">{note}</p>'
        f"<p>{said}</p></section>"
    )


def _figures(turn: Turn) -> str:
    return escaped(", ".join(figures_of(turn, None)))


def note_html(text: str, *, is_error: bool = False) -> str:
    """Return a line that says what happens, or what went wrong."""
    if not text:
        return ""
    style, role = ("error", "alert") if is_error else ("status", "status")
    return f'<p class="{style}" role="{role}">{escaped(text)}</p>'
