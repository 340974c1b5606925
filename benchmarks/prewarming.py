"""What a table brings after so many minutes of `lade prewarm`: `prewarming`.

The table is made in a folder of its own, and grows from one row to the next. Each row answers all
prompts with a new pool each, in turn by the budget's own numbers of draft tokens and by fixed ones,
whose accepted tokens no other work on the machine changes.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import lade
from benchmarks.environment import environment
from benchmarks.report import Keeping, progress_bar, sheet, show
from lade.apps.bench.methods import Method, by_lade
from lade.apps.cli.bench import describe_model
from lade.config import Config
from lade.drafting.sources import PoolDrafter
from lade.drafting.tables import path_of_table
from lade.models.prompts import encode
from lade.models.settings import Settings
from ngram_pool import NGramPool

if TYPE_CHECKING:
    from benchmarks.prompts import Chosen
    from lade.models.loading import LoadedModel

AUTO = "auto"
_WITHOUT = "without a table, auto"


def run(
    loaded: "LoadedModel",
    chosen: "Chosen",
    minutes: Sequence[float],
    numbers: Sequence[int],
    max_new_tokens: int,
    file: Path | None,
) -> None:
    """Measure without a table and after so many minutes in all; print and write what was found.

    Args:
        minutes: in rising order.
        numbers: fixed ones of draft tokens.
    """
    configs = {AUTO: Config()} | {str(num): Config(max_draft_tokens=num) for num in numbers}
    ways: dict[str, Method] = {name: by_lade(config) for name, config in configs.items()}
    # A drafter of the caller's uses no table. Each prompt has a new pool, as in other ways.
    ways[_WITHOUT] = lambda *given: by_lade(drafter=PoolDrafter(NGramPool()))(*given)
    inputs = [encode(loaded.tokenizer, each.text, loaded.model.device) for each in chosen.prompts]
    settings = Settings(max_new_tokens)
    options = settings.options()
    rows: list[dict[str, Any]] = []
    with Keeping(rows) as kept, TemporaryDirectory() as folder, progress_bar() as bars:
        os.environ["XDG_CACHE_HOME"] = folder  # where tables are looked for
        task = bars.add_task("measuring", total=len(minutes) + 1)
        for given in inputs[:3]:
            ways[AUTO](loaded.model, given, options)
        made, path = None, path_of_table(loaded.model)
        for total in (0.0, *minutes):
            if sec := 60 * total - (made.seconds if made else 0.0):
                made = lade.prewarm(loaded.model, sec)
            row: dict[str, Any] = {"minutes": total}
            if made is not None:
                row["num_contexts"] = made.num_contexts
                row["megabytes"] = path.stat().st_size / 10**6
            totals = {name: [0, 0, 0.0] for name in ways}  # tokens, steps, seconds
            for place, given in enumerate(inputs):
                names = [*ways]
                for name in (*names[place % len(names) :], *names[: place % len(names)]):
                    got = ways[name](loaded.model, given, options)
                    found = (got.stats.num_committed_tokens, got.stats.num_steps, got.sec)
                    totals[name] = [a + b for a, b in zip(totals[name], found, strict=True)]
            for name, (num, steps, sec) in totals.items():
                row[name] = {"mean_accepted_tokens": num / steps, "tokens_per_sec": num / sec}
            rows.append(row)
            bars.advance(task)
    content = {
        "environment": environment(),
        "settings": {
            **describe_model(loaded),
            **asdict(settings),
            "prompts": chosen.described,
            "interrupted": kept.by is not None,
        },
        "rows": rows,
    }
    headings = ("", "minutes", "MB", *(f"MAT, {name}" for name in configs), "of none")
    lines = [
        (
            *("", f"{row['minutes']:g}", f"{row.get('megabytes', 0.0):.1f}"),
            *(f"{row[name]['mean_accepted_tokens']:.3f}" for name in configs),
            f"{row[AUTO]['tokens_per_sec'] / row[_WITHOUT]['tokens_per_sec']:.2f}x",
        )
        for row in rows
    ]
    show(file, content, sheet("After so many minutes of lade prewarm", headings, [lines]))
    kept.end(f"stopped after {len(rows)} of {len(minutes) + 1} tables")
