"""Generation options: raise for unsupported ones, and handle stop strings."""

import copy
from typing import Any

from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria

from lade.compat import Model
from lade.errors import UnsupportedOptionError
from lade.probing.rules import refuse_sharded


def refuse_unsupported_arguments(model: Model, generate_kwargs: dict[str, Any]) -> None:
    """Raise for arguments of `generate` that are unsupported but would never reach `decode`."""
    configs = (model.generation_config, generate_kwargs.get("generation_config"))
    heals = any(config.token_healing for config in configs if config is not None)
    asked = {
        "custom_generate": generate_kwargs.pop("custom_generate", None) is not None,
        "cache_implementation='paged'": generate_kwargs.get("cache_implementation") == "paged",
        "synced_gpus": generate_kwargs.get("synced_gpus"),
        "token_healing": generate_kwargs.get("token_healing", heals),
    }
    for name in asked:
        if asked[name]:
            raise UnsupportedOptionError(
                f"lade.generate does not support {name} yet{_way_out(model)}"
            )


def take_stop_strings(model: Model, generate_kwargs: dict[str, Any]) -> Model:
    """Turn `stop_strings` and `tokenizer` into a criterion: a custom function gets neither.

    Returns:
        The model whose `generate` to call: `model`, or, if its generation config has stop strings,
        a twin without them that shares everything else. transformers would ask for the missing
        tokenizer, and other threads may be using the model's config.
    """
    tokenizer = generate_kwargs.pop("tokenizer", None)
    of_call = generate_kwargs.get("generation_config")
    asked = generate_kwargs.pop("stop_strings", None)
    if of_call is not None and of_call.stop_strings is not None:
        asked = of_call.stop_strings if asked is None else asked
        of_call = generate_kwargs["generation_config"] = copy.deepcopy(of_call)
        of_call.stop_strings = None
    of_model = model.generation_config
    stop_strings = of_model.stop_strings if asked is None else asked
    if stop_strings is None:
        return model
    if tokenizer is None:
        raise ValueError("expected tokenizer= beside stop_strings, got none")
    criteria = list(generate_kwargs.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
    generate_kwargs["stopping_criteria"] = StoppingCriteriaList(criteria)
    if of_model.stop_strings is None:
        return model
    twin = copy.copy(model)
    twin.generation_config = copy.deepcopy(of_model)
    twin.generation_config.stop_strings = None
    return twin


def refuse_unsupported_options(model: Model, config: GenerationConfig) -> None:
    """Raise for options that would change the text or the output and cannot be honoured."""
    mode = config.get_generation_mode().value
    refuse_sharded(model)
    # Early exit, heads and prompt lookup are ways of drafting; other modes decode differently.
    num_lookup = config.prompt_lookup_num_tokens
    if num_lookup is not None and num_lookup < 1:
        raise ValueError(f"expected prompt_lookup_num_tokens of at least 1, got {num_lookup!r}")
    if mode not in ("greedy_search", "sample", "assisted_generation"):
        raise UnsupportedOptionError(
            f"lade does not support the generation mode {mode} yet{_way_out(model)}"
        )


def _way_out(model: Model) -> str:
    """Return a hint at the model's original `generate`, for an error's end."""
    if getattr(vars(model).get("generate"), "is_lades", False):
        return "; lade.unwrap(model) restores the model's original generate"
    return "; call model.generate for it"
