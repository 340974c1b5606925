"""Answers piece by piece, as no test of a terminal can set them: cut, printed and drawn."""

import io
import re
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from lade.chat.pieces import Piece, PieceStream
from lade.chat.view import AnswerView
from lade.cli.demo import _Shown
from tests.lade.chat.screen import Screen
from tests.lade.tiny import byte_tokenizer

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

A <b>tag</b> and `code`.
The end."""


def pieces_of(text: str, size: int = 3) -> list[Piece]:
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    return [Piece(part, i % 2 == 0, False) for i, part in enumerate(parts)]


def screen_console(width: int, height: int) -> tuple[Console, Screen]:
    screen = Screen(height)
    sizes: Any = {"width": width, "height": height, "color_system": "standard"}
    return Console(file=screen, legacy_windows=False, highlight=False, _environ={}, **sizes), screen


def shown(console: Console, pieces: Sequence[Piece], shows_drafted: bool = False) -> None:
    with AnswerView(console, shows_drafted) as view:
        for piece in pieces:
            view._pause = 0.0  # as if time had passed
            view.add(piece)


@pytest.mark.parametrize("size", [(20, 5), (33, 50), (80, 12)])
@pytest.mark.parametrize("shows_drafted", [False, True])
def test_the_end_is_the_same_however_it_came(size: tuple[int, int], shows_drafted: bool) -> None:
    console, screen = screen_console(*size)
    shown(console, pieces_of(ANSWER), shows_drafted)
    at_once, expected = screen_console(size[0], 200)
    shown(at_once, pieces_of(ANSWER, len(ANSWER)), shows_drafted)
    assert screen.shown() == expected.shown()
    assert all(len(line) <= size[0] for line in screen.lines)
    for word in ("Fruits", "apple", "return a + b", "lemon", "<b>tag</b>", "end."):
        assert screen.shown().count(word) == 1
    if shows_drafted:
        assert re.sub(r"\s", "", screen.shown()) == re.sub(r"\s", "", ANSWER)
    else:
        assert not {"**three**", "```"} & {*screen.shown().split()}
        assert screen.shown().endswith("code.\nThe end.")  # where the model broke the line


@pytest.mark.parametrize("text", ["{} {}", "```\n{}\n{}\n```\n"])
def test_no_state_on_the_way_shows_a_word_twice_or_loses_one(text: str) -> None:
    """Lines that have scrolled out cannot be taken back; drawing them again would repeat them."""
    console, screen = screen_console(40, 8)
    words = [f"word{i:03}" for i in range(60)]
    one, other = (" ".join(part) for part in (words[:40], words[40:]))
    text = text.format(one.replace(" ", "\n") if "`" in text else one, other)
    shown(console, pieces_of(text, 8))
    most = 0
    for lines in screen.writes:
        seen = re.findall(r"word\d{3}", " ".join(lines))
        assert seen == words[: len(seen)]
        assert len(seen) >= most  # what was there stays
        most = len(seen)
    assert most == 60


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "own \x1b[1;32mdrafted\x1b[0m"),
        ({"no_color": True}, "own \x1b[1mdrafted\x1b[0m"),
        ({"color_system": None}, "own drafted"),
    ],
)
def test_drafted_text_is_bold_and_green(options: Any, expected: str) -> None:
    pieces = [Piece("own ", False, False), Piece("drafted", True, False)]
    file = io.StringIO()
    options = {"color_system": "standard", **options}
    console = Console(file=file, force_terminal=True, record=True, _environ={}, **options)
    shown(console, pieces, shows_drafted=True)
    assert file.getvalue().strip() == expected


def test_thinking_is_dim_and_no_control_character_reaches_the_terminal() -> None:
    console, screen = screen_console(60, 12)
    pieces = [Piece("\nhm\x1b[2J\x07, *so*\nwell", True, True), Piece("\n\n**yes**", False, False)]
    shown(console, pieces)
    assert screen.shown() == "hm[2J, *so*\nwell\n\nyes"
    assert "\x1b[2mhm[2J, *so*\x1b[0m" in screen.getvalue()


# --- pieces -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "text", "thinking", "answer"),
    [
        ("", "no thinking", "", "no thinking"),
        ("", "<think>\nhm, é</think>\n\nyes<|im_end|>", "\nhm, é", "\n\nyes"),
        ("", "[THINK]a[/THINK]b", "a", "b"),
        ("", "<think>never ends </thi", "never ends </thi", ""),
        ("<think>?\nbot\n", "a", "", "a"),  # of the question
        ("bot\n<think>\n", "a</think>b", "a", "b"),
        ("bot\n<think>\n\n</think>\n", "b", "", "b"),
        ("", "<|channel>hm<channel|>yes<|im_end|>", "hm", "yes"),
    ],
)
def test_thinking_is_told_from_the_answer(
    prompt: str, text: str, thinking: str, answer: str
) -> None:
    tokenizer = byte_tokenizer()
    marks = ["[THINK]", "[/THINK]", "<|im_end|>", "<|channel>", "<channel|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.add_tokens(["<think>", "</think>"])
    stream = PieceStream(tokenizer, tokenizer(prompt)["input_ids"])
    token_ids = tokenizer(text)["input_ids"]
    pieces = [piece for each in token_ids for piece in stream.put(each, False)] + stream.end()
    assert "".join(piece.text for piece in pieces if piece.is_thinking) == thinking
    assert "".join(piece.text for piece in pieces if not piece.is_thinking) == answer


def test_a_character_was_drafted_if_all_its_tokens_were_and_one_that_is_cut_is_none() -> None:
    tokenizer = byte_tokenizer()
    stream = PieceStream(tokenizer, [])
    token_ids = tokenizer("a€é😀")["input_ids"][:-1]
    drafted = [True, True, False, True, True, True, True, True, True]
    pairs = zip(token_ids, drafted, strict=True)
    found = [piece for pair in pairs for piece in stream.put(*pair)]
    assert found == [Piece("a", True, False), Piece("€", False, False), Piece("é", True, False)]
    assert stream.end(is_cut=True) == []


# --- of lade demo ---------------------------------------------------------------------------


def test_lines_of_the_demo_end_between_words() -> None:
    written = io.StringIO()
    shown = _Shown(Console(file=written, width=10), byte_tokenizer(), 1)
    for part in ("one two th", "ree\nfour ", "", "fi", "ve eleventeenth", " end\n"):
        shown._put(part, "dim")
    lines = ["one two", "three", "four five", "eleventeenth", "end", ""]
    assert written.getvalue().split("\n") == lines
