"""`Draft` and `SampledDraft`: what a pool proposes, as arrays. Nothing here knows how it was found.

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


@dataclass(frozen=True, slots=True)
class SampledDraft(Draft):
    """A prefix tree of drawn tokens, with the distribution that each one was drawn from.

    Node i was drawn from row i of the supports. Children of one parent stand in the order in which
    they were drawn, without replacement: the row of a later one leaves the earlier ones out.

    Whoever holds such a draft against a target by rejection sampling must decide which nodes to
    keep without looking at the tokens drawn there: a node that is kept because of its token makes
    that token more frequent than its row says. Unbiased are `first(num_nodes)` with a number known
    before the draft was drawn (from the probabilities of `NGramPool.draft`, say), and keeping nodes
    one after the other until the `probs` of the next is too low, because `probs[i]` depends only on
    the tokens of nodes before i. Biased are a number chosen from all of `probs` at once, leaving
    out single nodes, and ordering siblings anew.
    """

    # `probs`: [num_nodes], the path probability that the pool expected for the node before its
    # token was drawn. Not sorted: an unlikely token leaves its next sibling a greater expectation.
    support_token_ids: NDArray[np.int32]  # [num_nodes, max_support], what could have been drawn
    support_probs: NDArray[np.float64]  # [num_nodes, max_support], rows sum to 1; 0 is padding

    @classmethod
    def empty(cls) -> "SampledDraft":
        """Return the draft that proposes nothing.

        >>> SampledDraft.empty().dense_probs(vocab_size=5).shape
        (0, 5)
        """
        ids, probs = np.empty(0, np.int32), np.empty(0, np.float64)
        return cls(ids, ids, ids, probs, ids.reshape(0, 1), probs.reshape(0, 1))

    def first(self, num_nodes: int) -> "SampledDraft":
        """Return the draft of the first `num_nodes` nodes (all of them if there are fewer).

        Node i depends on the draws of nodes before i only, so this is the draft that would have
        been drawn if no more had been asked for.
        """
        return SampledDraft(
            self.token_ids[:num_nodes],
            self.parents[:num_nodes],
            self.depths[:num_nodes],
            self.probs[:num_nodes],
            self.support_token_ids[:num_nodes],
            self.support_probs[:num_nodes],
        )

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
