"""Attention masks for a tree. Nothing here knows of models.

Next file: `target.py`.
"""

import torch
from torch import Tensor


def tree_mask(prefix: Tensor, ancestors: Tensor, additive_dtype: torch.dtype | None) -> Tensor:
    """Return the 4D mask under which each node sees the prefix and its own ancestors.

    Args:
        prefix: bool [rows, num_cached], False where the prompt was padding.
        ancestors: bool [rows, num_nodes, num_nodes].
        additive_dtype: None for a boolean mask (True sees), as `sdpa` attention takes it; a
            floating dtype for one that is added to the scores, as `eager` attention takes it.

    Returns:
        [rows, 1, num_nodes, num_cached + num_nodes]. No row of it is empty: a node sees itself.
    """
    num_nodes = ancestors.shape[1]
    seen = torch.cat([prefix[:, None, :].expand(-1, num_nodes, -1), ancestors], dim=2)[:, None]
    if additive_dtype is None:
        return seen
    # The lowest finite value, not -inf: attention code may add to it or rescale it.
    lowest = torch.finfo(additive_dtype).min
    return torch.zeros_like(seen, dtype=additive_dtype).masked_fill_(~seen, lowest)
