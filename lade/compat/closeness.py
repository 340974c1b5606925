"""The distance between two computations of the same logits, and its tolerance."""

import math
from typing import Any

import torch
from torch import Tensor

from lade.compat import Model, device_of_inputs

#: A limit below this is that of float32 or float64.
EXACT = 1e-3
_PLAIN_FORMATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


def limit_of(model: Model) -> float:
    """Return the largest difference accepted as rounding, in standard deviations of the logits.

    Half precision rounds differently in forwards of different sizes; a wrong mask, position or
    cache is off by about 1. Measured in float32: at most 4e-5 between correct forwards, and 4e-4
    for a step that is clamped in one of them and not in the other.
    """
    # The dtype of quantized weights says nothing.
    dtypes = {
        getattr(module, "computes_in", weight.dtype)
        for module in model.modules()
        for weight in module._parameters.values()
        if weight is not None
    } & _PLAIN_FORMATS or {model.dtype}
    kind = device_of_inputs(model).type
    if torch.is_autocast_enabled(kind):
        dtypes.add(torch.get_autocast_dtype(kind))
    known = vars(model).get("_lade_profiles")  # of `lade.probing`, which has watched a forward
    if known is not None and known.autocast is not None:
        dtypes.add(known.autocast)
    eps = max(torch.finfo(each).eps for each in dtypes)
    if eps == torch.finfo(torch.float32).eps and float32_precision(kind) != "highest":
        eps = 2**-11  # TF32
    return max(2e-4, 40 * eps)


def float32_precision(device_type: str) -> str:
    """Return the precision of float32 products, "highest" if it is that of float32."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set for one backend only
        backend: Any = torch.backends.cuda if device_type == "cuda" else torch.backends.mkldnn
        precision: str = backend.matmul.fp32_precision
        return "highest" if precision in ("ieee", "none") else precision


def is_exact_in(model: Model) -> bool:
    """Return whether the model's precision guarantees the text of `generate`."""
    return limit_of(model) < EXACT


def distance(logits: Tensor, reference: Tensor) -> float:
    """Return the largest difference of logits, in standard deviations of the reference.

    Both must have the same infinite and NaN logits at the same tokens; else the distance is
    infinite.
    """
    apart = difference(logits, reference)
    if not 0.0 < apart < math.inf:
        return apart
    finite = reference[reference.isfinite()].double()
    spread = finite.std() if len(finite) > 1 else finite.abs()
    return apart / max(float(spread), 1e-30)


def difference(mine: Tensor, theirs: Tensor) -> float:
    """Return the largest difference; infinite if one is infinite or NaN where the other is not."""
    apart = (mine.double() - theirs.double()).abs()
    if math.isfinite(found := float(apart.max())):
        return found
    apart = apart.masked_fill((mine == theirs) | (mine.isnan() & theirs.isnan()), 0.0)
    return float(apart.nan_to_num(math.inf, math.inf).max())


def largest(values: Tensor) -> float:
    """Return the largest absolute value among the finite ones."""
    return float(values.nan_to_num(0.0, 0.0, 0.0).abs().max())
