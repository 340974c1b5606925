"""Processes that end, fork or are interrupted in the middle of calls: their status, and no hangs.

Most are forks of one process that has imported all there is and checked its model; each lives and
ends as a process of its own. Some are programs of their own: `python -m tests.stress.processes`.
"""

import multiprocessing
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import lade
from tests.lade.tiny import tiny_model
from tests.stress.interrupts import Result

_HANGS_SEC = 90.0  # on a busy machine a program imports for a minute
_PROGRAMS = 20  # one of so many is no fork
_IDS = torch.arange(5, 45)[None]
_SHORT: dict[str, Any] = {"do_sample": True, "max_new_tokens": 6, "eos_token_id": None}
_LONG: dict[str, Any] = {**_SHORT, "max_new_tokens": 4000}
_FOREIGN: dict[str, Any] = {**_SHORT, "max_new_tokens": 200}
_WRONG = 77  # status of a process that got a wrong answer


class Life:
    """A process with a batcher, to be ended while calls run."""

    def __init__(self, model: Any, seed: int) -> None:
        self.rng, self.model = random.Random(seed), model
        self.status = self.rng.randrange(1, 50)
        self.expected = self._answer(model.generate)
        self.config = lade.Config(verification=self.rng.choice([None, "plain"]))
        self.batcher = lade.Batcher(model, config=self.config)
        self.in_callback: Callable[[], None] | None = None  # called once
        num_calls = self.rng.randint(1, 4)
        submit = partial(self.batcher.submit, _IDS, on_step=self._on_step, **_LONG)
        self.requests = [submit() for _ in range(num_calls)]
        if self.rng.random() < 0.3:  # code that knows nothing of batchers, and so never rests
            call = partial(self.batcher.run, partial(model.generate, _IDS, **_FOREIGN))
            threading.Thread(target=call, daemon=True).start()
        next(iter(self.requests[0]))

    def _on_step(self, _: lade.Step) -> None:
        call, self.in_callback = self.in_callback, None
        if call is not None:
            call()

    def _answer(self, generate: Callable[..., Any]) -> Any:
        torch.manual_seed(3)
        return generate(_IDS, **_SHORT).tolist()

    def pause(self) -> None:
        """Let calls run for a moment."""
        time.sleep(self.rng.random() * 0.2)

    def check(self, *, is_child: bool = True) -> None:
        """End with another status if a new call has a wrong answer; a child may refuse it."""
        try:
            answer = self.batcher.submit(_IDS, seed=3, **_SHORT).result().tolist()
        except lade.LadeError as error:
            if not is_child or "forked during a forward pass" not in str(error):
                raise
        else:
            if answer != self.expected:
                os._exit(_WRONG)

    # --- ways to end: each returns or raises, or waits to be ended ------------------------------

    def exits(self) -> None:
        """Leave by `sys.exit`."""
        self.pause()

    def raises(self) -> None:
        """Leave by an error."""
        self.pause()
        raise ZeroDivisionError

    def waits(self) -> None:
        """Wait for an answer."""
        self.requests[-1].result()

    def waits_in_its_block(self) -> None:
        """Wait for an answer in the batcher's `with`."""
        with self.batcher:
            self.requests[-1].result()

    def forks(self) -> None:
        """Have a child use the batcher, leave itself and be used again."""
        self.pause()
        child = os.fork()
        if child == 0:
            self.check()
            return  # and ends as its parent does
        for request in self.requests:
            request.cancel()
        self.check(is_child=False)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != self.status:
            os._exit(_WRONG)

    def forks_a_worker(self) -> None:
        """Have a worker of multiprocessing use the batcher."""
        worker = multiprocessing.get_context("fork").Process(target=self.check)
        worker.start()
        worker.join()
        if worker.exitcode != 0:
            os._exit(_WRONG)

    def forks_in_a_callback(self) -> None:
        """Have a child of the batcher's own thread use the batcher."""
        done = threading.Event()

        def fork() -> None:
            self.forks_a_worker()
            done.set()

        self.in_callback = fork
        done.wait()


#: Ways to end, with the signal that is sent if one is, and the status; None for that of the life.
WAYS: dict[str, tuple[signal.Signals | None, int | None]] = {
    "exits": (None, None),
    "waits": (signal.SIGINT, -signal.SIGINT),
    "forks": (None, None),
    "raises": (None, 1),
    "waits_in_its_block": (signal.SIGINT, -signal.SIGINT),
    "forks_a_worker": (None, None),
    "forks_in_a_callback": (None, None),
}


def _live(model: Any, way: str, seed: int, begun: int) -> None:
    """Live and end, as the process that this is."""
    life = Life(model, seed)
    os.write(begun, bytes([life.status]))
    getattr(life, way)()
    sys.exit(life.status)


def _model() -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "max_position_embeddings": 8192,
    }
    return tiny_model("llama", dtype=torch.float32, **sizes)


def end_processes(num_processes: int, seed: int = 0) -> Result:
    """Have processes live and end in each way in turn; called by a program, not by its tests."""
    result, rng, model = Result(), random.Random(seed), _model()
    lade.generate(model, _IDS, **_SHORT)
    for number in range(num_processes):
        way = [*WAYS][number % len(WAYS)]
        sent, status = WAYS[way]
        is_program = number % _PROGRAMS == _PROGRAMS - 1
        with tempfile.TemporaryFile() as output:
            reading, begun = os.pipe()
            if is_program:
                command = [sys.executable, "-m", __name__, way, str(number), str(begun)]
                process = subprocess.Popen(
                    command, stdout=output, stderr=output, pass_fds=[begun]
                ).pid
            elif (process := os.fork()) == 0:
                for each in (1, 2):
                    os.dup2(output.fileno(), each)
                _live(model, way, number, begun)
            os.close(begun)
            said = _told(reading)
            os.close(reading)
            if sent is not None and said is not None:
                time.sleep(rng.random() * 0.2)
                os.kill(process, sent)
                result.interrupted += 1
            got = _status_of(process)
            result.calls += 1
            expected = status if status is not None else said
            if got is None or got != expected:
                output.seek(0)
                last = output.read()[-400:].decode(errors="replace")
                kind = "hangs" if got is None else "wrong answer" if got == _WRONG else "ended"
                result.tell(way, [f"{kind}: status {got}, expected {expected}: {last}"])
    return result


def _told(reading: int) -> int | None:
    """Return the byte that a process writes once its calls run; None if it never does."""
    found = os.read(reading, 1) if select.select([reading], [], [], _HANGS_SEC)[0] else b""
    return found[0] if found else None


def _status_of(process: int) -> int | None:
    """Return how a process ends; None, after ending it, if it does not."""
    deadline = time.monotonic() + _HANGS_SEC
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


if __name__ == "__main__":
    _live(_model(), sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
