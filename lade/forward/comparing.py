"""How numbers that passed in a watched forward are held against those of a plan."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from lade.forward import words

ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    words.SILU: functional.silu,
    words.GELU: functional.gelu,
    words.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    words.RELU: functional.relu,
    words.RELU_SQUARED: lambda x: functional.relu(x).square(),
}


class UnsupportedForwardError(Exception):
    """A model, or a forward of it, computes something that a plan has no place for."""


def require(holds: bool, reason: str) -> None:
    """Raise `UnsupportedForwardError` with a reason, unless something holds."""
    if not holds:
        raise UnsupportedForwardError(reason)


def difference(mine: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, infinite between different shapes."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return math.inf
    return float((mine - theirs).abs().max())


def tolerance(values: Tensor) -> float:
    """Return how far results may be apart that are rounded at other places."""
    return 16 * torch.finfo(values.dtype).eps * float(values.abs().max())


def is_near(mine: Tensor, theirs: Tensor) -> bool:
    """Return whether results differ by rounding alone."""
    return difference(mine, theirs) <= tolerance(theirs)
