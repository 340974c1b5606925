"""The chat in a terminal: keys, commands, what is shown and what is kept."""

import os
import signal
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from lade.chat.conversation import Conversation
from lade.chat.figures import figures_of, fitted, likeness_of
from lade.chat.settings import Settings
from lade.chat.terminal import Terminal, _Completer, history_in
from lade.config import Config
from lade.models.loading import LoadedModel
from lade.stats import Step
from ngram_pool import NGramPool
from tests.lade.chat.screen import Screen, screen_console

SHORT = Settings(max_new_tokens=10)
CTRL_C, CTRL_D, ALT_ENTER = "\x03", "\x04", "\x1b\r"


class Chat:
    """A terminal, its screen and its conversation."""

    def __init__(self, loaded: LoadedModel, width: int = 80, **options: Any) -> None:
        self.conversation = Conversation(loaded, **{"settings": SHORT, **options})
        console, self.screen = screen_console(width, 400)
        self.history = InMemoryHistory()
        self.terminal = Terminal(self.conversation, console, self.history)

    def type(self, *keys: str) -> str:
        """Let the user type until the chat ends; return what was shown."""
        with create_pipe_input() as keyboard:
            keyboard.send_text("".join(keys))
            with create_app_session(input=keyboard, output=DummyOutput()):
                self.terminal.run()
        return self.screen.shown()

    def take(self, *lines: str) -> str:
        """Take lines; return what is shown after them."""
        before = len(self.screen.shown())
        for line in lines:
            self.terminal.take(line)
        return self.screen.shown()[before:].strip("\n")

    @property
    def texts(self) -> list[str]:
        return [message["content"] for message in self.conversation.messages]


@pytest.fixture
def chat(loaded: LoadedModel) -> Chat:
    return Chat(loaded)


# --- keys ---------------------------------------------------------------------------------------


def test_questions_are_answered_until_ctrl_d(chat: Chat) -> None:
    shown = chat.type("abc\r", "\r", "de", ALT_ENTER, "f\r", CTRL_D)
    assert chat.texts[::2] == ["abc", "de\nf"]
    assert "/help lists commands" in shown
    assert shown.count("10 tokens, ") == 2
    assert [*chat.history.get_strings()][:2] == ["abc", "de\nf"]


def test_pasted_lines_are_one_question(chat: Chat) -> None:
    chat.type("\x1b[200~one\ntwo\r\nthree\x1b[201~\r", CTRL_D)
    assert chat.texts[0] == "one\ntwo\nthree"


def test_ctrl_c_clears_what_is_typed_and_leaves_the_second_time(chat: Chat) -> None:
    shown = chat.type("not this", CTRL_C, "this\r", CTRL_C, "that\r", *2 * CTRL_C, "never\r")
    assert chat.texts[::2] == ["this", "that"]
    assert shown.count("Ctrl-C again, or Ctrl-D, leaves.") == 2


def test_exit_leaves(chat: Chat) -> None:
    chat.type("/exit\r", "never\r")
    assert chat.texts == []


def test_commands_and_files_are_completed(tmp_path: Path, chat: Chat) -> None:
    (tmp_path / "mine.json").touch()

    def completed(text: str) -> list[str]:
        found = _Completer().get_completions(Document(text), CompleteEvent())
        return [completion.text for completion in found]

    assert completed("/s") == ["/system", "/show", "/stats", "/save"]
    assert completed("a /s") == []
    assert completed("/system ") == []
    assert completed(f"/load {tmp_path}/mi") == ["ne.json"]
    chat.type("/temp\t 0.5\r", CTRL_D)
    assert chat.conversation.settings.temperature == 0.5


def test_the_history_is_a_file_of_its_owner(tmp_path: Path) -> None:
    history = history_in(tmp_path / "lade")
    history.store_string("abc")
    assert [*history_in(tmp_path / "lade").load_history_strings()] == ["abc"]
    (path,) = (tmp_path / "lade").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# --- answers ------------------------------------------------------------------------------------


@pytest.fixture
def interrupting(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that has Ctrl-C pressed so many times at the first piece."""

    def at_first_piece(num_times: int) -> None:
        answer = Conversation.answer

        def pressed(*args: Any, **options: Any) -> Iterator[Any]:
            for i, piece in enumerate(answer(*args, **options)):
                yield piece
                for _ in range(num_times if i == 0 else 0):
                    os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(Conversation, "answer", pressed)

    return at_first_piece


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(
    loaded: LoadedModel, interrupting: Callable[[int], None]
) -> None:
    chat = Chat(loaded, settings=Settings(max_new_tokens=400))
    interrupting(1)
    before = signal.getsignal(signal.SIGINT)
    shown = chat.type("abc\r", CTRL_D)
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopped, " in shown
    turn = chat.conversation.turn
    assert turn is not None
    assert turn.is_interrupted
    assert chat.texts == ["abc", turn.text]


def test_ctrl_c_before_an_answer_begins_asks_again(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = chat.terminal.take

    def interrupted(line: str) -> None:
        if chat.conversation.turn is not None:
            os.kill(os.getpid(), signal.SIGINT)  # as the line has been read
        take(line)

    monkeypatch.setattr(chat.terminal, "take", interrupted)
    shown = chat.type("abc\r", "def\r", *3 * CTRL_C)  # the first one clears "def"
    assert "stopped before the first word; the question was taken back" in shown
    assert chat.texts[::2] == ["abc"]


def test_a_second_ctrl_c_leaves(loaded: LoadedModel, interrupting: Callable[[int], None]) -> None:
    chat = Chat(loaded, settings=Settings(max_new_tokens=400))
    interrupting(2)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        chat.type("abc\r", "never\r")
    assert signal.getsignal(signal.SIGINT) is before
    assert chat.texts[0] == "abc"
    assert len(chat.texts) == 2


def test_a_question_that_is_too_long_can_be_made_shorter(chat: Chat) -> None:
    shown = chat.type("x" * 600, "\r", *["\x7f"] * 590, "\r", CTRL_D)
    assert "expected a prompt of at most 512 tokens" in shown
    assert "/undo or /clear makes room" in shown
    assert chat.texts[0] == "x" * 10


def test_an_error_in_the_model_is_shown_and_the_chat_goes_on(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("out of memory\nand more")

    with monkeypatch.context() as patch:
        patch.setattr("lade.chat.conversation.generate", fail)
        assert chat.take("abc").endswith("RuntimeError: out of memory")
    assert chat.texts == []
    assert "10 tokens" in chat.take("abc")


def test_the_figures_of_an_answer_name_its_seed_where_it_matters(loaded: LoadedModel) -> None:
    assert "seed" not in Chat(loaded).take("abc")
    settings = Settings(max_new_tokens=10, temperature=1.0, seed=7)
    assert ", seed 7" in Chat(loaded, settings=settings).take("abc")


# --- commands -----------------------------------------------------------------------------------


def test_plain_answers_both_ways_and_compares(chat: Chat) -> None:
    shown = chat.take("/plain abc")
    assert shown.index("plain generate ──") < shown.index("lade ──")
    assert "plain, 10 tokens" in shown
    assert "x plain" in shown
    assert "The texts are the same." in shown
    assert len(chat.texts) == 2
    turn = chat.conversation.turn
    assert turn is not None
    assert not turn.is_plain
    assert shown.count(" tokens in ") == 2
    # The pool learned lade's answer alone.
    pool = chat.conversation.pool
    assert pool is not None
    assert len(pool) == len("[user]abc\n[assistant]") + 10


def test_plain_is_of_the_next_question(chat: Chat) -> None:
    assert "next question is answered by plain" in chat.take("/plain")
    assert chat.terminal.status(80).startswith("next: plain and lade")
    assert "lade ──" in chat.take("abc")
    assert "lade ──" not in chat.take("def")
    assert "x plain" in chat.terminal.status(80)


def test_plain_and_lade_have_the_same_seed(loaded: LoadedModel) -> None:
    settings = Settings(max_new_tokens=30, temperature=1.0)
    assert "The texts are the same." in Chat(loaded, settings=settings).take("/plain abc")


def test_texts_that_part_are_told(chat: Chat) -> None:
    chat.take("/plain abc")
    turn = chat.conversation.turn
    assert turn is not None
    other = type(turn)(0, True, 1, pieces=[turn.pieces[0], turn.pieces[0]._replace(text="?!")])
    told = likeness_of(other, turn, chat.conversation.loaded.model)
    assert told.startswith(f"The texts part after {len(turn.pieces[0].text)} characters")
    assert "report this as a fault" in told  # in float64


def test_loops_and_interrupted_answers_are_not_held_against_plain(loaded: LoadedModel) -> None:
    chat = Chat(loaded)
    chat.take("abc")
    whole = chat.conversation.turn
    assert whole is not None
    assert "x plain" in " ".join(figures_of(whole, 5.0))
    stopped = replace(whole, is_interrupted=True)
    assert "x plain" not in " ".join(figures_of(stopped, 5.0))
    loop = replace(whole, steps=[Step([7, 8], 1, 1)] * 20, token_times=[0.1] * 40)
    assert "x plain" not in " ".join(figures_of(loop, 5.0))
    assert figures_of(loop, 5.0)[-1] == "ends in a loop"
    assert "which flatters drafts" in likeness_of(loop, loop, loaded.model)
    chat.conversation.turns.append(loop)
    shown = chat.take("/stats")
    assert "answers         2, 1 of them ending in a loop and not counted below" in shown
    assert "tokens          10 in " in shown
    del chat.conversation.turns[0]
    assert "tokens          0 in 0.0 s" in chat.take("/stats")


def test_an_interrupted_plain_answer_is_not_compared(
    loaded: LoadedModel, interrupting: Callable[[int], None]
) -> None:
    chat = Chat(loaded, settings=Settings(max_new_tokens=300))
    interrupting(1)
    shown = chat.type("/plain abc\r", CTRL_D)
    assert "lade ──" not in shown
    assert len(chat.texts) == 2


def test_retry_undo_and_clear(loaded: LoadedModel) -> None:
    chat = Chat(loaded, settings=Settings(max_new_tokens=10, temperature=1.0))
    chat.take("abc")
    first = chat.texts[1]
    chat.take("/retry")
    assert chat.texts[1] != first
    assert chat.texts[0] == "abc"
    chat.type("/undo\r", "d\r", CTRL_D)  # the question stands there again
    assert chat.texts[0] == "abcd"
    chat.take("/clear")
    assert chat.texts == []
    assert "expected a question to answer again" in chat.take("/retry")
    assert "expected a question to take back" in chat.take("/undo")


def test_system_and_temperature_are_shown_and_set(chat: Chat) -> None:
    assert chat.take("/system") == "There is no system prompt."
    assert chat.take("/system be brief") == "System prompt: be brief"
    assert chat.conversation.system == "be brief"
    assert chat.take("/system off") == "There is no system prompt."
    assert chat.take("/temperature") == "Temperature 0: greedy."
    assert chat.take("/temperature 0.7") == "Temperature 0.7."
    assert chat.conversation.settings == Settings(max_new_tokens=10, temperature=0.7)
    assert "expected a number as temperature, got 'hot'" in chat.take("/temperature hot")
    assert "expected a finite temperature" in chat.take("/temperature -1")
    assert chat.conversation.settings.temperature == 0.7


def test_show_tells_drafted_tokens_apart_and_begins_with_the_last_answer(
    loaded: LoadedModel,
) -> None:
    drafting = Config(max_draft_tokens=6)  # whatever the machine's costs are
    chat = Chat(loaded, settings=Settings(max_new_tokens=100), config=drafting)
    chat.terminal.console = screen_console(80, 400, color_system=None)[0]
    screen: Any = chat.terminal.console.file
    chat.take("abcabc")
    turn = chat.conversation.turn
    assert turn is not None
    assert any(piece.is_drafted for piece in turn.pieces)
    before = len(screen.shown())
    chat.take("/show")
    shown = screen.shown()[before:]
    assert "Shown in brackets" in shown
    assert shown.count("[") > 0
    chat.take("/show")
    assert screen.shown().endswith("Answers are shown as Markdown again.")


def test_stats_pool_and_help(loaded: LoadedModel) -> None:
    layer = NGramPool()
    layer.observe([5, 6, 7, 8])
    chat = Chat(loaded, pool=[NGramPool(2**10), layer.as_read_only()])
    assert "there is none yet" in chat.take("/stats")
    chat.take("abc", "def")
    shown = chat.take("/stats")
    assert "answers         2" in shown
    assert "unknown: see /plain" in shown
    assert "20 in " in shown
    shown = chat.take("/pool")
    assert "of at most 1,024 tokens" in shown
    assert "read 1  4 tokens" in shown
    assert "/temperature [T]" in chat.take("/help")
    assert "such as /help" in chat.take("/hlp")


def test_a_conversation_is_saved_and_loaded(loaded: LoadedModel, tmp_path: Path) -> None:
    chat, path = Chat(loaded), tmp_path / "my chat.json"
    assert "expected a file for the first time" in chat.take("/save")
    chat.take("abc")
    assert "no such folder" in chat.take(f"/save {tmp_path}/none/a.json")
    assert "Saved to" in chat.take(f"/save {path}")
    chat.take("def", "/save")
    other = Chat(loaded)
    shown = other.take(f"/load {path}")
    assert "Loaded 2 questions" in shown
    assert "> def" in shown
    assert other.texts == chat.texts
    assert "expected a saved conversation" in other.take(f"/load {__file__}")
    assert "No such file" in other.take(f"/load {tmp_path}/none.json")
    assert other.texts == chat.texts


def test_a_loaded_conversation_changes_nothing_in_the_terminal(chat: Chat, tmp_path: Path) -> None:
    chat.conversation.messages = [
        {"role": "user", "content": "a\x1b]0;b"},
        {"role": "assistant", "content": "c\x9bd"},
    ]
    chat.conversation.system = "e\x07f"
    chat.conversation.save(tmp_path / "chat.json")
    shown = chat.take(f"/load {tmp_path}/chat.json", "/system")
    assert "> a]0;b\n\ncd\n" in shown
    assert "System prompt: ef" in shown


# --- the line at the bottom ---------------------------------------------------------------------


def test_the_status_has_speed_and_fill_as_far_as_there_is_room(chat: Chat) -> None:
    assert chat.terminal.status(80) == "context 0 of 512 · pool 0% · tiny"
    chat.take("abc")
    wide = chat.terminal.status(120)
    assert " a second · " in wide
    assert " a step · context " in wide
    assert " of 512 · pool <1% · tiny" in wide
    for width in (5, 20, 40):
        assert len(chat.terminal.status(width)) <= width
        assert wide.startswith(chat.terminal.status(width))


def test_parts_that_do_not_fit_are_left_out() -> None:
    assert fitted(["abc", "def", "ghi"], 9) == "abc · def"
    assert fitted(["abc", "def", "ghi"], 8) == "abc"
    assert fitted(["abc"], 2) == "ab"
    assert fitted([], 2) == ""


def test_a_model_without_a_template_is_named(loaded_with: Callable[..., LoadedModel]) -> None:
    chat = Chat(loaded_with(None))
    assert "tiny has no chat template" in chat.type(CTRL_D)


@pytest.mark.parametrize("width", [20, 30])
def test_nothing_is_wider_than_the_window(loaded: LoadedModel, width: int) -> None:
    chat = Chat(loaded, width)
    chat.take("/help", "/plain abc", "/stats", "/pool", "/show", "/hlp", "def")
    screen: Screen = chat.screen
    assert all(len(line) <= width for line in screen.lines)
