"""Assisted generation by the options of transformers.

`assistant_model`, `assistant_early_exit`, `use_mtp` and `speculation_type` become drafters beside
the call's pool. Options of transformers control them: from the call, else from the assistant's
generation config, where transformers looks for all options but `assistant_early_exit`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from transformers import GenerationConfig

from lade.compat import Model, unwrapped
from lade.drafters import AssistantModel, CallPool, FirstLayers, Heads, Merged
from lade.drafting.drafter import Drafter
from lade.errors import UnsupportedOptionError
from lade.probing.profile import Profiles

_ALIGNING = ("assistant_lookbehind", "target_lookbehind")  # the texts of two tokenizers
_LENGTHS = ("num_assistant_tokens", "num_assistant_tokens_schedule")


def _options_of(sources: Any, *, has_tokenizers: bool = False) -> dict[str, Any]:
    """Return the options of assisted generation in dicts and generation configs of a call.

    Raises:
        UnsupportedOptionError: an option cannot be honoured.
    """
    names = (*_LENGTHS, "assistant_confidence_threshold", *_ALIGNING, "assistant_ensemble_weight")
    found = {name: first_of(name, sources) for name in names}
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
        TypeError: the assistant is no model.
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
    for other in ("assistant_early_exit", "use_mtp"):
        if first_of(other, (*of_call, model.generation_config)):
            raise ValueError(f"expected assistant_model or {other}, got both")
    assistant, translates = unwrapped(assistant), tokenizers[0] is not None
    if not isinstance(assistant, nn.Module):
        raise TypeError(
            f"expected assistant_model to be a model of transformers, got {assistant!r:.100}"
        )
    kind = first_of("speculation_type", (*of_call, model.generation_config))
    if kind not in (None, "dflash"):  # AssistantModel knows such an assistant by itself
        raise UnsupportedOptionError(f"lade does not support speculation_type={kind!r}")
    of_assistant = getattr(assistant, "generation_config", None)
    options = _options_of((*of_call, of_assistant), has_tokenizers=translates)
    make = partial(AssistantModel, assistant, options=options)
    if translates:
        make = partial(make, tokenizer=tokenizers[0], target_tokenizer=tokenizers[1])
    return _shared_drafter(assistant, model, (options, *tokenizers[: 2 * translates]), make)


def by_itself(model: Model, drafter: Drafter | None, config: GenerationConfig) -> Drafter | None:
    """Turn `assistant_early_exit` or `use_mtp` of a prepared config into a drafter.

    Returns:
        The given drafter if neither is set.

    Raises:
        ValueError: a drafter is given, too, or a value is out of its range.
        UnsupportedOptionError: an option of assisted generation cannot be honoured.
    """
    num_layers, has_heads = config.assistant_early_exit, bool(config.use_mtp)
    if num_layers is None and not has_heads:
        return drafter
    if drafter is not None or (has_heads and num_layers is not None):
        others = "drafter or " * (drafter is not None) + "assistant_early_exit or use_mtp"
        raise ValueError(f"expected {others}, got two of them")
    options = _options_of((config,))
    make = Heads if has_heads else partial(FirstLayers, num_layers, options=options)
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


def first_of(name: str, sources: Any) -> Any:
    """Return an option from the first of dicts and generation configs that has it, or None."""
    for source in sources:
        found = source.get(name) if isinstance(source, dict) else getattr(source, name, None)
        if found is not None:
            return found
    return None
