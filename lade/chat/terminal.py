"""A chat in a terminal: reads lines, runs commands, shows answers.

`commands.py` has what one can type, `view.py` how answers appear, `conversation.py` all the rest.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.styles import Style
from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from lade.chat.commands import COMMANDS, parse
from lade.chat.conversation import Context, Conversation, Turn
from lade.chat.figures import figures_of, fill_of, fitted, likeness_of, speed_of
from lade.chat.pieces import Piece, without_controls
from lade.chat.view import AnswerView, drafted_style
from lade.errors import ContextLengthError, in_one_line
from lade.stats import DecodeStats

PROMPT = "> "
_CONTINUED = "  "
_STYLE = Style.from_dict({"bottom-toolbar": "noreverse fg:ansibrightblack", "prompt": "bold"})
_LEAST_WIDTH_OF_BARS = 80  # of the window
_TAKES_FILES = ("/save ", "/load ")


class Terminal:
    """A conversation in a terminal.

    Args:
        history: of typed lines; None to remember them in memory alone.
    """

    def __init__(
        self,
        conversation: Conversation,
        console: Console,
        history: History | None = None,
    ) -> None:
        self.conversation = conversation
        self.console = console
        self._history = history or InMemoryHistory()
        self._context = Context(0, conversation.context.max_positions)
        self._shows_drafted = False
        self._compares_next = False  # whether the next question is answered plainly, too
        self._has_left = False
        self._cancelled = threading.Event()  # by Ctrl-C, since a line was asked for
        self._typed = ""  # what stands in the next prompt to begin with
        self._path: Path | None = None  # of the conversation
        self._handlers: dict[str, Callable[[str], None]] = {
            name: getattr(self, f"_{name}") for name in COMMANDS
        }

    def run(self) -> None:
        """Read and answer until the user leaves.

        Raises:
            KeyboardInterrupt: the user left while an answer was being stopped.
        """
        name = Path(self.conversation.loaded.name).name
        self._say(f"{name}. /help lists commands; Ctrl-C stops an answer, Ctrl-D leaves.")
        if not self.conversation.loaded.tokenizer.chat_template:
            self._say(f"{name} has no chat template: it goes on with the text as it stands.")
        session = self._session()
        with _setting_at_interrupt(self._cancelled):
            self._run(session)

    def _run(self, session: "PromptSession[str]") -> None:
        is_warned = False
        while not self._has_left:
            self._cancelled.clear()
            try:
                line = session.prompt(default=self._take_typed())
            except EOFError:
                return
            except KeyboardInterrupt:
                if is_warned:
                    return
                is_warned = True
                self._say("Ctrl-C again, or Ctrl-D, leaves.")
            else:
                is_warned = False
                self.take(line)

    def take(self, line: str) -> None:
        """Run a command or answer a question; errors are shown."""
        if not line.strip():
            return
        try:
            found = parse(line.rstrip())
            if found is not None:
                command, argument = found
                self._handlers[command.name](argument)
            else:
                self._ask(line.strip())
        except (ValueError, OSError) as error:
            self._show_error(error)
        self._count_context()

    # --- answers ------------------------------------------------------------------------------

    def _ask(self, text: str | None, seed: int | None = None) -> None:
        """Answer a question, or the last one again; put it back where that fails."""
        try:
            if self._compares_next:
                self._compares_next = False
                self._compare(text)
            else:
                self._answer(text, seed=seed)
        except Exception as error:  # the model may raise anything
            self._show_error(error)
            self._typed = text or ""

    def _answer(self, text: str | None, *, is_plain: bool = False, seed: int | None = None) -> Turn:
        """Show an answer as it comes, and its figures; the second Ctrl-C passes."""
        conversation, cancelled = self.conversation, self._cancelled
        pieces = conversation.answer(text, is_plain=is_plain, seed=seed, cancelled=cancelled)
        self.console.print()
        turn = None
        with _without_echo(), AnswerView(self.console, self._shows_drafted) as view:
            for piece in pieces:
                turn = conversation.turn
                view.add(piece)
        if cancelled.is_set() and turn is None:
            self._typed = text or ""
            raise ValueError("stopped before the first word; the question was taken back")
        turn = turn or conversation.turn
        assert turn is not None, "what did not fail is kept"
        figures = ", ".join(figures_of(turn, conversation.plain_tokens_per_sec))
        if conversation.settings.temperature > 0:
            figures += f", seed {turn.seed}"
        self.console.print()
        self._say(figures)
        return turn

    def _compare(self, text: str | None) -> None:
        """Answer by plain generate and then by lade, with one seed, and show both times."""
        self.console.rule("plain generate", align="left", style="dim")
        plain = self._answer(text, is_plain=True)
        if plain.is_interrupted:
            return
        self.console.rule("lade", align="left", style="dim")
        with_drafts = self._answer(None, seed=plain.seed)
        self.console.print()
        self.console.print(_comparison(plain, with_drafts, self.console.width))
        self._say(likeness_of(plain, with_drafts, self.conversation.loaded.model) or "stopped")

    # --- commands -----------------------------------------------------------------------------

    def _plain(self, argument: str) -> None:
        self._compares_next = True
        if argument:
            self._ask(argument)
        else:
            self._say("The next question is answered by plain generate and then by lade.")

    def _retry(self, _: str) -> None:
        if not self.conversation.messages:
            raise ValueError("expected a question to answer again, there is none yet")
        self._ask(None)

    def _undo(self, _: str) -> None:
        text = self.conversation.undo()
        if text is None:
            raise ValueError("expected a question to take back, there is none")
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
                raise ValueError(f"expected a number as temperature, got {argument!r}") from None
            settings = self.conversation.settings = replace(settings, temperature=temperature)
        how = "" if settings.temperature else ": greedy"
        self._say(f"Temperature {settings.temperature:g}{how}.")

    def _show(self, _: str) -> None:
        self._shows_drafted = not self._shows_drafted
        if not self._shows_drafted:
            self._say("Answers are shown as Markdown again.")
            return
        if self.console.color_system is None:
            self._say("Shown in brackets: drafted and accepted. The rest: the model's own tokens.")
        else:
            self.console.print(
                Text("drafted by the n-gram pool and accepted", style=drafted_style(self.console)),
                Text("or the model's own token", style="default"),
                sep=", ",
            )
        turn = self.conversation.turn
        if turn is not None:
            with AnswerView(self.console, shows_drafted=True) as view:
                for piece in turn.pieces:
                    view.add(piece)

    def _stats(self, _: str) -> None:
        turns, plain_speed = self.conversation.turns, self.conversation.plain_tokens_per_sec
        if not turns:
            raise ValueError("expected an answer to show figures of, there is none yet")
        num_loops = sum(turn.ends_in_loop for turn in turns)
        apart = f", {num_loops} of them ending in a loop and not counted below" * (num_loops > 0)
        answers = f"{len(turns)}{apart}"
        turns = [turn for turn in turns if not turn.ends_in_loop]
        total = DecodeStats()
        for turn in turns:
            if turn.stats is not None:
                total.add(turn.stats)
        num_tokens, sec = sum(turn.num_tokens for turn in turns), sum(turn.sec for turn in turns)
        rate = num_tokens / sec if sec else 0.0
        rows = {
            "answers": answers,
            "tokens": f"{num_tokens:,} in {sec:.1f} s, {rate:.1f} a second",
            "plain generate": f"{plain_speed:.1f} a second"
            if plain_speed
            else "unknown: see /plain",
            "tokens a step": f"{total.mean_accepted_tokens:.2f}",
            "drafted": f"{total.num_draft_tokens:,}, {total.acceptance_rate:.0%} of them accepted",
            "prompts": f"{sum(turn.num_prompt_tokens for turn in turns):,} tokens, "
            f"{sum(turn.num_reused_tokens for turn in turns):,} of them not run again",
        }
        self._print_pairs(rows)

    def _pool(self, _: str) -> None:
        rows = {}
        own = self.conversation.pool
        if own is not None:
            rows["learns"] = f"{len(own):,} of at most {own.capacity_tokens:,} tokens"
        for pool in self.conversation.read_pools:
            rows[f"read {len(rows)}"] = f"{len(pool):,} tokens"
        self._print_pairs(rows)

    def _save(self, argument: str) -> None:
        path = self._path if not argument else Path(argument).expanduser()
        if path is None:
            raise ValueError(f"expected a file for the first time: {COMMANDS['save'].usage}")
        if not path.parent.is_dir():
            raise ValueError(f"no such folder: {path.parent}")
        self.conversation.save(path)
        self._path = path
        self._say(f"Saved to {path}.")

    def _load(self, argument: str) -> None:
        path = Path(argument).expanduser()
        self.conversation.load(path)
        self._path = path
        num_questions = len(self.conversation.messages) // 2
        self._say(f"Loaded {num_questions} question{'s' * (num_questions != 1)} from {path}.")
        if self.conversation.messages:
            question, answer = self.conversation.messages[-2:]
            asked = without_controls(question["content"])
            self.console.print(Text(f"{PROMPT}{asked}", style="bold"))
            self.console.print()
            with AnswerView(self.console) as view:
                view.add(Piece(answer["content"], False, False))

    def _clear(self, _: str) -> None:
        self.conversation.clear()
        self._say("A new conversation begins.")

    def _help(self, _: str) -> None:
        self._print_pairs({command.usage: command.help for command in COMMANDS.values()})
        self._say("Alt-Enter or Esc Enter begins a new line, Tab completes commands.")

    def _exit(self, _: str) -> None:
        self._has_left = True

    # --- lines --------------------------------------------------------------------------------

    def status(self, width: int) -> str:
        """Return the line at the bottom of the window."""
        conversation, turn = self.conversation, self.conversation.turn
        parts = []
        if self._compares_next:
            parts.append("next: plain and lade")
        if turn is not None:
            parts += speed_of(turn, conversation.plain_tokens_per_sec)
        parts += fill_of(self._context, conversation.pool)
        return fitted([*parts, Path(conversation.loaded.name).name], width)

    def _say(self, text: str) -> None:
        self.console.print(Text(without_controls(text), style="dim"))

    def _show_error(self, error: Exception) -> None:
        text = str(error) if isinstance(error, ValueError | OSError) else in_one_line(error)
        if isinstance(error, ContextLengthError):
            text += ". /undo or /clear makes room"
        self.console.print(Text(text, style="red"))

    def _print_pairs(self, rows: dict[str, str]) -> None:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=self.console.width > 60)
        table.add_column(style="dim")
        for name, value in rows.items():
            table.add_row(Text(name), Text(value))
        self.console.print(table)

    def _count_context(self) -> None:
        try:
            self._context = self.conversation.context
        except ValueError:  # of a template that refuses what was loaded; the next answer tells
            self._context = Context(0, self._context.max_positions)

    def _take_typed(self) -> str:
        typed, self._typed = self._typed, ""
        return typed

    def _session(self) -> "PromptSession[str]":
        def toolbar() -> str:
            return self.status(get_app().output.get_size().columns)

        return PromptSession(
            [("class:prompt", PROMPT)],
            history=self._history,
            multiline=True,
            prompt_continuation=_CONTINUED,
            key_bindings=_key_bindings(),
            completer=_Completer(),
            complete_while_typing=False,
            bottom_toolbar=toolbar,
            style=_STYLE,
        )


class _Completer(Completer):
    """Completes commands, and the files of those that take one."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        """Yield what may stand at the cursor."""
        text = document.text_before_cursor
        if text.startswith(_TAKES_FILES):
            path = text.split(" ", 1)[1]
            yield from self._paths.get_completions(Document(path), event)
        elif text.startswith("/") and not any(letter.isspace() for letter in text):
            for command in COMMANDS.values():
                if f"/{command.name}".startswith(text):
                    yield Completion(
                        f"/{command.name}", -len(text), command.usage, display_meta=command.help
                    )


def _key_bindings() -> KeyBindings:
    """Return what keys do other than usual: Enter ends the question, also one of many lines."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def submit(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @bindings.add("c-c")
    def clear_or_leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:exiting")

    return bindings


def history_in(folder: Path) -> History:
    """Return the history of typed lines, in a file that only its owner may read."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "history"
    os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    return FileHistory(str(path))


def _comparison(plain: Turn, with_drafts: Turn, width: int) -> Table:
    """Return a table of two answers to one question, with bars where there is room."""
    table = Table.grid(padding=(0, 2, 0, 0))
    gain = with_drafts.tokens_per_sec / plain.tokens_per_sec if plain.tokens_per_sec else 0.0
    longest = max(plain.sec, with_drafts.sec)
    for name, turn, note in (("plain", plain, ""), ("lade", with_drafts, f", {gain:.2f}x")):
        cells: list[RenderableType] = [Text(name)]
        if width >= _LEAST_WIDTH_OF_BARS:
            cells.append(Bar(longest, 0, turn.sec, width=24, color="green" if note else "default"))
        took = f"{turn.num_tokens:,} tokens in {turn.sec:.1f} s"
        table.add_row(*cells, Text(f"{took}, {turn.tokens_per_sec:.1f} a second{note}"))
    return table


@contextmanager
def _setting_at_interrupt(event: threading.Event) -> Iterator[None]:
    """Let the first Ctrl-C set an event, and the next ones raise, for as long as it is set."""

    def stop(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    if threading.current_thread() is not threading.main_thread():  # which gets all signals
        yield
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _without_echo() -> Iterator[None]:
    """Keep keys from showing within the answer; they are read by the next prompt."""
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    try:
        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
    except (ValueError, OSError, termios.error):  # no terminal
        yield
        return
    without = [*before]
    without[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(keyboard, termios.TCSANOW, without)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSANOW, before)
