"""`lade bench record`, `replay` and `project`: record answers, and replay drafters on them."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lade.bench.settings import Settings
from lade.cli.bench import (
    ResultFiles,
    describe_model,
    describe_prompts,
    print_sheet,
    progress_bar,
    say_written,
)
from lade.cli.loading import console
from lade.cli.prompting import check_prompts
from lade.models.loading import LoadedModel

if TYPE_CHECKING:
    from lade.bench.prompts import PromptFile


def record(
    loaded: LoadedModel,
    chosen: "PromptFile",
    out: Path,
    settings: Settings,
    num_successors: int,
) -> None:
    """Answer prompts and write the traces, even after an interruption."""
    from lade.bench.environment import environment
    from lade.bench.record import record as record_all
    from lade.bench.record import vocab_size_of
    from lade.bench.traces import Trace, Traces, write_traces

    prompts = chosen.prompts
    check_prompts(loaded, [prompt.text for prompt in prompts], settings.max_new_tokens)
    traces: list[Trace] = []
    stopped_by: BaseException | None = None
    with progress_bar() as bars:
        task = bars.add_task("answering", total=len(prompts))
        try:
            record_all(
                loaded,
                prompts,
                settings,
                num_successors,
                traces=traces,
                on_trace=lambda trace: bars.advance(task),
            )
        except BaseException as error:  # still write what was recorded so far
            stopped_by = error
    if stopped_by is not None and not traces:
        raise stopped_by
    described: dict[str, Any] = {
        **describe_model(loaded),
        **asdict(settings),
        "vocab_size": vocab_size_of(loaded.model),
        "num_successors": num_successors,
        "prompts": describe_prompts(chosen),
        "interrupted": stopped_by is not None,
    }
    write_traces(out, Traces(traces, described, environment()))
    if stopped_by is not None:
        console.print(f"stopped after {len(traces)} of {len(prompts)} prompts")
    num_tokens = sum(trace.num_answer_tokens for trace in traces)
    console.print(f"{len(traces)} answers, {num_tokens} tokens")
    say_written([out])
    if stopped_by is not None:
        raise stopped_by


def choose_methods(text: str | None) -> list[str]:
    """Return the methods to replay: those in a comma-separated list, or all replayable ones.

    Raises:
        ValueError: a method is unknown, named twice, or has no drafter to replay.
    """
    from lade.bench.replay import replayable

    known = replayable()
    if text is None:
        return known
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names) or not set(names) <= set(known):
        raise ValueError(
            f"expected --methods to be different ones of those that draft without a model, "
            f"{', '.join(known)}, got {text!r}"
        )
    return names


def choose_draft_sizes(text: str) -> list[int]:
    """Return the draft sizes, in draft tokens, of a comma-separated list.

    Raises:
        ValueError: a size is not a number of 1 or more, or is listed twice.
    """
    parts = [part.strip() for part in text.split(",")]
    sizes = [int(part) for part in parts if part.isdecimal()]
    if len(sizes) < len(parts) or min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise ValueError(
            f"expected --max-draft-tokens to be different numbers above 0, got {text!r}"
        )
    return sizes


def replay(
    traces_path: Path,
    methods: list[str],
    draft_sizes: list[int],
    num_passes: int,
    table_path: Path | None,
    files: ResultFiles,
) -> None:
    """Replay traces; print and write the results, even after an interruption."""
    from lade.bench.methods import METHODS
    from lade.bench.plots import plot_curves
    from lade.bench.replay import Replay
    from lade.bench.replay import replay as replay_all
    from lade.bench.replay_report import as_json, points, table
    from lade.bench.report import prompts_fingerprint
    from lade.bench.traces import read_traces
    from lade.prewarming.tables import load_table

    recorded = read_traces(traces_path)
    prewarmed = None if table_path is None else load_table(table_path, recorded.vocab_size)
    num_replays = len(methods) * len(draft_sizes) * num_passes * len(recorded.traces)
    replays: list[Replay] = []
    stopped_by: BaseException | None = None
    with progress_bar() as bars:
        task = bars.add_task("replaying", total=num_replays)
        try:
            replay_all(
                recorded,
                methods,
                draft_sizes,
                num_passes=num_passes,
                prewarmed=prewarmed,
                replays=replays,
                on_replay=lambda each: bars.advance(task),
            )
        except BaseException as error:  # still show and write what was replayed so far
            stopped_by = error
    if stopped_by is not None and not replays:
        raise stopped_by
    described = {
        "traces": {**prompts_fingerprint(traces_path), "num": len(recorded.traces)},
        "recorded": {"settings": recorded.settings, "environment": recorded.environment},
        "methods": {name: METHODS[name].description for name in methods},
        "max_draft_tokens": draft_sizes,
        "passes": num_passes,
        "num_table_contexts": None if prewarmed is None else len(prewarmed),
        "interrupted": stopped_by is not None,
    }
    measured = points(replays)
    caption = "Drafters that learn from the logits of rejected tokens do better live than here."
    sheet = table(measured, caption)
    print_sheet(sheet)
    if stopped_by is not None:
        console.print(f"stopped after {len(replays)} of {num_replays} replays")
    files.write(as_json(measured, described), sheet)
    if files.plot is not None:
        say_written(plot_curves(files.plot, "mat", measured))
    if stopped_by is not None:
        raise stopped_by
