"""A draft as tensors: what one target forward takes in.

Next file: `masks.py`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ngram_pool import Draft

ROOT = 0  # index of the root in a tree; draft node i is tree node i + 1


@dataclass(frozen=True, slots=True)
class Tree:
    """The last committed token and the draft under it, for one row.

    The leading dimension of the tensors is the rows of a batch.
    """

    token_ids: Tensor  # int64 [1, num_nodes], root first, parents before children
    depths: Tensor  # int64 [1, num_nodes], 0 for the root
    ancestors: Tensor  # bool [1, num_nodes, num_nodes]: node (row) sees node (column), itself too
    children: dict[tuple[int, int], int]  # (node, token id) -> child node

    def __len__(self) -> int:
        return self.token_ids.shape[1]

    @classmethod
    def build(cls, root_token_id: int, draft: Draft, device: torch.device) -> "Tree":
        """Lay a draft under its root."""
        num_nodes = len(draft) + 1
        parents = (draft.parents + 1).tolist()
        token_ids = draft.token_ids.tolist()
        ancestors = np.zeros((num_nodes, num_nodes), np.bool_)
        ancestors[ROOT, ROOT] = True
        depths = [0]
        children = {}
        for node, (parent, token_id) in enumerate(zip(parents, token_ids, strict=True), start=1):
            ancestors[node] = ancestors[parent]
            ancestors[node, node] = True
            depths.append(depths[parent] + 1)
            children[parent, token_id] = node
        return cls(
            token_ids=torch.tensor([[root_token_id, *token_ids]], device=device),
            depths=torch.tensor([depths], device=device),
            ancestors=torch.from_numpy(ancestors)[None].to(device),
            children=children,
        )
