"""How far logits of the same text may be apart, computed in two ways, and how far they are."""

import torch
from torch import Tensor

from lade.compat import Model, device_of_inputs


def limit_of(model: Model) -> float:
    """Return what a right way may differ by, in units of the logits' standard deviation.

    Half precision rounds differently in forwards of different sizes; a wrong mask, position or
    cache is off by about 1. Right ways were measured at most at 4e-5 in float32, a step that one
    path clamps and another does not at 4e-4.
    """
    dtype = model.dtype
    kind = device_of_inputs(model).type
    if torch.is_autocast_enabled(kind):
        dtype = max(dtype, torch.get_autocast_dtype(kind), key=lambda each: torch.finfo(each).eps)
    eps: float = torch.finfo(dtype).eps
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        eps = 2**-11  # TF32
    return max(2e-4, 40 * eps)


def is_exact_in(model: Model) -> bool:
    """Tell whether text is promised to be that of `generate` in a model's number format."""
    return limit_of(model) < 1e-3


def distance(logits: Tensor, reference: Tensor) -> float:
    """Return the largest difference of logits in units of the reference's standard deviation.

    What is no number is a model's own affair: there, the same in the same places will do.
    """
    is_finite = reference.isfinite()
    if not bool(is_finite.all()):
        if not torch.equal(logits.isfinite(), is_finite):
            return float("inf")
        if not bool(is_finite.any()):
            return 0.0
        logits, reference = logits[is_finite], reference[is_finite]
    apart = (logits.double() - reference.double()).abs().max()
    return float(apart / reference.double().std().clamp(min=1e-30))
