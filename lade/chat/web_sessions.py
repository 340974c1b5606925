"""Sessions of the page: a conversation and a pool for each browser tab, one answer at a time.

Knows nothing of Gradio: `web.py` shows what stands here.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from queue import SimpleQueue
from time import perf_counter
from typing import NamedTuple

from lade.chat.conversation import Conversation, Turn
from lade.chat.figures import likeness_of
from lade.chat.settings import Settings
from lade.config import Config
from lade.drafting.drafter import Drafter
from lade.errors import LadeError, in_one_line
from lade.models.loading import LoadedModel
from ngram_pool import NGramPool

# Conversations kept at once. A pool takes some megabytes; tabs that are closed are gone at once,
# and one that was idle for so long makes room.
MAX_SESSIONS = 32
_IDLE_SEC = 1800.0
# Answers that may wait for others.
_MAX_WAITING = 16


class BusyError(LadeError):
    """A session has not ended what it was asked before, or there is too much to do for others."""


# --- one at a time --------------------------------------------------------------------------


Rest = Callable[[float], AbstractContextManager[None]]


def no_rest(sec: float) -> AbstractContextManager[None]:
    """Do nothing while nothing is asked."""
    return nullcontext()


class Task:
    """Work that waits for its turn, runs, or is done."""

    def __init__(self, desk: "Desk") -> None:
        self.cancelled = threading.Event()  # looked at by the work
        self._desk = desk
        self._future: Future[None] = Future()

    @property
    def is_running(self) -> bool:
        """Whether it has begun and not ended."""
        return self._future.running()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, failed or will never run."""
        return self._future.done()

    @property
    def has_run(self) -> bool:
        """Whether it is done and was begun."""
        return self.is_done and not self._future.cancelled()

    @property
    def num_before(self) -> int:
        """How many other tasks end before this one begins."""
        return self._desk.num_before(self)

    @property
    def error(self) -> str | None:
        """What went wrong, in one line."""
        error = self._future.exception() if self.has_run else None
        if error is None:
            return None
        return str(error) if isinstance(error, LadeError | ValueError) else in_one_line(error)

    def cancel(self) -> None:
        """Let it end soon, or never begin."""
        self.cancelled.set()
        self._future.cancel()

    def do(self, work: "Work") -> None:
        """Do its work, unless it was cancelled before."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            work(self)
        except BaseException as error:  # shown on the page
            self._future.set_exception(error)
        else:
            self._future.set_result(None)


Work = Callable[[Task], object]


class Desk:
    """Does one task after the other in the order they came: one model computes for all.

    Args:
        rest: gives what to do while nothing is asked, as a context, by the seconds that the last
            task took; entered and left in the thread that does the tasks.
    """

    def __init__(self, rest: Rest = no_rest) -> None:
        self._rest = rest
        self._queue: SimpleQueue[tuple[Task, Work] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._tasks: list[Task] = []  # not done when last looked at
        # A daemon: leaving does not wait for a long forward.
        self._thread = threading.Thread(target=self._run, name="lade-desk", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> Task:
        """Put work at the end of the line.

        Raises:
            BusyError: too much waits.
        """
        task = Task(self)
        with self._lock:
            self._tasks = [each for each in self._tasks if not each.is_done]
            if len(self._tasks) > _MAX_WAITING:
                raise BusyError("too many questions wait already: ask again later")
            self._queue.put((task, work))
            self._tasks.append(task)
        return task

    def num_before(self, task: Task) -> int:
        """Return how many tasks are to be done before this one; 0 if it runs or is done."""
        with self._lock:
            if task not in self._tasks:
                return 0
            before = self._tasks[: self._tasks.index(task)]
        return sum(not each.is_done for each in before)

    def close(self) -> None:
        """Stop what runs, drop what waits, and wait for the end."""
        with self._lock:
            for task in self._tasks:
                task.cancel()
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        sec = 0.0
        while True:
            with self._rest(sec):
                taken = self._queue.get()
            if taken is None:
                return
            begin = perf_counter()
            task, work = taken
            task.do(work)
            del taken, work  # a session is not held while nothing is asked
            sec = perf_counter() - begin


# --- one browser tab ------------------------------------------------------------------------


class Setup(NamedTuple):
    """What all conversations of a page are made of."""

    loaded: LoadedModel
    settings: Settings
    config: Config = Config()
    system: str | None = None
    pools: Sequence[NGramPool] = ()  # read by all of them
    drafter: Drafter | None = None  # drafts beside their pools

    def conversation(self, *, reuses_prefix: bool = True) -> Conversation:
        """Begin a conversation, with a pool of its own."""
        return Conversation(
            self.loaded,
            settings=self.settings,
            config=replace(self.config, reuses_prefix=reuses_prefix),
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
            conversation.settings,
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
        )


class QuestionAndAnswer(NamedTuple):
    """A question and its answer, which may still grow."""

    question: str
    turn: Turn


class Session:
    """What one browser tab asked and was answered; its conversation and pool are its own.

    Answers are given by tasks at the desk. Only one of a session is there at a time, and nothing
    else touches the conversation until it is done.
    """

    def __init__(self, desk: Desk, setup: Setup) -> None:
        self._desk = desk
        self._setup = setup
        self.conversation = setup.conversation()
        self.task: Task | None = None  # the last one
        self.race: Race | None = None
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """Whether something of this session waits or runs."""
        return self.task is not None and not self.task.is_done

    @property
    def is_waiting(self) -> bool:
        """Whether something of this session waits for others."""
        return self.is_busy and self.task is not None and not self.task.is_running

    @property
    def is_answering(self) -> bool:
        """Whether the last exchange is being answered."""
        last = self.conversation.messages[-1:]
        return self.is_busy and bool(last) and last[0]["role"] == "user"

    @property
    def exchanges(self) -> list[QuestionAndAnswer]:
        """Questions and answers so far, the one that is being given included."""
        messages, turns = [*self.conversation.messages], [*self.conversation.turns]
        questions = [each["content"] for each in messages if each["role"] == "user"]
        return [*map(QuestionAndAnswer, questions, turns)]

    def ask(self, question: str, choices: Choices) -> Task:
        """Answer a question.

        Raises:
            BusyError: the answer before has not ended.
        """
        self._check_idle()
        return self._submit(lambda task: self._answer(question, choices, task))

    def retry(self, choices: Choices) -> None:
        """Answer the last question again.

        Raises:
            BusyError: the answer before has not ended.
            LadeError: there was no question.
        """
        self._check_idle()
        self._check_asked()
        self._submit(lambda task: self._answer(None, choices, task))

    def undo(self) -> None:
        """Take the last question and its answer back.

        Raises:
            BusyError: the answer has not ended.
            LadeError: there was no question.
        """
        self._check_idle()
        self._check_asked()
        self.conversation.undo()
        self.task = None

    def clear(self) -> None:
        """Begin anew: no messages, and a pool that knows nothing of those there were.

        Raises:
            BusyError: the last answer has not ended.
        """
        self._check_idle()
        self.conversation = self._setup.conversation()
        self.task = None

    def start_race(self, question: str, choices: Choices) -> None:
        """Answer a question with plain generate, then with lade, outside the conversation.

        Raises:
            BusyError: the answer before has not ended.
        """
        self._check_idle()
        race = self.race = Race(question)
        self._submit(lambda task: race.run(self._setup, choices, task))

    def stop(self) -> None:
        """End what runs, keeping what was said, or drop what waits."""
        if self.task is not None:
            self.task.cancel()

    def close(self) -> None:
        """End what runs and let nothing begin any more."""
        self._is_closed = True
        self.stop()

    def _check_idle(self) -> None:
        if self.is_busy:
            raise BusyError("an answer is being given: wait for its end, or stop it")

    def _check_asked(self) -> None:
        if not self.conversation.messages:
            raise LadeError("there is no question to go back to")

    def _submit(self, work: Callable[[Task], None]) -> Task:
        if self._is_closed:
            raise BusyError("this session was closed: reload the page")
        self.task = self._desk.submit(work)
        return self.task

    def _answer(self, question: str | None, choices: Choices, task: Task) -> None:
        choices.apply(self.conversation)
        for _ in self.conversation.answer(question, cancelled=task.cancelled):
            pass  # its turn has them


class Race:
    """One question answered twice: by plain generate, then by lade with an empty pool.

    Neither knows anything of the conversation. With the session's own pool, the second race of a
    question would be run from memory.
    """

    def __init__(self, question: str) -> None:
        self.question = question
        self.result = ""  # who was faster, in words; once both answers are complete
        self._conversations: list[Conversation] = []

    def run(self, setup: Setup, choices: Choices, task: Task) -> None:
        """Give both answers."""
        for is_plain in (True, False):
            if task.cancelled.is_set():
                return
            conversation = setup.conversation(reuses_prefix=False)  # it ends with its answer
            choices.apply(conversation)
            answer = conversation.answer(self.question, is_plain=is_plain, cancelled=task.cancelled)
            self._conversations.append(conversation)
            for _ in answer:
                pass  # its turn has them
        self.result = self._compared()

    @property
    def plain(self) -> Turn | None:
        """The answer of plain generate, as far as it is given."""
        return self._turn(0)

    @property
    def lade(self) -> Turn | None:
        """The answer of lade, as far as it is given."""
        return self._turn(1)

    def _compared(self) -> str:
        plain, lade = self.plain, self.lade
        if plain is None or lade is None:
            return ""
        likeness = likeness_of(plain, lade, self._conversations[0].loaded.model)
        if not likeness:
            return ""
        ratio = lade.tokens_per_sec / plain.tokens_per_sec
        return f"lade had {ratio:.2f} times the tokens per second of generate. {likeness}"

    def _turn(self, place: int) -> Turn | None:
        conversations = [*self._conversations]
        return conversations[place].turn if place < len(conversations) else None


class Sessions:
    """Sessions by the hash that each tab has; of many, one that was long idle makes room."""

    def __init__(self, desk: Desk, setup: Setup) -> None:
        self._desk = desk
        self._setup = setup
        self._lock = threading.Lock()
        # With the time of their last use, which is their order.
        self._sessions: OrderedDict[str, tuple[Session, float]] = OrderedDict()

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
                session = Session(self._desk, self._setup)
            self._sessions[name] = session, now
            return session

    def _end_oldest(self, now: float) -> None:
        name, (oldest, used) = next(iter(self._sessions.items()))
        if now - used < _IDLE_SEC or oldest.is_busy:
            raise BusyError("too many pages are open: close one, or come back later")
        del self._sessions[name]
        oldest.close()

    def close(self, name: str) -> None:
        """End a session: its answer stops, its conversation and pool are gone."""
        with self._lock:
            session, _ = self._sessions.pop(name, (None, 0.0))
        if session is not None:
            session.close()

    def __len__(self) -> int:
        return len(self._sessions)
