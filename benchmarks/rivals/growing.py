"""What rivals share: drafts made node by node, and an index of each text.

Next file: `prompt_lookup.py`.
"""

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Generic, Protocol, TypeVar

import numpy as np

from lade.drafting.drafter import Drafter
from ngram_pool import Draft

ROOT = -1  # the parent of first tokens


class GrowingDraft:
    """A draft in the order in which nodes were added; a node has one child per token."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._max_nodes = max_draft_tokens
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._probs: list[float] = []
        self._children: dict[tuple[int, int], int] = {}  # (node, token id) -> child

    @property
    def room(self) -> int:
        """Number of nodes that can still be added."""
        return self._max_nodes - len(self._token_ids)

    def token_id(self, node: int) -> int:
        """Return the token of a node."""
        return self._token_ids[node]

    def parent(self, node: int) -> int:
        """Return the parent of a node, `ROOT` for first tokens."""
        return self._parents[node]

    def depth(self, node: int) -> int:
        """Return the depth of a node, 0 for `ROOT`."""
        return 0 if node == ROOT else self._depths[node]

    def add(self, parent: int, token_id: int, prob: float = 1.0) -> int:
        """Add a node, for which there must be room, and return it."""
        assert self.room > 0
        assert (parent, token_id) not in self._children
        node = len(self._token_ids)
        self._token_ids.append(token_id)
        self._parents.append(parent)
        self._depths.append(self.depth(parent) + 1)
        self._probs.append(prob)
        self._children[parent, token_id] = node
        return node

    def add_path(self, token_ids: Iterable[int]) -> list[int]:
        """Add as much of a candidate as there is room for, and return its nodes.

        The part it shares with earlier candidates is not added again.
        """
        node, nodes = ROOT, []
        for token_id in token_ids:
            child = self._children.get((node, token_id))
            if child is None:
                if self.room == 0:
                    break
                child = self.add(node, token_id)
            node = child
            nodes.append(node)
        return nodes

    def build(self) -> Draft:
        """Return the draft."""
        return Draft(
            np.array(self._token_ids, np.int32),
            np.array(self._parents, np.int32),
            np.array(self._depths, np.int32),
            np.array(self._probs, np.float64),
        )


class TextIndex(Protocol):
    """What a rival knows of a text, without arguments at first."""

    def __init__(self) -> None: ...

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index the next tokens."""


_Index = TypeVar("_Index", bound=TextIndex)


class IndexingDrafter(Drafter, Generic[_Index]):
    """Drafter by an index of prompt and answer, new for each prompt.

    Args:
        make: makes an empty index.
    """

    def __init__(self, make: type[_Index]) -> None:
        self._handles, self._make = count(), make
        self._open: dict[int, _Index] = {}

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Index a prompt."""
        sequence = next(self._handles)
        self._open[sequence] = self._make()
        self._open[sequence].extend(prompt_ids)
        return sequence

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Index the committed tokens."""
        self._open[sequence].extend(token_ids)

    def close(self, sequence: int) -> None:
        """Forget the index."""
        del self._open[sequence]
