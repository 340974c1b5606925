"""`lade chat --web`: the chat, a race against plain generate, and live charts, as one page.

Begin here; `web_sessions.py` has what happens in a session, `web_html.py` and `web_charts.py` have
what it looks like. Gradio brings page and server.
"""

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lade.errors import LadeError, MissingExtraError

try:
    import gradio as gr
    from starlette.middleware import Middleware
except ModuleNotFoundError as error:
    raise MissingExtraError(error.name or "gradio", "web") from None

from lade.chat.conversation import Turn
from lade.chat.web_charts import Timeline, fill_chart, race_chart, rate_chart, steps_chart
from lade.chat.web_gate import PageGate
from lade.chat.web_html import answer_html, escaped, lane_html, note_html, question_html
from lade.chat.web_sessions import (
    MAX_SESSIONS,
    Choices,
    Race,
    Session,
    Sessions,
    Setup,
)
from lade.hosts import check_port, names_of
from ngram_pool import NGramPool

_SETTLE_SEC = 0.02
_FRAME_SEC = 0.1  # between two looks at an answer that is being given
_PORTS = range(7860, 7960)  # those that Gradio takes
_FOLDER = Path(__file__).parent
# System fonts only: Gradio's own themes fetch theirs from Google.
_FONT = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
_FONT_MONO = ("ui-monospace", "Consolas", "monospace")

_EMPTY = '<p class="empty">No messages yet. Answers are kept only until this tab is closed.</p>'
_LEGEND = (
    '<p class="legend"><mark class="drafted">Underlined</mark> text was drafted by the pool and '
    "accepted by the model; the rest the model wrote itself. Enter sends, Shift+Enter begins a "
    "new line, Escape stops.</p>"
)

Outputs = tuple[Any, ...]


class Page:
    """The page and its server.

    Raises:
        ValueError: the model has no place for the system prompt.
    """

    def __init__(self, setup: Setup) -> None:
        self.sessions = Sessions(setup)
        self._blocks = self._build(setup)

    def launch(
        self,
        host: str = "127.0.0.1",
        port: int | None = None,
        share: bool = False,
        password: str | None = None,
    ) -> str:
        """Serve the page and return its address; the caller keeps the process running.

        Args:
            host: address to listen at; others than the default let other machines in.
            port: to listen at; None for the first free one from 7860 on.
            share: whether to have Gradio's servers forward a public address to it.
            password: that visitors have to give, with any name; None for none.

        Raises:
            OSError: the port is taken, or the address is none of this machine.
            LadeError: there is no public address.
        """
        theme = gr.themes.Default(primary_hue="blue", font=_FONT, font_mono=_FONT_MONO).set(
            # White on the theme's own blue is hard to read.
            button_primary_background_fill="*primary_600",
            button_primary_background_fill_hover="*primary_700",
        )
        names = None if share else names_of(host)

        def is_right(_: str, given: str) -> bool:
            return hmac.compare_digest(given.encode(), (password or "").encode())

        self._blocks.launch(
            auth=None if password is None else is_right,
            auth_message="Any name, and the password.",
            app_kwargs={"middleware": [Middleware(PageGate, names=names)]},
            state_session_capacity=MAX_SESSIONS,
            server_name=host,
            server_port=_free_port(host) if port is None else port,
            share=share,
            prevent_thread_lock=True,
            inbrowser=False,
            inline=False,
            quiet=True,
            show_error=True,
            footer_links=[],
            run_history=False,  # else browsers keep what was asked
            enable_monitoring=False,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            max_file_size="1kb",
            theme=theme,
            css_paths=[_FOLDER / "web.css"],
            js=(_FOLDER / "web.js").read_text(),
        )
        if share and not self._blocks.share_url:
            raise LadeError("the page could not be shared: Gradio's servers gave no address")
        address: str = self._blocks.share_url or self._blocks.local_url
        return address

    def close(self) -> None:
        """Stop answers and server."""
        self.sessions.close()
        self._blocks.close(verbose=False)

    # --- what it consists of ----------------------------------------------------------------

    def _build(self, setup: Setup) -> Any:
        title = Path(setup.loaded.name).name
        # As wide as `web.css` lets it be.
        with gr.Blocks(title=f"lade: {title}", analytics_enabled=False, fill_width=True) as blocks:
            gr.HTML(f'<h1 class="title">lade <small>{escaped(title)}</small></h1>')
            with gr.Row(elem_id="columns"):
                with gr.Column(scale=3, min_width=300), gr.Tabs():
                    with gr.Tab("Chat"):
                        chat = self._chat_tab()
                    with gr.Tab("Race"):
                        race = self._race_tab()
                with gr.Column(scale=2, min_width=280):
                    options = self._options(setup)
                    charts = gr.HTML(_charts_html(None, None), elem_id="charts")
            self._connect(chat, race, options, charts)
            blocks.unload(self._closed)
        # Answers wait for each other elsewhere, which the page can show.
        return blocks.queue(default_concurrency_limit=None)

    def _chat_tab(self) -> dict[str, Any]:
        with gr.Column(elem_id="log"):
            history = gr.HTML(_EMPTY, elem_id="history")
            current = gr.HTML("", elem_id="current")
        note = gr.HTML("", elem_id="note")
        message, send = _composer("Message", "message", "Send", "composer", autofocus=True)
        with gr.Row(elem_id="actions"):
            names = ("Stop", "Retry", "Undo", "Clear")
            buttons = {
                name: gr.Button(name, size="sm", elem_id=name.lower(), min_width=60)
                for name in names
            }
        gr.HTML(_LEGEND)
        shown = {"history": history, "current": current, "note": note, "message": message}
        return {**shown, "Send": send, **buttons}

    def _race_tab(self) -> dict[str, Any]:
        gr.HTML(
            '<p class="hint">The same question, answered by plain <code>generate</code> and then '
            "by lade. Each begins knowing nothing of the chat or of earlier races.</p>"
        )
        question, start = _composer("Question", "race-question", "Start", "race-composer")
        stop = gr.Button("Stop", size="sm", elem_id="race-stop")
        note = gr.HTML("", elem_id="race-note")
        result = gr.HTML("", elem_id="race")
        return {"question": question, "start": start, "stop": stop, "note": note, "result": result}

    def _options(self, setup: Setup) -> list[Any]:
        with gr.Accordion("Options", open=False, elem_id="options"):
            return [
                gr.Textbox(
                    setup.system or "",
                    label="System prompt",
                    placeholder="None",
                    lines=2,
                    elem_id="system",
                ),
                gr.Slider(
                    0.0,
                    max(2.0, setup.settings.temperature),
                    setup.settings.temperature,
                    step=0.05,
                    label="Temperature",
                    info="0 always takes the likeliest token",
                    elem_id="temperature",
                ),
                gr.Slider(
                    1,
                    max(4096, setup.settings.max_new_tokens),
                    setup.settings.max_new_tokens,
                    step=1,
                    label="Longest answer, in tokens",
                    elem_id="longest",
                ),
            ]

    def _connect(
        self, chat: dict[str, Any], race: dict[str, Any], options: list[Any], charts: Any
    ) -> None:
        shared = {"show_progress": "hidden", "api_visibility": "private"}
        outputs = [chat["history"], chat["current"], chat["note"], charts]
        asked = {"inputs": [chat["message"], *options], "outputs": [*outputs, chat["message"]]}
        # "multiple": a question during an answer gets an explanation instead of nothing.
        for asks in (chat["message"].submit, chat["Send"].click):
            asks(self._send, **asked, **shared, trigger_mode="multiple")
        chat["Retry"].click(self._retry, options, outputs, **shared)
        chat["Undo"].click(self._undo, None, outputs, **shared)
        chat["Clear"].click(self._clear, None, outputs, **shared)
        raced = [race["result"], race["note"], charts]
        for starts in (race["question"].submit, race["start"].click):
            starts(
                self._race, [race["question"], *options], raced, **shared, trigger_mode="multiple"
            )
        for button in (chat["Stop"], race["stop"]):
            button.click(self._stop, None, None, **shared, queue=False)

    # --- what it does -----------------------------------------------------------------------

    async def _send(
        self, text: str, system: str, temperature: float, longest: float, request: gr.Request
    ) -> AsyncIterator[Outputs]:
        session = self._session(request)
        skip = gr.skip()
        if not text.strip():
            yield (*[skip] * 4, skip)
            return
        try:
            task = session.ask(text, Choices(system, temperature, int(longest)))
        except LadeError as error:
            yield skip, skip, note_html(str(error), is_error=True), skip, skip
            return
        box: Any = ""  # what the message box is set to
        async for shown in self._watch(session, question=text):
            yield *shown, box
            box = skip
        if task.cancelled():
            yield skip, "", note_html("Stopped before its turn."), skip, text
        elif session.error:
            yield skip, skip, skip, skip, text

    async def _retry(
        self, system: str, temperature: float, longest: float, request: gr.Request
    ) -> AsyncIterator[Outputs]:
        choices = Choices(system, temperature, int(longest))
        async for shown in self._attempt(request, lambda session: session.ask(None, choices)):
            yield shown

    async def _undo(self, request: gr.Request) -> AsyncIterator[Outputs]:
        async for shown in self._attempt(request, Session.undo):
            yield shown

    async def _clear(self, request: gr.Request) -> AsyncIterator[Outputs]:
        async for shown in self._attempt(request, Session.clear):
            yield shown

    def _stop(self, request: gr.Request) -> None:
        self._session(request).stop()

    def _closed(self, request: gr.Request) -> None:
        name = _name_of(request)
        self.sessions.end(name)
        # What Gradio keeps of the page, answers included, until many other pages were opened.
        self._blocks.app.state_holder.session_data.pop(name, None)

    async def _race(
        self, question: str, system: str, temperature: float, longest: float, request: gr.Request
    ) -> AsyncIterator[Outputs]:
        session = self._session(request)
        if not question.strip():
            yield gr.skip(), note_html("Type a question first."), gr.skip()
            return
        try:
            session.start_race(question, Choices(system, temperature, int(longest)))
        except LadeError as error:
            yield gr.skip(), note_html(str(error), is_error=True), gr.skip()
            return
        race = session.race
        assert race is not None
        changed = _Changes()
        async for note in self._progress(session):
            yield changed(
                _race_html(race), note, _charts_html(race.lade, session.conversation.pool)
            )

    # --- sessions ---------------------------------------------------------------------------

    def _session(self, request: gr.Request) -> Session:
        return self.sessions.of(_name_of(request))

    async def _attempt(
        self, request: gr.Request, act: Callable[[Session], object]
    ) -> AsyncIterator[Outputs]:
        """Stop a session's answer, do something to it, and show what comes of it."""
        session = self._session(request)
        session.stop()
        while session.is_busy:  # a step of the model at most
            await asyncio.sleep(_SETTLE_SEC)
        try:
            act(session)
        except LadeError as error:
            yield gr.skip(), gr.skip(), note_html(str(error), is_error=True), gr.skip()
            return
        async for shown in self._watch(session):
            yield shown

    async def _watch(self, session: Session, question: str | None = None) -> AsyncIterator[Outputs]:
        """Yield the chat as it changes, and a question that waits, until the session rests."""
        changed = _Changes()
        async for note in self._progress(session):
            exchanges = session.exchanges
            turn = exchanges[-1][1] if exchanges else None
            current = question_html(question) if question and session.is_waiting else ""
            if turn is not None and session.is_answering:
                asked, _ = exchanges.pop()
                current = question_html(asked) + answer_html(turn, is_running=True)
            charts = _charts_html(turn, session.conversation.pool)
            yield changed(_history_html(exchanges) or _EMPTY * (not current), current, note, charts)

    async def _progress(self, session: Session) -> AsyncIterator[str]:
        """Yield what happens as a line of HTML, again and again until the session rests."""
        while True:
            is_over = not session.is_busy
            if session.error:
                yield note_html(session.error, is_error=True)
            elif session.is_waiting:
                yield note_html("Waiting for other answers …")
            elif not is_over:
                yield note_html("Answering …")
            elif session.task is None:
                yield ""
            else:
                yield note_html("Stopped." if session.is_stopped else "Answered.")
            if is_over:
                return
            await asyncio.sleep(_FRAME_SEC)


def _composer(
    label: str, name: str, button: str, row: str, *, autofocus: bool = False
) -> tuple[Any, Any]:
    """Return a box for a text and the button beside it."""
    with gr.Row(elem_id=row):
        box = gr.Textbox(
            label=label,
            placeholder="Ask something",
            lines=1,
            max_lines=8,
            elem_id=name,
            scale=5,
            min_width=160,
            autofocus=autofocus,
        )
        asks = gr.Button(button, variant="primary", elem_id=button.lower(), scale=0, min_width=80)
    return box, asks


def _free_port(host: str) -> int:
    """Return the first of Gradio's ports that is free; its own search leaves sockets open."""
    for port in _PORTS:
        with suppress(ValueError):
            check_port(host, port)
            return port
    raise OSError(f"cannot listen at {host}: no port from {_PORTS[0]} to {_PORTS[-1]} is free")


class _Changes:
    """Leaves out of each frame what is as it was in the frame before."""

    def __init__(self) -> None:
        self._before: Sequence[Any] = ()

    def __call__(self, *values: Any) -> Outputs:
        before, self._before = self._before, values
        if not before:
            return values
        return tuple(
            gr.skip() if new == old else new for new, old in zip(values, before, strict=True)
        )


def _name_of(request: gr.Request) -> str:
    name: str | None = request.session_hash
    if name is None:
        raise LadeError("expected a request of a page, got one without a session")
    return name


def _history_html(exchanges: Sequence[tuple[str, Turn]]) -> str:
    return "".join(question_html(asked) + answer_html(turn) for asked, turn in exchanges)


def _race_html(race: Race) -> str:
    sides = (("generate", "lade-plain", race.plain), ("lade", "lade-line", race.lade))
    chart = race_chart(
        [Timeline(name, style, [*turn.token_times]) for name, style, turn in sides if turn]
    )
    lanes = "".join(lane_html(*side) for side in sides)
    return f'{chart}{note_html(race.result)}<div class="lanes">{lanes}</div>'


def _charts_html(turn: Turn | None, pool: NGramPool | None) -> str:
    """Return the charts of an answer and of how full a pool is."""
    times, steps = ([*turn.token_times], [*turn.steps]) if turn else ([], [])
    parts = [rate_chart(times), steps_chart(steps)]
    if pool is not None:
        parts.append(fill_chart("Pool, in tokens", len(pool), pool.capacity_tokens))
    return "".join(parts)
