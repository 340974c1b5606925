"""`lade bench`: answer prompts by every method; print and write the results."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeRemainingColumn

from lade.bench.prompts import Prompt
from lade.cli.loading import bar, console
from lade.cli.prompting import encode_prompts
from lade.models.loading import LoadedModel
from lade.models.settings import Settings

if TYPE_CHECKING:
    from lade.bench.run import Result


def compare(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    settings: Settings,
    file: Path | None,
    *,
    shows_budget: bool = False,
) -> None:
    """Run every method of `lade bench`; on request, also show what the budget chose."""
    from lade.bench.methods import METHODS
    from lade.bench.report import budget_table, groups, table
    from lade.bench.run import Contest, stats_of, summarise, warm_up
    from lade.cli.prewarm import note_missing_table
    from lade.probing.plan import probe

    inputs = encode_prompts(loaded, [each.text for each in prompts], settings.max_new_tokens)
    results: list[Result] = []
    stopped: KeyboardInterrupt | None = None
    with bar(MofNCompleteColumn(), TimeRemainingColumn()) as bars:
        task = bars.add_task("answering", total=len(inputs))
        warm_up(loaded, METHODS, settings)
        contest = Contest(loaded.model, METHODS, settings)
        try:
            for prompt, given in zip(prompts, inputs, strict=True):
                results.append(contest.answer([prompt], given))
                bars.advance(task)
        except KeyboardInterrupt as error:
            if not results:
                raise
            stopped = error
    verification = probe(loaded.model).verification
    if verification != "plain":
        note_missing_table(loaded)
    caption = f"verification: {verification}"
    made = table(results, [*METHODS], settings.describe(), caption)
    Console(highlight=False).print(made, crop=False)
    if shows_budget:
        widths = stats_of(result.answers["lade"] for result in results).widths
        Console(highlight=False).print(budget_table(widths), crop=False)
    if file is not None:
        summary = {
            group: {name: summarise(part, name)._asdict() for name in METHODS}
            for group, part in groups(results).items()
        }
        how = {**describe_model(loaded), **asdict(settings), "verification": verification}
        how["interrupted"] = stopped is not None
        _write(file, {"settings": how, "summary": summary})
    if stopped is not None:
        console.print(f"stopped after {len(results)} of {len(inputs)} prompts")
        raise stopped


def compare_busy(
    loaded: LoadedModel, prompts: Sequence[Prompt], settings: Settings, file: Path | None
) -> None:
    """Run `lade bench --busy`."""
    from lade.bench.busy import METHODS, measure
    from lade.bench.report import busy_table
    from lade.bench.run import warm_up
    from lade.machine.threads import num_cores

    inputs = encode_prompts(loaded, [each.text for each in prompts], settings.max_new_tokens)
    with bar(MofNCompleteColumn(), TimeRemainingColumn()) as bars:
        task = bars.add_task("answering", total=len(inputs))
        warm_up(loaded, METHODS, settings)
        given = loaded.model, inputs, settings.options()
        sums = measure(*given, num_cores(), lambda: bars.advance(task))
    Console(highlight=False).print(busy_table(sums, settings.describe()), crop=False)
    if file is not None:
        rows = [{**load._asdict(), **of_load.rates()} for load, of_load in sums.items()]
        _write(file, {"settings": {**describe_model(loaded), **asdict(settings)}, "loads": rows})


def _write(file: Path, results: dict[str, Any]) -> None:
    file.write_text(f"{json.dumps(results, indent=1)}\n", encoding="utf-8")
    console.print(f"[dim]written to {file}[/dim]", soft_wrap=True)


def describe_model(loaded: LoadedModel) -> dict[str, Any]:
    """Return the description of a model, and of how it runs, for results."""
    import torch

    from lade.compat import dtype_of
    from lade.forward.packed import formats_of

    return {
        "model": Path(loaded.name).name,
        "dtype": str(dtype_of(loaded.model)).removeprefix("torch."),
        **({"weights": ", ".join(formats)} if (formats := formats_of(loaded.model)) else {}),
        "device": str(loaded.model.device),
        "threads": torch.get_num_threads(),
    }
