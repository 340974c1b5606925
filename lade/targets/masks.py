"""Attention masks for trees, independent of models."""

from typing import NamedTuple

import torch
from torch import Tensor

from lade.tree import TreeTensors


class AttentionSpan(NamedTuple):
    """How far back a layer's attention reaches, in slots; at most one field is set."""

    window: int | None = None  # the token itself and the `window - 1` before it
    chunk: int | None = None  # the token's own chunk of `chunk` tokens, not counting padding

    @property
    def num_slots(self) -> int | None:
        """Maximum number of slots that a token sees; None for no limit."""
        return self.window or self.chunk


FULL = AttentionSpan()


def tree_mask(
    tree: TreeTensors,
    cached: int,
    num_slots: int,
    span: AttentionSpan = FULL,
    padding: Tensor | None = None,
    additive_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the 4D mask of a tree behind cached tokens, for layers with one attention span.

    For windows and chunks, a node is taken to be in the slot that its token would have in plain
    decoding, given by its depth. No shape depends on the values of tensors.

    Args:
        tree: its nodes lie behind the cached tokens.
        cached: tokens that the cache holds.
        num_slots: slots of the mask; those behind the nodes are hidden.
        span: the attention span of these layers.
        padding: bool [1, num_tokens], False for the first tokens that no node sees; chunks begin
            after those in front. None if there are none.
        additive_dtype: None for a boolean mask (True sees), as `sdpa` attention takes it; a
            floating dtype for one that is added to the scores, as `eager` attention takes it.

    Returns:
        [1, 1, num_nodes, num_slots]. No node's row is empty: a node sees itself.
    """
    device, stop = tree.ancestors.device, cached + tree.ancestors.shape[1]
    seen = torch.zeros((*tree.depths.shape, num_slots), dtype=torch.bool, device=device)
    seen[..., :cached] = True
    if padding is not None:
        num = min(num_slots, padding.shape[1])
        seen[..., :num] &= padding[:, None, :num]
    seen[..., cached:stop] = tree.ancestors
    if span != FULL:
        nodes = cached + tree.depths[0]
        slots = torch.arange(num_slots, dtype=torch.int64, device=device)
        slots[cached:stop] = nodes
        if span.chunk is not None:
            first: Tensor | int = 0 if padding is None else (padding.cumsum(dim=-1) == 0).sum()
            slots, nodes = (
                (at - first).div(span.chunk, rounding_mode="floor") for at in (slots, nodes)
            )
            seen &= slots == nodes[:, None]
        else:
            assert span.window is not None
            seen &= slots > nodes[:, None] - span.window
    seen = seen[:, None]
    if additive_dtype is None:
        return seen
    # The lowest finite value, not -inf: attention code may add to or rescale it.
    lowest = torch.finfo(additive_dtype).min
    return torch.zeros_like(seen, dtype=additive_dtype).masked_fill_(~seen, lowest)
