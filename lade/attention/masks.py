"""Attention masks for trees, independent of models."""

from typing import NamedTuple

import torch
from torch import Tensor


class AttentionSpan(NamedTuple):
    """How far back a layer's attention reaches, in slots; at most one field is set."""

    window: int | None = None  # the token itself and the `window - 1` before it
    chunk: int | None = None  # the token's own chunk of `chunk` tokens, not counting padding

    @property
    def num_slots(self) -> int | None:
        """Maximum number of slots that a token sees; None for no limit."""
        return self.window or self.chunk


FULL = AttentionSpan()


class TreeSlots:
    """The cache slots that the nodes of a batch of trees see.

    A row's nodes follow its cached tokens, so in a ragged batch they start at different columns;
    slots after the nodes of a shorter row are hidden. For windows and chunks, a node is taken to be
    in the slot that its token would have in plain decoding, given by its depth.

    No shape depends on the values of the tensors, and nothing waits for them.

    Args:
        visible: bool [rows, num_slots]: False for slots that must not be seen: padding, holes, and
            slots after a row's cached tokens. The values at the slots of the nodes are ignored.
        num_cached: int64 [rows], cached tokens of each row.
        ancestors: bool [rows, num_nodes, num_nodes].
        depths: int64 [rows, num_nodes].
        num_padding: int64 [rows], leading padding slots; chunks begin after them.
    """

    def __init__(
        self,
        visible: Tensor,
        num_cached: Tensor,
        ancestors: Tensor,
        depths: Tensor,
        num_padding: Tensor | None = None,
    ) -> None:
        self._visible = visible
        self._ancestors = ancestors
        self._num_cached = num_cached
        self._of_nodes = num_cached[:, None] + depths
        self._num_padding = num_padding

    def mask(
        self, span: AttentionSpan, first_slot: int, additive_dtype: torch.dtype | None
    ) -> Tensor:
        """Return the 4D mask for the layers with one attention span.

        Args:
            span: the attention span of these layers.
            first_slot: column of `visible` where the mask begins: the first slot that the cache of
                these layers still holds.
            additive_dtype: None for a boolean mask (True sees), as `sdpa` attention takes it; a
                floating dtype for one that is added to the scores, as `eager` attention takes it.

        Returns:
            [rows, 1, num_nodes, num_slots - first_slot]. No node's row is empty: a node sees
            itself.
        """
        rows, num_nodes, _ = self._ancestors.shape
        device = self._ancestors.device
        nodes = torch.arange(num_nodes, dtype=torch.int64, device=device)
        nodes = self._num_cached[:, None] + nodes
        seen = self._visible[:, None, :].repeat(1, num_nodes, 1)
        seen.scatter_(2, nodes[:, None, :].expand(-1, num_nodes, -1), self._ancestors)
        if span != FULL:
            slots = torch.arange(seen.shape[2], dtype=torch.int64, device=device)
            slots = slots.expand(rows, -1).scatter(1, nodes, self._of_nodes)
            seen &= self._within(span, slots)
        seen = seen[:, None, :, first_slot:]
        if additive_dtype is None:
            return seen
        # The lowest finite value, not -inf: attention code may add to or rescale it.
        lowest = torch.finfo(additive_dtype).min
        return torch.zeros_like(seen, dtype=additive_dtype).masked_fill_(~seen, lowest)

    def _within(self, span: AttentionSpan, slots: Tensor) -> Tensor:
        """Return which slots, int64 [rows, n], are within the span of each node."""
        if span.window is not None:
            return slots[:, None, :] > self._of_nodes[:, :, None] - span.window
        assert span.chunk is not None
        chunks, of_nodes = (self._chunks(at, span.chunk) for at in (slots, self._of_nodes))
        return chunks[:, None, :] == of_nodes[:, :, None]

    def _chunks(self, slots: Tensor, chunk: int) -> Tensor:
        return (slots - self._padding()).div(chunk, rounding_mode="floor")

    def _padding(self) -> Tensor | int:
        return 0 if self._num_padding is None else self._num_padding[:, None]
