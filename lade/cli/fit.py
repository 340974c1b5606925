"""`lade bench fit`: fit the first weights of pools, and print them as source code."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lade.bench.settings import Settings
from lade.cli.bench import describe_model, describe_prompts, progress_bar, write_result
from lade.cli.loading import console
from lade.cli.prompting import check_prompts
from lade.config import Config
from lade.models.loading import LoadedModel

if TYPE_CHECKING:
    from lade.bench.prompts import PromptFile


def run(
    loaded: LoadedModel,
    chosen: "PromptFile",
    settings: Settings,
    config: Config,
    json_path: Path | None,
) -> None:
    """Answer the prompts, fit weights to what pools were told meanwhile, print and write them."""
    from lade.bench.environment import environment
    from lade.bench.fit import (
        RATES,
        Lesson,
        as_source,
        crude_weights,
        fit,
        record_lessons,
    )
    from lade.prewarming.tables import table_for

    check_prompts(loaded, [prompt.text for prompt in chosen.prompts], settings.max_new_tokens)
    prewarmed = table_for(loaded.model)
    if prewarmed is None:
        console.print("without a table (lade prewarm), the weights of tables are not fitted")
    lessons: list[Lesson] = []
    with progress_bar() as bars:
        task = bars.add_task("answering", total=len(chosen.prompts))
        record_lessons(
            loaded,
            chosen.prompts,
            settings,
            config,
            prewarmed,
            lessons=lessons,
            on_answer=lambda: bars.advance(task),
        )
    with console.status(f"learning from {len(lessons)} answers"):
        weights = fit(lessons, crude_weights(), prewarmed)
    print(as_source(weights))
    described: dict[str, Any] = {
        **describe_model(loaded),
        **asdict(settings),
        "max_draft_tokens": config.max_draft_tokens,
        "prompts": describe_prompts(chosen),
        "num_answers": len(lessons),
        "num_table_contexts": None if prewarmed is None else len(prewarmed),
        "rates": [*RATES],
    }
    content = {"environment": environment(), "settings": described}
    write_result(json_path, {**content, "weights": weights.round(4).tolist()})
