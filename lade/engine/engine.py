"""Many calls of one model at once: coroutines of one thread, whose forward passes run together.

A call runs until it needs a forward pass. Once every call waits for one, all of them run as one. So
the same code decodes a call whether it is alone or not, a call may begin and end at any time, and
each has its own random state. The coroutines are greenlets: the code between a call and its forward
passes does not see them.
"""

import asyncio
import logging
import secrets
import sys
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
from lade.engine.processes import look_after
from lade.engine.turns import TURNS
from lade.errors import LadeError, in_one_line
from lade.machine.generators import put_back, random_states

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_FIRST_CHUNK = 128  # tokens of a prompt
_LEAST_CHUNK = 16
_SAFE = 0.8  # share of the time to plan for: later tokens attend to more keys, and take longer

_IN_PARENT = "this process was forked while the call ran; the parent process has its result"
_IN_ITS_OWN_THREAD = (
    "expected another thread to wait for the result: the batcher's own thread computes it; use "
    "`add_done_callback`, which does not wait"
)


class JointRunner(Protocol):
    """Runs parts of a forward pass."""

    why_not: str | None  # why parts of several calls no longer run together
    marginal_cost: float | None  # tokens that one more draft token must add to pay, if known

    def __call__(self, parts: Sequence[Any], /) -> list[Any]:
        """Run parts; return for each its output, or the exception that it raised."""


class Engine:
    """Runs calls of one model in its own thread, which lives while there are calls.

    The next call is one of the owner that holds the fewest tokens. Among equal owners, it is the
    one that has held none for the longest time. One owner never fills the batch: it leaves a slot
    for others. A call that fits may overtake calls that wait for more memory, but at most
    `max_tokens` tokens overtake each of them.

    Args:
        forwards: runs the parts that calls ask for.
        device: of the model; calls draw from its default generator.
        max_calls: maximum number of calls that run at once.
        max_tokens: maximum tokens of all running calls; a longer call runs alone. None for no
            limit.
        stall_sec: how long a prefill chunk may keep the other calls waiting, in seconds.

    Source: iteration-level scheduling, Orca (OSDI 2022).
    """

    def __init__(
        self,
        forwards: JointRunner,
        device: torch.device,
        max_calls: int,
        max_tokens: int | None,
        stall_sec: float,
    ) -> None:
        self.forwards = forwards
        self.device = device
        self._max_calls = max_calls
        self._max_tokens = sys.maxsize if max_tokens is None else max_tokens
        #: Whether a call was found whose forwards may run together with others.
        self.is_joint = False
        #: Prompt tokens that run between two steps, or with one; adapted to the time they take.
        self.prefill_chunk = _FIRST_CHUNK
        self._stall_sec = stall_sec
        self._costs = Seconds()  # of forward passes with prefill chunks, by their prompt tokens
        self._calls = set[EngineCall]()  # that have not ended; under the lock
        self.begin_anew()
        look_after(self)

    def begin_anew(self, refusal: str | None = None) -> None:
        """Reset to an engine without calls; in a forked child, the parent's calls fail.

        Args:
            refusal: why no more calls are taken; None to take calls.
        """
        self._lock = threading.Lock()
        self._forwarding = threading.Lock()  # held while a forward runs
        #: The thread that runs calls, while there are any; changed under the lock.
        self.thread: threading.Thread | None = None
        self._refusal = refusal
        left, self._calls = self._calls, set()
        self._empty()
        for call in left:
            call.future.begin_anew(self)
            call.future.set_exception(LadeError(_IN_PARENT))

    def _empty(self) -> None:
        """Hold no call."""
        self._arrived: list[EngineCall] = []  # under the lock
        self._waiting: list[EngineCall] = []  # in order, among owners that hold equally much
        self._running: list[EngineCall] = []
        self._held: Counter[str] = Counter()  # tokens, by owner
        self._ready = deque[EngineCall]()
        self.asking: list[EngineCall] = []  # that wait for a forward
        self.prefilling: list[EngineCall] = []  # that want to run a prefill chunk
        self._prefill_left = self.prefill_chunk  # prompt tokens that the next forward still takes
        self._num_reserved = 0  # prompt tokens that the next forward has

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
    def max_running(self) -> int:
        """Maximum number of calls that run at once; 1 if the model's forwards cannot be joined."""
        return self._max_calls if self.is_joint and self.forwards.why_not is None else 1

    @property
    def is_here(self) -> bool:
        """Whether the current thread is the engine's."""
        thread = self.thread
        return thread is not None and thread.ident == threading.get_ident()

    @property
    def locks(self) -> Sequence[threading.Lock]:
        """The locks that the engine's thread holds only while it runs something."""
        return self._forwarding, self._lock

    def submit(
        self,
        function: Callable[[], Any],
        num_tokens: int = 0,
        owner: str = "",
        future: "EngineFuture | None" = None,
    ) -> "EngineCall":
        """Call a function that generates, as soon as it fits.

        Args:
            function: the function. Other calls wait for all its work but lade's forward passes.
            num_tokens: maximum tokens of prompt and answer.
            owner: name of the owner of the call.
            future: gets the result; None for a new future.

        Raises:
            LadeError: the engine takes no more calls.
        """
        num_tokens = min(num_tokens, self._max_tokens)
        return self._add(EngineCall(self, function, num_tokens, owner, future or EngineFuture()))

    def _add(self, call: "EngineCall") -> "EngineCall":
        with self._lock:
            if self._refusal is not None:
                raise LadeError(f"expected an engine that takes calls: {self._refusal}")
            if self.thread is None:
                thread = threading.Thread(target=self._run, name="lade-engine", daemon=True)
                thread.start()  # or raise, and nothing has changed
                self.thread = thread
            call.future.engine = self
            self._calls.add(call)
            self._arrived.append(call)
        return call

    def run(self, function: Callable[[], _Result], num_tokens: int = 0) -> _Result:
        """Call a function as `submit` does, and wait; in the engine's thread, call it at once.

        The function continues the random state of the caller, and the caller continues that of the
        function. Of several calls at once, this holds for the first; the others draw from random
        seeds. An interrupt ends the call before its next step.
        """
        if self.is_here:
            return function()
        num_tokens = min(num_tokens, self._max_tokens)
        call = EngineCall(self, function, num_tokens, "", EngineFuture())
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
            refusal: why later calls are refused; None to accept them.
        """
        with self._lock:
            self._refusal = refusal or self._refusal
            calls = [*self._calls]
        for call in calls:
            call.interrupt = call.interrupt or CancelledError()

    def wait(self, sec: float | None = None) -> None:
        """Wait until all calls have ended, at most `sec` seconds.

        In the engine's own thread, return at once.
        """
        thread = self.thread
        if thread is not None and not self.is_here:
            with aside():
                thread.join(sec)

    # --- runs in the engine's thread ----------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_in():
                try:
                    self._admit()
                    self._advance()
                except BaseException as defect:  # no caller must wait forever
                    self._fail(defect)
        finally:
            if self.is_here:  # else it has ended in order
                self.thread = None

    def _take_in(self) -> bool:
        """Move new calls into the queue; return whether there is anything to do."""
        with self._lock:
            self._waiting += self._arrived
            self._arrived = []  # not cleared: others may count it
            if self._waiting or self._running:
                return True
            self.thread = None
            return False

    def _fail(self, defect: BaseException) -> None:
        """End all calls because of a defect of the engine; later calls find it empty."""
        with self._lock:
            failed, self._calls = self._calls, set()
            self._empty()
        TURNS.disinherit({*failed})
        if self._refusal is None:  # else it may be what ended the last calls of the process
            logger.error("an engine failed and ended all its calls", exc_info=defect)
        for call in failed:
            with suppress(BaseException):  # whatever its code does about it
                call.break_off(defect)
            error = LadeError(
                f"a bug in lade ended this call and all calls beside it ({in_one_line(defect)}); "
                "new calls are accepted; please report it"
            )
            error.__cause__ = defect
            if not call.future.done():
                call.future.set_exception(error)

    def _admit(self) -> None:
        """Begin the calls that fit."""
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
        """Return the next call that fits, and count its tokens for the calls it overtakes."""
        max_running = self.max_running
        if len(self._running) >= max_running:
            return None
        of_owners = Counter(call.owner for call in self._running)
        num_taken, num_passed, passed = self._held.total(), 0, list[EngineCall]()
        for call in sorted(self._waiting, key=lambda each: self._held[each.owner]):
            if call.owner and 1 < max_running <= of_owners[call.owner] + 1:
                continue
            fits = max(num_taken, num_passed) + call.num_tokens <= self._max_tokens
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
        if not self.asking and not self._prefill_left:
            self._prefill_left = self.prefill_chunk
        while self.prefilling and self._prefill_left:
            call = min(self.prefilling, key=lambda each: each.num_left - each.num_before)
            self.prefilling.remove(call)
            self._resume(call)
        if self.asking:
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
        calls, self.asking = self.asking, []
        begin = perf_counter()
        with self._forwarding:
            try:
                results = self.forwards([part for call in calls for part in call.asked])
            except BaseException as failure:  # each call ends by it
                results = [failure for call in calls for _ in call.asked]
        for call in calls:
            call.results = [results.pop(0) for _ in call.asked]
        self._ready += calls
        num, sec = self._num_reserved, perf_counter() - begin
        if num >= max(_LEAST_CHUNK, self.prefill_chunk // 2):  # else other work takes most of it
            self._costs.record(num, sec)
            if self._costs.is_known:
                most = self._costs.largest_within(_SAFE * self._stall_sec)
                self.prefill_chunk = max(_LEAST_CHUNK, most)
        self._prefill_left = self.prefill_chunk
        self._num_reserved = 0

    # --- runs in a call's coroutine -----------------------------------------------------------

    def suspend(self) -> None:
        """Switch from the running call, which is in a queue, to the engine until it is resumed."""
        with torch.inference_mode(False):  # the calls that run next may be in another mode
            parent = getcurrent().parent
            assert parent is not None
            parent.switch()

    def reserve(self, num_tokens: int) -> int:
        """Reserve up to `num_tokens` prompt tokens of the next forward; return how many fit."""
        num = min(num_tokens, self._prefill_left or self.prefill_chunk)
        left = self._prefill_left - num
        self._prefill_left = 0 if left < _LEAST_CHUNK else left
        self._num_reserved += num
        for call in self.prefilling:
            call.num_before += num
        return num


class EngineFuture(Future[Any]):
    """The result of an engine's call."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine | None = None  # once it has the call

    def begin_anew(self, engine: Engine) -> None:
        """Reset in a forked child: without a result, and without waiting threads."""
        self.__init__()  # type: ignore[misc]
        self.engine = engine

    def add_done_callback(self, fn: Callable[[Self], object]) -> None:
        """Call a function with this future once it has a result; errors of it are logged."""
        super().add_done_callback(partial(_call_back, fn))

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the call, and return its result.

        Raises:
            BaseException: what the call raised.
            LadeError: called in the engine's own thread, which would wait forever.
        """
        with self.waiting(timeout):
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call, and return the exception that it raised, or None.

        Raises:
            LadeError: called in the engine's own thread, which would wait forever.
        """
        with self.waiting(timeout):
            return super().exception(timeout)

    @contextmanager
    def waiting(self, timeout: float | None = None) -> Iterator[None]:
        """Allow a wait for the call, unless it would last forever."""
        if self.engine is not None and self.engine.is_here and not self.done() and timeout is None:
            raise LadeError(_IN_ITS_OWN_THREAD)
        with aside():
            yield


def _call_back(function: Callable[[Any], object], answer: Any) -> None:
    """Call a function with a future; no error of it ends the engine's thread."""
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
    num_tokens: int  # this field and the next two are as for `Engine.submit`
    owner: str
    future: EngineFuture
    interrupt: BaseException | None = None  # to raise in the call where it waits
    num_passed: int = 0  # tokens of later calls that began before it
    num_left: int = 0  # prompt tokens that wait for a forward
    num_before: int = 0  # prompt tokens of other calls that ran meanwhile
    asked: Sequence[Any] = ()  # parts of a forward
    results: Sequence[Any] = ()  # of these parts: outputs or exceptions
    draws_on: bool = False  # whether it continues the random state of the process
    states: list[torch.Tensor] | None = None  # of the generators, while other calls run
    num_turns: int | None = None  # turns taken by any call when it last went aside
    context: Context = field(default_factory=copy_context)  # of the caller that submits it
    coroutine: Any = None  # once it has begun
    result: Any = None
    failure: BaseException | None = None

    def begin(self) -> None:
        """Make the coroutine; it belongs to the current thread."""
        self.coroutine = _Coroutine(self._run)
        self.coroutine.call = self
        self.coroutine.gr_context = self.context

    def go_on(self) -> bool:
        """Run until it needs a forward or ends; return whether it has ended."""
        device = self.engine.device
        TURNS.take(device, self.states)
        try:
            if self.interrupt is None or not self.coroutine:  # not begun yet
                self.coroutine.switch()
            else:
                self.coroutine.throw(self.interrupt)
        finally:
            self.states = TURNS.leave(device, self if self.coroutine.dead else None)
        return bool(self.coroutine.dead)

    def break_off(self, defect: BaseException) -> None:
        """Raise an error in the call where it waits, so that it cleans up."""
        self.interrupt = defect
        if self.coroutine:  # true while it waits
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
        """Give the future the result or the error of the ended call."""
        if self.future.done():  # another thread has done so
            return
        if self.failure is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.failure)

    def go_aside(self) -> None:
        """Lend the turn to other calls."""
        self.states, self.num_turns = TURNS.lend(self.engine.device)

    def come_back(self) -> None:
        """Take the turn again."""
        TURNS.take(self.engine.device, self.states, self.num_turns)

    def run(self, parts: Sequence[Any]) -> list[Any]:
        """Run parts of a forward, together with the parts of other calls.

        Returns:
            The output of each part.

        Raises:
            BaseException: what one of the parts raised.
        """
        self.engine.is_joint = True
        self.asked = parts
        self.engine.asking.append(self)
        self.engine.suspend()
        results, self.asked, self.results = self.results, (), ()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [*results]

    def reserve(self, num_tokens: int) -> int:
        """Wait until a forward can take prompt tokens; reserve some, and return how many.

        Args:
            num_tokens: prompt tokens that have not run yet.

        Returns:
            Number of prompt tokens that the next forward must run, from 1 to `num_tokens`.
        """
        self.num_left = num_tokens
        self.engine.prefilling.append(self)
        self.engine.suspend()
        return self.engine.reserve(num_tokens)

    @property
    def has_batch_mates(self) -> bool:
        """Whether other calls run, too; a forward may then have waited for them."""
        return self.engine.num_running > 1

    @property
    def marginal_cost(self) -> float | None:
        """Expected tokens that a draft token must add to pay; None for a call alone."""
        return self.engine.forwards.marginal_cost if self.has_batch_mates else None


class _Coroutine(greenlet):
    """A coroutine that knows its call."""

    call: EngineCall


def current_call() -> EngineCall | None:
    """Return the engine's call that runs the current code; None outside of engines."""
    here = getcurrent()
    return here.call if isinstance(here, _Coroutine) else None


@contextmanager
def aside() -> Iterator[None]:
    """Lend the turn to other engines while a call runs user code, or waits.

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
    """Take the turn again if the current call has lent it; yield the call, or None."""
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
    """Return whether an asyncio loop runs in this thread: no coroutine may leave it meanwhile."""
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return False
