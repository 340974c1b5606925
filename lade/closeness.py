"""The distance between two computations of the same logits, and its tolerance."""

from typing import Any

import torch
from torch import Tensor

from lade.compat import Model, device_of_inputs


def limit_of(model: Model) -> float:
    """Return the largest difference accepted as rounding, in standard deviations of the logits.

    Half precision rounds differently in forwards of different sizes; a wrong mask, position or
    cache is off by about 1. Measured in float32: at most 4e-5 between correct forwards, and 4e-4
    for a step that is clamped in one of them and not in the other.
    """
    dtype = _coarsest_of(model)
    kind = device_of_inputs(model).type
    if torch.is_autocast_enabled(kind):
        dtype = max(dtype, torch.get_autocast_dtype(kind), key=lambda each: torch.finfo(each).eps)
    eps: float = torch.finfo(dtype).eps
    if dtype == torch.float32 and float32_precision(kind) != "highest":
        eps = 2**-11  # TF32
    return max(2e-4, 40 * eps)


def _coarsest_of(model: Model) -> torch.dtype:
    """Return the least precise format of a model's weights; the first may be of another."""
    known = next(iter(vars(model).get("_lade_profiles", ())), None)
    dtype: torch.dtype = model.dtype if known is None else known.coarsest
    return dtype


def float32_precision(device_type: str) -> str:
    """Return the precision of float32 products, "highest" if it is that of float32."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set for one backend alone; torch has no word for that
        backend: Any = torch.backends.cuda if device_type == "cuda" else torch.backends.mkldnn
        precision: str = backend.matmul.fp32_precision
        return "highest" if precision in ("ieee", "none") else precision


def is_exact_in(model: Model) -> bool:
    """Return whether the text is guaranteed to be that of `generate` in the model's precision."""
    return limit_of(model) < 1e-3


def distance(logits: Tensor, reference: Tensor) -> float:
    """Return the largest difference of logits, in standard deviations of the reference.

    Infinite and NaN logits are the model's own affair: it suffices that both have the same ones in
    the same places; else the distance is infinite.
    """
    is_finite = reference.isfinite()
    if not bool(is_finite.all()):
        # A NaN is no less than what is masked by -inf: it would be chosen.
        is_same = (logits == reference) | (logits.isnan() & reference.isnan())
        if not torch.equal(logits.isfinite(), is_finite) or not bool(is_same[~is_finite].all()):
            return float("inf")
        if not bool(is_finite.any()):
            return 0.0
        logits, reference = logits[is_finite], reference[is_finite]
    apart = (logits.double() - reference.double()).abs().max()
    return float(apart / reference.double().std().clamp(min=1e-30))
