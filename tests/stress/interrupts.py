"""Calls that are interrupted, between functions and by signals, or made by several threads."""

import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import lade
import ngram_pool
from tests.stress import uses
from tests.stress.uses import USES, Use
from tests.stress.whole import answers, damage, state_of

# Packages, and the functions that calls are given.
_INTERRUPTED = (
    *(str(Path(str(package.__file__)).parent) for package in (lade, ngram_pool)),
    str(uses.__file__),
)
_MOST_TOLD = 50
_SWITCH_SEC = 1e-5  # between threads, for races to be likely


@dataclass
class Result:
    """What became of many calls."""

    calls: int = 0
    interrupted: int = 0  # others were over by then
    swallowed: int = 0  # interrupts that Python gave to nobody, as in a `__del__`
    raised: int = 0  # other errors than the interrupt
    wrong: int = 0  # answers that are not those of plain decoding
    left: int = 0  # what was not whole
    grad_left_off: int = 0  # how often torch's own `no_grad` was interrupted half-way
    told: list[str] = field(default_factory=list)  # of each finding, where

    def tell(self, where: str, found: Iterable[str]) -> None:
        """Note what was found behind one interrupt."""
        for what in found:
            kind = "raised" if "raised" in what else "wrong" if "answer" in what else "left"
            setattr(self, kind, getattr(self, kind) + 1)
            result = f"{where}: {what}"
            if result not in self.told and len(self.told) < _MOST_TOLD:
                self.told.append(result)


# --- in this thread -----------------------------------------------------------------------------

#: Lets something interrupt a call in its middle; tells where, or None where it was over by then.
Interrupt = Callable[[Use], str | None]


def _interrupt_each(
    num_calls: int, names: Iterable[str], interrupt_in: Callable[[Use], Interrupt], result: Result
) -> None:
    """Interrupt calls of each use in turn, and look after each at what is left and at two more."""
    names = [*names]
    for place, name in enumerate(names):
        use = USES[name]()
        before, interrupt = state_of(use), interrupt_in(use)
        for _ in range(num_calls * place // len(names), num_calls * (place + 1) // len(names)):
            result.calls += 1
            where = interrupt(use)
            result.interrupted += where is not None
            if not torch.is_grad_enabled():  # torch's own Python, which plain `generate` runs too
                torch.set_grad_enabled(True)
                result.grad_left_off += 1
            found = damage(use, before)
            found += answers(use) or answers(use)
            if found:
                result.tell(f"{where} in {name!r}", found)
                use = USES[name]()
                before = state_of(use)


def interrupt_between(num_calls: int, names: Iterable[str] = tuple(USES), seed: int = 0) -> Result:
    """Raise where a function of lade, of the pool or of the caller begins; kernels are whole."""
    result, rng = Result(), random.Random(seed)

    def interrupt_in(use: Use) -> Interrupt:
        num_begun = _begun(use, 0)[0]
        return lambda use: _begun(use, rng.randint(1, num_begun))[1]

    with _counting_swallowed(result):
        _interrupt_each(num_calls, names, interrupt_in, result)
    return result


def _begun(use: Use, nth: int) -> tuple[int, str | None]:
    """Call, raising where the nth function begins; return how many began, and the last of them."""
    num, where = 0, None

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal num, where
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(_INTERRUPTED)
            and code.co_name != "__del__"
        ):
            num += 1
            if num == nth:
                where = f"{Path(code.co_filename).name}:{code.co_name}"
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        use.call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(before)
    return num, where


def interrupt_by_signals(
    num_calls: int, names: Iterable[str] = tuple(USES), seed: int = 0
) -> Result:
    """Let a signal interrupt each of many calls at a random moment, as Ctrl-C does.

    To be called in the main thread.
    """
    result, rng = Result(), random.Random(seed)
    is_armed = False

    def raise_once(number: int, frame: FrameType | None) -> None:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            signal.default_int_handler(number, frame)

    def interrupt_in(use: Use) -> Interrupt:
        start = time.perf_counter()
        use.call()
        sec = time.perf_counter() - start

        def interrupt(use: Use) -> str | None:
            nonlocal is_armed
            where = None
            try:
                is_armed = True
                signal.setitimer(signal.ITIMER_REAL, max(1e-5, rng.random() * sec))
                use.call()
                is_armed = False
            except KeyboardInterrupt:
                where = "a call"
            is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            return where

        return interrupt

    handler = signal.signal(signal.SIGALRM, raise_once)
    try:
        with _counting_swallowed(result):
            _interrupt_each(num_calls, names, interrupt_in, result)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    return result


@contextmanager
def _counting_swallowed(result: Result) -> Iterator[None]:
    """Count interrupts that Python could raise in nobody's face."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            result.swallowed += 1
        else:
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


# --- from several threads -------------------------------------------------------------------------


def call_from_threads(name: str, num_calls: int, num_threads: int) -> Result:
    """Let threads that share a model and a pool call at once."""
    result, lock, use = Result(calls=num_calls), threading.Lock(), USES[name]()
    before = state_of(use)

    def work(place: int) -> None:
        for _ in range(place, num_calls, num_threads):
            found = answers(use)
            with lock:
                result.tell("a thread", found)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SEC)
    try:
        threads = [threading.Thread(target=work, args=(place,)) for place in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    result.tell(f"threads in {name!r}", damage(use, before))
    return result
