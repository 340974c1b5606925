"""The methods under comparison, all decoding with the same model.

Next file: `run.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

from lade.bench.baselines import (
    BASELINES,
    Answer,
    DraftModels,
    Method,
    MethodInfo,
    answer_of,
)
from lade.bench.device import wait_for
from lade.bench.rivals.catalogue import RIVALS, Rival
from lade.config import SPECULATING, Config, Lookahead, Verification
from lade.drafters import AssistantModel, CallPool, FirstLayers, Merged
from lade.drafting.drafter import CallDrafter, Drafter
from lade.drafting.pool_drafter import PoolDrafter
from lade.hf.doors import generate
from lade.stats import Step
from ngram_pool import NGramPool


class Lade:
    """`lade.generate`; given pools or a drafter are kept, else each call gets a new pool."""

    def __init__(
        self,
        config: Config | None,
        pool: NGramPool | Sequence[NGramPool] | None = None,
        on_step: Callable[[Step], None] | None = None,
        drafter: Drafter | CallDrafter | None = None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._drafter = drafter
        self._on_step = on_step

    def __call__(self, model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Answer:
        """Answer the rows of `inputs`."""
        start = perf_counter()
        output = generate(
            model,
            **inputs,
            pool=self._pool,
            drafter=self._drafter,
            config=self._config,
            on_step=self._on_step,
            return_dict_in_generate=True,
            **options,
        )
        wait_for(model.device)
        sec = perf_counter() - start
        return answer_of(model, inputs, output, sec)


class Pools(NamedTuple):
    """Pools given to a run, beside those that its methods make."""

    read: Sequence[NGramPool] = ()  # by methods that read pools, besides their own
    own: NGramPool | None = None  # of the method that keeps one; else a new one


def make_method(
    name: str,
    config: Config | None,
    pools: Pools | None = None,
    models: DraftModels | None = None,
) -> Method:
    """Return a method by name, for one pass."""
    info, pools = METHODS[name], pools or Pools()
    if info.make_assisted is not None:
        return info.make_assisted(config, models or DraftModels())
    if not (info.keeps_pool or info.reads_pools):
        return info.make(config)
    own = NGramPool(seed=0) if pools.own is None else pools.own
    return Lade(
        config,
        [*([own] if info.keeps_pool else []), *(pools.read if info.reads_pools else [])],
    )


def _verifying_by(verification: Verification) -> MethodInfo:
    return MethodInfo(
        lambda config: Lade(
            replace(config or Config(), verification=verification), NGramPool(seed=0)
        ),
        f"as lade, drafts verified by {verification}",
        verification=verification,
        is_default=False,
    )


def _drafting_as(rival: Rival) -> MethodInfo:
    """Return a rival's method: its own window, and its own budget unless one is set."""

    def make(config: Config | None) -> Lade:
        config = config or Config()
        asked = config.max_draft_tokens
        budget = rival.max_draft_tokens if asked is None else asked
        config = replace(config, max_draft_tokens=budget, lookahead=rival.lookahead)
        return Lade(config, drafter=rival.make_drafter())

    return MethodInfo(
        make,
        f"{rival.description}; {rival.max_draft_tokens} draft tokens, or max_draft_tokens",
        # A window needs the model.
        drafter=None if rival.lookahead else lambda prewarmed: rival.make_drafter(),
        is_default=False,
    )


def _assistant(models: DraftModels) -> CallDrafter:
    return AssistantModel(
        models.assistant, models.tokenizer, target_tokenizer=models.target_tokenizer
    )


def _first_layers(models: DraftModels) -> CallDrafter:
    return FirstLayers(models.num_layers)


def _drafting_by(
    make_drafter: Callable[[DraftModels], CallDrafter], description: str, *, has_pool: bool
) -> MethodInfo:
    """Return the method of a model that drafts, alone or beside a pool for all prompts."""

    def make(config: Config | None, models: DraftModels) -> Lade:
        drafter = make_drafter(models)
        if has_pool:
            return Lade(config, NGramPool(seed=0), drafter=Merged([CallPool(), drafter]))
        return Lade(config, drafter=drafter)

    return MethodInfo(
        lambda config: make(config, DraftModels()),
        description,
        is_default=False,
        make_assisted=make,
        needs_assistant=make_drafter is _assistant,
        uses_num_layers=make_drafter is _first_layers,
    )


#: By name, in the order of tables.
METHODS: dict[str, MethodInfo] = {
    **BASELINES,
    "lade": MethodInfo(
        lambda config: Lade(config, NGramPool(seed=0)),
        "lade, one pool for all prompts of a pass",
        drafter=lambda prewarmed: PoolDrafter(NGramPool(seed=0), prewarmed=prewarmed),
        keeps_pool=True,
    ),
    "lade_fresh": MethodInfo(
        lambda config: Lade(config),
        "lade, a new and empty pool for each prompt or batch",
        drafter=lambda prewarmed: PoolDrafter(NGramPool(seed=0), prewarmed=prewarmed),
        is_fresh=True,
    ),
    "lade_pool": MethodInfo(
        lambda config: Lade(config, NGramPool(seed=0)),
        "as lade, drafting from the files of --pool as well",
        is_default=False,
        keeps_pool=True,
        reads_pools=True,
    ),
    "lade_pool_fresh": MethodInfo(
        Lade,
        "as lade_fresh, drafting from the files of --pool as well",
        is_fresh=True,
        is_default=False,
        reads_pools=True,
    ),
    "lade_untabled": MethodInfo(
        lambda config: Lade(replace(config or Config(), uses_table=False), NGramPool(seed=0)),
        "as lade, without the table that lade prewarm made",
        drafter=lambda prewarmed: PoolDrafter(NGramPool(seed=0)),
        is_default=False,
    ),
    "lade_stable": MethodInfo(
        lambda config: Lade(replace(config or Config(), stable_text=True), NGramPool(seed=0)),
        "as lade, with text that does not depend on the pool, even in half precision",
        drafter=lambda prewarmed: PoolDrafter(NGramPool(seed=0), prewarmed=prewarmed),
        is_default=False,
    ),
    "lade_lookahead": MethodInfo(
        lambda config: Lade(replace(config or Config(), lookahead=Lookahead()), NGramPool(seed=0)),
        "as lade, with a lookahead window of W=7, N=5 in every forward",
        is_default=False,
    ),
    "pool": MethodInfo(
        lambda config: Lade(config, NGramPool(seed=0)),
        "lade by its name beside other drafters: one pool for all prompts of a pass",
        is_default=False,
    ),
    "assistant": _drafting_by(_assistant, "lade, the model of --assistant drafts", has_pool=False),
    "first_layers": _drafting_by(
        _first_layers, "lade, the model's own first layers draft", has_pool=False
    ),
    "pool+assistant": _drafting_by(
        _assistant, "lade, a pool and the model of --assistant draft one tree", has_pool=True
    ),
    "pool+first_layers": _drafting_by(
        _first_layers, "lade, a pool and the model's own first layers draft one tree", has_pool=True
    ),
    **{f"lade_{verification}": _verifying_by(verification) for verification in SPECULATING},
    **{name: _drafting_as(rival) for name, rival in RIVALS.items()},
}
