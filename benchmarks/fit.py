"""Fit a pool's first weights: decode live once, and let new pools learn from that again and again.

First weights are fitted by the pool's own learning (`ngram_pool/_kernels.py`), at higher rates and
over several passes: by turns with a pool that is kept from prompt to prompt and with a new one for
each, with a prewarmed table as a layer, if there is one, and without. The weights of further
candidates (`RESCORING` there) are those of maximum likelihood, with new pools.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from benchmarks.environment import environment
from benchmarks.prompts import Chosen
from benchmarks.report import progress_bar, show
from lade.apps.bench.methods import Lade
from lade.apps.bench.prompts import Prompt
from lade.apps.cli.bench import describe_model
from lade.apps.cli.generate import encode_prompts
from lade.apps.cli.loading import console
from lade.config import Config
from lade.drafting.similarity import token_codes
from lade.drafting.sources import PoolDrafter
from lade.drafting.successors import Successors
from lade.models.loading import LoadedModel
from lade.models.settings import Settings
from lade.prewarming.tables import table_for
from lade.stats import ends_in_loop
from ngram_pool import NGramPool, _kernels

_MAX_DRAFT_TOKENS = 16  # of the steps that are learned from
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
    """Answer prompts with one pool, appending to `lessons` all but answers that end in loops."""
    drafter = LessonRecorder(NGramPool(seed=0), layers)
    method = Lade(config, drafter=drafter)
    texts = [prompt.text for prompt in prompts]
    for inputs in encode_prompts(loaded, texts, settings.max_new_tokens):
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


class SeenContext(NamedTuple):
    """A context of an answer: its candidates, and which of them came."""

    group: int  # the row of weights
    terms: NDArray[np.float32]  # [num_candidates, num_weights], what the weights are multiplied by
    came: int  # index of the candidate plus 1; 0 for none


def seen_contexts(lesson: Lesson, codes: NDArray[np.int8] | None) -> Iterator[SeenContext]:
    """Teach a new pool a lesson; yield each context of the answer, as it was drafted from."""
    pool = NGramPool(seed=0)
    drafter, text = PoolDrafter(pool, codes=codes), [*lesson.prompt_ids]
    sequence = drafter.open(text)
    for given in lesson.given:
        if isinstance(given, Harvested):
            drafter.harvest(sequence, *given)
            continue
        for token_id in given:
            yield _seen(pool, sequence, text, token_id)
            text.append(token_id)
        drafter.observe(sequence, given)
    drafter.close(sequence)


def _seen(pool: NGramPool, sequence: int, text: Sequence[int], came: int) -> SeenContext:
    opened, context = pool._sequence(sequence), np.array(text[: -pool.max_match - 1 : -1])
    scratch = pool._scratch.row_for(1, opened.num_texts)
    args, order = (pool._header().row, opened.row, scratch, context), pool.max_ngram_size
    num_estimated, _ = _kernels.estimate(*args, min(len(context), order), 1.0)
    found, probs, features = pool._scratch.header.arrays[1:4]
    known, odds = probs[:num_estimated].copy(), int(found[4, 2])
    num, num_further = _kernels.widen(*args, num_estimated), _kernels.NUM_FURTHER
    terms = np.zeros((num, _kernels.RESCORING.shape[1]), np.float32)
    none = max(1.0 - known.sum(), _kernels.LEAST_PROB)
    terms[:num_estimated, 0] = np.log(known.clip(_kernels.LEAST_PROB) / none)
    terms[:num_estimated, 1:3] = 1.0, none
    terms[num_estimated:, 3] = 1.0
    terms[:num_estimated, 4 : 4 + num_further] = features[:num_estimated, :num_further]
    terms[num_estimated:, 4 + num_further :] = features[num_estimated:num, :num_further]
    group = 0 if not num_estimated else 1 if odds == _kernels.KNOWN_ROW else 2
    places = np.flatnonzero(found[1, :num] == came)
    return SeenContext(group, terms, int(places[0]) + 1 if len(places) else 0)


def fit_further(lessons: Sequence[Lesson], codes: NDArray[np.int8] | None) -> NDArray[np.float64]:
    """Return the weights of further candidates, [3, num_weights]."""
    found = [each for lesson in lessons for each in seen_contexts(lesson, codes)]
    groups = ([choice for choice in found if choice.group == group] for group in range(3))
    return np.array([_likeliest(group) for group in groups])


def _likeliest(choices: Sequence[SeenContext], decay: float = 1e-3) -> NDArray[np.float64]:
    """Return weights of maximum likelihood, but near those by which candidates hardly come."""
    terms = pad_sequence([torch.from_numpy(choice.terms) for choice in choices], True)
    lengths = torch.tensor([len(choice.terms) for choice in choices])
    is_missing = torch.arange(terms.shape[1]) >= lengths[:, None]
    came = torch.tensor([choice.came for choice in choices])
    start = torch.zeros(terms.shape[2])
    start[0], start[3] = 1.0, -6.0
    weights = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        scores = (terms @ weights).masked_fill(is_missing, -torch.inf)
        scores = torch.cat([torch.zeros(len(scores), 1), scores], 1)
        value = cross_entropy(scores, came) + decay * ((weights - start) ** 2).sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weights.detach().double().numpy()


def crude_weights() -> NDArray[np.float64]:
    """Return weights that nothing was fitted to, the same for all contexts.

    A token of the text alone gets the text's probability; each table counts a third of that.
    """
    weights = np.zeros((_kernels.NUM_WEIGHT_ROWS, _kernels.NUM_WEIGHTS))
    of_matches = weights[: _kernels.ORIGIN_ROW]
    of_matches[:, : _kernels.NUM_SOURCES] = 0.3
    of_matches[:, _kernels.TEXT] = 1.0
    of_matches[:, _kernels.BIAS] = _kernels.LEAST_LOG_PROB
    return weights


def as_source(weights: NDArray[np.float64]) -> str:
    """Return weights in hundredths, as lines of source; layers' are not fitted."""
    rows = np.round(100 * weights[: _kernels.LAYER_ROW]).astype(int).tolist()
    return "\n".join(f"    ({', '.join(map(str, row))})," for row in rows)


def run(loaded: LoadedModel, chosen: Chosen, settings: Settings, file: Path | None) -> None:
    """Answer the prompts, fit weights to what pools received meanwhile, print and write them."""
    config = Config(max_draft_tokens=_MAX_DRAFT_TOKENS)
    table = table_for(loaded.model)
    layers = () if table is None else (table,)
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
        further = fit_further(lessons, token_codes(loaded.model))
    print(as_source(weights), as_source(further), sep="\n\n")
    described = {
        **describe_model(loaded),
        **asdict(settings),
        "max_draft_tokens": config.max_draft_tokens,
        "prompts": chosen.described,
        "num_answers": len(lessons),
        "num_table_contexts": None if table is None else table.num_contexts,
        "rates": [*RATES],
    }
    content = {"environment": environment(), "settings": described}
    show(file, {**content, "weights": weights.round(4).tolist(), "further": further.tolist()})
