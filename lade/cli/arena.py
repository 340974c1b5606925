"""`lade bench arena`: run the arena with a progress bar, print and write its table."""

from dataclasses import asdict
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
from lade.config import Config
from lade.models.loading import LoadedModel

if TYPE_CHECKING:
    from lade.bench.prompts import PromptFile


def choose_methods(text: str | None) -> list[str]:
    """Return the methods in a comma-separated list, or the default ones.

    Raises:
        ValueError: a method is unknown, named twice, or not one of lade's own decoding.
    """
    from lade.bench.arena import DEFAULT_METHODS, enterable

    known = enterable()
    if text is None:
        return [*DEFAULT_METHODS]
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names) or not set(names) <= set(known):
        raise ValueError(
            f"expected --methods to be different ones of {', '.join(known)}, got {text!r}"
        )
    return names


def run(
    loaded: LoadedModel,
    chosen: "PromptFile",
    methods: list[str],
    draft_sizes: list[int],
    settings: Settings,
    config: Config,
    files: ResultFiles,
) -> None:
    """Run the arena; print and write the results, even after an interruption."""
    from lade.bench.arena import Entry, run_arena, steps_by_prompt
    from lade.bench.methods import METHODS
    from lade.bench.plots import plot_curves
    from lade.bench.replay_report import as_json, points, table
    from lade.prewarming.tables import table_for
    from lade.probing.report import probe

    check_prompts(loaded, [prompt.text for prompt in chosen.prompts], settings.max_new_tokens)
    prewarmed = table_for(loaded.model)
    num_answers = len(chosen.prompts) * len(methods) * len(draft_sizes)
    entries: list[Entry] = []
    stopped_by: BaseException | None = None
    with progress_bar() as bars:
        task = bars.add_task("answering", total=num_answers)
        try:
            run_arena(
                loaded,
                chosen.prompts,
                methods,
                draft_sizes,
                settings,
                config,
                entries=entries,
                on_answer=lambda: bars.advance(task),
            )
        except BaseException as error:  # still show and write what was measured so far
            stopped_by = error
    if stopped_by is not None and not entries:
        raise stopped_by
    described: dict[str, Any] = {
        **describe_model(loaded),
        **asdict(settings),
        "prompts": describe_prompts(chosen),
        "methods": {name: METHODS[name].description for name in methods},
        "draft_sizes": draft_sizes,
        "num_table_contexts": None if prewarmed is None else len(prewarmed),
        "verification": config.verification or probe(loaded.model).verification,
        "interrupted": stopped_by is not None,
    }
    measured = points(entries)
    caption = "All methods write the texts of generate."
    sheet = table(measured, caption, "Live")
    print_sheet(sheet)
    if stopped_by is not None:
        console.print(f"stopped after {len(entries)} of {num_answers} answers")
    content = {**as_json(measured, described), "prompts": steps_by_prompt(entries)}
    files.write(content, sheet)
    if files.plot is not None:
        say_written(plot_curves(files.plot, "arena", measured))
    if stopped_by is not None:
        raise stopped_by
