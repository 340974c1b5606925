"""In what a call computes: float32, if a compiled forward runs its model, whatever weights are in.

A call of a model in 16 bits then runs a view that computes in float32 (`lade/forward/widening.py`):
also where torch runs it, so that one text has one arithmetic.
"""

from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import LogitsProcessorList

from lade.compat import CACHE, Model, dtype_of, has_adapters_by_row, may_be_users
from lade.forward.widening import NARROW
from lade.hf.call import Call
from lade.hf.generation import Generation
from lade.probing.plan import why_not_run
from lade.probing.profile import computing


def run(call: Call) -> Any:
    """Decode a call, in float32 if a compiled forward runs its model.

    The cache of a model in 16 bits is widened for the call, and has the model's dtype afterwards.
    """
    model = computing(call.model, call.profile) if _may_widen(call) else call.model
    if model is call.model:
        return Generation(call).run()
    dtype, kwargs = dtype_of(call.model), call.model_kwargs
    cache, returned = kwargs.get(CACHE), None
    is_kept = call.config.reuses_prefix and not may_be_users(cache)
    wide = {name: _converted(each, dtype, torch.float32) for name, each in kwargs.items()}
    processors = LogitsProcessorList(_running(each, call.model, model) for each in call.processors)
    _convert(cache, dtype, torch.float32)
    try:
        widened = replace(call, model=model, model_kwargs=wide, processors=processors)
        output = Generation(widened).run()
        returned = output.get(CACHE) if isinstance(output, dict) else None
        return output
    finally:
        if not is_kept:
            for each in {id(each): each for each in (cache, returned)}.values():
                _convert(each, torch.float32, dtype)


def _may_widen(call: Call) -> bool:
    """Return whether a call of a model in 16 bits may compute in float32."""
    config, model = call.config, call.model
    if dtype_of(model) not in NARROW or not config.uses_kernels or config.arithmetic == "model":
        return False
    is_elsewhere = call.input_ids.device.type != "cpu" or torch.is_autocast_enabled("cpu")
    if is_elsewhere or config.execution == "static" or has_adapters_by_row(model):
        return False
    has_time = not call.is_timed or "widened" in call.profile.found
    return has_time and why_not_run(call.profile) is None


def _running(processor: Any, model: Model, view: Model) -> Any:
    """Return a processor that runs the view if it runs the model, as guidance does."""
    if getattr(processor, "__dict__", {}).get("model") is not model:
        return processor
    twin = copy(processor)
    twin.model = view
    return twin


def _converted(value: Any, source: torch.dtype, dtype: torch.dtype) -> Any:
    is_one = isinstance(value, Tensor) and value.dtype == source
    return value.to(dtype) if is_one else value


def _convert(cache: Any, source: torch.dtype, dtype: torch.dtype) -> None:
    """Convert keys, values and states of a cache of transformers, in its layers."""
    for layer in getattr(cache, "layers", None) or ():
        held = vars(layer)
        held.update(tree_map(lambda each: _converted(each, source, dtype), held))
        if held.get("dtype") == source:
            held["dtype"] = dtype
