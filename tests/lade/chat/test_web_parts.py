"""What the page is made of, without a browser: charts, HTML, and sessions side by side."""

import gc
import html
import re
import time
import weakref
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lade.chat.conversation import Conversation
from lade.chat.pieces import Piece
from lade.chat.settings import Settings
from lade.chat.web_charts import Timeline, fill_chart, race_chart, rate_chart, steps_chart
from lade.chat.web_html import escaped, note_html, pieces_html
from lade.chat.web_sessions import BusyError, Choices, Session, Sessions, Setup
from lade.config import Config
from lade.errors import LadeError
from lade.models.loading import LoadedModel
from lade.models.prompts import encode_messages
from lade.probing.profile import Profiles
from lade.stats import Step
from lade.targets.joint import JointForwards
from ngram_pool import NGramPool
from tests.lade.chat.conftest import tokenizer_with
from tests.lade.tiny import MAMBA2, tiny_model

_DEADLINE = 60.0
SHORT, LONG = Choices("", 0.0, 16), Choices("", 0.0, 4096)


# --- charts ---------------------------------------------------------------------------------


def numbers(drawn: str, attribute: str) -> list[float]:
    return [float(each) for each in re.findall(rf' {attribute}="([\d.-]+)"', drawn)]


def label_of(drawn: str) -> str:
    (label,) = re.findall(r'aria-label="([^"]+)"', drawn)
    return html.unescape(label)


def test_rates_are_those_of_the_last_second() -> None:
    steady = rate_chart([0.1 * i for i in range(1, 41)])  # ten tokens per second
    assert label_of(steady) == "Tokens per second: 10.0 now, 10.0 at most."
    slower = rate_chart([*(0.01 * i for i in range(1, 101)), 2.0, 3.0, 4.0])
    assert label_of(slower) == "Tokens per second: 1.0 now, 100.0 at most."
    assert label_of(rate_chart([2.0, 4.0, 6.0])) == "Tokens per second: 0.5 now, 0.5 at most."


def test_tokens_of_one_moment_have_no_rate() -> None:
    assert "after the first answer" in rate_chart([])
    assert "after the first answer" in rate_chart([0.5])
    assert "after the first answer" in rate_chart([0.5, 0.5])


def test_bars_are_as_long_as_steps() -> None:
    steps = [Step([1], 0, 0), Step([1, 2, 3], 4, 2), Step([1, 2], 4, 2)]
    drawn = steps_chart(steps)
    assert label_of(drawn) == "Tokens by step, last 3 steps: 2.00 on average, 3 at most."
    bars = re.findall(r'<rect class="(\w+)"[^>]* height="([\d.]+)"', drawn)
    # A quarter of the height is a token; the last step ended within its draft.
    assert bars == [("own", "25.00"), ("drafted", "50.00"), ("own", "25.00"), ("drafted", "50.00")]


def test_charts_stay_small_and_inside_however_long_the_answer() -> None:
    times = [0.003 * i for i in range(1, 50_001)]
    steps = [Step([0] * (1 + i % 40), 40, i % 40) for i in range(50_000)]
    charts = [
        rate_chart(times),
        steps_chart(steps),
        race_chart([Timeline("a", "lade-line", times), Timeline("b", "lade-plain", times[:9])]),
    ]
    for drawn in charts:
        assert len(drawn) < 20_000
        ElementTree.fromstring(drawn)  # whole
        places = [
            float(number)
            for points in re.findall(r'points="([^"]+)"', drawn)
            for number in re.split("[ ,]", points)
        ]
        places += numbers(drawn, "x") + numbers(drawn, "y")
        assert places
        assert 0 <= min(places) <= max(places) <= 100


def test_a_race_is_drawn_to_one_scale() -> None:
    slow = Timeline("generate", "lade-plain", [1.0, 2.0, 3.0, 4.0])
    fast = Timeline("lade", "lade-line", [1.0, 2.0])
    drawn = race_chart([slow, fast])
    assert label_of(drawn) == "generate: 4 tokens in 4.00 seconds; lade: 2 tokens in 2.00 seconds."
    first, second = re.findall(r'points="([^"]+)"', drawn)
    assert first.split()[-1] == "100.00,0.00"
    assert second.split()[-1] == "50.00,50.00"
    assert "polyline" not in race_chart([Timeline("lade", "lade-line", [])])


def test_a_meter_says_how_full() -> None:
    drawn = fill_chart("Pool", 1_500, 6_000)
    assert 'aria-valuenow="1500"' in drawn
    assert "1,500 of 6,000" in drawn
    assert "width: 25.000%" in drawn


# --- HTML -----------------------------------------------------------------------------------


def test_text_is_never_markup() -> None:
    nasty = "<b>&\"'${x}{{y}}`\\\x00\x1b\x7f\r\n\tü"
    made = escaped(nasty)
    assert not set("<>${}`\\\"'\x00\x1b\x7f\r") & set(made)
    assert html.unescape(made) == "<b>&\"'${x}{{y}}`\\␀␛␡\n\tü"


def test_runs_of_pieces_are_joined_by_who_wrote_them() -> None:
    pieces = [
        *(Piece("so", False, True), Piece("!", True, True)),
        *(Piece("a", False, False), Piece("b", True, False), Piece("c<", True, False)),
    ]
    assert pieces_html(pieces) == (
        '<span class="thinking">so<mark class="drafted">!</mark></span>'
        '<span class="said">a<mark class="drafted">bc&lt;</mark></span>'
    )


def test_notes_tell_errors_apart() -> None:
    assert note_html("") == ""
    assert 'role="status"' in note_html("well")
    assert 'role="alert"' in note_html("no", is_error=True)


# --- answers side by side -------------------------------------------------------------------


@pytest.fixture
def make(loaded: LoadedModel) -> Iterator[Callable[..., Sessions]]:
    made: list[Sessions] = []

    def make(setup: Setup | None = None) -> Sessions:
        made.append(Sessions(setup or Setup(loaded, Settings())))
        return made[-1]

    yield make
    for sessions in made:
        sessions.close()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have one thing done at a time."""
    monkeypatch.setattr("lade.chat.web_sessions._MAX_ANSWERS", 1)


def wait(session: Session) -> None:
    assert session.task is not None
    session.task.result(_DEADLINE)


def begin_long_answer(session: Session) -> None:
    session.ask("abcabc", LONG)
    end = time.monotonic() + _DEADLINE
    while session.conversation.turn is None or not session.conversation.turn.num_tokens:
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


def of_generate(session: Session, settings: Settings) -> str:
    """Return what plain generate answers to the only question of a session."""
    loaded, (question, _) = session.conversation.loaded, session.conversation.messages
    inputs = encode_messages(loaded, [question])
    torch.manual_seed(settings.seed)
    ids = loaded.model.generate(**inputs, **settings.options())[0, inputs["input_ids"].shape[1] :]
    text: str = loaded.tokenizer.decode(ids)
    return text.rstrip("\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tabs_share_forwards_and_have_the_texts_of_generate(
    make: Callable[..., Sessions], monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    numbers = set[int]()
    run = JointForwards.__call__

    def counted(self: JointForwards, asked: Sequence[Any]) -> Any:
        numbers.add(len(asked))
        return run(self, asked)

    monkeypatch.setattr(JointForwards, "__call__", counted)
    sessions = make()
    tabs = [sessions.of(name) for name in ("one", "two", "three")]
    for tab, question in zip(tabs, ("abcabcabc", "xyz", "and so on and so on"), strict=True):
        tab.ask(question, Choices("", temperature, 100))
    for tab in tabs:  # all, for plain generate draws from the same random numbers
        wait(tab)
    for tab in tabs:
        turn = tab.conversation.turn
        assert turn is not None
        assert turn.num_tokens == 100
        assert turn.text == of_generate(tab, Settings(100, temperature))
    assert max(numbers) > 1


def test_stopping_one_tab_frees_its_place_and_stops_no_other(
    make: Callable[..., Sessions], alone: None
) -> None:
    sessions = make()
    first, second, third = (sessions.of(name) for name in ("first", "second", "third"))
    begin_long_answer(first)
    for waiting in (second, third):
        waiting.ask("def", SHORT)
    assert (first.is_waiting, second.is_waiting) == (False, True)
    second.stop()
    assert not second.is_busy
    assert first.is_busy
    assert third.is_waiting
    first.stop()
    for session in (first, third):
        wait(session)
    assert first.is_stopped
    assert first.conversation.turn is not None
    assert first.conversation.turn.is_interrupted
    assert second.exchanges == []
    assert third.conversation.turn is not None
    assert third.conversation.turn.num_tokens == 16


def test_models_that_go_alone_answer_one_at_a_time() -> None:
    options = {**MAMBA2, "attention": "eager", "vocab_size": 256, "eos_token_id": None}
    model = tiny_model("mamba2", **options)
    sessions = Sessions(Setup(LoadedModel(model, tokenizer_with(), "tiny"), Settings()))
    first, second = sessions.of("first"), sessions.of("second")
    begin_long_answer(first)
    second.ask("abc", SHORT)
    second.stop()  # at once, whatever the first takes
    assert not second.is_busy
    sessions.close()
    assert first.is_stopped


def test_what_fails_says_why_and_stops_nobody(
    make: Callable[..., Sessions], monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = make()
    errors = (KeyError("x"), LadeError("what it is"), SystemExit(3))
    failing = [sessions.of(str(error)) for error in errors]
    well = sessions.of("well")
    begin_long_answer(well)
    with monkeypatch.context() as patch:
        for session, error in zip(failing, errors, strict=True):
            patch.setattr(Conversation, "answer", Mock(side_effect=error))
            session.ask("abc", SHORT)
            assert session.task is not None
            session.task.exception(_DEADLINE)
    assert [each.error for each in failing] == ["KeyError: 'x'", "what it is", "SystemExit: 3"]
    assert well.is_busy
    assert well.error is None


def test_closing_ends_what_runs_and_drops_what_waits(
    make: Callable[..., Sessions], alone: None
) -> None:
    sessions = make()
    runs, waits = sessions.of("runs"), sessions.of("waits")
    begin_long_answer(runs)
    waits.ask("abc", SHORT)
    sessions.close()
    assert runs.task is not None
    assert waits.task is not None
    assert runs.task.done()
    assert runs.conversation.turn is not None
    assert runs.conversation.turn.is_interrupted
    assert waits.task.cancelled()


@pytest.mark.parametrize("waits", [False, True])
def test_closing_a_tab_forgets_what_was_said(
    make: Callable[..., Sessions], alone: None, waits: bool
) -> None:
    sessions = make()
    other, closed = sessions.of("other"), sessions.of("closed")
    pool = weakref.ref(closed.conversation.pool)
    if waits:
        begin_long_answer(other)
        closed.ask("a secret", SHORT)
    else:
        begin_long_answer(closed)
    prefixes = Profiles.of(closed.conversation.loaded.model).prefixes
    task = closed.task
    assert task is not None
    del closed
    sessions.end("closed")
    futures.wait([task], _DEADLINE)
    gc.collect()
    assert pool() is None
    assert len(sessions) == 1
    other.stop()
    wait(other) if waits else None
    sessions.end("other")
    del other
    gc.collect()
    assert prefixes.num_bytes == 0


def test_a_session_does_one_thing_at_a_time(make: Callable[..., Sessions]) -> None:
    session = make().of("one")
    with pytest.raises(LadeError, match="no question to go back to"):
        session.ask(None, SHORT)
    begin_long_answer(session)
    for act in (session.undo, session.clear, lambda: session.ask("def", SHORT)):
        with pytest.raises(BusyError):
            act()
    session.stop()
    wait(session)
    session.undo()
    session.ask("abc", SHORT)
    wait(session)
    ((question, turn),) = session.exchanges
    assert question == "abc"
    assert turn.num_tokens == 16
    assert not session.is_busy


def test_greedy_and_sampled_answers_share_a_page(
    make: Callable[..., Sessions], loaded: LoadedModel
) -> None:
    setup = Setup(loaded, Settings(temperature=0.5, top_p=0.8), system="Be kind.")
    session = make(setup).of("one")
    session.ask("abc", Choices("Be kind.", 0.0, 8))
    wait(session)
    assert session.conversation.settings == Settings(8, 0.0, 0.8)
    assert session.conversation.system == "Be kind."
    session.ask("abc", Choices(" ", 0.5, 8))
    wait(session)
    assert session.conversation.settings == Settings(8, 0.5, 0.8)
    assert session.conversation.system is None


def test_pools_of_sessions_are_their_own_beside_those_all_read(
    make: Callable[..., Sessions], loaded: LoadedModel
) -> None:
    shared = NGramPool()
    shared.observe([*b"abcdefgh"] * 4)
    num_shared = len(shared)
    sessions = make(Setup(loaded, Settings(8), pools=[shared.as_read_only()]))
    one, other = sessions.of("one"), sessions.of("other")
    assert sessions.of("one") is one
    one.ask("a secret", SHORT)
    wait(one)
    own, others = one.conversation.pool, other.conversation.pool
    assert own is not None
    assert others is not None
    assert own is not others
    assert len(own) > 0
    assert len(others) == 0
    assert len(shared) == num_shared  # only read
    one.clear()
    assert one.conversation.pool is not own


def test_no_tab_ends_another_but_one_that_was_long_idle(
    make: Callable[..., Sessions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lade.chat.web_sessions.MAX_SESSIONS", 2)
    sessions = make()
    first, second = sessions.of("first"), sessions.of("second")
    sessions.of("first")
    with pytest.raises(BusyError, match="too many pages"):
        sessions.of("third")
    assert sessions.of("second") is second
    assert sessions.of("first") is first
    monkeypatch.setattr("lade.chat.web_sessions._IDLE_SEC", 0.0)
    sessions.of("third")
    assert len(sessions) == 2
    assert sessions.of("first") is first
    with pytest.raises(BusyError, match="reload the page"):
        second.ask("abc", SHORT)
    sessions.end("first")
    assert len(sessions) == 1
    with pytest.raises(BusyError, match="reload the page"):
        first.start_race("abc", SHORT)


def test_a_race_knows_nothing_of_earlier_ones(
    make: Callable[..., Sessions], loaded: LoadedModel
) -> None:
    session = make(Setup(loaded, Settings(), Config(max_draft_tokens=8))).of("one")
    steps = []
    for _ in range(2):
        session.start_race("abcabcabc", SHORT)
        wait(session)
        race = session.race
        assert race is not None
        assert race.plain is not None
        assert race.lade is not None
        assert race.plain.is_plain
        assert race.plain.text == race.lade.text
        assert re.fullmatch(
            r"lade had \d+\.\d\d times the tokens per second of generate\. "
            r"The texts are the same\.",
            race.result,
        )
        assert race.lade.num_reused_tokens == 0
        steps.append(race.lade.steps)
    assert steps[0] == steps[1]  # with the pool of the first, the second would take a few
    assert session.exchanges == []


def test_others_wait_while_the_answers_of_a_race_are_timed(make: Callable[..., Sessions]) -> None:
    sessions = make()
    chatting, racing = sessions.of("chatting"), sessions.of("racing")
    begin_long_answer(chatting)
    racing.start_race("abcabcabc", Choices("", 0.0, 60))
    wait(racing)
    race, turn = racing.race, chatting.conversation.turn
    assert race is not None
    assert race.plain is not None
    assert race.lade is not None
    assert race.plain.text == race.lade.text
    assert race.result
    assert turn is not None
    num_tokens = turn.num_tokens
    while turn.num_tokens == num_tokens:
        assert chatting.is_busy
    gaps = [b - a for a, b in pairwise(turn.token_times)]
    assert max(gaps) >= max(race.plain.sec, race.lade.sec)


def test_a_stopped_race_has_no_winner(make: Callable[..., Sessions]) -> None:
    session = make().of("one")
    session.start_race("abc", LONG)
    while session.race is None or session.race.plain is None:
        time.sleep(0.001)
    session.stop()
    wait(session)
    assert session.race.result == ""
    assert session.race.lade is None
