"""Methods beside processes that keep cores busy: few machines are quiet.

Next file: `rivals.py`.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from subprocess import Popen
from typing import Any

import torch

from lade.apps.bench.methods import Answer, Method, by_lade, plain
from lade.errors import UserError


@contextmanager
def beside_busy(num_cores: int) -> Iterator[dict[str, Callable[[], Method]]]:
    """Start a process a core that keeps it busy; give methods that let some of them run meanwhile.

    Loads are no busy process, one, and one a core; with torch's number of threads, and with one.
    Each call of lade has a new pool, so that none gains by those before it.
    """
    if not hasattr(signal, "SIGSTOP"):
        raise UserError("--busy stops processes by signals that this system does not have")
    made = [Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_cores)]

    def beside(method: Method, threads: int, num_busy: int) -> Callable[[], Method]:
        def answer(*given: Any) -> Answer:
            torch.set_num_threads(threads)
            for number, each in enumerate(made):
                each.send_signal(signal.SIGCONT if number < num_busy else signal.SIGSTOP)
            return method(*given)

        return lambda: answer

    usual, methods = torch.get_num_threads(), dict[str, Callable[[], Method]]()
    alone: dict[str, Method] = {"plain": plain, "lade": by_lade()}
    for name, method in alone.items():
        for threads, busy in product(dict.fromkeys((usual, 1)), dict.fromkeys((0, 1, num_cores))):
            loads = [f"{busy} busy"] * (busy > 0) + ["one thread"] * (threads < usual)
            methods[", ".join([name, *loads])] = beside(method, threads, busy)
    try:
        yield methods
    finally:
        torch.set_num_threads(usual)
        for each in made:
            each.kill()
            each.wait()
