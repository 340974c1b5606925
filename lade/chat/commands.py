"""What one can type in a chat besides questions: the commands, and how a line is read as one."""

import re
from difflib import get_close_matches
from typing import NamedTuple

_COMMAND = re.compile(r"/([A-Za-z]+|\?)(?:\s+(.*))?", re.DOTALL)


class Command(NamedTuple):
    """A command and its help."""

    name: str
    metavar: str  # what may follow it; "" for nothing
    help: str
    needs_argument: bool = False

    @property
    def usage(self) -> str:
        """How it is typed."""
        return f"/{self.name} {self.metavar}".rstrip()


_ALL = (
    Command("plain", "[QUESTION]", "answer this or the next question by plain generate as well"),
    Command("retry", "", "answer the last question again, when sampling by another seed"),
    Command("undo", "", "take the last question and its answer back, to ask it differently"),
    Command("system", "[TEXT|off]", "show, set or remove the system prompt"),
    Command("temperature", "[T]", "show or set the temperature of sampling; 0 is greedy"),
    Command("show", "", "tell drafted tokens from the model's own, or no longer"),
    Command("stats", "", "show the figures of all answers"),
    Command("pool", "", "show what drafts come from"),
    Command("save", "[FILE]", "save the conversation, without a name where it was last"),
    Command("load", "FILE", "go on with a saved conversation", needs_argument=True),
    Command("clear", "", "begin a new conversation; the pool keeps what it learned"),
    Command("help", "", "show this list"),
    Command("exit", "", "leave, as Ctrl-D does"),
)
COMMANDS = {command.name: command for command in _ALL}
_OTHER_NAMES = {"quit": "exit", "bye": "exit", "?": "help", "temp": "temperature"}


def parse(line: str) -> tuple[Command, str] | None:
    """Return the command that a line is and what follows it; None for a question.

    A path such as `/etc/hosts` is no command, nor is what a space stands before.

    Raises:
        ValueError: there is no such command, or its argument is missing or one too many.
    """
    found = _COMMAND.fullmatch(line)
    if found is None:
        return None
    name, argument = found[1].lower(), (found[2] or "").strip()
    command = COMMANDS.get(_OTHER_NAMES.get(name, name))
    if command is None:
        near = get_close_matches(name, COMMANDS, 1)
        hint = f"/{near[0]}" if near else "/help for all of them"
        raise ValueError(
            f"expected a command, such as {hint}, got /{name}; "
            "a space before it makes it a question"
        )
    if command.needs_argument and not argument:
        raise ValueError(f"expected {command.usage}")
    if argument and not command.metavar:
        raise ValueError(f"expected {command.usage} alone, got {argument!r} behind it")
    return command, argument
