"""The budget beside fixed numbers of draft tokens: `budget`.

How well a process has learned what steps take is a matter of luck, so that each run is repeated in
fresh processes. In each of them, the budget answers the first few prompts before anything else.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.alone import alone
from lade.models.settings import Settings

if TYPE_CHECKING:
    from benchmarks.prompts import Chosen
    from lade.stats import WidthStats

AUTO = "auto"
_NUM_FIRST = 5  # prompts that the budget answers first, and again in its turn
_WARM_UP_TOKENS = 1  # the model is checked then, and no step is measured

#: Tokens and seconds of each number of draft tokens, for each prompt.
Times = list[dict[str, tuple[int, float]]]


class Job(NamedTuple):
    """What a process does."""

    model: str | None
    threads: int | None
    uses_kernels: bool  # whether forwards may run as jobs, or torch alone runs them
    numbers: Sequence[int]  # of draft tokens, beside the budget's own
    texts: Sequence[str]
    max_new_tokens: int
    sec: float | None  # after which no prompt is begun


class Measured(NamedTuple):
    """What came of a process."""

    first: list[tuple[int, float]]  # of the first prompts, before anything else
    times: Times
    widths: "dict[int, WidthStats]"  # what the budget chose and expected


def measure(job: Job) -> Measured:
    """Answer prompts with every number of draft tokens in turn, in this process."""
    from lade.apps.bench.methods import by_lade
    from lade.apps.cli.options import load_model
    from lade.config import Config
    from lade.models.prompts import encode
    from lade.stats import DecodeStats

    begin = perf_counter()
    loaded = load_model(job.model, device="cpu", dtype="float32", threads=job.threads)
    auto = Config(uses_kernels=job.uses_kernels)
    ways = {AUTO: by_lade(auto)}
    ways |= {str(num): by_lade(replace(auto, max_draft_tokens=num)) for num in job.numbers}
    options, stats = Settings(job.max_new_tokens).options(), DecodeStats()

    def answer(text: str, name: str, **more: Any) -> tuple[int, float]:
        inputs = encode(loaded.tokenizer, text, loaded.model.device)
        found = ways[name](loaded.model, inputs, {**options, **more})
        if name == AUTO:
            stats.add(found.stats)
        return found.num_tokens, found.sec

    answer(job.texts[0], str(job.numbers[0]), max_new_tokens=_WARM_UP_TOKENS)
    first = [answer(text, AUTO) for text in job.texts[:_NUM_FIRST]]
    names, times = [*ways], list[dict[str, tuple[int, float]]]()
    for number, text in enumerate(job.texts):
        if times and job.sec is not None and perf_counter() - begin > job.sec:
            break
        start = number % len(names)
        found = {name: answer(text, name) for name in (*names[start:], *names[:start])}
        times.append({name: found[name] for name in names})
    return Measured(first, times, stats.widths)


def summarised(found: Measured, categories: Sequence[str]) -> dict[str, Any]:
    """Return what a process found: tokens a second of each number, and what the budget is of them.

    Args:
        found: of the process.
        categories: of the prompts.
    """
    rates = _rates(found.times)
    best = max((name for name in rates if name != AUTO), key=rates.__getitem__)
    of_categories = {}
    for category in dict.fromkeys(categories[: len(found.times)]):
        mine = [each for each, of in zip(found.times, categories, strict=False) if of == category]
        of_best = _rates(mine)
        of_categories[category] = of_best[AUTO] / of_best[best]
    num_first = min(len(found.first), len(found.times))
    later = _rate([each[AUTO] for each in found.times[:num_first]])
    return {
        "num_prompts": len(found.times),
        "tokens_per_sec": rates,
        "best": best,
        "ratio": rates[AUTO] / rates[best],
        "ratio_of_categories": of_categories,
        "ratio_of_first": _rate(found.first[:num_first]) / later,
        "widths": {
            str(width): {"num_steps": each.num_steps, "tokens_per_sec": each.tokens_per_sec}
            for width, each in found.widths.items()
        },
    }


def _rates(times: Times) -> dict[str, float]:
    return {name: _rate([each[name] for each in times]) for name in times[0]}


def _rate(answers: Sequence[tuple[int, float]]) -> float:
    return sum(num for num, _ in answers) / sum(sec for _, sec in answers)


def run(
    model: str | None,
    chosen: "Chosen",
    job: Mapping[str, Any],
    num_processes: int,
    minutes: float | None,
    file: Path | None,
) -> None:
    """Measure in fresh processes, by jobs and by torch alone; print and write what was found.

    Args:
        model: as for `lade bench`.
        chosen: the prompts.
        job: fields of `Job` that all processes share.
        num_processes: of each way.
        minutes: that all processes may take together; None for all prompts.
        file: where results go.
    """
    from benchmarks.environment import environment
    from benchmarks.report import Keeping, progress_bar, sheet, show

    ways = {"float32, a job": True, "float32, torch alone": False}
    texts = [prompt.text for prompt in chosen.prompts]
    categories = [prompt.category for prompt in chosen.prompts]
    sec = None if minutes is None else 60 * minutes / (num_processes * len(ways))
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with Keeping(runs) as kept, progress_bar() as bars:
        task = bars.add_task("measuring", total=num_processes * len(ways))
        for _ in range(num_processes):  # in turn: a machine that slows down slows all
            for name, is_job in ways.items():
                given = Job(model=model, uses_kernels=is_job, texts=texts, sec=sec, **job)
                runs[name].append(summarised(alone(measure, given), categories))
                bars.advance(task)
    summary = {name: _medians(each) for name, each in runs.items()}
    numbers = [AUTO, *map(str, job["numbers"])]
    rows = [
        (
            *("", name, *(f"{each['tokens_per_sec'][number]:.1f}" for number in numbers)),
            *(f"{each[what]:.2f}" for what in ("ratio", "least_ratio", "least_of_categories")),
            f"{each['ratio_of_first']:.2f}",
        )
        for name, each in summary.items()
    ]
    ratios = ("of the best", "lowest", "lowest category", "first calls")
    content = {
        "environment": environment(),
        "settings": {**job, "prompts": chosen.described, "interrupted": kept.by is not None},
        "summary": summary,
        "processes": runs,
    }
    title = f"Tokens a second, medians of {num_processes} processes"
    show(file, content, sheet(title, ("", "way", *numbers, *ratios), [rows]))
    kept.end(f"stopped after {sum(map(len, runs.values()))} processes")


def _medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians over processes, and the lowest ratios."""
    rates = runs[0]["tokens_per_sec"]
    of_categories = [ratio for each in runs for ratio in each["ratio_of_categories"].values()]
    return {
        "num_processes": len(runs),
        "tokens_per_sec": {name: median(r["tokens_per_sec"][name] for r in runs) for name in rates},
        "ratio": median(each["ratio"] for each in runs),
        "least_ratio": min(each["ratio"] for each in runs),
        "least_of_categories": min(of_categories),
        "ratio_of_first": median(each["ratio_of_first"] for each in runs),
    }
