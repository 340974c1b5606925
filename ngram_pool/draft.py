"""`Draft`, `SampledDraft` and `DraftChains`: the proposals of a pool, as arrays.

Nothing here depends on how drafts are found. Next file: `pool.py`.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Draft:
    """A prefix tree of proposed tokens, likeliest node first.

    The tree hangs under the last committed token (the root), which is not one of its nodes. Nodes
    are ordered by the probability of their whole path, so parents come before children, and the
    first nodes of a draft, however many, are again a draft.
    """

    token_ids: NDArray[np.int32]  # [num_nodes]
    parents: NDArray[np.int32]  # [num_nodes], -1 under the root; parents[i] < i
    depths: NDArray[np.int32]  # [num_nodes], 1 under the root
    probs: NDArray[np.float64]  # [num_nodes], estimated acceptance of the node; never increasing

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def empty(cls) -> "Draft":
        """Return a draft without nodes.

        >>> len(Draft.empty())
        0
        """
        ids = np.empty(0, np.int32)
        return cls(token_ids=ids, parents=ids, depths=ids, probs=np.empty(0, np.float64))

    def first(self, num_nodes: int) -> Self:
        """Return the draft of the first `num_nodes` nodes, or of all if there are fewer."""
        if num_nodes >= len(self.token_ids):
            return self
        return type(self)(*[getattr(self, name)[:num_nodes] for name in self.__match_args__])

    def candidates(self) -> list[list[int]]:
        """Return the token ids of every root-to-leaf path, likeliest leaf first."""
        paths: list[list[int]] = []
        parents = self.parents.tolist()
        for token_id, parent in zip(self.token_ids.tolist(), parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), token_id])
        inner = set(parents)
        return [path for node, path in enumerate(paths) if node not in inner]


@dataclass(frozen=True, slots=True)
class SampledDraft(Draft):
    """A prefix tree of drawn tokens, with the distribution that each token was drawn from.

    Node i was drawn from row i of the supports. Children of one parent are in the order of drawing,
    without replacement: the row of a later child leaves out the earlier ones.

    To verify such a draft by rejection sampling, decide which nodes to keep without looking at the
    tokens drawn there: a node kept because of its token makes that token more frequent than its row
    says. It is unbiased to take `first(num_nodes)` with a number known before the draft was drawn
    (from the probabilities of `NGramPool.draft`, say), or to keep nodes one after the other until
    the `probs` of the next is too low, because `probs[i]` depends only on the tokens of nodes
    before i. It is biased to choose a number from all of `probs` at once, to leave out single
    nodes, or to reorder siblings.
    """

    # `probs`: [num_nodes], the path probability that the pool expected for the node before its
    # token was drawn. Not sorted: after an unlikely token, its next sibling is expected to be
    # likelier.
    support_token_ids: NDArray[np.int32]  # [num_nodes, max_support], tokens that could be drawn
    support_probs: NDArray[np.float64]  # [num_nodes, max_support], rows sum to 1; 0 is padding

    @classmethod
    def empty(cls) -> "SampledDraft":
        """Return a draft without nodes.

        >>> SampledDraft.empty().dense_probs(vocab_size=5).shape
        (0, 5)
        """
        ids, probs = np.empty(0, np.int32), np.empty(0, np.float64)
        return cls(ids, ids, ids, probs, ids.reshape(0, 1), probs.reshape(0, 1))

    def dense_probs(self, vocab_size: int) -> NDArray[np.float64]:
        """Return the distribution that each node was drawn from, float64 [num_nodes, vocab_size].

        Raises:
            ValueError: a token that could have been drawn lies outside the vocabulary.
        """
        largest = int(np.max(self.support_token_ids, initial=-1, where=self.support_probs > 0))
        if largest >= vocab_size:
            raise ValueError(f"expected vocab_size of at least {largest + 1}, got {vocab_size}")
        dense = np.zeros((len(self), vocab_size), np.float64)
        node, choice = self.support_probs.nonzero()
        dense[node, self.support_token_ids[node, choice]] = self.support_probs[node, choice]
        return dense


class DraftChains(NamedTuple):
    """One proposed path of tokens for each of several texts.

    A path hangs under the last token of its text. Entries beyond a path's length mean nothing.
    """

    token_ids: NDArray[np.int32]  # [num_rows, max_draft_tokens]
    probs: NDArray[np.float64]  # as `token_ids`, estimated acceptance of the path up to there
    lengths: NDArray[np.int64]  # [num_rows], from 0 to max_draft_tokens

    def tolist(self) -> list[list[int]]:
        """Return the token ids of each path."""
        rows = zip(self.token_ids.tolist(), self.lengths.tolist(), strict=True)
        return [ids[:length] for ids, length in rows]
