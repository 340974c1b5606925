"""Assisted generation by the options of transformers.

`assistant_model` and `assistant_early_exit` become drafters beside the call's pool. Options of
transformers control them: from the call, else from the assistant's generation config, where
transformers looks for all options but `assistant_early_exit`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from transformers import GenerationConfig

from lade.compat import Model, unwrapped
from lade.drafters import AssistantModel, CallPool, FirstLayers, Merged
from lade.drafting.drafter import Drafter
from lade.errors import UnsupportedOptionError
from lade.probing.profile import Profiles

# Unsupported options, with their defaults: two align the texts of two tokenizers, and the last one
# changes the text.
_REFUSED = {"assistant_lookbehind": 10, "target_lookbehind": 10, "assistant_ensemble_weight": None}


def _length_by(*sources: Any) -> int | None:
    """Return the constant K that dicts and generation configs ask for, None to let lade choose.

    The first source with an option counts. In transformers, K is constant only without a confidence
    threshold; lade measures what pays instead of following one.

    Raises:
        UnsupportedOptionError: an option cannot be honoured.
    """
    for name, usual in _REFUSED.items():
        if _first(name, sources) not in (None, usual):
            raise UnsupportedOptionError(f"lade does not support {name} beside an assistant")
    schedule = _first("num_assistant_tokens_schedule", sources)
    if _first("assistant_confidence_threshold", sources) != 0 or schedule not in (None, "constant"):
        return None
    return int(_first("num_assistant_tokens", sources) or 20)  # as in transformers


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
    assistant = unwrapped(assistant)
    if not (isinstance(assistant, nn.Module) and hasattr(assistant, "generation_config")):
        raise TypeError(
            f"expected assistant_model to be a transformers causal LM, got {assistant!r:.100}"
        )
    if _first("speculation_type", (*of_call, model.generation_config)) is not None:
        raise UnsupportedOptionError("lade does not support speculation_type")
    length = _length_by(*of_call, assistant.generation_config)
    make = partial(AssistantModel, assistant, length=length)
    return _shared_drafter(assistant, model, (length,), make)


def exiting_early(
    model: Model, drafter: Drafter | None, config: GenerationConfig
) -> Drafter | None:
    """Turn `assistant_early_exit` of a prepared config into a drafter; else return the given one.

    Raises:
        ValueError: a drafter is given, too, or a value is out of its range.
        UnsupportedOptionError: an option of assisted generation cannot be honoured.
    """
    num_layers = config.assistant_early_exit
    if num_layers is None:
        return drafter
    if drafter is not None:
        raise ValueError("expected drafter or assistant_early_exit, got both")
    length = _length_by(config)
    make = partial(FirstLayers, num_layers, length=length)
    return _shared_drafter(model, model, (length, num_layers), make)


def _shared_drafter(
    model: Model, target: Model, key: tuple[object, ...], make: Callable[[], Drafter]
) -> Drafter:
    """Return the drafter that calls of a target share as long as their options stay the same.

    It is kept, with its measurements, in the profiles of the model that drafts, as long as that
    model lives.
    """
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
