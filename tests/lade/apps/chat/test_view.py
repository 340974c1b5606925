"""Answers piece by piece, as no test of a terminal can set them: cut and printed."""

from typing import Any

import pytest
from rich.console import Console

from lade.apps.chat.pieces import Piece, PieceStream
from lade.apps.chat.view import AnswerView
from tests.lade.apps.chat.screen import Screen
from tests.lade.tiny import byte_tokenizer

ANSWER = """# Fruits

1. an apple, in a line that is longer than the window, [bold]
   return a
日本の果物は美味しい A <b>tag</b> and `code`."""


def screen_console(width: int) -> tuple[Console, Screen]:
    screen = Screen()
    sizes: Any = {"width": width, "height": 100, "color_system": "standard"}
    return Console(file=screen, legacy_windows=False, highlight=False, _environ={}, **sizes), screen


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("shows_drafted", [False, True])
def test_text_appears_as_it_comes(size: int, shows_drafted: bool) -> None:
    console, screen = screen_console(40)
    with AnswerView(console, shows_drafted) as view:
        assert screen.shown() == "…"
        for begin in range(0, len(ANSWER), size):
            view.add(Piece(ANSWER[begin : begin + size], begin % 2 == 0, False))
            assert screen.shown() == ANSWER[: begin + size].rstrip()
    assert screen.shown() == ANSWER
    assert screen.lines[-1] == ""
    with AnswerView(console):
        pass
    assert screen.shown() == ANSWER  # nothing was said, and no sign of waiting is left


def test_thinking_is_dim_and_no_control_character_reaches_the_terminal() -> None:
    console, screen = screen_console(60)
    pieces = [Piece("\nhm\x1b[2J\x07, *so*\nwell", True, True), Piece("\n\n**yes**", False, False)]
    with AnswerView(console) as view:
        [*map(view.add, pieces)]
    assert screen.shown() == "hm[2J, *so*\nwell\n\n**yes**"
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
