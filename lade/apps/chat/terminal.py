"""A chat in a terminal: reads lines, runs commands, shows answers.

`view.py` has how answers appear, `conversation.py` all the rest.
"""

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lade.apps.bench.methods import Answer
from lade.apps.bench.report import compared, why_different
from lade.apps.chat.conversation import Conversation, Turn
from lade.apps.chat.pieces import Piece
from lade.apps.chat.view import DRAFTED, AnswerView
from lade.errors import ContextLengthError, UserError, in_one_line
from lade.models.loading import title_of
from lade.models.stream import without_controls
from lade.stats import DecodeStats

PROMPT = "> "
_COMMAND = re.compile(r"/([A-Za-z]+)(?:\s+(.*))?", re.DOTALL)

# By name: the argument and the purpose of a command.
_COMMANDS = {
    "plain": ("[QUESTION]", "answer this or the last question by plain generate as well"),
    "retry": ("", "answer the last question again, when sampling by another seed"),
    "undo": ("", "take the last question and its answer back, to ask it differently"),
    "system": ("[TEXT|off]", "show, set or remove the system prompt"),
    "temperature": ("[T]", "show or set the temperature of sampling; 0 is greedy"),
    "show": ("", "show drafted tokens apart from the model's own, or no longer"),
    "save": ("FILE", "save the conversation"),
    "load": ("FILE", "go on with a saved conversation"),
    "clear": ("", "begin a new conversation; the pool keeps what it learned"),
    "help": ("", "show this list"),
    "exit": ("", "leave, as Ctrl-D, /quit and /bye do"),
}
_EXITS = {"exit", "quit", "bye"}  # as commands, or alone on a line


def _usage(name: str) -> str:
    """Return how a command is typed."""
    return f"/{name} {_COMMANDS[name][0]}".rstrip()


def _parsed(line: str) -> tuple[str, str] | None:
    """Return the name and the argument of a command; None if a line is a question.

    A path such as `/etc/hosts` is no command, nor is a line that begins with a space.

    Raises:
        UserError: there is no such command, or its argument is missing or one too many.
    """
    if line.strip().lower().removeprefix("/") in _EXITS:
        return "exit", ""
    found = _COMMAND.fullmatch(line)
    if found is None:
        return None
    name, argument = found[1].lower(), (found[2] or "").strip()
    if name not in _COMMANDS:
        raise UserError(
            f"expected a command, which /help lists, got /{name}; "
            "a space before it makes it a question"
        )
    metavar, _ = _COMMANDS[name]
    if metavar == "FILE" and not argument:
        raise UserError(f"expected {_usage(name)}")
    if argument and not metavar:
        raise UserError(f"expected {_usage(name)} alone, got {argument!r} behind it")
    return name, argument


class Terminal:
    """A conversation in a terminal.

    Args:
        history: of typed lines; None to remember them in memory alone.
    """

    def __init__(
        self, conversation: Conversation, console: Console, history: History | None = None
    ) -> None:
        self.conversation = conversation
        self.console = console
        self._history = history
        self._shows_drafted = False
        self.is_waiting = False  # until the user has typed a line
        self._has_left = False
        self._cancelled = threading.Event()  # set by Ctrl-C after the last prompt
        self._typed = ""  # text that the next prompt begins with

    def run(self) -> None:
        """Read and answer until the user leaves.

        Raises:
            KeyboardInterrupt: the user left while an answer was being stopped.
        """
        name = title_of(self.conversation.loaded.name)
        self._say(f"{name}. /help lists commands; Ctrl-C stops an answer, Ctrl-D leaves.")
        if not self.conversation.loaded.tokenizer.chat_template:
            self._say(f"{name} has no chat template: it goes on with the text as it stands.")
        session = self._session()
        with _setting_at_interrupt(self._cancelled):
            while not self._has_left:
                self._cancelled.clear()
                typed, self._typed, self.is_waiting = self._typed, "", True
                try:
                    line = session.prompt(default=typed)
                except EOFError:
                    return
                except KeyboardInterrupt:
                    if not session.default_buffer.text:  # else the next line begins without it
                        self._say("Ctrl-D leaves.")
                else:
                    self.is_waiting = False
                    self.take(line)

    def take(self, line: str) -> None:
        """Run a command or answer a question; errors are shown."""
        if not line.strip():
            return
        try:
            found = _parsed(line.rstrip())
            if found is not None:
                name, argument = found
                getattr(self, f"_{name}")(argument)
            else:
                self._ask(line.strip())
        except (ValueError, OSError) as error:
            self._show_error(error)

    # --- answers ------------------------------------------------------------------------------

    def _ask(self, text: str | None, *, compares: bool = False) -> None:
        """Answer a question, or the last one again; put it back where that fails."""
        try:
            if compares:
                self._compare(text)
            else:
                self._answer(text)
        except Exception as error:  # the model may raise anything
            self._show_error(error)
            self._typed = text or ""

    def _answer(self, text: str | None, *, is_plain: bool = False, seed: int | None = None) -> Turn:
        """Show an answer as it comes, and its figures; the second Ctrl-C passes."""
        conversation, cancelled = self.conversation, self._cancelled
        how: Any = {"is_plain": is_plain, "seed": seed, "cancelled": cancelled}
        self.console.print()
        with _without_echo(), AnswerView(self.console, self._shows_drafted) as view:
            turn = conversation.answer(text, view.add, **how)
        if turn is None:
            raise UserError("stopped before the first word; the question was taken back")
        figures = turn.figures()
        if conversation.settings.temperature > 0:
            figures.append(f"seed {turn.seed}")
        self.console.print()
        self._say(", ".join(figures))
        return turn

    def _compare(self, text: str | None) -> None:
        """Answer by plain generate and then by lade, with one seed and nothing kept; compare."""
        self.console.rule("plain generate", align="left", style="dim")
        plain = self._answer(text, is_plain=True)
        if not plain.is_complete:
            return
        self.console.rule("lade", align="left", style="dim")
        with_drafts = self._answer(None, seed=plain.seed)
        if not with_drafts.is_complete:
            return
        turns = {"plain": plain, "lade": with_drafts}
        answers = {
            name: Answer([turn.token_ids], turn.sec, turn.stats or DecodeStats())
            for name, turn in turns.items()
        }
        self.console.print()
        for line in compared(answers):
            self.console.print(Text(line))
        if plain.token_ids != with_drafts.token_ids:
            self._say(why_different(self.conversation.loaded.model))

    # --- commands -----------------------------------------------------------------------------

    def _plain(self, argument: str) -> None:
        if not (argument or self.conversation.messages):  # else a heading would come first
            raise UserError("expected a question to answer again, there is none yet")
        self._ask(argument or None, compares=True)

    def _retry(self, _: str) -> None:
        self._ask(None)

    def _undo(self, _: str) -> None:
        text = self.conversation.undo()
        if text is None:
            raise UserError("expected a question to take back, there is none")
        self._typed = text
        self._say("The last question and its answer are taken back.")

    def _system(self, argument: str) -> None:
        if argument:
            self.conversation.system = None if argument.lower() == "off" else argument
        system = self.conversation.system
        self._say(f"System prompt: {system}" if system else "There is no system prompt.")

    def _temperature(self, argument: str) -> None:
        settings = self.conversation.settings
        if argument:
            try:
                temperature = float(argument)
            except ValueError:
                raise UserError(f"expected a number as temperature, got {argument!r}") from None
            settings = self.conversation.settings = replace(settings, temperature=temperature)
        how = "" if settings.temperature else ": greedy"
        self._say(f"Temperature {settings.temperature:g}{how}.")

    def _show(self, _: str) -> None:
        self._shows_drafted = not self._shows_drafted
        if not self._shows_drafted:
            self._say("Drafted tokens are no longer shown.")
            return
        drafted = ("drafted by the n-gram pool and accepted", DRAFTED)
        self.console.print(Text.assemble(drafted, ", or the model's own token"))
        turn = self.conversation.turn
        if turn is not None:
            with AnswerView(self.console, shows_drafted=True) as view:
                for piece in turn.pieces:
                    view.add(piece)

    def _save(self, argument: str) -> None:
        path = Path(argument).expanduser()
        if not path.parent.is_dir():
            raise UserError(f"no such folder: {path.parent}")
        self.conversation.save(path)
        self._say(f"Saved to {path}.")

    def _load(self, argument: str) -> None:
        path = Path(argument).expanduser()
        if not path.exists():
            raise UserError(f"no such file: {path}")
        self.conversation.load(path)
        num_questions = len(self.conversation.messages) // 2
        self._say(f"Loaded {num_questions} question{'s' * (num_questions != 1)} from {argument}.")
        if self.conversation.messages:
            question, answer = self.conversation.messages[-2:]
            asked = without_controls(question["content"])
            self.console.print(Text(f"{PROMPT}{asked}\n", style="bold"))
            with AnswerView(self.console) as view:
                view.add(Piece(answer["content"], False, False))

    def _clear(self, _: str) -> None:
        self.conversation.clear()
        self._say("A new conversation begins.")

    def _help(self, _: str) -> None:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=self.console.width > 60)
        table.add_column(style="dim")
        for name, (_, purpose) in _COMMANDS.items():
            table.add_row(Text(_usage(name)), purpose)
        self.console.print(table)
        self._say("Alt-Enter or Esc Enter begins a new line, Tab completes commands.")

    def _exit(self, _: str) -> None:
        self._has_left = True

    # --- lines --------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self.console.print(Text(without_controls(text), style="dim"))

    def _show_error(self, error: Exception) -> None:
        text = str(error) if isinstance(error, ValueError | OSError) else in_one_line(error)
        if isinstance(error, ContextLengthError):
            text += ". /undo or /clear makes room"
        self.console.print(Text(text, style="red"))

    def _session(self) -> "PromptSession[str]":
        purposes = {f"/{name}": purpose for name, (_, purpose) in _COMMANDS.items()}
        bindings = KeyBindings()

        @bindings.add("escape", "enter")
        def new_line(event: KeyPressEvent) -> None:
            event.current_buffer.newline(copy_margin=False)

        return PromptSession(
            [("bold", PROMPT)],
            history=self._history,
            prompt_continuation=" " * len(PROMPT),
            key_bindings=bindings,
            completer=WordCompleter([*purposes], meta_dict=purposes, sentence=True),
            complete_while_typing=False,
        )


def history_in(folder: Path) -> History:
    """Return the history of typed lines, in a file that only its owner may read."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "history"
    os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    return _History(str(path))


class _History(FileHistory):
    def store_string(self, string: str) -> None:
        with suppress(OSError):  # a full disk must not end a conversation
            super().store_string(string)


@contextmanager
def _setting_at_interrupt(event: threading.Event) -> Iterator[None]:
    """Let the first Ctrl-C set an event, and the next ones raise, for as long as it is set."""

    def stop(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _without_echo() -> Iterator[None]:
    """Keep keys from showing within the answer; they are read by the next prompt."""
    if sys.platform == "win32" or not os.isatty(0):
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(0)
    tty.setcbreak(0, termios.TCSANOW)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSANOW, before)
