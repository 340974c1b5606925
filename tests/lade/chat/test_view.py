"""Answers as they appear: the same at the end however they came, and nothing twice on the way."""

import io
import re
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from lade.chat.pieces import Piece
from lade.chat.view import AnswerView
from tests.lade.chat.screen import Screen, screen_console

ANSWER = """# Fruits

Here are **three** of them, with a line that is long enough to be wrapped in any window:

1. an apple
2. a pear
   - green
   - or yellow

```python
def add(a, b):
    return a + b
```

| name | taste |
| --- | --- |
| lemon | sour |

A <b>tag</b> and `code`. The end."""


def pieces_of(text: str, size: int = 3) -> list[Piece]:
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    return [Piece(part, i % 2 == 0, False) for i, part in enumerate(parts)]


def shown(console: Console, pieces: Sequence[Piece], shows_drafted: bool = False) -> None:
    with AnswerView(console, shows_drafted) as view:
        for piece in pieces:
            view.add(piece)
            if view._live is not None:
                with view._lock:
                    view._draw()  # as if time had passed


@pytest.mark.parametrize("width", [20, 33, 80])
@pytest.mark.parametrize("height", [5, 12, 50])
@pytest.mark.parametrize("shows_drafted", [False, True])
def test_the_end_is_the_same_however_it_came(width: int, height: int, shows_drafted: bool) -> None:
    console, screen = screen_console(width, height)
    shown(console, pieces_of(ANSWER), shows_drafted)
    at_once, expected = screen_console(width, 200)
    shown(at_once, pieces_of(ANSWER, len(ANSWER)), shows_drafted)
    assert screen.shown() == expected.shown()
    assert all(len(line) <= width for line in screen.lines)
    if shows_drafted:
        assert re.sub(r"\s", "", screen.shown()) == re.sub(r"\s", "", ANSWER)
    for word in ("Fruits", "apple", "return a + b", "lemon", "<b>tag</b>", "end."):
        assert screen.shown().count(word) == 1


def test_markdown_is_rendered_and_drafted_tokens_are_not_told_apart() -> None:
    console, screen = screen_console(80, 50)
    shown(console, pieces_of(ANSWER))
    assert "**three**" not in screen.shown()
    assert "```" not in screen.shown()
    assert " • green" in screen.shown()


def test_lines_break_where_the_model_broke_them() -> None:
    console, screen = screen_console(80, 50)
    shown(console, pieces_of("A cat,\na **cat**,\na hat.\n\nThe end."))
    lines = [line.strip() for line in screen.shown().splitlines() if line.strip()]
    assert lines == ["A cat,", "a cat,", "a hat.", "The end."]


def test_no_state_on_the_way_shows_a_line_twice_or_loses_one() -> None:
    console, screen = screen_console(40, 8)
    words = [f"word{i:03}" for i in range(60)]
    shown(console, pieces_of(" ".join(words[:40]) + "\n\n" + " ".join(words[40:]), 8))
    most = 0
    for lines in screen.writes:
        seen = re.findall(r"word\d{3}", " ".join(lines))
        assert seen == words[: len(seen)]
        assert len(seen) >= most  # what was there stays
        most = len(seen)
    assert most == 60


def test_no_more_than_the_window_is_drawn_anew() -> None:
    """Lines that have scrolled out cannot be taken back; drawing them again would repeat them."""
    console, screen = screen_console(30, 6)
    code = "```\n" + "\n".join(f"line {i}" for i in range(40)) + "\n```\n"
    shown(console, pieces_of(code, 4))
    numbers = [int(number) for number in re.findall(r"line (\d+)", screen.shown())]
    assert numbers == [*range(40)]


def test_drafted_text_is_coloured_underlined_or_in_brackets() -> None:
    pieces = [Piece("own ", False, False), Piece("draf", True, False), Piece("ted", True, False)]
    kinds: list[tuple[dict[str, Any], str]] = [
        ({}, "own \x1b[32mdrafted\x1b[0m"),
        ({"no_color": True}, "own \x1b[4mdrafted\x1b[0m"),
        ({"color_system": None}, "own [drafted]"),
    ]
    for options, expected in kinds:
        file = io.StringIO()
        options = {"color_system": "standard", **options}
        console = Console(file=file, force_terminal=True, record=True, _environ={}, **options)
        shown(console, pieces, shows_drafted=True)
        assert file.getvalue().strip() == expected


def test_thinking_is_dim_and_stands_before_the_answer() -> None:
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, record=True, color_system="standard", _environ={}
    )
    shown(
        console,
        [
            Piece("\nhm, *so*\nwell", True, True),
            Piece("\n\n", False, True),
            Piece("\n\n**yes**", False, False),
        ],
    )
    lines = file.getvalue().splitlines()
    assert lines == [
        *("\x1b[2mhm, *so*\x1b[0m", "\x1b[2mwell\x1b[0m", "", ""),
        "\x1b[1myes\x1b[0m",
    ]


def test_control_characters_do_not_reach_the_terminal() -> None:
    console, screen = screen_console(60, 12)
    shown(console, [Piece("a\x1b[2Jb\x07\x9b31mc\rd", False, False)])
    assert screen.shown() == "a[2Jb31mcd"


def test_before_the_first_piece_something_moves() -> None:
    console, screen = screen_console(60, 12)
    with AnswerView(console) as view, view._lock:
        view._draw()
        assert screen.shown() in ("-", "\\", "|", "/")
    assert screen.shown() == ""


def test_a_terminal_that_cannot_go_back_gets_finished_parts() -> None:
    screen = Screen(50)
    console = Console(file=screen, force_terminal=True, width=60, _environ={"TERM": "dumb"})
    assert console.is_dumb_terminal
    shown(console, pieces_of(ANSWER))
    assert "\x1b" not in screen.getvalue()
    assert screen.shown().count("apple") == 1
