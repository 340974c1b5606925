"""A draft as a tree under its root, and the trees of a batch as tensors."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lade.transfer import arrays_on
from ngram_pool import Draft

ROOT = 0  # index of the root in a tree; draft node i is tree node i + 1


class SideNodes(NamedTuple):
    """Cells beside a draft: nodes that see the root and each other, and that no draft node sees."""

    token_ids: list[int]
    depths: list[int]  # the root is at 0
    ancestors: NDArray[np.bool_]  # [num_cells, num_cells]: row sees column, itself included


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
        children = {
            place: node for node, place in enumerate(zip(parents, token_ids, strict=True), start=1)
        }
        depths = [0, *draft.depths.tolist()]
        return cls([root_token_id, *token_ids], depths, _unpacked(seen), children, draft)

    def without_draft(self) -> "Tree":
        """Return a tree of the root alone."""
        return Tree.build(self.token_ids[ROOT], Draft.empty())

    def beside(self, cells: SideNodes) -> "Tree":
        """Return the tree with cells after its nodes; no walk down the tree reaches them."""
        size = len(self)
        ancestors = np.zeros((size + len(cells.token_ids),) * 2, np.bool_)
        ancestors[:size, :size] = self.ancestors
        ancestors[size:, ROOT] = True
        ancestors[size:, size:] = cells.ancestors
        token_ids = [*self.token_ids, *cells.token_ids]
        depths = [*self.depths, *cells.depths]
        return Tree(token_ids, depths, ancestors, self.children, self.draft)


def _unpacked(seen: Sequence[int]) -> NDArray[np.bool_]:
    """Unpack bit sets of nodes into a matrix [num_nodes, num_nodes]."""
    num_nodes = len(seen)
    num_bytes = -(-num_nodes // 8)
    rows = b"".join([of_node.to_bytes(num_bytes, "little") for of_node in seen])
    packed = np.frombuffer(rows, np.uint8).reshape(num_nodes, num_bytes)
    return np.unpackbits(packed, axis=1, count=num_nodes, bitorder="little").view(np.bool_)


class TreeBatch(NamedTuple):
    """The trees of several rows, padded to the largest; a padding node sees only itself."""

    token_ids: Tensor  # int64 [rows, width]
    depths: Tensor  # int64 [rows, width]
    ancestors: Tensor  # bool [rows, width, width]

    @property
    def width(self) -> int:
        """Number of nodes of the largest tree."""
        return self.token_ids.shape[1]

    @classmethod
    def stack(cls, trees: Sequence[Tree], device: torch.device) -> "TreeBatch":
        """Stack the trees of a step into tensors on the device."""
        width = max(len(tree.token_ids) for tree in trees)
        token_ids = np.zeros((len(trees), width), np.int64)
        depths = np.zeros((len(trees), width), np.int64)
        # Padding nodes see themselves: attention over nothing is NaN, and a NaN in keys or values
        # spreads.
        ancestors = np.tile(np.eye(width, dtype=np.bool_), (len(trees), 1, 1))
        for row, tree in enumerate(trees):
            size = len(tree.token_ids)
            token_ids[row, :size] = tree.token_ids
            depths[row, :size] = tree.depths
            ancestors[row, :size, :size] = tree.ancestors
        return cls(*arrays_on(device, token_ids, depths, ancestors))


class Packing(NamedTuple):
    """Where the nodes of ragged trees are if they run one tree after the other in a single row."""

    rows: Tensor  # int64 [num_nodes]: the row of each node
    nodes: Tensor  # int64 [num_nodes]: its index in its tree
    places: Tensor  # int64 [num_nodes]: its index among the rows · width nodes of padded trees
    packed: Tensor  # int64 [rows · width]: the other way round; 0 for padding nodes
    shape: tuple[int, int]  # rows and width of the padded trees

    @classmethod
    def of(cls, sizes: Sequence[int], device: torch.device) -> "Packing":
        """Return the packing of trees of these sizes."""
        shape = len(sizes), max(sizes)
        is_real = np.arange(shape[1]) < np.array(sizes)[:, None]
        rows, nodes = is_real.nonzero()
        packed = np.zeros(shape, np.int64)
        packed[is_real] = np.arange(len(rows))
        arrays = rows, nodes, rows * shape[1] + nodes, packed.reshape(-1)
        on_device = arrays_on(device, *arrays)
        return cls(on_device[0], on_device[1], on_device[2], on_device[3], shape)

    @property
    def width(self) -> int:
        """Number of nodes of the largest tree."""
        return self.shape[1]

    def pack(self, padded: Tensor) -> Tensor:
        """Return numbers of nodes, [..., rows, width], as [..., 1, num_nodes]."""
        return padded.flatten(-2).index_select(-1, self.places).unsqueeze(-2)

    def pad(self, states: Tensor) -> Tensor:
        """Return states of nodes, [num_nodes, …], as [rows, width, …], padded with the first."""
        return states.index_select(0, self.packed).view(*self.shape, *states.shape[1:])


def origins(trees: Collection[Tree], num_rows: int) -> list[tuple[int, int]]:
    """Return where the roots are in a forward's output [num_rows, width, …]: row and column.

    Each tree has a row of its own, or a single row has one tree after the other.
    """
    if num_rows == len(trees):
        return [*zip(range(num_rows), [ROOT] * num_rows, strict=True)]
    assert num_rows == 1
    return [(0, start) for start in [*accumulate(map(len, trees), initial=0)][:-1]]


def of_trees(output: Tensor, trees: Collection[Tree]) -> Tensor:
    """Return a forward's output [rows, width, …] without what was run beside the trees."""
    return output if len(output) < len(trees) else output[:, : max(map(len, trees))]


def at_nodes(output: Tensor, trees: Collection[Tree], nodes: Sequence[int]) -> Tensor:
    """Return a forward's output [rows, width, …] at one node of each tree, [len(trees), …]."""
    places = [
        (row, start + node)
        for (row, start), node in zip(origins(trees, len(output)), nodes, strict=True)
    ]
    rows, columns = arrays_on(output.device, *np.array(places, np.int64).T.copy())
    return output[rows, columns]
