"""The page of `lade chat --web`, in a real browser: what it shows, and what it keeps to itself."""

import html
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("gradio", reason='needs the extra: pip install "lade-decoding[web]"')
sync_api = pytest.importorskip("playwright.sync_api", reason="needs: pip install playwright")

from lade.chat.conversation import Conversation, Turn  # noqa: E402
from lade.chat.settings import Settings  # noqa: E402
from lade.chat.web import Page  # noqa: E402
from lade.chat.web_html import escaped  # noqa: E402
from lade.chat.web_sessions import Session, Setup  # noqa: E402
from lade.models.loading import LoadedModel  # noqa: E402
from tests.grids import thinned  # noqa: E402
from tests.lade.chat.conftest import tokenizer_with  # noqa: E402
from tests.lade.chat.loops import in_loop  # noqa: E402
from tests.lade.tiny import tiny_model  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("web"),  # one browser, one server
    # Gradio's statistics of requests, with pandas 3.
    pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting' is deprecated"),
    pytest.mark.filterwarnings("ignore:The copy keyword is deprecated"),
]

_BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_SHORT = 48  # tokens of an answer, unless a test wants one that takes long
_LONG = "4096"
_WAIT_MSEC = 90_000  # a busy machine takes its time


def failing(self: Any, *arguments: Any, **options: Any) -> Any:
    raise RuntimeError("the cable is <loose>")


class Served:
    """A page at an address, and what its process did on the network."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.address = page.launch()

    @property
    def sessions(self) -> list[Session]:
        return [session for session, _ in self.page.sessions._sessions.values()]

    @property
    def newest(self) -> Session:
        return self.sessions[-1]

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait for a state of the server."""
        end = time.monotonic() + _WAIT_MSEC / 1000
        while not is_so():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.01)


_BUTTONS = ("send", "stop", "retry", "undo", "clear")
_connected: list[Any] = []  # addresses that this process connected to or looked up
_is_watched = False


def _watch_sockets(event: str, arguments: tuple[Any, ...]) -> None:
    if _is_watched and event == "socket.connect":
        _connected.append(arguments[1])
    elif _is_watched and event == "socket.getaddrinfo":
        _connected.append(arguments[:2])


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    global _is_watched
    model = tiny_model(vocab_size=256, eos_token_id=None, max_position_embeddings=2**15)
    loaded = LoadedModel(model, tokenizer_with(), "tiny")
    sys.addaudithook(_watch_sockets)  # for good: there is no way to take it out
    _is_watched = True
    started = in_loop(lambda: Served(Page(Setup(loaded, Settings(_SHORT)))))
    yield started
    started.page.close()
    _is_watched = False


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if _BROWSER is None:
        pytest.skip("needs a browser: apt-get install chromium, or Google Chrome")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has none as root
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=_BROWSER, args=arguments)
        yield started
        started.close()


class Tab:
    """A browser window of its own with the page in it."""

    def __init__(self, browser: Any, served: Served, **options: Any) -> None:
        self.requests: list[str] = []
        self.faults: list[str] = []
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(_WAIT_MSEC)
        self.page = self.context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.goto(served.address)
        self.message = self.page.get_by_label("Message")
        self.message.wait_for()
        for name in _BUTTONS:  # parts of the page come one by one
            self.find(f"#{name}").wait_for()

    def find(self, selector: str) -> Any:
        return self.page.locator(selector)

    def ask(self, text: str) -> None:
        self.message.fill(text)
        self.message.press("Enter")

    def wait_for_answers(self, number: int) -> None:
        sync_api.expect(self.find("#history .answer")).to_have_count(number, timeout=_WAIT_MSEC)

    def wait_for_note(self, text: str, note: str = "#note") -> None:
        sync_api.expect(self.find(note)).to_contain_text(text, timeout=_WAIT_MSEC)

    def set_longest(self, number: str) -> None:
        self.page.get_by_role("button", name="Options").click()
        field = self.page.get_by_role("spinbutton", name="Longest answer")
        slider = self.find("#longest input[type=range]")  # shows what the page has taken
        for name in ("system", "temperature", "longest"):  # these come one by one, too
            self.find(f"#{name}").wait_for()
        end = time.monotonic() + _WAIT_MSEC / 1000
        while slider.input_value() != number:  # lost where the page was not ready to listen
            assert time.monotonic() < end, "the page takes no length"
            field.fill(number)
            field.press("Tab")
            self.page.wait_for_timeout(100)

    def begin_long_answer(self, text: str = "abcabc") -> None:
        self.set_longest(_LONG)
        self.ask(text)
        # Attached: what is shown first may be white space alone.
        self.find("#current .answer.running p span").first.wait_for(state="attached")

    def open_race(self) -> Any:
        self.page.get_by_role("tab", name="Race").click()
        question = self.page.get_by_label("Question")
        question.wait_for()
        return question

    def overflow(self) -> int:
        """Return how much wider the page is than the window."""
        wider: int = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        return wider


@pytest.fixture
def open_tab(browser: Any, served: Served) -> Iterator[Callable[..., Tab]]:
    tabs: list[Tab] = []

    def make(**options: Any) -> Tab:
        tabs.append(Tab(browser, served, **options))
        return tabs[-1]

    yield make
    for tab in tabs:
        tab.context.close()
    # The next test finds nobody before it.
    served.wait_for(lambda: not served.sessions)
    for tab in tabs:
        assert tab.faults == []
        assert [url for url in tab.requests if not url.startswith((served.address, "data:"))] == []


def shown(text: str) -> str:
    """Return how a text is shown."""
    return html.unescape(escaped(text))


def last_turn(session: Session) -> Turn:
    turn = session.conversation.turn
    assert turn is not None
    return turn


# --- the chat -------------------------------------------------------------------------------


def test_enter_sends_and_the_answer_is_the_conversations(
    open_tab: Callable[..., Tab], served: Served
) -> None:
    tab = open_tab()
    tab.ask("abcabcabc")
    tab.wait_for_answers(1)
    turn = last_turn(served.newest)
    assert turn.num_tokens == _SHORT
    assert tab.find("#history .answer p").first.text_content() == shown(turn.text)
    assert tab.find("#history .question p").text_content() == "abcabcabc"
    assert tab.message.input_value() == ""
    tab.wait_for_note("Answered.")
    assert f"{_SHORT} tokens, " in tab.find("#history .answer .note").text_content()
    labels = [each.get_attribute("aria-label") for each in tab.find("#charts svg").all()]
    assert labels[0].startswith("Tokens per second: ")
    assert labels[1].startswith("Tokens by step, last ")
    pool = served.newest.conversation.pool
    assert pool is not None
    meter = tab.page.get_by_role("meter")
    assert meter.get_attribute("aria-valuenow") == str(len(pool))
    tab.ask("and then?")
    tab.wait_for_answers(2)
    assert len(served.newest.conversation.messages) == 4


@pytest.mark.exhaustive
def test_who_wrote_what_is_told_by_more_than_colour(
    open_tab: Callable[..., Tab], served: Served
) -> None:
    tab = open_tab()
    tab.ask("abcabcabc")
    tab.wait_for_answers(1)
    pieces = last_turn(served.newest).pieces
    drafted = "".join(piece.text for piece in pieces if piece.is_drafted)
    own = "".join(piece.text for piece in pieces if not piece.is_drafted)
    assert drafted
    assert own
    marks = tab.find("#history .answer mark.drafted")
    assert "".join(marks.all_text_contents()) == shown(drafted)
    style = (
        "(e) => { const s = getComputedStyle(e); return [s.textDecorationLine, s.backgroundColor] }"
    )
    line, back = marks.first.evaluate(style)
    assert line == "underline"
    assert [line, back] != tab.find("#history .answer p").first.evaluate(style)


def test_text_is_text_whatever_it_contains(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    text = "<img src=x onerror=alert(1)> ${1+1} {{value}} `${value}` \\n &amp; <script>x</script>"
    tab.ask(text)
    tab.wait_for_answers(1)
    assert tab.find("#history .question p").text_content() == text
    assert tab.find("#log img, #log script").count() == 0


@pytest.mark.parametrize("how", thinned(["button", "Escape"], "Escape"))
def test_stop_ends_an_answer_and_keeps_what_was_said(
    open_tab: Callable[..., Tab], served: Served, how: str
) -> None:
    tab = open_tab()
    tab.begin_long_answer()
    tab.message.fill("too early")
    tab.message.press("Enter")
    tab.wait_for_note("an answer is being given")
    assert tab.message.input_value() == "too early"
    if how == "button":
        tab.find("#stop").click()
    else:
        tab.message.press("Escape")
    tab.wait_for_answers(1)
    turn = last_turn(served.newest)
    assert turn.is_interrupted
    assert 0 < turn.num_tokens < int(_LONG)
    assert tab.find("#history .answer p").first.text_content() == shown(turn.text)
    assert "stopped" in tab.find("#history .answer .note").text_content()
    assert not served.newest.is_busy


@pytest.mark.exhaustive
def test_answers_are_given_again_taken_back_and_cleared(
    open_tab: Callable[..., Tab], served: Served
) -> None:
    tab = open_tab()
    for number, text in enumerate(("abcabc", "defdef"), start=1):
        tab.ask(text)
        tab.wait_for_answers(number)
    session = served.newest
    first, second = session.conversation.turns
    tab.find("#retry").click()
    served.wait_for(
        lambda: (
            len(session.conversation.messages) == 4
            and not session.is_busy
            and session.conversation.turns[1] is not second
        )
    )
    assert session.conversation.turns[0] is first
    assert session.conversation.turns[1].text == second.text  # greedy
    tab.wait_for_answers(2)
    tab.find("#undo").click()
    tab.wait_for_answers(1)
    assert [each["content"] for each in session.conversation.messages] == ["abcabc", first.text]
    pool = session.conversation.pool
    tab.find("#clear").click()
    tab.wait_for_answers(0)
    assert session.conversation.messages == []
    assert session.conversation.pool is not pool  # what it knew is gone, too
    assert tab.find("#note").inner_text().strip() == ""
    tab.find("#retry").click()
    tab.wait_for_note("no question to go back to")


@pytest.mark.exhaustive
def test_options_are_those_of_the_next_answer(open_tab: Callable[..., Tab], served: Served) -> None:
    tab = open_tab()
    tab.set_longest("20")
    tab.page.get_by_label("System prompt").fill("Be brief.")
    temperature = tab.page.get_by_role("spinbutton", name="Temperature")
    temperature.fill("0.7")
    temperature.press("Tab")
    tab.ask("abc")
    tab.wait_for_answers(1)
    conversation = served.newest.conversation
    assert conversation.system == "Be brief."
    assert conversation.settings == Settings(20, temperature=0.7)
    assert last_turn(served.newest).num_tokens == 20


def test_what_goes_wrong_is_shown(
    open_tab: Callable[..., Tab], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    tab = open_tab()
    with monkeypatch.context() as patch:
        patch.setattr(Conversation, "answer", failing)
        tab.ask("abc")
        alert = tab.find("#note [role=alert]")
        alert.wait_for()
        assert alert.text_content() == "RuntimeError: the cable is <loose>"
        question = tab.open_race()
        question.fill("abc")
        question.press("Enter")
        tab.find("#race-note [role=alert]").wait_for()
    tab.page.get_by_role("tab", name="Chat").click()
    assert tab.message.input_value() == "abc"  # to be asked again
    tab.message.press("Enter")
    tab.wait_for_answers(1)
    assert len(served.newest.conversation.messages) == 2


# --- several tabs ---------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_tabs_are_answered_side_by_side_and_share_nothing(
    open_tab: Callable[..., Tab], served: Served
) -> None:
    first, second = open_tab(), open_tab()
    first.begin_long_answer("alpha")
    second.ask("omega")
    second.wait_for_answers(1)
    assert first.find("#current .answer.running").count() == 1
    first.find("#stop").click()
    first.wait_for_answers(1)
    one, other = (session.conversation for session in served.sessions)
    assert {one.messages[0]["content"], other.messages[0]["content"]} == {"alpha", "omega"}
    assert one.pool is not other.pool
    assert "alpha" not in second.find("#log").text_content()


@pytest.mark.exhaustive
def test_a_question_stopped_before_its_turn_is_given_back(
    open_tab: Callable[..., Tab], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.page.sessions, "_threads", ThreadPoolExecutor(1))
    first, second = open_tab(), open_tab()
    first.begin_long_answer()
    second.ask("second")
    second.wait_for_note("Waiting for other answers")
    assert second.find("#current .question p").text_content() == "second"
    second.find("#stop").click()
    second.wait_for_note("Stopped before its turn.")
    assert second.message.input_value() == "second"
    assert first.find("#current .answer.running").count() == 1


@pytest.mark.exhaustive
def test_closing_a_tab_ends_its_answer(open_tab: Callable[..., Tab], served: Served) -> None:
    tab = open_tab()
    tab.begin_long_answer()
    session = served.newest
    assert session.is_busy
    tab.page.close()
    served.wait_for(lambda: not session.is_busy)
    assert last_turn(session).is_interrupted
    assert session not in served.sessions
    assert not served.page._blocks.app.state_holder.session_data  # what Gradio keeps of a page


# --- the race -------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_race_draws_both_timelines(open_tab: Callable[..., Tab], served: Served) -> None:
    tab = open_tab()
    question = tab.open_race()
    question.fill("abcabcabc")
    question.press("Enter")
    tab.wait_for_note("times the tokens per second of generate. The texts are the same", "#race")
    assert tab.find("#race .chart polyline").count() == 2
    label = tab.find("#race .chart svg").get_attribute("aria-label")
    assert label.startswith(f"generate: {_SHORT} tokens in ")
    assert f"; lade: {_SHORT} tokens in " in label
    race = served.newest.race
    assert race is not None
    assert race.plain is not None
    assert race.lade is not None
    assert race.plain.is_plain
    assert race.lade.num_reused_tokens == 0  # it begins as plain generate does
    for lane, turn in (("lade-plain", race.plain), ("lade-line", race.lade)):
        assert tab.find(f".lane.{lane} p").last.text_content() == shown(turn.text)
    assert tab.find(".lane.lade-plain mark").count() == 0
    assert tab.find(".lane.lade-line mark").count() > 0
    assert served.newest.conversation.messages == []


# --- everybody's page -----------------------------------------------------------------------


@pytest.mark.exhaustive
def test_nothing_is_wider_than_a_phone(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(viewport={"width": 360, "height": 740}, has_touch=True)
    assert tab.overflow() == 0
    tab.ask("Donaudampfschifffahrtsgesellschaft" * 4)
    tab.wait_for_answers(1)
    assert tab.overflow() == 0
    tab.page.get_by_role("button", name="Options").click()
    tab.page.get_by_label("System prompt").wait_for()
    assert tab.overflow() == 0
    question = tab.open_race()
    question.fill("abcabc")
    question.press("Enter")
    tab.wait_for_note("times the tokens", "#race")
    assert tab.overflow() == 0


# Contrast of an element's text with what is behind it, by the formula of WCAG 2.
_CONTRAST = """(element) => {
  const parsed = (colour) => {
    const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return context.getImageData(0, 0, 1, 1).data;
  };
  const luminance = (colour) => {
    const parts = [...colour].slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let behind = element;
  while (behind && parsed(getComputedStyle(behind).backgroundColor)[3] < 255) {
    behind = behind.parentElement;
  }
  const back = behind ? getComputedStyle(behind).backgroundColor : "white";
  const [a, b] = [getComputedStyle(element).color, back].map((c) => luminance(parsed(c)));
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(
    open_tab: Callable[..., Tab], monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    tab = open_tab(color_scheme=scheme)
    tab.ask("abcabcabc")
    tab.wait_for_answers(1)
    monkeypatch.setattr(Conversation, "answer", failing)
    tab.ask("abc")
    tab.find("#note p.error").wait_for()
    back = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (scheme == "light")
    selectors = (
        *(".title", ".title small", ".question p", ".answer p", ".answer .note", "mark.drafted"),
        *(".who", ".legend", "#note p.error", ".chart figcaption", ".chart .labels span"),
        *(".chart .ends", "#message textarea", "#message label span", "#send", "#stop"),
        *("#options button", "button[role=tab][aria-selected=true]"),
        "button[role=tab][aria-selected=false]",
    )
    contrasts = {name: tab.find(name).first.evaluate(_CONTRAST) for name in selectors}
    assert {name: value for name, value in contrasts.items() if value < 4.5} == {}


@pytest.mark.exhaustive
def test_the_keyboard_does_all(open_tab: Callable[..., Tab], served: Served) -> None:
    tab = open_tab()
    tab.message.focus()
    tab.page.keyboard.type("abcabc")
    order = []
    for _ in _BUTTONS:
        tab.page.keyboard.press("Tab")
        order.append(tab.page.evaluate("document.activeElement.id"))
        outline = tab.page.evaluate(
            "(s => s.outlineStyle + s.outlineWidth)(getComputedStyle(document.activeElement))"
        )
        assert outline == "solid3px"
    assert order == [*_BUTTONS]
    for _ in range(4):
        tab.page.keyboard.press("Shift+Tab")
    tab.page.keyboard.press("Enter")
    tab.wait_for_answers(1)
    tab.message.focus()
    tab.page.keyboard.type("one")
    tab.page.keyboard.press("Shift+Enter")
    tab.page.keyboard.type("two")
    tab.page.keyboard.press("Enter")
    tab.wait_for_answers(2)
    assert served.newest.conversation.messages[2]["content"] == "one\ntwo"
    tab.page.keyboard.press("Shift+Tab")  # the conversation, which arrows scroll
    assert tab.page.evaluate("document.activeElement.id") == "log"
    assert tab.page.get_by_role("log", name="Conversation").count() == 1


@pytest.mark.exhaustive
def test_everything_to_type_in_has_a_name(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    tab.page.get_by_role("button", name="Options").click()
    tab.page.get_by_label("System prompt").wait_for()
    nameless = """[...document.querySelectorAll("input, textarea, button, select")]
        .filter((e) => e.checkVisibility() && !e.labels?.length && !e.ariaLabel
            && !e.innerText?.trim() && !e.title)
        .map((e) => e.outerHTML.slice(0, 100))"""
    assert tab.page.evaluate(nameless) == []


# --- what it keeps to itself ----------------------------------------------------------------


def test_nothing_leaves_this_machine(open_tab: Callable[..., Tab], served: Served) -> None:
    tab = open_tab()
    tab.ask("abcabc")
    tab.wait_for_answers(1)
    assert len(tab.requests) > 10
    hosts = {url.split("/")[2].rpartition(":")[0] for url in tab.requests if url[:5] != "data:"}
    assert hosts == {"127.0.0.1"}
    stored = tab.page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")
    assert "abcabc" not in stored
    places = {str(each[0]) for each in _connected if isinstance(each, tuple)}
    assert places <= {"127.0.0.1", "localhost", "::1"}


def test_it_is_served_here_alone_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRADIO_SHARE", "True")
    monkeypatch.setenv("GRADIO_SERVER_NAME", "0.0.0.0")
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "True")
    loaded = LoadedModel(tiny_model(vocab_size=256), tokenizer_with(), "tiny")
    served = in_loop(lambda: Served(Page(Setup(loaded, Settings()))))
    page = served.page
    try:
        assert served.address.startswith("http://127.0.0.1:")
        assert page._blocks.server_name == "127.0.0.1"
        assert page._blocks.share_url is None
        assert not page._blocks.analytics_enabled
        assert not page._blocks.run_history
    finally:
        page.close()
