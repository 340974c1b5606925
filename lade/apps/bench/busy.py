"""How fast a model answers beside processes that keep cores busy: few machines are quiet.

Next file: `report.py`.
"""

import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from subprocess import Popen
from time import process_time
from typing import Any, NamedTuple

import torch

from lade.apps.bench.methods import Lade, Method, plain
from lade.errors import UserError

#: What is measured; each call of lade has a new pool, so that none gains by those before it.
METHODS: Mapping[str, Callable[[], Method]] = {"plain": lambda: plain, "lade": Lade}


class Load(NamedTuple):
    """How a method ran."""

    method: str
    num_threads: int
    num_busy: int  # processes beside it


class Sums(NamedTuple):
    """Sums over some answers."""

    num_tokens: int = 0
    sec: float = 0.0
    cpu_sec: float = 0.0  # of all threads

    def rates(self) -> dict[str, float]:
        """Return tokens a second, and a second of CPU time."""
        return {
            "tokens_per_sec": self.num_tokens / self.sec,
            "tokens_per_cpu_sec": self.num_tokens / max(self.cpu_sec, 1e-9),
        }


def measure(
    model: Any,
    inputs: Sequence[Any],
    options: dict[str, Any],
    num_cores: int,
    advance: Callable[[], None],
) -> dict[Load, Sums]:
    """Answer each prompt under each load; call a function after each prompt.

    Loads are no busy process, one, and one a core; with torch's number of threads, and with one.
    """
    num_threads, sums = torch.get_num_threads(), defaultdict[Load, Sums](Sums)
    with _busy(num_cores) as let_run:
        try:
            for given in inputs:
                for name, make in METHODS.items():
                    for load in _loads(name, num_threads, num_cores):
                        torch.set_num_threads(load.num_threads)
                        let_run(load.num_busy)
                        begin, (tokens, sec, cpu_sec) = process_time(), sums[load]
                        answer = make()(model, given, options)
                        cpu_sec += process_time() - begin
                        sums[load] = Sums(tokens + answer.num_tokens, sec + answer.sec, cpu_sec)
                advance()
        finally:
            torch.set_num_threads(num_threads)
    return sums


def _loads(method: str, num_threads: int, num_cores: int) -> list[Load]:
    threads, busy = dict.fromkeys((num_threads, 1)), dict.fromkeys((0, 1, num_cores))
    return [Load(method, threads_, busy_) for threads_ in threads for busy_ in busy]


@contextmanager
def _busy(num: int) -> Iterator[Callable[[int], None]]:
    """Start processes that keep a core busy each; give a function that lets so many of them run."""
    if not hasattr(signal, "SIGSTOP"):
        raise UserError("--busy stops processes by signals that this system does not have")
    made = [Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]

    def let_run(num_running: int) -> None:
        for number, each in enumerate(made):
            each.send_signal(signal.SIGCONT if number < num_running else signal.SIGSTOP)

    try:
        yield let_run
    finally:
        for each in made:
            each.kill()
            each.wait()
