"""lade beside processes that keep cores busy, in fresh processes: `busy`."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.alone import alone
from lade.models.settings import Settings

if TYPE_CHECKING:
    from benchmarks.prompts import Chosen

_AS_STORED = "as stored"


def measure(
    model: str | None, dtype: str | None, chosen: "Chosen", max_new_tokens: int
) -> dict[str, float]:
    """Return tokens a second of each load and number of threads, in this process."""
    from lade.apps.bench.busy import beside_busy
    from lade.apps.bench.run import contest, summarise, warm_up
    from lade.apps.cli.options import load_model
    from lade.machine.threads import num_cores
    from lade.models.prompts import encode

    loaded = load_model(model, device="cpu", dtype=dtype)
    settings = Settings(max_new_tokens)
    with beside_busy(num_cores()) as made:
        methods = {
            name: make
            for name, make in made.items()
            if not (name.startswith("plain") and "one thread" in name)
        }
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
