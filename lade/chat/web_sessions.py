"""Sessions of the page: a conversation and a pool for each browser tab, answered side by side.

Knows nothing of Gradio: `web.py` shows what stands here.
"""

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from lade.batcher import Batcher
from lade.chat.conversation import Conversation, Turn
from lade.chat.figures import likeness_of
from lade.chat.settings import Settings
from lade.config import Config
from lade.drafting.drafter import Drafter
from lade.errors import LadeError, in_one_line
from lade.models.loading import LoadedModel
from ngram_pool import NGramPool

# Conversations kept at once, each of which may have a question that waits. A pool takes some
# megabytes; tabs that are closed are gone at once, and one that was idle for so long makes room.
MAX_SESSIONS = 32
_IDLE_SEC = 1800.0
# Answers given at once, as those of `lade serve`.
_MAX_ANSWERS = 8


class BusyError(LadeError):
    """A session has not ended what it was asked before, or too many pages are open."""


# --- one browser tab ------------------------------------------------------------------------


class Setup(NamedTuple):
    """What all conversations of a page are made of."""

    loaded: LoadedModel
    settings: Settings
    config: Config = Config()
    system: str | None = None
    pools: Sequence[NGramPool] = ()  # read by all of them
    drafter: Drafter | None = None  # drafts beside their pools

    def conversation(self, batcher: Batcher | None) -> Conversation:
        """Begin a conversation, with a pool of its own.

        Args:
            batcher: that answers share forwards in; None for one that ends with its first answer.
        """
        return Conversation(
            self.loaded,
            settings=self.settings,
            config=replace(self.config, reuses_prefix=batcher is not None),
            batcher=batcher,
            pool=[NGramPool(), *self.pools],
            drafter=self.drafter,
            system=self.system,
        )


class Choices(NamedTuple):
    """What the user can set on the page."""

    system: str
    temperature: float
    max_new_tokens: int

    def apply(self, conversation: Conversation) -> None:
        """Let the next answer of a conversation be given with these.

        Raises:
            ValueError: the model has no place for a system prompt.
        """
        system = self.system.strip() or None
        if system != conversation.system:
            conversation.system = system
        conversation.settings = replace(
            conversation.settings, temperature=self.temperature, max_new_tokens=self.max_new_tokens
        )


class Session:
    """What one browser tab asked and was answered; its conversation and pool are its own.

    One thing at a time is done for it, in a thread; nothing else touches the conversation until
    that has ended. Whatever would raises `BusyError`, and `LadeError` where it takes a question
    that there was not.

    Args:
        submit: has a function called in a thread.
    """

    def __init__(
        self, setup: Setup, batcher: Batcher, submit: Callable[[Callable[[], None]], Future[None]]
    ) -> None:
        self._setup = setup
        self._batcher = batcher
        self._submit = submit
        self.conversation = setup.conversation(batcher)
        self.task: Future[None] | None = None  # the last one
        self.race: Race | None = None
        self._work: Callable[[], None] | None = None
        self._cancelled = threading.Event()  # the last task
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """Whether something of this session waits or runs."""
        return self.task is not None and not self.task.done()

    @property
    def is_waiting(self) -> bool:
        """Whether something of this session waits for others."""
        return self.task is not None and self.is_busy and not self.task.running()

    @property
    def is_stopped(self) -> bool:
        """Whether the last thing asked was to be stopped."""
        return self._cancelled.is_set()

    @property
    def error(self) -> str | None:
        """What went wrong with the last thing asked, in one line."""
        if self.task is None or not self.task.done() or self.task.cancelled():
            return None
        error = self.task.exception()
        if error is None:
            return None
        return str(error) if isinstance(error, LadeError | ValueError) else in_one_line(error)

    @property
    def is_answering(self) -> bool:
        """Whether the last exchange is being answered."""
        last = self.conversation.messages[-1:]
        return self.is_busy and bool(last) and last[0]["role"] == "user"

    @property
    def exchanges(self) -> list[tuple[str, Turn]]:
        """Questions and answers so far, the one that is being given included."""
        messages, turns = [*self.conversation.messages], [*self.conversation.turns]
        questions = [each["content"] for each in messages if each["role"] == "user"]
        return [*zip(questions, turns, strict=False)]

    def ask(self, question: str | None, choices: Choices) -> Future[None]:
        """Answer a question, or the last one again; the future ends with the answer."""
        self._check_idle(needs_question=question is None)
        return self._begin(lambda: self._answer(question, choices))

    def undo(self) -> None:
        """Take the last question and its answer back."""
        self._check_idle(needs_question=True)
        self.conversation.undo()
        self.task = None

    def clear(self) -> None:
        """Begin anew: no messages, and a pool that knows nothing of those there were."""
        self._check_idle()
        self.conversation = self._setup.conversation(self._batcher)
        self.task = None

    def start_race(self, question: str, choices: Choices) -> None:
        """Answer a question with plain generate, then with lade, outside the conversation."""
        self._check_idle()
        race = self.race = Race(question)
        self._begin(lambda: race.run(self._setup, choices, self._batcher, self._cancelled))

    def stop(self) -> None:
        """End what runs, keeping what was said, or drop what waits."""
        self._cancelled.set()
        if self.task is not None:
            self.task.cancel()

    def close(self) -> None:
        """End what runs and let nothing begin any more."""
        self._is_closed = True
        self._work = None
        self.stop()

    def _check_idle(self, needs_question: bool = False) -> None:
        if self.is_busy:
            raise BusyError("an answer is being given: wait for its end, or stop it")
        if needs_question and not self.conversation.messages:
            raise LadeError("there is no question to go back to")

    def _begin(self, work: Callable[[], None]) -> Future[None]:
        if self._is_closed:
            raise BusyError("this session was closed: reload the page")
        self._work, self._cancelled = work, threading.Event()
        # Where it waits and the tab is closed, nothing holds the conversation any more.
        task = self.task = self._submit(partial(_run, weakref.ref(self)))
        return task

    def _answer(self, question: str | None, choices: Choices) -> None:
        choices.apply(self.conversation)
        for _ in self.conversation.answer(question, cancelled=self._cancelled):
            pass  # its turn has them


def _run(reference: weakref.ref[Session]) -> None:
    session = reference()
    if session is not None:
        work, session._work = session._work, None
        if work is not None:
            work()


class Race:
    """One question answered twice: by plain generate, then by lade with an empty pool.

    Neither knows anything of the conversation. With the session's own pool, the second race of a
    question would be run from memory.
    """

    def __init__(self, question: str) -> None:
        self.question = question
        self.result = ""  # who was faster, in words; once both answers are complete
        self._conversations: list[Conversation] = []

    def run(
        self, setup: Setup, choices: Choices, batcher: Batcher, cancelled: threading.Event
    ) -> None:
        """Give both answers, each alone: what others are asked waits, so that times compare."""
        for is_plain in (True, False):
            if cancelled.is_set():
                return
            conversation = setup.conversation(None)
            choices.apply(conversation)
            answer = conversation.answer(self.question, is_plain=is_plain, cancelled=cancelled)
            self._conversations.append(conversation)
            # The conversation's own thread decodes while this one has the turn.
            batcher.run(partial(list, answer), choices.max_new_tokens)
        plain, lade = self.plain, self.lade
        if plain is None or lade is None:
            return
        if likeness := likeness_of(plain, lade, setup.loaded.model):
            ratio = lade.tokens_per_sec / plain.tokens_per_sec
            self.result = (
                f"lade had {ratio:.2f} times the tokens per second of generate. {likeness}"
            )

    @property
    def plain(self) -> Turn | None:
        """The answer of plain generate, as far as it is given."""
        return self._turn(0)

    @property
    def lade(self) -> Turn | None:
        """The answer of lade, as far as it is given."""
        return self._turn(1)

    def _turn(self, place: int) -> Turn | None:
        conversations = [*self._conversations]
        return conversations[place].turn if place < len(conversations) else None


class Sessions:
    """Sessions by the hash that each tab has; of many, one that was long idle makes room.

    Raises:
        ValueError: the model has no place for the system prompt.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        # With the time of their last use, which is their order.
        self._sessions: OrderedDict[str, tuple[Session, float]] = OrderedDict()
        self._batcher = Batcher(setup.loaded.model)
        self._warm_up()
        # Whoever waits here can be stopped, unlike who waits for whole answers in the batcher.
        num_threads = _MAX_ANSWERS if self._batcher.is_joint else 1
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="lade-page")

    def of(self, name: str) -> Session:
        """Return the session of that name, begun if there is none.

        Raises:
            BusyError: there are too many; none of others is ended for it.
        """
        with self._lock:
            now = time.monotonic()
            session, _ = self._sessions.pop(name, (None, now))
            if session is None:
                if len(self._sessions) >= MAX_SESSIONS:
                    self._end_oldest(now)
                session = Session(self._setup, self._batcher, self._threads.submit)
            self._sessions[name] = session, now
            return session

    def _end_oldest(self, now: float) -> None:
        name, (oldest, used) = next(iter(self._sessions.items()))
        if now - used < _IDLE_SEC or oldest.is_busy:
            raise BusyError("too many pages are open: close one, or come back later")
        del self._sessions[name]
        oldest.close()

    def end(self, name: str) -> None:
        """End a session: its answer stops, its conversation and pool are gone."""
        with self._lock:
            session, _ = self._sessions.pop(name, (None, 0.0))
        if session is not None:
            session.close()

    def close(self) -> None:
        """Stop what runs, drop what waits, and wait for the end."""
        for name in [*self._sessions]:
            self.end(name)
        self._threads.shutdown()
        self._batcher.close()

    def __len__(self) -> int:
        return len(self._sessions)

    def _warm_up(self) -> None:
        """Check the model and whether answers can share forwards; what fails now fails for all."""
        conversation = self._setup.conversation(self._batcher)
        conversation.settings = replace(self._setup.settings, max_new_tokens=2)
        for _ in conversation.answer("Hi"):
            pass
