"""Compare tensors of a watched forward with those that a plan computes."""

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
    """A model, or one of its forwards, computes something that a plan cannot describe."""


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
    """Return how much results may differ that are rounded in other places."""
    return 16 * torch.finfo(values.dtype).eps * float(values.abs().max())


def is_near(mine: Tensor, theirs: Tensor) -> bool:
    """Return whether results differ by rounding alone."""
    return difference(mine, theirs) <= tolerance(theirs)
