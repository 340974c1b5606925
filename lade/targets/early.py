"""Nodes of a step that a model's first layers run before the step is verified, to draft it.

Their keys and values are those of the target, and so is what the last of these layers hands on:
the verification runs only what is left.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lade.compat import Model
from lade.targets.base import Forward
from lade.tree import ROOT, Tree
from ngram_pool import Draft


class Exit(NamedTuple):
    """What the first layers of a model give."""

    logits: Tensor  # [rows, num_nodes, vocab_size], as if there were no other layers
    hidden: Tensor  # [rows, num_nodes, …], what the next layer would get


class Halves(Protocol):
    """A model cut in two between two of its layers."""

    def first(self, inputs: dict[str, Any]) -> Exit:
        """Run the layers before the cut, and what follows the last layer of all."""

    def rest(self, inputs: dict[str, Any], hidden: Tensor) -> Forward:
        """Run the layers after the cut, on what the first ones handed on."""


#: Cuts a model, or a view of it.
Halve = Callable[[Model], Halves]


class EarlyNodes:
    """Nodes that the first layers have run since the last commit, in the order of their slots."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._depths: list[int] = []
        self._ancestors: NDArray[np.bool_] = np.zeros((0, 0), np.bool_)
        self._children: dict[tuple[int, int], int] = {}  # (node, token id) -> node
        self._hidden: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def num_run(self) -> int:
        """Number of nodes whose forward is complete."""
        return sum(hidden.shape[1] for hidden in self._hidden)

    def add(self, token_ids: Sequence[int], parents: Sequence[int]) -> None:
        """Add nodes to run; parents come before their children, and that of the root is -1."""
        seen = self._grown(len(token_ids))
        for token_id, parent in zip(token_ids, parents, strict=True):
            node = len(self)
            if parent >= 0:
                seen[node] |= seen[parent]
            # Of equal siblings, the first one counts.
            self._children.setdefault((parent, token_id), node)
            self._depths.append(0 if parent < 0 else self._depths[parent] + 1)
            self._token_ids.append(token_id)

    def add_missing(self, tree: Tree) -> list[int]:
        """Add the nodes of a tree that are missing here, and return the place of each node."""
        places: list[int] = []
        num_drafted = 1 + len(tree.draft)  # cells beside the draft have several parents
        parents = [-1, *tree.draft.parents.tolist()]
        missing = []
        for node, token_id in enumerate(tree.token_ids):
            known = None
            if node < num_drafted:
                parent = -1 if node == ROOT else places[parents[node] + 1]
                known = self._children.get((parent, token_id))
            if known is None:
                missing.append(node)
                known = len(self) + len(missing) - 1
            places.append(known)
        if missing:
            seen = self._grown(len(missing))
            for node in missing:
                for other in np.flatnonzero(tree.ancestors[node]):
                    seen[places[node], places[other]] = True
                self._token_ids.append(tree.token_ids[node])
                self._depths.append(tree.depths[node])
        return places

    def end_run(self, hidden: Tensor) -> None:
        """Keep what the first layers handed on for the nodes added since the last run."""
        num_new = len(self) - self.num_run
        if hidden.dim() < 3 or hidden.shape[1] != num_new:
            raise ValueError(f"expected hidden states of {num_new} nodes, got {list(hidden.shape)}")
        self._hidden.append(hidden)

    def hidden_at(self, places: Sequence[int]) -> Tensor:
        """Return what was handed on for some nodes, [1, num_nodes, …]."""
        hidden = self._hidden[0] if len(self._hidden) == 1 else torch.cat(self._hidden, dim=1)
        if places == [*range(hidden.shape[1])]:
            return hidden
        return hidden[:, [*places]]

    def tree(self) -> Tree:
        """Return all nodes as a tree, for a forward."""
        return Tree(self._token_ids, self._depths, self._ancestors, {}, Draft.empty())

    def _grown(self, num_new: int) -> NDArray[np.bool_]:
        size = len(self)
        grown = np.eye(size + num_new, dtype=np.bool_)
        grown[:size, :size] = self._ancestors
        self._ancestors = grown
        return grown
