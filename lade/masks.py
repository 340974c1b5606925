"""Attention masks for trees. Nothing here knows of models.

Next file: `target.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Reach(NamedTuple):
    """How far back a layer's attention reaches, in slots; at most one of the two is set."""

    window: int | None = None  # the token itself and the `window - 1` before it
    chunk: int | None = None  # those of the same chunk of so many tokens, padding not counted

    @property
    def num_slots(self) -> int | None:
        """The greatest number of slots that one token sees."""
        return self.window or self.chunk


FULL = Reach()


class TreeSlots:
    """Which slots of a cache the nodes of a batch of trees see.

    The nodes of a row lie behind its cached tokens, so in a ragged batch they start at different
    columns; what a shorter row has behind its nodes is hidden. A node takes, for windows and
    chunks, the slot that its token would have in plain decoding: as deep as it is.

    Args:
        visible: bool [rows, max(num_cached)], False where a slot must not be seen: padding, holes,
            and whatever lies behind a row's own cached tokens.
        num_cached: int64 [rows].
        ancestors: bool [rows, num_nodes, num_nodes].
        depths: int64 [rows, num_nodes].
        num_padding: int64 [rows], the slots of padding in front; chunks begin behind them.
    """

    def __init__(
        self,
        visible: Tensor,
        num_cached: Tensor,
        ancestors: Tensor,
        depths: Tensor,
        num_padding: Tensor | None = None,
    ) -> None:
        rows, num_nodes, _ = ancestors.shape
        prefix = visible[:, None, :].expand(-1, num_nodes, -1)
        self._seen = torch.cat([prefix, torch.zeros_like(ancestors)], dim=2)
        nodes = num_cached[:, None] + torch.arange(num_nodes, device=ancestors.device)
        self._nodes = nodes
        self._seen.scatter_(2, nodes[:, None, :].expand(rows, num_nodes, -1), ancestors)
        self._of_nodes = num_cached[:, None] + depths
        self._num_padding = num_padding

    def mask(self, reach: Reach, first_slot: int, additive_dtype: torch.dtype | None) -> Tensor:
        """Return the 4D mask of the layers that reach so far.

        Args:
            reach: of their attention.
            first_slot: which the cache of these layers still holds; the mask begins there.
            additive_dtype: None for a boolean mask (True sees), as `sdpa` attention takes it; a
                floating dtype for one that is added to the scores, as `eager` attention takes it.

        Returns:
            [rows, 1, num_nodes, max(num_cached) + num_nodes - first_slot]. No row of it is empty: a
            node sees itself.
        """
        seen = self._seen if reach == FULL else self._seen & self._within(reach)
        seen = seen[:, None, :, first_slot:]
        if additive_dtype is None:
            return seen
        # The lowest finite value, not -inf: attention code may add to it or rescale it.
        lowest = torch.finfo(additive_dtype).min
        return torch.zeros_like(seen, dtype=additive_dtype).masked_fill_(~seen, lowest)

    def _within(self, reach: Reach) -> Tensor:
        rows, _, num_slots = self._seen.shape
        slots = torch.arange(num_slots, device=self._seen.device).expand(rows, -1)
        slots = slots.scatter(1, self._nodes, self._of_nodes)
        if reach.window is not None:
            return slots[:, None, :] > self._of_nodes[:, :, None] - reach.window
        assert reach.chunk is not None
        num_padding = 0 if self._num_padding is None else self._num_padding[:, None]
        chunks, of_nodes = (
            (at - num_padding).div(reach.chunk, rounding_mode="floor")
            for at in (slots, self._of_nodes)
        )
        return chunks[:, None, :] == of_nodes[:, :, None]
