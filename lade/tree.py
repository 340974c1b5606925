"""A draft as a tree under its root, on the host and on a device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lade.machine.transfer import arrays_on
from ngram_pool import Draft

_Row = TypeVar("_Row")

ROOT = 0  # index of the root in a tree; draft node i is tree node i + 1


@dataclass(frozen=True, slots=True)
class Tree:
    """The root of one row and the draft under it."""

    token_ids: list[int]  # root first, parents before children
    depths: list[int]  # 0 for the root
    ancestors: NDArray[np.bool_]  # [num_nodes, num_nodes]: row sees column, itself included
    children: dict[tuple[int, int], int]  # (node, token id) -> child node
    draft: Draft

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def build(cls, root_token_id: int, draft: Draft) -> "Tree":
        """Build the tree of a draft under its root."""
        parents = (draft.parents + 1).tolist()
        token_ids = draft.token_ids.tolist()
        # One bit per visible node: at 64 nodes, half the time of building array rows.
        seen = [1 << ROOT]
        for node, parent in enumerate(parents, start=1):
            seen.append(seen[parent] | 1 << node)
        children = dict(zip(zip(parents, token_ids, strict=True), count(1), strict=False))
        depths = [0, *draft.depths.tolist()]
        return cls([root_token_id, *token_ids], depths, _unpacked(seen), children, draft)

    def without_draft(self) -> "Tree":
        """Return a tree of the root alone."""
        return Tree.build(self.token_ids[ROOT], Draft.empty())


def matched_path(draft: Draft, token_ids: Sequence[int]) -> list[int]:
    """Return the nodes of a draft that a text takes, beginning under the root."""
    path, last = list[int](), -1
    nodes = zip(draft.parents.tolist(), draft.token_ids.tolist(), strict=True)
    for node, (parent, token_id) in enumerate(nodes):
        if len(path) == len(token_ids):
            break
        if parent == last and token_id == token_ids[len(path)]:
            path.append(node)
            last = node
    return path


def _unpacked(seen: Sequence[int]) -> NDArray[np.bool_]:
    """Unpack bit sets of nodes into a matrix [num_nodes, num_nodes]."""
    num_nodes = len(seen)
    num_bytes = -(-num_nodes // 8)
    rows = b"".join([of_node.to_bytes(num_bytes, "little") for of_node in seen])
    packed = np.frombuffer(rows, np.uint8).reshape(num_nodes, num_bytes)
    return np.unpackbits(packed, axis=1, count=num_nodes, bitorder="little").view(np.bool_)


class TreeTensors(NamedTuple):
    """A tree on a device; the first axis is a batch of one."""

    token_ids: Tensor  # int64 [1, num_nodes]
    depths: Tensor  # int64 [1, num_nodes]
    ancestors: Tensor  # bool [1, num_nodes, num_nodes]

    @classmethod
    def of(cls, tree: Tree, device: torch.device, width: int = 0) -> "TreeTensors":
        """Send a tree to the device; up to `width` nodes, the rest are as the root and alone."""
        numbers = np.array([[tree.token_ids], [tree.depths]], np.int64)
        ancestors, num_more = tree.ancestors, width - len(tree)
        if num_more > 0:
            numbers = np.pad(numbers, ((0, 0), (0, 0), (0, num_more)))
            ancestors = np.pad(ancestors, (0, num_more)) | np.eye(width, dtype=np.bool_)
        return cls(*arrays_on(device, *numbers, ancestors[None]))


def starts(trees: Mapping[_Row, Tree]) -> dict[_Row, int]:
    """Return the index of each root in a forward's output [1, num_nodes, …], tree after tree."""
    return dict(zip(trees, accumulate(map(len, trees.values()), initial=0), strict=False))
