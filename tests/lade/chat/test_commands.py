"""Which lines are commands, and what is wrong with those that are none."""

import pytest

from lade.chat.commands import COMMANDS, parse


@pytest.mark.parametrize(
    ("line", "name", "argument"),
    [
        ("/help", "help", ""),
        ("/HELP", "help", ""),
        ("/?", "help", ""),
        ("/quit", "exit", ""),
        ("/system  be brief\nand kind ", "system", "be brief\nand kind"),
        ("/temperature 0.7", "temperature", "0.7"),
        ("/load my chat.json", "load", "my chat.json"),
    ],
)
def test_commands_are_read(line: str, name: str, argument: str) -> None:
    assert parse(line) == (COMMANDS[name], argument)


@pytest.mark.parametrize(
    "line", ["help", " /help", "/etc/hosts is what?", "/", "// a comment", "5/2"]
)
def test_other_lines_are_questions(line: str) -> None:
    assert parse(line) is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/hlp", "such as /help, got /hlp; a space before it"),
        ("/xyzzy", "/help for all of them, got /xyzzy"),
        ("/load", "expected /load FILE"),
        ("/undo twice", "expected /undo alone, got 'twice'"),
    ],
)
def test_wrong_commands_are_told(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(line)


def test_usages_fit_beside_their_help() -> None:
    assert all(len(command.usage) <= 20 and command.help for command in COMMANDS.values())
