"""A real model for comparison: plain `generate` and lade on prompts, greedy and sampled.

Next file: `work.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from lade.bench.baselines import Answer
from lade.bench.gpu.stage import NO_TIME, Stage
from lade.bench.prompts import Prompt
from lade.bench.report import LOOPS, OVERALL, groups
from lade.bench.run import Result, run_methods, summarise, warm_up_methods
from lade.bench.settings import Settings
from lade.compat import attention_of
from lade.errors import MissingExtraError, ModelFetchError
from lade.models.loading import LoadedModel
from lade.probing.report import probe

_METHODS = ("plain", "lade")
_TEMPERATURES = (0.0, 0.7)


class _TimeIsUpError(Exception):
    """Signal that ends a run between two answers."""


def measure_real(
    load: Callable[[], LoadedModel], prompts: Sequence[Prompt], max_new_tokens: int, stage: Stage
) -> None:
    """Load a model and answer prompts with it; if it cannot be fetched, note why.

    Args:
        load: returns the model, on the device to measure.
        prompts: the prompts to answer.
        max_new_tokens: maximum length of an answer.
        stage: receives a row per decoding and method; answers that end in a loop get rows apart.
    """
    with stage.part("all", ModelFetchError, MissingExtraError):
        loaded = load()
        for temperature in _TEMPERATURES:
            settings = Settings(max_new_tokens, temperature)
            if stage.may_begin(settings.describe()):
                _measure(loaded, prompts, settings, stage)


def _measure(
    loaded: LoadedModel, prompts: Sequence[Prompt], settings: Settings, stage: Stage
) -> None:
    results: list[Result] = []

    def check(name: str, answer: Answer) -> None:
        if not stage.has_time:
            raise _TimeIsUpError

    try:
        warm_up_methods(loaded, _METHODS, settings)
        run_methods(loaded, prompts, _METHODS, settings, results=results, on_answer=check)
    except _TimeIsUpError:
        missing = len(prompts) - len(results)
        if missing:
            stage.leave_out(f"{settings.describe()}, {missing} of {len(prompts)} prompts", NO_TIME)
    finally:
        stage.add(*_rows(loaded, results, settings))


def _rows(
    loaded: LoadedModel, results: Sequence[Result], settings: Settings
) -> list[dict[str, Any]]:
    by_name = groups(results)
    if not by_name:
        return []
    found = probe(loaded.model)
    used = {
        "plain": {"attention": attention_of(loaded.model), "execution": "eager"},
        # As chosen; where steps could not be recorded after all, the stage has a warning.
        "lade": {
            "verification": found.verification,
            "attention": found.attention,
            "execution": found.execution,
        },
    }
    return [
        {
            "decoding": settings.describe(),
            "answers": name,
            "method": method,
            **summarise(by_name[name], method)._asdict(),
            **used[method],
        }
        for name in (OVERALL, LOOPS)
        if name in by_name
        for method in _METHODS
    ]
