"""Fit a pool's first weights: decode live once, and let new pools learn from that again and again.

Nothing is fitted but by the pool's own learning (`ngram_pool/_kernels.py`), at higher rates and
over several passes: by turns with a pool that is kept from prompt to prompt and with a new one for
each, with a prewarmed table as a layer, if there is one, and without.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.environment import environment
from benchmarks.prompts import Chosen
from benchmarks.report import progress_bar, show
from lade.apps.bench.methods import by_lade
from lade.apps.bench.prompts import Prompt
from lade.apps.cli.bench import describe_model
from lade.apps.cli.generate import encode_prompts
from lade.apps.cli.loading import console
from lade.config import Config
from lade.drafting.sources import PoolDrafter
from lade.drafting.successors import Successors
from lade.drafting.tables import table_for
from lade.models.loading import LoadedModel
from lade.models.settings import Settings
from lade.stats import ends_in_loop
from ngram_pool import NGramPool, _kernels

_MAX_DRAFT_TOKENS = 7  # of the steps that are learned from
# Rates of the passes. Pools themselves learn at 0.003.
RATES = (0.02, 0.014, 0.01, 0.007, 0.005, 0.0035, 0.0025)


class Harvested(NamedTuple):
    """Nodes of one step and what the target found likely after them."""

    committed: Sequence[int]  # the last tokens up to the first node
    token_ids: Sequence[int]
    parents: Sequence[int]
    successors: Successors


class Lesson(NamedTuple):
    """All that a drafter received of one prompt and its answer, in order."""

    prompt_ids: list[int]
    given: list[list[int] | Harvested]  # committed tokens, or what was harvested


class LessonRecorder(PoolDrafter):
    """A drafter that keeps all that it receives."""

    def __init__(self, pool: NGramPool, layers: Sequence[NGramPool]) -> None:
        super().__init__(pool, layers=layers)
        self.lessons: list[Lesson] = []

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a lesson."""
        self.lessons.append(Lesson([*prompt_ids], []))
        return super().open(prompt_ids)

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Keep committed tokens, and feed them."""
        self.lessons[-1].given.append([*token_ids])
        super().observe(sequence, token_ids)

    def harvest(
        self,
        sequence: int,
        committed: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        successors: Successors,
    ) -> None:
        """Keep what was harvested, and feed it."""
        nodes = [*token_ids], [*parents]
        self.lessons[-1].given.append(Harvested([*committed[-2:]], *nodes, successors))
        super().harvest(sequence, committed, token_ids, parents, successors)


def record_lessons(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    settings: Settings,
    config: Config,
    layers: Sequence[NGramPool],
    *,
    lessons: list[Lesson],
    on_answer: Callable[[], None] = lambda: None,
) -> None:
    """Answer prompts with new pools, appending to `lessons` all but answers that end in loops."""
    texts = [prompt.text for prompt in prompts]
    for inputs in encode_prompts(loaded, texts, settings.max_new_tokens):
        drafter = LessonRecorder(NGramPool(seed=0), layers)
        method = by_lade(config, drafter=drafter)
        answer = method(loaded.model, inputs, settings.options())
        if not ends_in_loop(answer.rows[0]):
            lessons.append(drafter.lessons[-1])
        on_answer()


def fit(
    lessons: Sequence[Lesson],
    weights: NDArray[np.float64],
    layers: Sequence[NGramPool],
    rates: Sequence[float] = RATES,
) -> NDArray[np.float64]:
    """Return weights after some passes over the lessons, each at its own rate."""
    weights = weights.copy()
    for rate in rates:
        for some in ((), layers) if layers else ((),):
            kept = learner(weights, rate)
            for lesson in lessons:
                for pool in (kept, learner(weights, rate)):
                    teach(PoolDrafter(pool, layers=some), lesson)
    return weights


def learner(weights: NDArray[np.float64], rate: float) -> NGramPool:
    """Return a new pool that moves these very weights, at this rate.

    Pools have no such options: fitting is the only use for them.
    """
    pool = NGramPool(seed=0)
    pool._weights, pool._learning_rate = weights, rate
    return pool


def teach(drafter: PoolDrafter, lesson: Lesson) -> None:
    """Tell a drafter all of a lesson."""
    sequence = drafter.open(lesson.prompt_ids)
    for given in lesson.given:
        if isinstance(given, Harvested):
            drafter.harvest(sequence, *given)
        else:
            drafter.observe(sequence, given)
    drafter.close(sequence)


def crude_weights() -> NDArray[np.float64]:
    """Return weights that nothing was fitted to, the same for all contexts.

    A token of the text alone gets the text's probability; other sources count a third of that.
    """
    weights = np.zeros((_kernels.NUM_WEIGHT_ROWS, _kernels.NUM_WEIGHTS))
    of_matches = weights[: _kernels.ORIGIN_ROW]
    of_matches[:, : _kernels.LENGTH] = 0.3
    of_matches[:, _kernels.TEXT] = of_matches[:, _kernels.SILENCE : _kernels.BIAS] = 1.0
    of_matches[:, _kernels.BIAS] = _kernels.LEAST_LOG_PROB
    return weights


def as_source(weights: NDArray[np.float64]) -> str:
    """Return weights in hundredths, as lines of `ngram_pool/weights.py`; layers' are not fitted."""
    rows = np.round(100 * weights[: _kernels.LAYER_ROW]).astype(int).tolist()
    return "\n".join(f"    ({', '.join(map(str, row))})," for row in rows)


def run(loaded: LoadedModel, chosen: Chosen, settings: Settings, file: Path | None) -> None:
    """Answer the prompts, fit weights to what pools received meanwhile, print and write them."""
    config = Config(max_draft_tokens=_MAX_DRAFT_TOKENS)
    table = table_for(loaded.model)
    layers = () if table is None else (table.pool,)
    if table is None:
        console.print("without a table (lade prewarm), the weights of tables are not fitted")
    lessons: list[Lesson] = []
    with progress_bar() as bars:
        task = bars.add_task("answering", total=len(chosen.prompts))
        record_lessons(
            *(loaded, chosen.prompts, settings, config, layers),
            lessons=lessons,
            on_answer=lambda: bars.advance(task),
        )
    with console.status(f"learning from {len(lessons)} answers"):
        weights = fit(lessons, crude_weights(), layers)
    print(as_source(weights))
    described = {
        **describe_model(loaded),
        **asdict(settings),
        "max_draft_tokens": config.max_draft_tokens,
        "prompts": chosen.described,
        "num_answers": len(lessons),
        "num_table_contexts": None if table is None else table.pool.num_contexts,
        "rates": [*RATES],
    }
    content = {"environment": environment(), "settings": described}
    show(file, {**content, "weights": weights.round(4).tolist()})
