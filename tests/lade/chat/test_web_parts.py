"""What the page is made of, without a browser: charts, HTML, and whose turn it is."""

import html
import re
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lade.chat.pieces import Piece
from lade.chat.settings import Settings
from lade.chat.web_charts import Timeline, fill_chart, race_chart, rate_chart, steps_chart
from lade.chat.web_html import escaped, note_html, pieces_html
from lade.chat.web_sessions import BusyError, Choices, Desk, Session, Sessions, Setup, Task
from lade.config import Config
from lade.errors import LadeError
from lade.models.loading import LoadedModel
from lade.stats import Step
from ngram_pool import NGramPool

_DEADLINE = 30.0
SHORT = Choices("", 0.0, 16)


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


# --- whose turn it is -----------------------------------------------------------------------


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.close()


def wait(task: Task) -> None:
    done = threading.Event()
    task._future.add_done_callback(lambda _: done.set())
    assert done.wait(_DEADLINE)


def test_tasks_are_done_one_after_the_other(desk: Desk) -> None:
    go_on, order = threading.Event(), list[str]()

    def begin(task: Task) -> None:
        go_on.wait(_DEADLINE)
        order.append("first")

    first = desk.submit(begin)
    second = desk.submit(lambda task: order.append("second"))
    third = desk.submit(lambda task: order.append("third"))
    last = desk.submit(lambda task: order.append("last"))
    assert [each.num_before for each in (first, second, third, last)] == [0, 1, 2, 3]
    third.cancel()
    assert third.is_done
    assert not third.has_run
    assert last.num_before == 2  # the one that never begins is not waited for
    go_on.set()
    wait(last)
    assert order == ["first", "second", "last"]
    assert [each.num_before for each in (first, second, last)] == [0, 0, 0]


def test_a_task_that_fails_says_why_and_stops_nobody(desk: Desk) -> None:
    def fail(error: BaseException) -> Task:
        def work(task: Task) -> None:
            raise error

        return desk.submit(work)

    tasks = [fail(each) for each in (KeyError("x"), LadeError("what it is"), SystemExit(3))]
    well = desk.submit(lambda task: None)
    wait(well)
    assert [each.error for each in tasks] == ["KeyError: 'x'", "what it is", "SystemExit: 3"]
    assert well.error is None


def test_a_desk_rests_while_nothing_is_asked() -> None:
    rests = list[float]()

    @contextmanager
    def rest(sec: float) -> Iterator[None]:
        rests.append(sec)
        yield

    desk = Desk(rest)
    wait(desk.submit(lambda task: None))
    desk.close()
    assert rests[0] == 0
    assert len(rests) == 2
    assert rests[1] > 0


def test_closing_a_desk_ends_what_runs_and_drops_what_waits() -> None:
    desk = Desk()
    runs = desk.submit(lambda task: task.cancelled.wait(_DEADLINE) or pytest.fail("not told"))
    waits = desk.submit(lambda task: pytest.fail("begun"))
    desk.close()
    assert runs.is_done
    assert not waits.has_run


def test_a_session_does_one_thing_at_a_time(desk: Desk, loaded: LoadedModel) -> None:
    session = Session(desk, Setup(loaded, Settings()))
    with pytest.raises(LadeError, match="no question to go back to"):
        session.retry(SHORT)
    go_on = threading.Event()
    desk.submit(lambda task: go_on.wait(_DEADLINE))
    task = session.ask("abc", SHORT)
    assert session.is_waiting
    for act in (session.undo, session.clear, lambda: session.ask("def", SHORT)):
        with pytest.raises(BusyError):
            act()
    go_on.set()
    wait(task)
    (exchange,) = session.exchanges
    assert exchange.question == "abc"
    assert exchange.turn.num_tokens == 16
    assert not session.is_busy


def test_greedy_and_sampled_answers_share_a_page(desk: Desk, loaded: LoadedModel) -> None:
    session = Session(desk, Setup(loaded, Settings(temperature=0.5, top_p=0.8), system="Be kind."))
    wait(session.ask("abc", Choices("Be kind.", 0.0, 8)))
    assert session.conversation.settings == Settings(8, 0.0, 0.8)
    assert session.conversation.system == "Be kind."
    wait(session.ask("abc", Choices(" ", 0.5, 8)))
    assert session.conversation.settings == Settings(8, 0.5, 0.8)
    assert session.conversation.system is None


def test_pools_of_sessions_are_their_own_beside_those_all_read(
    desk: Desk, loaded: LoadedModel
) -> None:
    shared = NGramPool()
    shared.observe([*b"abcdefgh"] * 4)
    num_shared = len(shared)
    setup = Setup(loaded, Settings(8), pools=[shared.as_read_only()])
    sessions = Sessions(desk, setup)
    one, other = sessions.of("one"), sessions.of("other")
    assert sessions.of("one") is one
    wait(one.ask("a secret", SHORT))
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
    desk: Desk, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lade.chat.web_sessions.MAX_SESSIONS", 2)
    sessions = Sessions(desk, Setup(loaded, Settings(8)))
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
    sessions.close("first")
    assert len(sessions) == 1
    with pytest.raises(BusyError, match="reload the page"):
        first.start_race("abc", SHORT)


def test_a_race_knows_nothing_of_earlier_ones(desk: Desk, loaded: LoadedModel) -> None:
    session = Session(desk, Setup(loaded, Settings(), Config(max_draft_tokens=8)))
    steps = []
    for _ in range(2):
        session.start_race("abcabcabc", SHORT)
        assert session.task is not None
        wait(session.task)
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


def test_a_stopped_race_has_no_winner(desk: Desk, loaded: LoadedModel) -> None:
    session = Session(desk, Setup(loaded, Settings()))
    go_on = threading.Event()
    desk.submit(lambda task: go_on.wait(_DEADLINE))
    session.start_race("abc", SHORT)
    assert session.task is not None
    session.task.cancelled.set()  # as if stopped in its first moment
    go_on.set()
    wait(session.task)
    assert session.race is not None
    assert session.race.result == ""
    assert session.race.lade is None
