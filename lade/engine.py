"""Many calls of one model at once: coroutines of one thread, whose forwards run together.

A call runs until it needs a forward; once all others need one, too, these run as one. So it is
decoded by the same code whether it is alone or not, may begin and end whenever it likes, and has a
random state of its own, as if nobody else drew. The coroutines are greenlets: nothing between a
call and its forwards needs to know of them.
"""

import asyncio
import logging
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Protocol, Self, TypeVar

import torch
from greenlet import getcurrent, greenlet

from lade.budget.seconds import Seconds
from lade.captures import put_back, random_states
from lade.errors import LadeError, in_one_line
from lade.openmp import release_workers
from lade.processes import look_after
from lade.turns import TURNS

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_FIRST_PIECE = 128  # tokens of a prompt
_LEAST_PIECE = 16
_SAFE = 0.8  # share of the time to plan for: the next tokens may see many more, and take longer

_IN_PARENT = "this process was forked while the call ran, whose result the parent has"
_IN_ITS_OWN_THREAD = (
    "expected another thread to wait for a result, got the batcher's own, which computes it; "
    "`add_done_callback` waits for nothing"
)


class Together(Protocol):
    """Runs parts of a forward."""

    why_not: str | None  # parts of several calls do not run together any more
    price: float | None  # tokens that a draft token must add for all calls to gain by it, if known

    def __call__(self, parts: Sequence[Any], /) -> list[Any]:
        """Run parts; return for each its output, or the exception that it raised."""


class Engine:
    """Runs calls of one model in a thread of its own, which lives while there are any.

    A waiting call is next if its owner holds the fewest tokens; among equal owners, the one that
    last held any the longest ago is next. One owner leaves a place to others. A call that fits may
    pass calls that wait for more memory, but at most `max_tokens` tokens pass each of them.

    Args:
        forwards: runs what calls ask for.
        device: of the model, whose default generator calls draw from.
        max_calls: that run at once.
        max_tokens: of all calls that run; a call of more runs alone. None for any number.
        stall_sec: how long a piece of a prompt may keep the others waiting.

    Source: iteration-level scheduling, Orca (OSDI 2022).
    """

    def __init__(
        self,
        forwards: Together,
        device: torch.device,
        max_calls: int,
        max_tokens: int | None,
        stall_sec: float,
    ) -> None:
        self.forwards = forwards
        self.device = device
        self._max_calls, self._max_tokens = max_calls, max_tokens
        #: Whether a call was found whose forwards may run together with others.
        self.is_joint = False
        #: Tokens of prompts that run between two steps, or with one, by the time that they take.
        self.piece = _FIRST_PIECE
        self._stall_sec = stall_sec
        self._costs = Seconds()  # of forwards with pieces of prompts, by the tokens of these
        self._calls = set[EngineCall]()  # all that have not ended; under the lock
        self.begin_anew()
        look_after(self)

    def begin_anew(self, refusal: str | None = None) -> None:
        """Be an engine without calls: in a forked child, those that there were fail.

        Args:
            refusal: why none is taken any more.
        """
        self._lock = threading.Lock()
        self._forwarding = threading.Lock()  # held while a forward runs
        self._thread: threading.Thread | None = None  # under the lock
        self._refusal = refusal
        left, self._calls = self._calls, set()
        self._empty()
        for call in left:
            call.future.begin_anew(self)
            call.future.set_exception(LadeError(_IN_PARENT))

    def _empty(self) -> None:
        """Hold no call."""
        self._arrived: list[EngineCall] = []  # under the lock
        self._waiting: list[EngineCall] = []  # in order of turns among owners that hold as much
        self._running: list[EngineCall] = []
        self._held: Counter[str] = Counter()  # tokens, by owner
        self._ready = deque[EngineCall]()
        self._asking: list[EngineCall] = []
        self._later: list[EngineCall] = []  # those that want to run a piece of a prompt
        self._room = self.piece  # tokens of prompts for which there is room until the next forward
        self._num_allotted = 0  # of these, the tokens that the next forward has

    @property
    def num_running(self) -> int:
        """Calls that have begun."""
        return len(self._running)

    def num_waiting(self, owner: str | None = None) -> int:
        """Return how many calls have not begun, of all owners or of one."""
        with self._lock:
            calls = [*self._arrived, *self._waiting]
        wanted = (call for call in calls if not call.future.cancelled())
        return sum(owner in (None, call.owner) for call in wanted)

    @property
    def num_places(self) -> int:
        """Calls that run at once; of models whose forwards cannot run together, one."""
        return self._max_calls if self.is_joint and self.forwards.why_not is None else 1

    @property
    def thread(self) -> threading.Thread | None:
        """The engine's thread, while there are calls."""
        return self._thread

    @property
    def is_here(self) -> bool:
        """Whether the current thread is the engine's."""
        thread = self._thread
        return thread is not None and thread.ident == threading.get_ident()

    @property
    def locks(self) -> Sequence[threading.Lock]:
        """Those that the engine's thread holds only while it runs something."""
        return self._forwarding, self._lock

    def submit(
        self,
        function: Callable[[], Any],
        num_tokens: int = 0,
        owner: str = "",
        future: "EngineFuture | None" = None,
    ) -> "EngineCall":
        """Call a function that generates as soon as there is room for it.

        Args:
            function: whatever it runs besides forwards of lade's, others wait for.
            num_tokens: that prompt and answer may come to have.
            owner: whose it is.
            future: of what it returns; None for a new one.

        Raises:
            LadeError: the engine takes no call any more.
        """
        call = EngineCall(
            self, function, self._fitting(num_tokens), owner, future or EngineFuture()
        )
        return self._add(call)

    def _fitting(self, num_tokens: int) -> int:
        return num_tokens if self._max_tokens is None else min(num_tokens, self._max_tokens)

    def _add(self, call: "EngineCall") -> "EngineCall":
        with self._lock:
            if self._refusal is not None:
                raise LadeError(f"expected an engine that takes calls: {self._refusal}")
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="lade-engine", daemon=True)
                thread.start()  # or raise, and nothing has changed
                self._thread = thread
            call.future.engine = self
            self._calls.add(call)
            self._arrived.append(call)
        return call

    def run(self, function: Callable[[], _Result], num_tokens: int = 0) -> _Result:
        """Call a function as `submit` does, and wait; in the engine's thread, call it there.

        It draws from where the caller's generators are, which go on from where it ends. Of several
        at once, the first does so; the others draw from seeds that nobody knows. An interrupt ends
        the call before its next step.
        """
        if self.is_here:
            return function()
        call = EngineCall(self, function, self._fitting(num_tokens), "", EngineFuture())
        with at_turn() as caller:  # a call of another engine, if any
            if caller is None:
                call.draws_on = True
            else:
                call.states = random_states(self.device)
            self._add(call)
            try:
                result: _Result = call.future.result()
            except BaseException as interrupt:
                if not call.future.done() and not call.future.cancel():
                    call.interrupt = interrupt
                    with aside():
                        wait([call.future])
                raise
            finally:
                if caller is not None and call.states is not None:
                    put_back(self.device, call.states)
        return result

    def end(self, refusal: str | None = None) -> None:
        """Have all calls end before their next step.

        Args:
            refusal: why those to come are refused; None if they are not.
        """
        with self._lock:
            self._refusal = refusal or self._refusal
            calls = [*self._calls]
        for call in calls:
            call.interrupt = call.interrupt or CancelledError()

    def wait(self, sec: float | None = None) -> None:
        """Wait until all calls have ended, but not longer than so many seconds.

        The engine's own thread waits for nothing.
        """
        thread = self._thread
        if thread is not None and not self.is_here:
            with aside():
                thread.join(sec)

    # --- what follows runs in the engine's thread ---------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_in():
                try:
                    self._admit()
                    self._advance()
                except BaseException as defect:  # nobody shall wait for ever
                    self._fail(defect)
        finally:
            if self.is_here:  # else it has ended in order
                self._thread = None
            release_workers()

    def _take_in(self) -> bool:
        """Move new calls into the queue; return whether there is anything to do."""
        with self._lock:
            self._waiting += self._arrived
            self._arrived = []  # not cleared: others may count it
            if self._waiting or self._running:
                return True
            self._thread = None
            return False

    def _fail(self, defect: BaseException) -> None:
        """End all calls by a defect of the engine itself; those to come find it empty."""
        with self._lock:
            failed, self._calls = self._calls, set()
            self._empty()
        TURNS.disinherit({*failed})
        if self._refusal is None:  # else it may be what ended the last calls of the process
            logger.error("an engine failed, and ended all its calls", exc_info=defect)
        for call in failed:
            with suppress(BaseException):  # whatever its code does about it
                call.break_off(defect)
            error = LadeError(
                f"a defect of lade's ended this call ({in_one_line(defect)}), and all that ran "
                "beside it; new ones are taken; please report it"
            )
            error.__cause__ = defect
            if not call.future.done():
                call.future.set_exception(error)

    def _admit(self) -> None:
        """Begin calls that there is room for."""
        while (call := self._next()) is not None:
            self._waiting.remove(call)
            is_answered = call.future.done() and not call.future.cancelled()  # by somebody else
            if not is_answered and call.future.set_running_or_notify_cancel():
                call.begin()
                self._held[call.owner] += call.num_tokens
                self._running.append(call)
                self._ready.append(call)
            else:
                self._forget(call)

    def _next(self) -> "EngineCall | None":
        """Return the next call that fits, and count its tokens for the calls that it passes."""
        num_places, most = self.num_places, self._max_tokens
        if len(self._running) >= num_places:
            return None
        of_owners = Counter(call.owner for call in self._running)
        num_taken, num_passed, passed = self._held.total(), 0, list[EngineCall]()
        for call in sorted(self._waiting, key=lambda each: self._held[each.owner]):
            if call.owner and 1 < num_places <= of_owners[call.owner] + 1:
                continue
            fits = most is None or max(num_taken, num_passed) + call.num_tokens <= most
            if fits or call.future.cancelled():
                for each in passed:
                    each.num_passed += call.num_tokens
                return call
            passed.append(call)
            num_passed = max(num_passed, call.num_passed)
        return None

    def _advance(self) -> None:
        """Have calls run until all need a forward, and run it."""
        while self._ready:
            self._resume(self._ready.popleft())
        if not self._asking and not self._room:
            self._room = self.piece
        while self._later and self._room:
            call = min(self._later, key=lambda each: each.num_left - each.num_before)
            self._later.remove(call)
            self._resume(call)
        if self._asking:
            self._forward()

    def _resume(self, call: "EngineCall") -> None:
        """Have a call run until it needs a forward or ends, with its own random state."""
        if not call.go_on():
            return
        self._running.remove(call)
        self._held -= Counter({call.owner: call.num_tokens})  # which drops who holds none
        self._waiting.sort(key=lambda each: each.owner == call.owner)  # behind all others
        call.finish()
        self._forget(call)

    def _forget(self, call: "EngineCall") -> None:
        with self._lock:
            self._calls.discard(call)

    def _forward(self) -> None:
        """Run the forward pass that the calls ask for, and learn how long prompts take."""
        calls, self._asking = self._asking, []
        begin = perf_counter()
        with self._forwarding:
            try:
                results = self.forwards([part for call in calls for part in call.asked])
            except BaseException as failure:  # each call ends by it
                results = [failure for call in calls for _ in call.asked]
        for call in calls:
            call.results = [results.pop(0) for _ in call.asked]
        self._ready += calls
        num, sec = self._num_allotted, perf_counter() - begin
        if num >= max(_LEAST_PIECE, self.piece // 2):  # of fewer, the rest takes most of it
            self._costs.record(num, sec)
            if self._costs.is_known:
                most = self._costs.largest_within(_SAFE * self._stall_sec)
                self.piece = max(_LEAST_PIECE, most)
        self._room = self.piece
        self._num_allotted = 0

    # --- what follows runs in a call's coroutine ----------------------------------------------

    def ask(self, call: "EngineCall") -> None:
        """Run what a call asks for, together with those of the other calls."""
        self._wait_in(self._asking, call)

    def wait_for_room(self, call: "EngineCall") -> None:
        """Wait for a step that has room for a piece of a prompt."""
        self._wait_in(self._later, call)

    def _wait_in(self, waiting: list["EngineCall"], call: "EngineCall") -> None:
        waiting.append(call)
        with torch.inference_mode(False):  # others, who go on, may be in another mode
            parent = getcurrent().parent
            assert parent is not None
            parent.switch()

    def allot(self, num_tokens: int) -> int:
        """Take room in the next forward for as many tokens; return how many there was room for."""
        num = min(num_tokens, self._room or self.piece)
        left = self._room - num
        self._room = 0 if left < _LEAST_PIECE else left
        self._num_allotted += num
        for call in self._later:
            call.num_before += num
        return num


class EngineFuture(Future[Any]):
    """What comes of a call of an engine."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine | None = None  # once it has the call

    def begin_anew(self, engine: Engine) -> None:
        """Know of no result, and of nobody who waits for one, in a forked child."""
        self.__init__()  # type: ignore[misc]
        self.engine = engine

    def add_done_callback(self, fn: Callable[[Self], object]) -> None:
        """Call a function with this once there is a result; what it raises is logged."""
        super().add_done_callback(partial(_tell, fn))

    def result(self, timeout: float | None = None) -> Any:
        """Wait for what the call returns, and return it.

        Raises:
            BaseException: what the call raised.
            LadeError: the engine's own thread would wait for ever.
        """
        with self.waiting(timeout):
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for what the call raises, and return it; None if it returns something.

        Raises:
            LadeError: the engine's own thread would wait for ever.
        """
        with self.waiting(timeout):
            return super().exception(timeout)

    @contextmanager
    def waiting(self, timeout: float | None = None) -> Iterator[None]:
        """Wait for something of the call, unless that would be for ever."""
        if self.engine is not None and self.engine.is_here and not self.done() and timeout is None:
            raise LadeError(_IN_ITS_OWN_THREAD)
        with aside():
            yield


def _tell(function: Callable[[Any], object], answer: Any) -> None:
    """Call a function with an answer; no error of it ends the engine's thread."""
    try:
        function(answer)
    except Exception:
        raise  # which `Future` logs
    except BaseException:
        if answer.engine is None or not answer.engine.is_here:
            raise
        logger.exception("exception calling callback for %r", answer)


@dataclass(eq=False)
class EngineCall:
    """A call of an engine, as its targets see it."""

    engine: Engine
    function: Callable[[], Any]
    num_tokens: int  # this and what follows is as for `Engine.submit`
    owner: str
    future: EngineFuture
    interrupt: BaseException | None = None  # what to raise in it where it waits
    num_passed: int = 0  # tokens of later calls that began before it
    #: Tokens of its prompt that wait for room, and of others' prompts that went before meanwhile.
    num_left: int = 0
    num_before: int = 0
    asked: Sequence[Any] = ()  # parts of a forward
    results: Sequence[Any] = ()  # what came of them
    draws_on: bool = False  # from the random state of the process, which goes on from its own
    states: list[torch.Tensor] | None = None  # those of generators, while others run
    num_turns: int | None = None  # that others had had when it last went aside
    context: Context = field(default_factory=copy_context)  # of the caller that submits it
    coroutine: Any = None  # once it has begun
    result: Any = None
    failure: BaseException | None = None

    def begin(self) -> None:
        """Make the coroutine, which belongs to the thread that does."""
        self.coroutine = _Coroutine(self._run)
        self.coroutine.call = self
        self.coroutine.gr_context = self.context

    def go_on(self) -> bool:
        """Run until it needs a forward or ends; return whether it has ended."""
        device = self.engine.device
        TURNS.take(device, self.states)
        try:
            if self.interrupt is None or not self.coroutine:  # which has not begun
                self.coroutine.switch()
            else:
                self.coroutine.throw(self.interrupt)
        finally:
            self.states = TURNS.leave(device, self if self.coroutine.dead else None)
        return bool(self.coroutine.dead)

    def break_off(self, defect: BaseException) -> None:
        """Have it clean up where it waits."""
        self.interrupt = defect
        if self.coroutine:  # which is true while it waits
            self.go_on()

    def _run(self) -> None:
        try:
            if self.interrupt is not None:
                raise self.interrupt
            if self.draws_on and not TURNS.inherits(self):
                torch.manual_seed(secrets.randbits(63))
            self.result = self.function()
        except BaseException as failure:  # raised again by the future
            self.failure = failure

    def finish(self) -> None:
        """Tell what came of it, once it has ended."""
        if self.future.done():  # somebody else has said so
            return
        if self.failure is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.failure)

    def go_aside(self) -> None:
        """Leave the turn to others."""
        self.states, self.num_turns = TURNS.lend(self.engine.device)

    def come_back(self) -> None:
        """Take the turn again."""
        TURNS.take(self.engine.device, self.states, self.num_turns)

    def run(self, parts: Sequence[Any]) -> list[Any]:
        """Run parts of a forward, together with those of the other calls.

        Returns:
            The output of each part.

        Raises:
            BaseException: what one of them raised.
        """
        self.engine.is_joint = True
        self.asked = parts
        self.engine.ask(self)
        results, self.asked, self.results = self.results, (), ()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [*results]

    def allot(self, num_tokens: int) -> int:
        """Wait for a step that has room for a prompt; return how many of its tokens run then."""
        self.num_left = num_tokens
        self.engine.wait_for_room(self)
        return self.engine.allot(num_tokens)

    @property
    def has_company(self) -> bool:
        """Whether other calls run, too; a forward may then have waited for them."""
        return self.engine.num_running > 1

    @property
    def price(self) -> float | None:
        """Tokens that a draft token must add to be worth its cost; None for a call alone."""
        return self.engine.forwards.price if self.has_company else None

    @property
    def piece(self) -> int:
        """Number of tokens of a prompt to run in one piece."""
        return self.engine.piece


class _Coroutine(greenlet):
    """A coroutine that knows its call. Threads that inherit contexts are none."""

    call: EngineCall


def current_call() -> EngineCall | None:
    """Return the engine's call that code runs for; None where no engine runs it."""
    here = getcurrent()
    return here.call if isinstance(here, _Coroutine) else None


@contextmanager
def aside() -> Iterator[None]:
    """Let calls of other engines have turns while a call runs code of the user's, or waits.

    Raises:
        BaseException: what interrupts the call.
    """
    call = current_call()
    if call is not None and call.interrupt is not None:
        raise call.interrupt
    if call is None or not TURNS.is_held_here:
        yield
        return
    call.go_aside()
    try:
        yield
    finally:
        call.come_back()


@contextmanager
def at_turn() -> Iterator[EngineCall | None]:
    """Have a turn also where the call that code runs for, if there is one, is aside."""
    call = current_call()
    if call is None or TURNS.is_held_here:
        yield call
        return
    call.come_back()
    try:
        yield call
    finally:
        call.go_aside()


def is_in_event_loop() -> bool:
    """Return whether a loop of asyncio runs in this thread: no coroutine may leave it meanwhile."""
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return False
