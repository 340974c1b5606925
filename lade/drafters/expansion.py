"""Which tree a model's drafts are: its likeliest paths, or paths drawn at random."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lade.budget.levels import Level
from ngram_pool import Draft, SampledDraft

# Nodes of a level that are run for the next, and children that each may have. Nodes far less likely
# than the best of their level are left out: hardly any text takes them.
TREE_WIDTH = 4
TREE_CHILDREN = 4
_LEAST_SHARE = 0.1
# Tokens that a drawn token is drawn from: the likeliest, with their probabilities scaled to 1. That
# is the distribution that it is verified with, so the text is not affected.
_MAX_SUPPORT = 256


class RankedTokens(NamedTuple):
    """The likeliest tokens after nodes, best first, on the host."""

    token_ids: NDArray[np.int64]  # [num_nodes, num_ranked]
    probs: NDArray[np.float64]  # [num_nodes, num_ranked]


class Speaker(Protocol):
    """What the drafting model says after the nodes of a growing tree."""

    def first(self, num_ranked: int) -> RankedTokens:
        """Return the likeliest tokens after the text [1, num_ranked]."""

    def grow(
        self,
        nodes: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        num_ranked: int,
    ) -> RankedTokens:
        """Run nodes, and return the likeliest tokens after each [len(nodes), num_ranked].

        Args:
            nodes: their indices in the draft, by which later ones refer to them.
            token_ids: their tokens.
            parents: indices in the draft of nodes that were run before; -1 for the text.
        """

    def is_end(self, token_id: int) -> bool:
        """Return whether nothing follows a token."""


class Grown(NamedTuple):
    """A draft, and its levels as rules for K see them."""

    draft: Draft
    levels: list[Level]


class GrowthLimits(NamedTuple):
    """How large a draft may be."""

    num_nodes: int
    num_levels: int


GoesOn = Callable[[Sequence[Level]], bool]


def likeliest(
    speaker: Speaker, limits: GrowthLimits, goes_on: GoesOn, *, is_chain: bool = False
) -> Grown:
    """Grow the likeliest paths of all lengths, or the likeliest token after each."""
    num_children = 1 if is_chain else TREE_CHILDREN
    return _grown(_Likeliest(limits.num_nodes), speaker, limits, goes_on, num_children)


def drawn(
    speaker: Speaker,
    limits: GrowthLimits,
    goes_on: GoesOn,
    rng: np.random.Generator,
    acceptance: float,
    *,
    is_chain: bool = False,
) -> Grown:
    """Draw a tree, or a chain, to be verified by rejection sampling.

    Each node has its tokens drawn one after another, without replacement, from what the model says.
    Which nodes have how many is decided by how often drawn tokens were accepted before, so that it
    does not depend on the tokens.

    Args:
        acceptance: probability that a token is accepted, if those beside it were not.
    """
    # Of an acceptance of 1, nothing would be left for the second token of a node.
    acceptance = min(max(acceptance, 0.05), 0.95)
    nodes = _Drawn(rng, acceptance, 1 if is_chain else TREE_CHILDREN)
    return _grown(nodes, speaker, limits, goes_on, _MAX_SUPPORT)


def _grown(
    nodes: "_Likeliest | _Drawn",
    speaker: Speaker,
    limits: GrowthLimits,
    goes_on: GoesOn,
    num_ranked: int,
) -> Grown:
    """Grow a tree, a level by each forward."""
    running, ranked = [-1], speaker.first(num_ranked)
    levels: list[Level] = []
    while level := nodes.add_level(running, ranked):
        levels.append(nodes.level(level))
        best = sorted(level, key=lambda node: -nodes.probs[node])[:TREE_WIDTH]
        running = [
            node
            for node in best
            if nodes.probs[node] >= _LEAST_SHARE * nodes.probs[best[0]]
            and not speaker.is_end(nodes.token_ids[node])
        ]
        is_over = len(levels) >= limits.num_levels or nodes.is_full(limits.num_nodes)
        if is_over or not running or not goes_on(levels):
            break
        ranked = speaker.grow(
            running,
            [nodes.token_ids[node] for node in running],
            [nodes.parents[node] for node in running],
            num_ranked,
        )
    return Grown(nodes.draft(limits.num_nodes), levels)


class _Nodes:
    """The nodes of a draft that grows."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.probs: list[float] = []  # of the whole path
        self._token_probs: list[float] = []

    def level(self, nodes: Sequence[int]) -> Level:
        """Return a level of these nodes, of which the first one tells how likely its best is."""
        mass = sum(self.probs[node] for node in nodes)
        return Level(min(1.0, mass), self._token_probs[nodes[0]], len(nodes))

    def _prob_of(self, node: int) -> float:
        """Return the probability of a node, or of the text, -1."""
        return 1.0 if node < 0 else self.probs[node]

    def _add(self, parent: int, token_id: int, prob: float, token_prob: float) -> int:
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        self.probs.append(prob)
        self._token_probs.append(token_prob)
        return len(self.token_ids) - 1


class _Likeliest(_Nodes):
    """Nodes that are the likeliest tokens after others."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def add_level(self, parents: Sequence[int], ranked: RankedTokens) -> list[int]:
        """Add the ranked tokens as children; return those that may be in the draft, best first."""
        level = [
            self._add(parent, token_id, self._prob_of(parent) * prob, prob)
            for parent, token_ids, probs in zip(
                parents, ranked.token_ids.tolist(), ranked.probs.tolist(), strict=True
            )
            for token_id, prob in zip(token_ids, probs, strict=True)
            if prob > 0  # else a processor rules it out
        ]
        level.sort(key=lambda node: -self.probs[node])
        return [
            node
            for node in level[: self._most]
            if self.probs[node] >= _LEAST_SHARE * self.probs[level[0]]
        ]

    def is_full(self, num_nodes: int) -> bool:
        """Return whether no later node can be in a draft: never, for it may be likelier."""
        return False

    def draft(self, num_nodes: int) -> Draft:
        """Return the draft of the best nodes, best first."""
        # Children are not likelier than their parents, and come later where they are as likely.
        nodes = sorted(range(len(self.probs)), key=lambda node: -self.probs[node])[:num_nodes]
        place = {node: index for index, node in enumerate(nodes)} | {-1: -1}
        return Draft(
            np.array([self.token_ids[node] for node in nodes], np.int32),
            np.array([place[self.parents[node]] for node in nodes], np.int32),
            np.array([self.depths[node] for node in nodes], np.int32),
            np.minimum(1.0, np.array([self.probs[node] for node in nodes], np.float64)),
        )


class _Drawn(_Nodes):
    """Nodes that are drawn; their probabilities are those that were expected before."""

    def __init__(self, rng: np.random.Generator, acceptance: float, num_children: int) -> None:
        super().__init__()
        self._rng = rng
        self._acceptance = acceptance
        self._num_children = num_children
        self._support_token_ids: list[NDArray[np.int64]] = []
        self._support_probs: list[NDArray[np.float64]] = []

    def add_level(self, parents: Sequence[int], ranked: RankedTokens) -> list[int]:
        """Draw the children of nodes that were run; return them."""
        best = max(map(self._prob_of, parents))
        level: list[int] = []
        for parent, token_ids, probs in zip(parents, ranked.token_ids, ranked.probs, strict=True):
            left = np.where(probs > 0, probs, 0.0)  # NaN, too, is none
            prob = self._prob_of(parent) * self._acceptance
            for _ in range(self._num_children):
                total = left.sum()
                if not total > 0 or prob < _LEAST_SHARE * best * self._acceptance:
                    break
                left = left / total
                level.append(self._draw(parent, token_ids, left, prob))
                left = np.where(token_ids == self.token_ids[-1], 0.0, left)
                prob *= 1 - self._acceptance
        return level

    def _draw(
        self, parent: int, token_ids: NDArray[np.int64], probs: NDArray[np.float64], prob: float
    ) -> int:
        """Draw a child of a node from a distribution, and return it."""
        sums = probs.cumsum()
        # Never a token of probability 0: of equal sums, the first is found.
        place = int(sums.searchsorted(self._rng.random() * sums[-1], side="right"))
        place = min(place, int(probs.nonzero()[0][-1]))
        self._support_token_ids.append(token_ids)
        self._support_probs.append(probs)
        return self._add(parent, int(token_ids[place]), prob, float(probs[place]))

    def is_full(self, num_nodes: int) -> bool:
        """Return whether no later node can be in a draft."""
        return len(self.token_ids) >= num_nodes

    def draft(self, num_nodes: int) -> SampledDraft:
        """Return the draft of the first nodes, in the order in which they were drawn."""
        if not self.token_ids:
            return SampledDraft.empty()
        return SampledDraft(
            np.array(self.token_ids, np.int32),
            np.array(self.parents, np.int32),
            np.array(self.depths, np.int32),
            np.array(self.probs, np.float64),
            np.stack(self._support_token_ids).astype(np.int32),
            np.stack(self._support_probs),
        ).first(num_nodes)
