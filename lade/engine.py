"""Many calls of one model at once: coroutines of one thread, whose forwards run together.

A call runs until it needs a forward; once all others need one, too, these run as one. So it is
decoded by the same code whether it is alone or not, may begin and end whenever it likes, and has a
random state of its own, as if nobody else drew. The coroutines are greenlets: nothing between a
call and its forwards needs to know of them.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch
from greenlet import getcurrent, greenlet

from lade.budget.seconds import Seconds
from lade.captures import put_back, random_states
from lade.openmp import release_workers

_Result = TypeVar("_Result")

#: The call that code runs for.
_current: ContextVar["EngineCall | None"] = ContextVar("lade_call", default=None)

_FIRST_PIECE = 128  # tokens of a prompt
_LEAST_PIECE = 16
_SAFE = 0.8  # share of the time to plan for: the next tokens may see many more, and take longer


class Together(Protocol):
    """Runs parts of a forward."""

    why_not: str | None  # parts of several calls do not run together any more
    price: float | None  # tokens that a draft token must add for all calls to gain by it, if known

    def __call__(self, parts: Sequence[Any], /) -> list[Any]:
        """Run parts; return for each its output, or the exception that it raised."""


class Engine:
    """Runs calls of one model in a thread of its own, which lives while there are any.

    Of those that wait, calls of whoever holds fewest tokens are next, and among equals of the one
    who had some longest ago; one owner leaves a place to others. Calls that fit pass those that
    wait for more, but each only by as many tokens as there are, so that its turn comes.

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
        self._device = device
        self._max_calls, self._max_tokens = max_calls, max_tokens
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._arrived: list[EngineCall] = []  # under the lock, as is the thread
        self._waiting: list[EngineCall] = []  # in order of turns among owners that hold as much
        self._running: list[EngineCall] = []
        self._held: Counter[str] = Counter()  # tokens, by owner
        self._ready = deque[EngineCall]()
        self._asking: list[EngineCall] = []
        self._later: list[EngineCall] = []  # those that want to run a piece of a prompt
        #: Whether a call was found whose forwards may run together with others.
        self.is_joint = False
        #: Tokens of prompts that run between two steps, or with one, by the time that they take.
        self.piece = _FIRST_PIECE
        self._room = self.piece  # what is left of these until the next forward
        self._num_allotted = 0  # of these, the tokens that the next forward has
        self._stall_sec = stall_sec
        self._costs = Seconds()  # of forwards with pieces of prompts, by the tokens of these

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

    def submit(
        self,
        function: Callable[[], Any],
        num_tokens: int = 0,
        owner: str = "",
        future: Future[Any] | None = None,
    ) -> "EngineCall":
        """Call a function that generates as soon as there is room for it.

        Args:
            function: whatever it runs besides forwards of lade's, others wait for.
            num_tokens: that prompt and answer may come to have.
            owner: whose it is.
            future: of what it returns; None for a new one.
        """
        most = self._max_tokens
        num_tokens = num_tokens if most is None else min(num_tokens, most)
        call = EngineCall(self, function, num_tokens, owner, future or Future())
        with self._lock:
            self._arrived.append(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lade-engine", daemon=True)
                self._thread.start()
        return call

    def run(self, function: Callable[[], _Result], num_tokens: int = 0) -> _Result:
        """Call a function as `submit` does, and wait; within a call of the engine, call it there.

        An interrupt ends the call before its next step.
        """
        here = current_call()
        if here is not None and here.engine is self:
            return function()
        call = self.submit(function, num_tokens)
        try:
            result: _Result = call.future.result()
        except BaseException as interrupt:
            if not call.future.done() and not call.future.cancel():
                call.interrupt = interrupt
                wait([call.future])
            raise
        return result

    def wait(self, sec: float | None = None) -> None:
        """Wait until all calls have ended, but not longer than so many seconds."""
        thread = self._thread
        if thread is not None:
            thread.join(sec)

    # --- what follows runs in the engine's thread ---------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_in():
                self._admit()
                self._advance()
        except BaseException as failure:  # a defect; nobody shall wait for ever
            with self._lock:
                left = [*self._arrived, *self._waiting, *self._running]
                self._arrived, self._waiting, self._running = [], [], []
                self._thread = None
            for call in left:
                if not call.future.done():
                    call.future.set_exception(failure)
            raise
        finally:
            release_workers()

    def _take_in(self) -> bool:
        """Let those wait that have arrived; return whether there is anything to do."""
        with self._lock:
            self._waiting += self._arrived
            self._arrived = []  # not cleared: others may count it
            if self._waiting or self._running:
                return True
            self._thread = None
            return False

    def _admit(self) -> None:
        """Begin calls that there is room for."""
        while (call := self._next()) is not None:
            self._waiting.remove(call)
            if call.future.set_running_or_notify_cancel():
                call.begin()
                self._held[call.owner] += call.num_tokens
                self._running.append(call)
                self._ready.append(call)

    def _next(self) -> "EngineCall | None":
        """Return the next call that there is room for; those that it passes by take note."""
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
        outside = random_states(self._device)
        if call.states is not None:
            put_back(self._device, call.states)
        is_over = call.go_on()
        call.states = random_states(self._device)
        put_back(self._device, outside)
        if is_over:
            self._running.remove(call)
            self._held -= Counter({call.owner: call.num_tokens})  # which drops who holds none
            self._waiting.sort(key=lambda each: each.owner == call.owner)  # behind all others
            call.finish()

    def _forward(self) -> None:
        """Run what all ask for, theirs are the next turns; learn how long prompts take."""
        calls, self._asking = self._asking, []
        begin = perf_counter()
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


@dataclass(eq=False)
class EngineCall:
    """A call of an engine, as its targets see it."""

    engine: Engine
    function: Callable[[], Any]
    num_tokens: int  # this and what follows is as for `Engine.submit`
    owner: str
    future: Future[Any]
    interrupt: BaseException | None = None  # what to raise in it where it waits
    num_passed: int = 0  # tokens of later calls that began before it
    #: Tokens of its prompt that wait for room, and of others' prompts that went before meanwhile.
    num_left: int = 0
    num_before: int = 0
    asked: Sequence[Any] = ()  # parts of a forward
    results: Sequence[Any] = ()  # what came of them
    states: list[torch.Tensor] | None = None  # those of generators, while others run
    context: Context = field(default_factory=copy_context)  # of whoever submits it
    result: Any = None
    failure: BaseException | None = None

    def begin(self) -> None:
        """Make the coroutine, which belongs to the thread that does."""
        self._coroutine = greenlet(self._run)
        self._coroutine.gr_context = self.context

    def go_on(self) -> bool:
        """Run until it needs a forward or ends; return whether it has ended."""
        if self.interrupt is None:
            self._coroutine.switch()
        else:
            self._coroutine.throw(self.interrupt)
        return bool(self._coroutine.dead)

    def _run(self) -> None:
        _current.set(self)
        try:
            self.result = self.function()
        except BaseException as failure:  # raised again by the future
            self.failure = failure

    def finish(self) -> None:
        """Tell what came of it, once it has ended."""
        if self.failure is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.failure)

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


def current_call() -> EngineCall | None:
    """Return the engine's call that code runs for; None where no engine runs it."""
    return _current.get()
