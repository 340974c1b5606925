"""Attention masks for trees. Nothing here knows of models.

Next file: `target.py`.
"""

import torch
from torch import Tensor


def tree_mask(
    visible: Tensor, num_cached: Tensor, ancestors: Tensor, additive_dtype: torch.dtype | None
) -> Tensor:
    """Return the 4D mask under which each node sees its row's prefix and its own ancestors.

    The nodes of a row lie behind its cached tokens, so in a ragged batch they start at different
    columns; what a shorter row has behind its nodes is hidden.

    Args:
        visible: bool [rows, max(num_cached)], False where a slot must not be seen: padding, holes,
            and whatever lies behind a row's own cached tokens.
        num_cached: int64 [rows].
        ancestors: bool [rows, num_nodes, num_nodes].
        additive_dtype: None for a boolean mask (True sees), as `sdpa` attention takes it; a
            floating dtype for one that is added to the scores, as `eager` attention takes it.

    Returns:
        [rows, 1, num_nodes, max(num_cached) + num_nodes]. No row of it is empty: a node sees
        itself.
    """
    rows, num_nodes, _ = ancestors.shape
    prefix = visible[:, None, :].expand(-1, num_nodes, -1)
    seen = torch.cat([prefix, torch.zeros_like(ancestors)], dim=2)
    columns = num_cached[:, None] + torch.arange(num_nodes, device=ancestors.device)
    seen.scatter_(2, columns[:, None, :].expand(rows, num_nodes, -1), ancestors)
    seen = seen[:, None]
    if additive_dtype is None:
        return seen
    # The lowest finite value, not -inf: attention code may add to it or rescale it.
    lowest = torch.finfo(additive_dtype).min
    return torch.zeros_like(seen, dtype=additive_dtype).masked_fill_(~seen, lowest)
