"""The methods under comparison, each a way of generating with the same model.

Next file: `run.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

from lade.bench.baselines import BASELINES, Answer, MethodInfo, new_rows, synchronise
from lade.config import SPECULATING, Config, Way
from lade.hf import generate
from lade.stats import Step
from ngram_pool import NGramPool


class Lade:
    """Run `lade.generate`; a given pool lives on from call to call, else each has a new one."""

    def __init__(
        self,
        config: Config | None,
        pool: NGramPool | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._on_step = on_step

    def __call__(self, model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Answer:
        """Answer the rows of `inputs`."""
        start = perf_counter()
        output = generate(
            model,
            **inputs,
            pool=self._pool,
            config=self._config,
            on_step=self._on_step,
            return_dict_in_generate=True,
            **options,
        )
        synchronise(model)
        sec = perf_counter() - start
        stats = output.stats
        return Answer(
            new_rows(model, output.sequences, inputs["input_ids"].shape[1]),
            sec,
            stats.num_steps,
            stats.num_row_steps,
            stats.num_draft_tokens,
            stats,
        )


def _verifying_by(way: Way) -> MethodInfo:
    return MethodInfo(
        lambda config: Lade(replace(config or Config(), target=way), NGramPool()),
        f"as lade, drafts verified by {way}",
        way=way,
    )


#: By name, in the order of tables.
METHODS: dict[str, MethodInfo] = {
    **BASELINES,
    "lade": MethodInfo(
        lambda config: Lade(config, NGramPool()), "lade, one pool for all prompts of a pass"
    ),
    "lade_fresh": MethodInfo(
        lambda config: Lade(config), "lade, a new and empty pool for each prompt or batch"
    ),
    **{f"lade_{way}": _verifying_by(way) for way in SPECULATING},
}
