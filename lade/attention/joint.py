"""Several calls in one row of tokens, each of which sees the keys and values of its own call.

A forward that is one job takes them as its parts (`lade.forward`); elsewhere `packed_rows` in
`packed.py` lets one call attend after the other.
"""

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor


class Calls:
    """Which tokens of a forward are of which call, and what they see.

    Args:
        sizes: number of tokens of each call, in the order of their tokens.
        masks: bool [1, 1, num_tokens, num_keys] of each, or additive; None where each token sees
            itself and all before it.
    """

    def __init__(self, sizes: Sequence[int], masks: Sequence[Tensor | None]) -> None:
        stops = [*accumulate(sizes)]
        self.nodes = [*map(slice, [0, *stops[:-1]], stops)]
        self.masks = masks


def with_calls(mask: Tensor, calls: Calls) -> Tensor:
    """Attach what calls see to a mask for `packed_rows`; return the mask."""
    mask._lade_calls = calls  # type: ignore[attr-defined]
    return mask


def with_held(states: Tensor, held: Sequence[Tensor]) -> Tensor:
    """Return new keys or values that carry all those of each call, for `packed_rows`."""
    carrying = states[:]  # a tensor of our own
    carrying._lade_held = held  # type: ignore[attr-defined]
    return carrying
