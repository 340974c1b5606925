"""`lade chat` from a pipe: one question, or what is wrong with it."""

from typing import Any

import pytest
from typer.testing import CliRunner

from lade.cli.app import app
from lade.prewarming import tables

SHORT = ["--dtype", "float32", "--max-new-tokens", "8"]


def chat(text: str | bytes, *options: str) -> Any:
    return CliRunner().invoke(app, ["chat", *options], input=text, catch_exceptions=False)


def test_all_of_standard_input_is_one_question(folder: str) -> None:
    result = chat("abc\nabc\n", "--model", folder, *SHORT)
    assert result.exit_code == 0
    assert result.stdout.endswith("\n")
    assert len(result.stdout) > 3
    assert "8 tokens, " in result.stderr
    assert "seed" not in result.stderr
    generated = CliRunner().invoke(
        app, ["generate", "abc\nabc", "--model", folder, *SHORT], catch_exceptions=False
    )
    assert generated.stdout == result.stdout


def test_a_sampled_answer_tells_its_seed_and_is_the_same_again(folder: str) -> None:
    options = ["--model", folder, "--temperature", "1", "--seed", "3", *SHORT]
    first, second = chat("abc", *options), chat("abc", *options)
    assert first.stdout == second.stdout
    assert ", seed 3" in first.stderr


def test_it_ends_with_the_answer(folder: str) -> None:
    assert chat("abc", "--model", folder, *SHORT).exit_code == 0
    assert not [*tables.tables_folder().glob("*.safetensors")]  # nothing is learned behind it


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", [], "expected a question on standard input, got nothing"),
        (" \n", [], "expected a question on standard input, got nothing"),
        (b"a\xff", [], "expected UTF-8 on standard input"),
        ("abc", ["--top-p", "0.5"], "expected a temperature above 0 with top_p=0.5"),
        ("abc", ["--verification", "plain", "--save-pool", "a.pool"], "expected no --save-pool"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_loaded(
    text: str | bytes, options: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        chat(text, "--model", "/no/such/folder", *options)


def test_a_question_that_is_too_long_is_told(folder: str) -> None:
    with pytest.raises(ValueError, match="expected a prompt of at most 512 tokens"):
        chat("x" * 600, "--model", folder, *SHORT)


def test_a_system_prompt_without_a_place_is_told(folder: str) -> None:
    with pytest.raises(ValueError, match=r"expected no system prompt: .* has no chat template"):
        chat("abc", "--model", folder, "--system", "be brief", *SHORT)
