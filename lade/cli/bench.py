"""`lade bench`: run measurements with a progress bar and print their tables."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lade.bench.settings import Settings
from lade.cli.loading import console
from lade.cli.prompting import check_prompts
from lade.config import Config
from lade.models.loading import LoadedModel

if TYPE_CHECKING:
    from lade.bench.baselines import DraftModels
    from lade.bench.prompts import PromptFile
    from lade.bench.run import Result
    from lade.bench.tables import Sheet


def choose_methods(
    text: str | None, settings: Settings, has_pools: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Return the methods to run, and those left out with the reasons.

    Args:
        text: a comma-separated list; None for all default methods that support `settings`.
        settings: some methods support neither batches nor several sequences per prompt.
        has_pools: whether there are pools to read; methods that do are then run by default.

    Raises:
        ValueError: a method is unknown, named twice, or does not support `settings`.
    """
    from lade.bench.methods import METHODS

    reason = "transformers runs it on one prompt and for one sequence at a time"
    unable = {
        name: reason
        for name, info in METHODS.items()
        if info.is_single_row and not settings.has_one_row
    }
    if text is None:
        names = [
            name
            for name, info in METHODS.items()
            if info.is_default or (has_pools and info.reads_pools)
        ]
        left_out = {name: unable[name] for name in names if name in unable}
        return [name for name in names if name not in unable], left_out
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names or len(set(names)) < len(names):
        known = ", ".join(METHODS)
        raise ValueError(f"expected --methods to be different ones of {known}, got {text!r}")
    for name in names:
        if name in unable:
            raise ValueError(
                f"expected --methods without {name} for {settings.describe()}: {reason}"
            )
        if METHODS[name].reads_pools and not has_pools:
            raise ValueError(f"expected --methods without {name}, as no pool is given to read")
    if has_pools and not any(METHODS[name].reads_pools for name in names):
        raise ValueError(
            f"expected lade_pool or lade_pool_fresh in --methods, to read --pool; got {text!r}"
        )
    return names, {}


def check_who_saves(methods: Sequence[str], num_passes: int, keep: bool) -> None:
    """Raise unless it is one pool that `--save-pool` goes on with and saves."""
    from lade.bench.methods import METHODS

    savers = [name for name in methods if METHODS[name].keeps_pool]
    if len(savers) != 1:
        raise ValueError(
            "expected lade or lade_pool in --methods with --save-pool, to save what it learns; "
            f"got {' and '.join(savers) or 'neither'}"
        )
    if num_passes > 1 and not keep:
        raise ValueError(
            f"expected --keep with --save-pool and {num_passes} passes, which else begin anew"
        )


def run(
    loaded: LoadedModel,
    chosen: "PromptFile",
    methods: list[str],
    left_out: dict[str, str],
    settings: Settings,
    num_passes: int,
    keep: bool,
    config: Config,
    pool_paths: Sequence[Path],
    save_path: Path | None,
    files: "ResultFiles",
    models: "DraftModels | None" = None,
    assistant: str | None = None,
) -> None:
    """Run methods over prompts; print and write the results, even after an interruption."""
    from lade.bench.baselines import BASELINES
    from lade.bench.batches import in_batches
    from lade.bench.methods import METHODS, Pools
    from lade.bench.plots import plot_speedups
    from lade.bench.report import as_json, source_table, table, time_table
    from lade.bench.run import run_methods, warm_up_methods
    from lade.bench.utilisation import why_no_device_share
    from lade.cli.pool import open_pools
    from lade.probing.report import probe

    prompts = chosen.prompts
    check_prompts(loaded, [prompt.text for prompt in prompts], settings.max_new_tokens)
    left_out = left_out | warm_up_methods(loaded, methods, settings, config, models)
    methods = [name for name in methods if name not in left_out]
    target = None
    if any(name not in BASELINES and METHODS[name].verification is None for name in methods):
        target = config.verification or probe(loaded.model, num_rows=settings.num_rows).verification
    num_calls = len(in_batches(prompts, settings.batch_size)) * num_passes
    results: list[Result] = []
    stopped_by: BaseException | None = None
    num_read = 0
    try:
        with open_pools(loaded, pool_paths, save_path) as (own, *read), progress_bar() as bars:
            num_read = sum(map(len, read))
            task = bars.add_task("answering", total=num_calls * len(methods))
            run_methods(
                loaded,
                prompts,
                methods,
                settings,
                num_passes=num_passes,
                keep=keep,
                config=config,
                pools=Pools(read, None if save_path is None else own),
                models=models,
                results=results,
                on_answer=lambda name, answer: bars.advance(task),
            )
    except BaseException as error:  # still show and write what was measured so far
        stopped_by = error
    if stopped_by is not None and not results:
        raise stopped_by
    num_done = len(results)
    results = _of_whole_passes(results, num_calls // num_passes)
    described: dict[str, Any] = {
        **describe_model(loaded),
        **asdict(settings),
        "prompts": describe_prompts(chosen),
        "methods": {name: METHODS[name].description for name in methods},
        "left_out": left_out,
        "assistant": assistant,
        "first_layers": None if models is None else models.num_layers,
        "passes": num_passes,
        "keep": keep,
        "pools": {"names": [path.name for path in pool_paths], "num_tokens": num_read},
        "interrupted": stopped_by is not None,
        "config": asdict(config),
        "verification": target,  # lade's, for methods that fix none; else None
    }
    notes = [f"{name} is left out: {reason}" for name, reason in left_out.items()]
    if target is not None:
        notes.append(f"verification: {target}")
    sheet = table(results, methods, settings, "\n".join(notes) or None, keep=keep)
    why_not = why_no_device_share(loaded.model.device)
    sheets = [sheet, time_table(results, methods, why_not)]
    if (sources := source_table(results, methods)) is not None:
        sheets.append(sources)
    for each in sheets:
        print_sheet(each)
    if stopped_by is not None:
        unit = "prompts" if settings.batch_size == 1 else "batches"
        rest = "" if len(results) == num_done else "; the unfinished pass is left out"
        console.print(f"stopped after {num_done} of {num_calls} {unit}{rest}")
    content = as_json(results, methods, described)
    files.write(content, *sheets)
    if files.plot is not None and "plain" in methods:
        say_written(plot_speedups(files.plot, "speedup", content["summary"]))
    if stopped_by is not None:
        raise stopped_by


def describe_model(loaded: LoadedModel) -> dict[str, Any]:
    """Return what result files say of a model and how it is run."""
    import torch

    return {
        "model": Path(loaded.name).name,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": str(loaded.model.device),
        "threads": torch.get_num_threads(),
    }


def describe_prompts(chosen: "PromptFile") -> dict[str, Any]:
    """Return what result files say of their prompts, whose texts they do not hold."""
    from lade.bench.report import prompts_fingerprint

    path, limit, half, prompts = chosen
    return {**prompts_fingerprint(path), "limit": limit, "half": half, "num": len(prompts)}


def _of_whole_passes(results: "list[Result]", num_batches: int) -> "list[Result]":
    """Drop an unfinished pass, unless it is the only one.

    Passes are compared with each other; medians over different prompts would mislead.
    """
    return results[: len(results) // num_batches * num_batches] or results


def show(paths: list[Path], files: "ResultFiles") -> None:
    """Print result files as one table and plot each."""
    from lade.bench.plots import plot_speedups
    from lade.bench.report import table_of_files

    sheet = table_of_files(paths)
    print_sheet(sheet)
    files.write({}, sheet)
    if files.plot is not None:
        for path in paths:
            summary = json.loads(path.read_text(encoding="utf-8"))["summary"]
            say_written(plot_speedups(files.plot, path.stem, summary))


@dataclass(frozen=True)
class ResultFiles:
    """Where to write results besides the terminal; all are optional."""

    json: Path | None = None
    markdown: Path | None = None
    plot: Path | None = None  # a folder

    def check(self) -> None:
        """Raise now, before any work is done, if the results could not be written later."""
        for path in (self.json, self.markdown):
            check_writable(path)
        if self.plot is not None:
            from lade.bench.plots import check_folder

            check_folder(self.plot)

    def write(self, content: dict[str, Any], *sheets: "Sheet") -> None:
        """Write the JSON and the tables as Markdown, where asked for; plots are drawn elsewhere."""
        write_result(self.json, content)
        if self.markdown is not None:
            text = "\n".join(sheet.as_markdown() for sheet in sheets)
            self.markdown.write_text(text, encoding="utf-8")
            say_written([self.markdown])


def print_sheet(sheet: "Sheet") -> None:
    """Print a table uncropped; lines may wrap on a narrow terminal."""
    Console(highlight=False).print(sheet, crop=False)


def progress_bar() -> Progress:
    """Return a progress bar with a count and the time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)


def write_result(json_path: Path | None, content: dict[str, Any]) -> None:
    """Write a result file if a path is given, and say so."""
    from lade.bench.report import write_json

    if json_path is not None:
        write_json(json_path, content)
        say_written([json_path])


def say_written(paths: Sequence[Path]) -> None:
    """Print where results were written."""
    for path in paths:
        console.print(f"[dim]written to {path}[/dim]")


def check_writable(json_path: Path | None) -> None:
    """Raise now, before any work is done, if a result file could not be written later."""
    if json_path is not None:
        with json_path.open("a", encoding="utf-8"):
            pass


def run_pool(max_tokens: int, max_draft_tokens: int, json_path: Path | None) -> None:
    """Time pools of 10^4, 10^5, … tokens, up to `max_tokens`."""
    from lade.bench.environment import environment
    from lade.bench.pool import PoolTiming, as_json, time_pool
    from lade.bench.tables import Sheet

    check_writable(json_path)
    time_pool(10_000, max_draft_tokens)  # compiles
    sizes = [10**power for power in range(4, 10) if 10**power <= max_tokens]
    timings: list[PoolTiming] = []
    stopped_by: BaseException | None = None
    try:
        for size in sizes:
            with console.status(f"filling a pool with {size:,} tokens"):
                timings.append(time_pool(size, max_draft_tokens))
    except BaseException as error:  # still show and write what was timed so far
        if not timings:
            raise
        stopped_by = error
    title = f"NGramPool, full, one core, up to {max_draft_tokens} draft tokens; times in µs"
    headings = (
        *("tokens held", "prompt/token", "observe 3 tokens", "draft median", "draft p95"),
        *("step median", "step p95", "draft tokens", "bytes/token", "save, ms", "load, ms"),
    )
    rows = [
        [f"{timing.num_tokens:,}", *(f"{value:.2f}" for value in timing[1:])] for timing in timings
    ]
    caption = (
        "prompt: observing a long one. step: all of a decoding step but the forward. load: of the "
        "saved file, with the first draft."
    )
    print_sheet(Sheet(title, headings, 1, [rows], caption))
    if stopped_by is not None:
        console.print(f"stopped after {len(timings)} of {len(sizes)} sizes")
    settings = {"max_draft_tokens": max_draft_tokens, "interrupted": stopped_by is not None}
    content = {"environment": environment(), "settings": settings}
    write_result(json_path, {**content, "timings": as_json(timings)})
    if stopped_by is not None:
        raise stopped_by


def run_pool_threads(max_threads: int, max_draft_tokens: int, json_path: Path | None) -> None:
    """Let 1, 4, 16, … threads share a pool, up to `max_threads`."""
    from lade.bench.environment import environment
    from lade.bench.pool import as_json
    from lade.bench.pool_threads import time_threads
    from lade.bench.tables import Sheet

    check_writable(json_path)
    time_threads(1, max_draft_tokens)  # compiles
    timings = []
    for num_threads in [4**power for power in range(8) if 4**power <= max_threads]:
        with console.status(f"decoding in {num_threads} threads"):
            timings.append(time_threads(num_threads, max_draft_tokens))
    title = f"One NGramPool for all threads, up to {max_draft_tokens} draft tokens; times in µs"
    headings = (
        *("threads", "steps/s", "draft median", "draft p99", "write median", "write p99"),
        *("longest call", "longest draft alone, times threads", "lost tokens"),
    )
    alone_us = timings[0].longest_draft_us
    rows = [
        [
            *(f"{each.num_threads}", f"{each.steps_per_sec:,.0f}"),
            *(f"{value:,.0f}" for value in each[2:7]),
            *(f"{alone_us * each.num_threads:,.0f}", f"{each.num_lost}"),
        ]
        for each in timings
    ]
    caption = "A step drafts, harvests 9 nodes and observes 3 tokens; no pause between steps."
    print_sheet(Sheet(title, headings, 1, [rows], caption))
    settings = {"max_draft_tokens": max_draft_tokens}
    content = {"environment": environment(), "settings": settings}
    write_result(json_path, {**content, "timings": as_json(timings)})


def run_pool_requests(max_requests: int, max_draft_tokens: int, json_path: Path | None) -> None:
    """Draft for 1, 4, 16, … requests in a step, up to `max_requests`."""
    from lade.bench.environment import environment
    from lade.bench.pool import as_json
    from lade.bench.pool_requests import RequestTiming, time_requests
    from lade.bench.tables import Sheet

    check_writable(json_path)
    time_requests(1, "all", max_draft_tokens)  # compiles
    timings: list[RequestTiming] = []
    for num_requests in [4**power for power in range(8) if 4**power <= max_requests]:
        with console.status(f"drafting for {num_requests} requests"):
            timings += [
                time_requests(num_requests, sharing, max_draft_tokens, least)
                for sharing in ("none", "all")
                for least in (None, 0.0)
            ]
    title = f"A step of an engine's proposer, one core, up to {max_draft_tokens} tokens a request"
    headings = (
        *("requests", "sharing", "min_probability", "step median, ms", "step p95, ms"),
        "draft tokens/request",
    )
    rows = [
        [
            *(f"{each.num_requests}", each.sharing, f"{each.min_probability:g}"),
            *(f"{value:.2f}" for value in each[3:]),
        ]
        for each in timings
    ]
    caption = (
        "A step finds each request by its text, observes 3 tokens of each, and drafts. Processor "
        "time."
    )
    print_sheet(Sheet(title, headings, 1, [rows], caption))
    settings = {"max_draft_tokens": max_draft_tokens}
    content = {"environment": environment(), "settings": settings}
    write_result(json_path, {**content, "timings": as_json(timings)})
