"""Assisted generation by the options that transformers has for it.

`assistant_model` and `assistant_early_exit` become drafters beside the call's pool. How they draft
is steered by options of transformers' own: of the call, else of the assistant's generation config,
which is where transformers looks for all but `assistant_early_exit`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from transformers import GenerationConfig

from lade.compat import Model, without_compiler
from lade.drafting.drafter import Drafter
from lade.errors import UnsupportedOptionError
from lade.probing.profile import Profiles

_SCHEDULES = ("constant", "heuristic", "heuristic_transient")
_STEERING = ("num_assistant_tokens", "num_assistant_tokens_schedule")
_THRESHOLD = "assistant_confidence_threshold"
# How transformers aligns texts of two tokenizers, and what would change the text.
_REFUSED = ("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight")
# What transformers fills in where nothing was asked for.
_DEFAULTS: dict[str, Any] = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "target_lookbehind": 10,
}


class Steering(NamedTuple):
    """How far an assistant drafts, as transformers' options say; None where they do not."""

    num_tokens: int | None = None
    schedule: str | None = None
    threshold: float | None = None

    @classmethod
    def of(cls, *sources: Any) -> "Steering":
        """Return what dicts and generation configs say, the first that says anything of each.

        Raises:
            ValueError: a value is out of its range.
            UnsupportedOptionError: an option cannot be honoured.
        """
        for name in _REFUSED:
            if _first(name, sources) is not None:
                raise UnsupportedOptionError(f"lade does not support {name} beside an assistant")
        num_tokens, schedule = (_first(name, sources) for name in _STEERING)
        threshold = _first(_THRESHOLD, sources)
        if num_tokens is not None and not (num_tokens >= 1 and num_tokens == int(num_tokens)):
            raise ValueError(f"expected num_assistant_tokens of at least 1, got {num_tokens!r}")
        if schedule not in (None, *_SCHEDULES):
            known = ", ".join(map(repr, _SCHEDULES))
            raise ValueError(f"expected num_assistant_tokens_schedule of {known}, got {schedule!r}")
        if threshold is not None and not 0 <= threshold <= 1:
            raise ValueError(f"expected {_THRESHOLD} from 0 to 1, got {threshold!r}")
        return cls(None if num_tokens is None else int(num_tokens), schedule, threshold)

    def options(self) -> dict[str, Any]:
        """Return arguments of drafters that are models, for chains as transformers drafts them.

        Its defaults stand for options that are not given. Without any, lade's own decide; and a
        number of tokens that follows what came of drafts is lade's own, which is measured.
        """
        if self == Steering():
            return {}
        num_tokens = self.num_tokens or _DEFAULTS["num_assistant_tokens"]
        threshold = _DEFAULTS[_THRESHOLD] if self.threshold is None else self.threshold
        made: dict[str, Any] = {"expansion": "chain", "confidence": threshold}
        if self.schedule in ("heuristic", "heuristic_transient"):
            return {**made, "length": "measured"}
        if threshold == 0:
            return {**made, "length": num_tokens}
        return {**made, "length": "confidence", "max_draft_tokens": num_tokens}


def take_assistant(
    model: Model, drafter: Drafter | None, generate_kwargs: dict[str, Any]
) -> Drafter | None:
    """Take `assistant_model` out of the arguments of `generate`, and turn it into a drafter.

    Returns:
        The given drafter if no assistant is named.

    Raises:
        TypeError: the assistant is no causal LM.
        ValueError: arguments contradict each other, or one is out of its range.
        UnsupportedOptionError: an option of assisted generation cannot be honoured.
    """
    assistant = generate_kwargs.pop("assistant_model", None)
    if generate_kwargs.pop("assistant_tokenizer", None) is not None:
        raise UnsupportedOptionError(
            "lade does not support assistant_tokenizer: an assistant must have the tokens of its "
            "target; drafter=lade.drafters.AssistantModel(model, tokenizer, target_tokenizer=…) "
            "takes one whose vocabulary is padded to another size"
        )
    if assistant is None:
        return drafter
    of_call = (generate_kwargs, generate_kwargs.get("generation_config"))
    if drafter is not None:
        raise ValueError("expected drafter or assistant_model, got both")
    if _first("assistant_early_exit", (*of_call, model.generation_config)) is not None:
        raise ValueError("expected assistant_model or assistant_early_exit, got both")
    assistant = without_compiler(assistant)
    if not (isinstance(assistant, nn.Module) and hasattr(assistant, "generation_config")):
        raise TypeError(
            f"expected assistant_model to be a transformers causal LM, got {assistant!r:.100}"
        )
    if _first("speculation_type", (*of_call, model.generation_config)) is not None:
        raise UnsupportedOptionError("lade does not support speculation_type")
    from lade.drafters import AssistantModel

    steering = Steering.of(*of_call, assistant.generation_config)
    make = partial(AssistantModel, assistant, **steering.options())
    return _kept(assistant, model, (steering,), make)


def exiting_early(
    model: Model, drafter: Drafter | None, config: GenerationConfig
) -> Drafter | None:
    """Turn `assistant_early_exit` of a prepared config into a drafter; else return the given one.

    There, options that nobody has set have transformers' defaults, which say nothing.

    Raises:
        ValueError: there is a drafter, too, or a value is out of its range.
        UnsupportedOptionError: an option of assisted generation cannot be honoured.
    """
    num_layers = config.assistant_early_exit
    if num_layers is None:
        return drafter
    if drafter is not None:
        raise ValueError("expected drafter or assistant_early_exit, got both")
    from lade.drafters import FirstLayers

    names = (*_STEERING, _THRESHOLD, *_REFUSED)
    found = {name: getattr(config, name, None) for name in names}
    asked = {name: value for name, value in found.items() if value != _DEFAULTS.get(name)}
    steering = Steering.of(asked)
    make = partial(FirstLayers, num_layers, **steering.options())
    return _kept(model, model, (steering, num_layers), make)


def _kept(
    model: Model, target: Model, key: tuple[object, ...], make: Callable[[], Drafter]
) -> Drafter:
    """Return the drafter that calls of a target share as long as their options stay the same.

    It is kept with what it measured in the profiles of the model that drafts, and so no longer than
    that.
    """
    from lade.drafters import CallPool, Merged

    of_model = Profiles.of(model).drafters
    known = of_model.get(target)
    if known is None or known[0] != key:
        known = of_model[target] = key, Merged([CallPool(), make()])
    return known[1]


def _first(name: str, sources: Any) -> Any:
    for source in sources:
        found = source.get(name) if isinstance(source, dict) else getattr(source, name, None)
        if found is not None:
            return found
    return None
