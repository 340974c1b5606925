"""Assisted generation by the options of transformers.

`assistant_model`, `assistant_early_exit`, `use_mtp` and `speculation_type` become drafters beside
the call's pool. Options of transformers control them: from the call, else from the assistant's
generation config, where transformers looks for all options but `assistant_early_exit`.
"""

import copy
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList

from lade.compat import Model, candidate_generator, unwrapped
from lade.drafters import AssistantModel, CallPool, Candidates, FirstLayers, Merged
from lade.drafters.candidates import config_for
from lade.drafting.drafter import Drafter, DraftingCall
from lade.errors import UnsupportedOptionError
from lade.probing.profile import Profiles

_ALIGNING = ("assistant_lookbehind", "target_lookbehind")  # the texts of two tokenizers
_LENGTHS = (  # of drafts
    *("num_assistant_tokens", "num_assistant_tokens_schedule"),
    "assistant_confidence_threshold",
)


def _options_of(sources: Any, *, has_tokenizers: bool = False) -> dict[str, Any]:
    """Return the options of assisted generation in dicts and generation configs of a call.

    Raises:
        UnsupportedOptionError: an option cannot be honoured.
    """
    names = (*_LENGTHS, *_ALIGNING, "assistant_ensemble_weight")
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
    for other in ("assistant_early_exit", "use_mtp"):
        if _first(other, (*of_call, model.generation_config)):
            raise ValueError(f"expected assistant_model or {other}, got both")
    assistant, own = unwrapped(assistant), getattr(unwrapped(assistant), "generation_config", None)
    kind = _first("speculation_type", (*of_call, model.generation_config))
    if kind not in (None, "dflash"):
        raise UnsupportedOptionError(f"lade does not support speculation_type={kind!r}")
    if not isinstance(assistant, nn.Module) or (own is None and kind is None):
        raise TypeError(
            f"expected assistant_model to be a transformers causal LM, got {assistant!r:.100}"
        )
    translates = tokenizers[0] is not None
    options = _options_of((*of_call, own), has_tokenizers=translates)
    make: Callable[[], Drafter]
    if kind is not None or "shared_kv_states" in signature(assistant.forward).parameters:
        options["speculation_type"] = kind
        make = partial(Candidates, _Heads(assistant, options), name="assistant")
        return _shared_drafter(assistant, model, (options,), make)
    if not translates:
        make = partial(AssistantModel, assistant, options=options)
        return _shared_drafter(assistant, model, (options,), make)
    make = partial(
        AssistantModel, assistant, tokenizers[0], target_tokenizer=tokenizers[1], options=options
    )
    return _shared_drafter(assistant, model, (options, *tokenizers), make)


def by_itself(model: Model, drafter: Drafter | None, config: GenerationConfig) -> Drafter | None:
    """Turn `assistant_early_exit` or `use_mtp` of a prepared config into a drafter.

    Returns:
        The given drafter if neither is set.

    Raises:
        ValueError: a drafter is given, too, or a value is out of its range.
        UnsupportedOptionError: an option of assisted generation cannot be honoured.
    """
    num_layers, has_heads = config.assistant_early_exit, bool(getattr(config, "use_mtp", None))
    if num_layers is None and not has_heads:
        return drafter
    if drafter is not None or (has_heads and num_layers is not None):
        got = "use_mtp" if num_layers is None else "assistant_early_exit"
        raise ValueError(f"expected drafter or {got}, got both")
    options = _options_of((config,))
    make: Callable[[], Drafter] = partial(FirstLayers, num_layers, options=options)
    if has_heads:
        options["use_mtp"] = True
        make = partial(Candidates, _Heads(None, options), name="heads")
    return _shared_drafter(model, model, (options, num_layers), make)


class _Heads:
    """Makes transformers' own generators, and loads the weights of a model's heads once."""

    def __init__(self, assistant: Model | None, options: dict[str, Any]) -> None:
        self._assistant, self._options = assistant, options
        self._made: Any = None

    def __call__(
        self, call: DraftingCall, input_ids: Tensor, processors: LogitsProcessorList
    ) -> Any:
        if self._made is None:
            config = config_for(call)
            config.update(**self._options)
            self._made = candidate_generator(call.model, config, input_ids, self._assistant)
        held = [each for each in vars(self._made).values() if isinstance(each, nn.Module)]
        made = copy.deepcopy(self._made, {id(each): each for each in held})
        own = {"main_model_max_length": call.max_length, "logits_processor": processors or None}
        vars(made).update({name: each for name, each in own.items() if hasattr(made, name)})
        return made


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
