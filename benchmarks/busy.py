"""lade beside processes that keep cores busy, in fresh processes: `busy`."""

import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from subprocess import Popen
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.alone import alone
from lade.apps.bench.methods import Answer, Method, by_lade, plain
from lade.models.settings import Settings

if TYPE_CHECKING:
    from benchmarks.prompts import Chosen

_AS_STORED = "as stored"


@contextmanager
def beside_busy(num_cores: int) -> Iterator[dict[str, Callable[[], Method]]]:
    """Start a process a core that keeps it busy; give methods that let some of them run meanwhile.

    Loads are no busy process, one, and one a core; lade also has them with one thread. Each call of
    lade has a new pool, so that none gains by those before it.
    """
    made = [Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_cores)]

    def beside(method: Method, threads: int, num_busy: int) -> Callable[[], Method]:
        def answer(*given: Any) -> Answer:
            torch.set_num_threads(threads)
            for number, each in enumerate(made):
                each.send_signal(signal.SIGCONT if number < num_busy else signal.SIGSTOP)
            return method(*given)

        return lambda: answer

    usual, methods = torch.get_num_threads(), dict[str, Callable[[], Method]]()
    ways = [("plain", plain, usual), ("lade", by_lade(), usual)]
    ways += [("lade", by_lade(), 1)] * (usual > 1)
    for name, method, threads in ways:
        for busy in dict.fromkeys((0, 1, num_cores)):
            loads = [f"{busy} busy"] * (busy > 0) + ["one thread"] * (threads < usual)
            methods[", ".join([name, *loads])] = beside(method, threads, busy)
    try:
        yield methods
    finally:
        torch.set_num_threads(usual)
        for each in made:
            each.kill()
            each.wait()


def measure(
    model: str | None, dtype: str | None, chosen: "Chosen", max_new_tokens: int
) -> dict[str, float]:
    """Return tokens a second of each load and number of threads, in this process."""
    from lade.apps.bench.run import contest, summarise, warm_up
    from lade.apps.cli.options import load_model
    from lade.machine.threads import num_cores
    from lade.models.prompts import encode

    loaded = load_model(model, device="cpu", dtype=dtype)
    settings = Settings(max_new_tokens)
    with beside_busy(num_cores()) as methods:
        warm_up(loaded, methods, settings)
        answer = contest(loaded.model, methods, settings)
        results = [answer([each], encode(loaded.tokenizer, each.text)) for each in chosen.prompts]
    return {name: summarise(results, name).tokens_per_sec for name in methods}


def run(
    model: str | None,
    chosen: "Chosen",
    dtypes: Sequence[str],
    max_new_tokens: int,
    num_processes: int,
    file: Path | None,
) -> None:
    """Measure each dtype in fresh processes, by turns; print and write medians of processes."""
    from benchmarks.environment import environment
    from benchmarks.report import Keeping, progress_bar, sheet, show

    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    with Keeping(runs) as kept, progress_bar() as bars:
        task = bars.add_task("measuring", total=num_processes * len(dtypes))
        for _ in range(num_processes):
            for dtype in dtypes:
                given = None if dtype == _AS_STORED else dtype
                runs[dtype].append(alone(measure, model, given, chosen, max_new_tokens))
                bars.advance(task)
    summary = {
        dtype: {name: median(each[name] for each in of_dtype) for name in of_dtype[0]}
        for dtype, of_dtype in runs.items()
    }
    rows = [
        ("", name, *(f"{summary[dtype][name]:.1f}" for dtype in summary))
        for name in summary[dtypes[0]]
    ]
    settings = {"max_new_tokens": max_new_tokens, "prompts": chosen.described}
    content = {
        "environment": environment(),
        "settings": {**settings, "interrupted": kept.by is not None},
        "summary": summary,
        "processes": runs,
    }
    title = f"Tokens a second, medians of {num_processes} processes"
    show(file, content, sheet(title, ("", "load", *summary), [rows]))
    kept.end(f"stopped after {sum(map(len, runs.values()))} processes")
