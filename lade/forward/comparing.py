"""Compare tensors of a watched forward with those that a plan computes."""

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from lade.compat import closeness

# Tokens of the forwards by lade's kernels that are compared: all remainders of tiles, more than one
# tile, and one token. Of packed weights, the time of the model's own forward grows with the most.
_HELD = (15, 8, 3, 1)
_FAULTY = 10  # times the limit: no model amplifies rounding so far


class UnsupportedForwardError(Exception):
    """A model, or one of its forwards, computes something that a plan cannot describe."""


def require(holds: bool, reason: str) -> None:
    """Raise `UnsupportedForwardError` with a reason, unless something holds."""
    if not holds:
        raise UnsupportedForwardError(reason)


def difference(mine: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, infinite between different shapes or dtypes."""
    is_alike = mine.shape == theirs.shape and mine.dtype is theirs.dtype
    return closeness.difference(mine, theirs) if is_alike else math.inf


def tolerance(values: Tensor) -> float:
    """Return how much results may differ that are rounded in other places."""
    return 16 * torch.finfo(values.dtype).eps * closeness.largest(values)


Forward = Callable[[int], Tensor]  # from a number of tokens of a text to their logits


def why_wrong(
    by_torch: Forward,
    by_kernels: Forward,
    limit: float,
    may_choose: bool,
) -> str | None:
    """Return why compiled forwards are wrong, and warn; None if they are right.

    Args:
        by_torch, by_kernels: return logits [1, num_tokens, vocab_size].
        limit: on the largest difference, in standard deviations of the logits.
        may_choose: whether rounding may choose other experts for a few tokens.
    """
    theirs = by_torch(max(_HELD))
    held = ((by_kernels(num), theirs[:, :num]) for num in _HELD)
    errors = (_error(*logits, limit, may_choose) for logits in held)
    error = next((each for each in errors if each > limit), None)
    if error is None:
        return None
    reason = f"logits differ by {error:.2g} of their standard deviation"
    # Some models amplify rounding, also that between torch's float32 and the exact result.
    hint = "" if error < _FAULTY * limit else "; please report this with your CPU and model"
    warnings.warn(
        f"lade's compiled forward is not used, as its {reason} from torch's (expected at most "
        f"{limit:.2g}){hint}",
        RuntimeWarning,
        stacklevel=2,
    )
    return reason


def _error(mine: Tensor, theirs: Tensor, limit: float, may_choose: bool) -> float:
    """Return the difference of logits, in standard deviations; see `why_wrong`."""
    error = closeness.distance(mine, theirs)
    if limit < error < math.inf and may_choose:
        logits, reference = mine.double(), theirs.double()
        finite = reference.isfinite()
        squares = (logits - reference).where(finite, 0.0).square().flatten(0, -2).mean(dim=-1)
        error = float(squares.median().sqrt() / reference[finite].std().clamp(min=1e-30))
    return error


def convolved(convolution: nn.Conv1d, inputs: Tensor) -> Tensor:
    """Return the results of a causal depthwise convolution.

    Args:
        inputs: [num_tokens, channels], the first ones of a text.
    """
    padded = functional.pad(inputs.T[None], (convolution.kernel_size[0] - 1, 0))
    made = functional.conv1d(padded, convolution.weight, convolution.bias, groups=inputs.shape[1])
    return made[0].T


def is_near(mine: Tensor, theirs: Tensor) -> bool:
    """Return whether results differ by rounding alone."""
    return difference(mine, theirs) <= tolerance(theirs)
