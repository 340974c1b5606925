"""Calls that are interrupted: at every line, by signals, by exceptions from other threads."""

import ctypes
import gc
import linecache
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode

import lade
import ngram_pool
from tests.stress.uses import USES, Use
from tests.stress.whole import answers, damage, of_thread, state_of

_ROOT = Path(lade.__file__).parent.parent
_FILES = {
    str(path)
    for package in (lade, ngram_pool)
    for path in Path(str(package.__file__)).parent.rglob("*.py")
}
_MOST_TOLD = 50

Line = tuple[str, int]  # file and number


@dataclass
class Result:
    """What became of many calls.

    Attributes:
        calls: that were to be interrupted.
        interrupted: those that were; others were over by then.
        swallowed: interrupts that Python gave to nobody, as in a `__del__`.
        raised, wrong, left: what was found, counted: other errors than the interrupt, answers that
            are not those of plain decoding, and what was not whole.
        lines: of the package, at which a call was interrupted.
        grad_left_off: how often torch's own `no_grad` was interrupted half-way.
        told: of each finding, where.
    """

    calls: int = 0
    interrupted: int = 0
    swallowed: int = 0
    raised: int = 0
    wrong: int = 0
    left: int = 0
    lines: int = 0
    grad_left_off: int = 0
    told: list[str] = field(default_factory=list)

    def tell(self, where: str, found: Iterable[str]) -> None:
        """Note what was found behind one interrupt."""
        for what in found:
            if "raised" in what:
                self.raised += 1
            elif "answer" in what:
                self.wrong += 1
            else:
                self.left += 1
            result = f"{where}: {what}"
            if result not in self.told and len(self.told) < _MOST_TOLD:
                self.told.append(result)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


# --- at every line ------------------------------------------------------------------------------


@contextmanager
def _traced(trace: Callable[..., Any]) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def lines_of(use: Use) -> Counter[Line]:
    """Return the lines of the package that a call runs, and how often."""
    lines: Counter[Line] = Counter()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in _FILES:
            return None
        if event == "line":
            lines[frame.f_code.co_filename, frame.f_lineno] += 1
        return trace

    with _traced(trace):
        use.call()
    return lines


def is_interrupted(use: Use, line: Line, nth: int) -> bool:
    """Call, and raise at a line as it comes the nth time; tell whether it did."""
    left = nth

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != line[0]:
            return None
        if event == "line" and frame.f_lineno == line[1]:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    try:
        with _traced(trace):
            use.call()
    except KeyboardInterrupt:
        return True
    return False


def interrupt_lines(
    names: Iterable[str] = tuple(USES),
    answer_every: int = 1,
    later_every: int = 1,
    line_every: int = 1,
    known: set[Line] | None = None,
    seed: int = 0,
) -> Result:
    """Raise at each line that calls run, as it comes first, and at some as they come again.

    Few lines are not run in every call: what a pool holds decides, or how long steps took.

    Args:
        names: of `USES`.
        answer_every: so many interrupts are followed by one more call, whose answer is looked at.
        later_every: of so many lines one is interrupted at a later time, too.
        line_every: of so many lines one is interrupted at all; uses that come later take others.
        known: lines to leave out; those interrupted are added. None leaves out none.
        seed: decides which time.
    """
    result, rng, reached = Result(), random.Random(seed), set[Line]()
    for name in names:
        if known is not None:
            known |= reached
        use = USES[name]()
        before = state_of(use)
        lines = lines_of(use)
        new = sorted(lines.keys() - (known or ()))[::line_every]
        moments = [(line, 1) for line in new]
        again = [line for line in new if lines[line] > 1]
        moments += [(line, 2) for line in again if _is_left_there(line)]
        moments += [(line, rng.randint(2, lines[line])) for line in again[::later_every]]
        for place, (line, nth) in enumerate(moments):
            result.calls += 1
            if is_interrupted(use, line, nth):
                result.interrupted += 1
                reached.add(line)
            found = damage(use, before)
            if found or place % answer_every == 0 or place == len(moments) - 1:
                found += answers(use)
                found += [] if found else answers(use)[: answer_every == 1]
            if found:
                where = f"{Path(line[0]).relative_to(_ROOT)}:{line[1]} (time {nth}) in {name!r}"
                result.tell(where, found)
                use = USES[name]()
                _clean_thread()
                before = state_of(use)
    if known is not None:
        known |= reached
    result.lines = len(reached)
    return result


def _is_left_there(line: Line) -> bool:
    """Whether a `with` begins there, so that its second time is when it ends."""
    return linecache.getline(*line).lstrip().startswith("with ")


def _clean_thread() -> None:
    """Take away what was left in this thread, for the findings to come."""
    for _ in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        _pop_function_mode()  # type: ignore[no-untyped-call]
    for _ in _get_current_dispatch_mode_stack():
        _pop_dispatch_mode()


# --- at any moment --------------------------------------------------------------------------------


@contextmanager
def _counting_swallowed(result: Result, also: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Count interrupts that Python could raise in nobody's face."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            result.swallowed += 1
            also()
        else:
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def interrupt_by_signals(
    num_calls: int, names: Iterable[str] = tuple(USES), seed: int = 0
) -> Result:
    """Let a signal interrupt each of many calls at a random moment, as Ctrl-C does.

    To be called in the main thread.
    """
    result, rng = Result(), random.Random(seed)
    is_armed = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            signal.default_int_handler(number, frame)

    names = [*names]
    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        with _counting_swallowed(result):
            for place, name in enumerate(names):
                num = num_calls * (place + 1) // len(names) - num_calls * place // len(names)
                use = USES[name]()
                before, sec = state_of(use), _time_of(use)
                for _ in range(num):
                    result.calls += 1
                    try:
                        is_armed = True
                        signal.setitimer(signal.ITIMER_REAL, max(1e-5, rng.random() * sec))
                        use.call()
                        is_armed = False
                    except KeyboardInterrupt:
                        result.interrupted += 1
                    is_armed = False
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    _put_back_grad_mode(result)
                    found = damage(use, before)
                    found += answers(use) or answers(use)
                    if found:
                        result.tell(f"a call of {name!r}", found)
                        _clean_thread()
                        use = USES[name]()
                        before = state_of(use)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    return result


def _put_back_grad_mode(result: Result) -> None:
    """Turn gradients on again where torch was interrupted in the midst of turning them off or on.

    That is Python code of its own, which plain `generate` runs as well.
    """
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        result.grad_left_off += 1


def _time_of(use: Use) -> float:
    start = time.perf_counter()
    for _ in range(3):
        use.call()
    return (time.perf_counter() - start) / 3


# --- from other threads ---------------------------------------------------------------------------


_ROUND = 100  # exceptions, before all is looked at
_LONGEST_SEC = 20.0  # until an exception must have come
#: Those whose answers do not hang on the random state, which all threads share.
FOR_THREADS = ("tree", "chain", "fixed", "stable", "lookahead", "strings", "sparse", "first call")


class _Worker(threading.Thread):
    """Calls again and again; interrupted, it goes on.

    Attributes:
        is_ready: whether it may be interrupted.
        is_pending: whether an interrupt is on its way.
        is_ended: whether no more will come.
    """

    def __init__(self, use: Use, result: Result, lock: threading.Lock) -> None:
        super().__init__(daemon=True)
        self._use, self._result, self._lock = use, result, lock
        self.is_ready = self.is_pending = self.is_ended = False

    def run(self) -> None:
        before = of_thread()
        while True:
            try:
                self._work()
                return
            except KeyboardInterrupt:
                self.is_ready = False
            with self._lock:
                self._result.interrupted += 1
                _put_back_grad_mode(self._result)
                now = of_thread()
                self._result.tell("a thread", (f"{n} differs" for n in now if now[n] != before[n]))
                _clean_thread()
            self.is_pending = False

    def _work(self) -> None:
        """Call until no interrupt will come; a frame of its own, all of which `run` catches."""
        self.is_ready = True
        while self.is_pending or not self.is_ended:
            self._call()

    def _call(self) -> None:
        try:
            got = self._use.call()
        except Exception as error:
            with self._lock:
                self._result.tell("a thread", [f"raised {type(error).__name__}: {error}"[:300]])
            if isinstance(error.__context__, KeyboardInterrupt):
                self.is_pending = False
            return
        if got != self._use.expected:
            with self._lock:
                self._result.tell("a thread", ["an answer is wrong"])


def interrupt_threads(
    num_exceptions: int,
    names: Iterable[str] = FOR_THREADS,
    num_threads: int = 6,
    seed: int = 0,
) -> Result:
    """Raise exceptions in threads that share a model and a pool, from another thread."""
    result, rng, names = Result(), random.Random(seed), [*names]
    for place, name in enumerate(names):
        num = num_exceptions * (place + 1) // len(names) - num_exceptions * place // len(names)
        use = USES[name]()
        sec = _time_of(use)
        while num:
            before = state_of(use)
            _interrupt_round(use, min(num, _ROUND), num_threads, result, rng, sec)
            num -= min(num, _ROUND)
            found = damage(use, before)
            found += answers(use) or answers(use)
            if found:
                result.tell(f"threads in {name!r}", found)
                use = USES[name]()
    return result


def _interrupt_round(
    use: Use, num: int, num_threads: int, result: Result, rng: random.Random, sec: float
) -> None:
    lock = threading.Lock()
    workers = [_Worker(use, result, lock) for _ in range(num_threads)]

    def swallow() -> None:
        worker = threading.current_thread()
        if isinstance(worker, _Worker):
            worker.is_pending = False

    with _counting_swallowed(result, swallow):
        for worker in workers:
            worker.start()
        for _ in range(num):
            time.sleep(rng.random() * 2 * sec)  # each is interrupted about once in a call
            worker = rng.choice(workers)
            _wait_until(lambda worker=worker: worker.is_ready and not worker.is_pending)  # type: ignore[misc]
            worker.is_pending = True
            result.calls += 1
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(worker.ident or 0), ctypes.py_object(KeyboardInterrupt)
            )
        for worker in workers:
            worker.is_ended = True
        for worker in workers:
            worker.join(_LONGEST_SEC)
            worker.is_pending = False  # if it never came
            worker.join(_LONGEST_SEC)
            if worker.is_alive():
                result.tell("a thread", ["a thread hangs"])
    gc.collect()


def _wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + _LONGEST_SEC
    while not condition() and time.monotonic() < until:
        time.sleep(1e-3)
