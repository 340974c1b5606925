"""Calls in threads of their own that take turns, and whose forwards run together.

One thread runs at a time. It hands the turn on where it needs a forward, and once all others need
one, too, these run as one. So a call is decoded by the same code whether it is alone or not, may
begin and end whenever it likes, and has a random state of its own, as if nobody else drew.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter
from typing import Any, Protocol

import torch

from lade.openmp import release_workers

#: The seat of whatever code runs in a turn.
_current: ContextVar["Seat | None"] = ContextVar("lade_seat", default=None)

_FIRST_PIECE = 128  # tokens of a prompt
_LEAST_PIECE = 16
_SAFE = 0.8  # share of the time to plan for: the next tokens may see many more, and take longer


class Together(Protocol):
    """Runs forwards of several calls."""

    #: Tokens that a draft token must add to be worth its part of a joint forward, if known.
    price: float | None

    @property
    def is_check_due(self) -> bool:
        """Whether what one of the calls asks for next runs twice."""

    def __call__(self, asked: Sequence[Any], /) -> Sequence[Any]:
        """Run what calls have asked for.

        Returns:
            For each of them the result, or the exception to raise in it.
        """


class Turns:
    """Whose turn it is among calls of one model.

    Args:
        run: runs forwards together.
        device: of the model, whose default generator calls draw from.
        stall_sec: how long a piece of a prompt may keep the others waiting.
    """

    def __init__(
        self,
        run: Together,
        device: torch.device,
        stall_sec: float = 0.5,
    ) -> None:
        self._run = run
        self._device = device
        self._thread = None
        if device.type == "cpu":
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="lade-forwards")
        self._lock = threading.Lock()
        self._holder: Seat | None = None
        self._ready = deque[Seat]()
        self._asking = deque[Seat]()
        self._later = deque[Seat]()  # those that want to run a piece of a prompt
        self._num_allotted = 0  # tokens of prompts that the next forward has
        self._num_seats = 0
        #: Whether a call was found whose forwards may run together with others.
        self.is_joint = False
        #: Tokens of prompts that run between two steps, or with one, by the time that they take.
        self.piece = _FIRST_PIECE
        self._room = self.piece  # what is left of these until the next forward
        self.stall_sec = stall_sec

    @contextmanager
    def seat(self) -> Iterator["Seat"]:
        """Take part; the code inside runs in turns, the first of which is waited for."""
        seat = Seat(self)
        seat._wait_in(self._ready)
        self._num_seats += 1
        token = _current.set(seat)
        try:
            yield seat
        finally:
            _current.reset(token)
            self._num_seats -= 1
            seat._leave()

    def close(self) -> None:
        """End the thread for forwards."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _forward(self, asked: Sequence[Any]) -> list[Any]:
        """Run forwards; on a CPU not in the main thread, whose interrupt would end all of them."""
        is_main = threading.current_thread() is threading.main_thread()
        if self._thread is None or not is_main:
            return [*self._run(asked)]
        release_workers()
        try:
            running = self._thread.submit(self._run_apart, asked)
        except RuntimeError:  # it was closed, or the interpreter ends
            return [*self._run(asked)]
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                results = [*running.result()]
            except KeyboardInterrupt as error:  # of the call that waits, not of the others
                if running.done():
                    raise
                interrupt = error
            else:
                return results if interrupt is None else [interrupt, *results[1:]]

    def _run_apart(self, asked: Sequence[Any]) -> list[Any]:
        try:
            return [*self._run(asked)]
        finally:
            release_workers()

    def _learn(self, num_tokens: int, sec: float) -> None:
        """Learn how many tokens of prompts run in the time that they may take."""
        if num_tokens >= max(_LEAST_PIECE, self.piece // 2):  # of fewer, the rest takes most of it
            self.piece = max(_LEAST_PIECE, int(_SAFE * self.stall_sec * num_tokens / sec))

    def _next(self) -> "Seat | None":
        """Return whose turn is next; the first of those that ask runs the forward of all."""
        first, second = self._asking, self._later
        if self._room:
            first, second = second, first
        for waiting in (self._ready, first, second):
            while waiting:
                seat = waiting[0] if waiting is not self._later else min(waiting, key=_length)
                waiting.remove(seat)
                if not seat._is_gone:
                    return seat
        return None


class Seat:
    """One call's place among those that take turns."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._woken = threading.Semaphore(0)
        self._states: list[torch.Tensor] | None = None  # of generators, while others have the turn
        self._begin = 0.0
        self._num_left = 0  # tokens of its prompt that wait for a turn
        self._num_before = 0  # tokens of other prompts that went before these
        self._is_gone = False  # whether an interrupt has ended its waiting
        self._asked: Any = None
        self._result: Any = None

    def run(self, asked: Any) -> Any:
        """Run a forward, together with those of the other calls.

        Returns:
            What the `run` of the turns returned for it.

        Raises:
            BaseException: what it returned for it, if that is an exception.
        """
        turns = self._turns
        self._asked = asked
        self._wait_in(turns._asking)
        if self._asked is not None:
            self._run_all()
        result, self._result = self._result, None
        if isinstance(result, BaseException):
            raise result
        return result

    def join(self) -> None:
        """Note that forwards of this call may run together with those of others."""
        self._turns.is_joint = True

    def allot(self, num_tokens: int) -> int:
        """Wait for a step that has room for a prompt; return how many of its tokens run then.

        The shortest goes first, so that none waits for longer ones; but each token of others that
        goes before a prompt counts as one of its own that has run, so that the turn of all comes.
        """
        turns = self._turns
        self._wait_for_room(num_tokens)
        num = min(num_tokens, turns._room or turns.piece)
        self._take_room(num)
        turns._num_allotted += num
        return num

    def pause(self) -> None:
        """Let others go on before a piece of a prompt is run alone, if one has run in this step."""
        turns = self._turns
        if not turns._room:
            self._wait_for_room(turns.piece)
        self._take_room(max(turns._room, turns.piece))
        self._begin = perf_counter()

    def _wait_for_room(self, num_tokens: int) -> None:
        self._num_left = num_tokens
        self._wait_in(self._turns._later)

    def _take_room(self, num_tokens: int) -> None:
        turns = self._turns
        left = turns._room - num_tokens
        turns._room = 0 if left < _LEAST_PIECE else left
        with turns._lock:
            for seat in turns._later:
                seat._num_before += num_tokens

    def end_piece(self, num_tokens: int) -> None:
        """Learn from a piece that was run alone."""
        self._turns._learn(num_tokens, perf_counter() - self._begin)

    @property
    def has_company(self) -> bool:
        """Whether other calls run, too; a forward may then have waited for them."""
        return self._turns._num_seats > 1

    @property
    def price(self) -> float | None:
        """Tokens that a draft token must add to be worth its cost; None for a call alone."""
        return self._turns._run.price if self.has_company else None

    @property
    def piece(self) -> int:
        """Number of tokens of a prompt to run in one piece."""
        return self._turns.piece

    def _run_all(self) -> None:
        """Run what all ask for; theirs are the next turns."""
        turns = self._turns
        with turns._lock:
            seats = [self, *(seat for seat in turns._asking if not seat._is_gone)]
            turns._asking.clear()
        begin = perf_counter()
        try:
            results = turns._forward([seat._asked for seat in seats])
        except BaseException as failure:  # an interrupt; each call ends by it
            results = [failure] * len(seats)
        for seat, result in zip(seats, results, strict=True):
            seat._asked, seat._result = None, result
        with turns._lock:
            turns._ready.extend(seats[1:])
            turns._learn(turns._num_allotted, perf_counter() - begin)
            room = turns.piece // 2 if turns._run.is_check_due else turns.piece
            turns._room, turns._num_allotted = room, 0

    def _wait_in(self, waiting: deque["Seat"]) -> None:
        """Hand the turn on, if it is ours, and wait until it comes again."""
        turns = self._turns
        if turns._holder is self:
            self._swap_states()
        with turns._lock:
            if turns._holder is None:
                turns._holder = self
            else:
                waiting.append(self)
                if turns._holder is self:
                    self._hand_on()
            must_wait = turns._holder is not self
        if must_wait:
            try:
                self._woken.acquire()
            except (KeyboardInterrupt, SystemExit):  # of the main thread
                with turns._lock:
                    self._is_gone = True
                    if turns._holder is self:
                        self._hand_on()
                raise
        self._swap_states()

    def _leave(self) -> None:
        if self._is_gone:
            return
        self._swap_states()
        with self._turns._lock:
            self._hand_on()

    def _hand_on(self) -> None:
        """Wake whoever is next; may be this one. The lock is held."""
        following = self._turns._holder = self._turns._next()
        if following is self:
            return
        release_workers()  # those of the next thread shall wait awake
        if following is not None:
            following._woken.release()

    def _swap_states(self) -> None:
        """Exchange the default generators' states with those kept here."""
        device = self._turns._device
        states = [torch.get_rng_state()]
        if device.type != "cpu":
            states.append(torch.get_device_module(device).get_rng_state(device))
        if self._states is not None:
            torch.set_rng_state(self._states[0])
            if device.type != "cpu":
                torch.get_device_module(device).set_rng_state(self._states[1], device)
        self._states = states


def _length(seat: Seat) -> int:
    """Return how late a prompt's turn comes."""
    return seat._num_left - seat._num_before


def current_seat() -> Seat | None:
    """Return the seat of the code that runs; None where it does not run in turns."""
    return _current.get()
