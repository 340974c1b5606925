"""The methods of `lade bench`, all decoding with the same model.

Next file: `run.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from lade.bench.baselines import BASELINES, Answer, Given, MethodInfo, answer_of
from lade.bench.device import wait_for
from lade.config import Config
from lade.drafters import AssistantModel, CallPool, Merged
from lade.drafting.drafter import Drafter
from lade.hf.api import generate
from lade.stats import Step
from ngram_pool import NGramPool


class Lade:
    """`lade.generate`; given pools or a drafter are kept, else each call gets a new pool."""

    def __init__(
        self,
        config: Config | None,
        pool: NGramPool | Sequence[NGramPool] | None = None,
        on_step: Callable[[Step], None] | None = None,
        drafter: Drafter | None = None,
        prediction: Sequence[int] | None = None,
    ) -> None:
        self._options: dict[str, Any] = {"config": config, "pool": pool, "on_step": on_step}
        self._options |= {"drafter": drafter, "prediction": prediction}

    def __call__(self, model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Answer:
        """Answer the rows of `inputs`."""
        given = {**inputs, **self._options, **options}
        start = perf_counter()
        output = generate(model, **given, return_dict_in_generate=True)
        wait_for(model.device)
        return answer_of(model, inputs, output, perf_counter() - start)


def with_pool(given: Given) -> Lade:
    """Return lade with one pool for all prompts."""
    return Lade(given.config, own_pool(given))


def own_pool(given: Given) -> NGramPool:
    """Return the pool that a method learns into."""
    return NGramPool(seed=0) if given.own is None else given.own


def assistant_of(given: Given) -> Drafter:
    """Return the drafter of the assistant."""
    assert given.assistant is not None
    model, tokenizer, _ = given.assistant
    return AssistantModel(model, tokenizer, target_tokenizer=given.tokenizer)


def beside_pool(drafter_of: Callable[[Given], Drafter]) -> Callable[[Given], Lade]:
    """Return what makes lade with one pool for all prompts and a drafter, as one tree."""
    return lambda given: Lade(
        given.config, NGramPool(seed=0), drafter=Merged([CallPool(), drafter_of(given)])
    )


#: By name, in the order of tables.
METHODS: dict[str, MethodInfo] = {
    **BASELINES,
    "no_drafts": MethodInfo(
        lambda given: Lade(replace(given.config, max_draft_tokens=0)),
        "lade without drafts: one token a step, on a CPU with its own products",
    ),
    "lade": MethodInfo(with_pool, "lade, one pool for all prompts of a pass", keeps_pool=True),
    "lade_fresh": MethodInfo(
        lambda given: Lade(given.config), "lade, a new and empty pool for each prompt or batch"
    ),
    "lade_pool": MethodInfo(
        lambda given: Lade(given.config, [own_pool(given), *given.pools]),
        "as lade, drafting from the files of --pool as well",
        takes="pools",
        keeps_pool=True,
    ),
    "lade_pool_fresh": MethodInfo(
        lambda given: Lade(given.config, given.pools),
        "as lade_fresh, drafting from the files of --pool as well",
        takes="pools",
    ),
    "lade_prediction": MethodInfo(
        lambda given: Lade(given.config, prediction=given.prediction),
        "as lade_fresh, drafting from the text of --prediction as well",
        takes="prediction",
    ),
    "pool+assistant": MethodInfo(
        beside_pool(assistant_of),
        "lade, a pool and the model of --assistant draft one tree",
        takes="assistant",
    ),
}
