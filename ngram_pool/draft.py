"""`Draft`: what a pool proposes, as flat arrays. Nothing here knows where it comes from.

Next file: `_kernels.py`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Draft:
    """A prefix tree of proposed tokens, best node first.

    The tree hangs under the last committed token (the root), which is not one of its nodes. Because
    the nodes are ordered by the probability of their whole path, parents stand before children and
    any first nodes of a draft are a draft again.
    """

    token_ids: NDArray[np.int32]  # [num_nodes]
    parents: NDArray[np.int32]  # [num_nodes], -1 under the root; parents[i] < i
    depths: NDArray[np.int32]  # [num_nodes], 1 under the root
    probs: NDArray[np.float64]  # [num_nodes], estimate that the node is accepted; never increasing

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def empty(cls) -> "Draft":
        """Return the draft that proposes nothing.

        >>> len(Draft.empty())
        0
        """
        ids = np.empty(0, np.int32)
        return cls(token_ids=ids, parents=ids, depths=ids, probs=np.empty(0, np.float64))

    def first(self, num_nodes: int) -> "Draft":
        """Return the draft of the `num_nodes` best nodes (all of them if there are fewer)."""
        return Draft(
            self.token_ids[:num_nodes],
            self.parents[:num_nodes],
            self.depths[:num_nodes],
            self.probs[:num_nodes],
        )

    def candidates(self) -> list[list[int]]:
        """Return the token ids of every root-to-leaf path, best leaf first."""
        inner = set(self.parents.tolist())
        paths = []
        for leaf in range(len(self)):
            if leaf in inner:
                continue
            path = []
            node = leaf
            while node != -1:
                path.append(int(self.token_ids[node]))
                node = int(self.parents[node])
            paths.append(path[::-1])
        return paths
