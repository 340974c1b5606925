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
from lade.drafters.assistant import LENGTH_OPTIONS
from lade.drafting.drafter import Drafter
from lade.errors import UnsupportedOptionError
from lade.probing.profile import Profiles

_ALIGNING = ("assistant_lookbehind", "target_lookbehind")  # the texts of two tokenizers


def _options_of(sources: Any, *, has_tokenizers: bool = False) -> dict[str, Any]:
    """Return the options of assisted generation in dicts and generation configs of a call.

    Raises:
        UnsupportedOptionError: an option cannot be honoured.
    """
    names = (*LENGTH_OPTIONS, *_ALIGNING, "assistant_ensemble_weight")
    found = {name: _first(name, sources) for name in names}
    found = {name: value for name, value in found.items() if value is not None}
    if "assistant_ensemble_weight" in found:
        raise UnsupportedOptionError(
            "lade does not support assistant_ensemble_weight, which changes the text"
        )
    for name in _ALIGNING:
        if not has_tokenizers and found.get(name, 10) != 10:  # transformers' default
            raise UnsupportedOptionError(f"lade does not support {name} without two tokenizers")
    return found


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
    tokenizers = generate_kwargs.pop("assistant_tokenizer", None), generate_kwargs.get("tokenizer")
    if tokenizers[0] is not None and (assistant is None or tokenizers[1] is None):
        raise ValueError("expected assistant_model= and tokenizer= beside assistant_tokenizer")
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
    translates = tokenizers[0] is not None
    options = _options_of((*of_call, assistant.generation_config), has_tokenizers=translates)
    if not translates:
        make = partial(AssistantModel, assistant, options=options)
        return _shared_drafter(assistant, model, (options,), make)
    make = partial(
        AssistantModel, assistant, tokenizers[0], target_tokenizer=tokenizers[1], options=options
    )
    return _shared_drafter(assistant, model, (options, *tokenizers), make)


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
    options = _options_of((config,))
    make = partial(FirstLayers, num_layers, options=options)
    return _shared_drafter(model, model, (options, num_layers), make)


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
