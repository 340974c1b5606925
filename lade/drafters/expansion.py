"""Which tree a model's drafts are: a chain, the best tree, beams, or drawn at random."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from lade.budget.levels import Level
from lade.errors import UnsupportedOptionError
from ngram_pool import Draft, SampledDraft

ExpansionName = Literal["tree", "chain", "beam"]

# Nodes of a level that are run for the next, and children that each may have. Nodes far less likely
# than the best of their level are left out: hardly any text takes them.
_TREE_WIDTH = 4
_TREE_CHILDREN = 4
_LEAST_SHARE = 0.1
_NUM_BEAMS = 3
# Tokens that a drawn token is drawn from: the likeliest, with their probabilities scaled to 1. That
# is the distribution that it is verified with, so the text is not affected.
_MAX_SUPPORT = 256


class Ranked(NamedTuple):
    """The likeliest tokens after nodes, best first, on the host."""

    token_ids: NDArray[np.int64]  # [num_nodes, num_ranked]
    probs: NDArray[np.float64]  # [num_nodes, num_ranked]


class Speaker(Protocol):
    """What the drafting model says after the nodes of a growing tree, as an expansion asks."""

    def first(self, num_ranked: int) -> Ranked:
        """Return the likeliest tokens after the text [1, num_ranked]."""

    def grow(
        self,
        nodes: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        num_ranked: int,
    ) -> Ranked:
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


class Limits(NamedTuple):
    """How large a draft may be."""

    num_nodes: int
    num_levels: int


GoesOn = Callable[[Sequence[Level]], bool]


def check_expansion(expansion: str) -> None:
    """Raise if there is no such expansion.

    Raises:
        ValueError: there is none.
    """
    if expansion not in get_args(ExpansionName):
        names = ", ".join(map(repr, get_args(ExpansionName)))
        raise ValueError(f"expected expansion to be one of {names}, got {expansion!r}")


class Expansion(NamedTuple):
    """The shape of drafts.

    Attributes:
        name: "chain" is the likeliest token after each; "tree" has the likeliest paths of all
            lengths; "beam" has the likeliest paths of the full length.
        width: nodes of a level that are run for the next.
        num_children: tokens after each that may become nodes.
    """

    name: ExpansionName
    width: int
    num_children: int

    @classmethod
    def of(cls, name: ExpansionName, is_chain: bool) -> "Expansion":
        """Return an expansion; a chain where only one path can be grown or verified."""
        if name == "chain" or is_chain:
            return cls("chain", 1, 1)
        if name == "beam":
            return cls("beam", _NUM_BEAMS, _NUM_BEAMS)
        return cls("tree", _TREE_WIDTH, _TREE_CHILDREN)

    def grow(self, speaker: Speaker, limits: Limits, goes_on: GoesOn) -> Grown:
        """Grow the likeliest paths, a level by each forward."""
        nodes = _Nodes()
        level = nodes.add([-1], speaker.first(self.num_children))
        levels: list[Level] = []
        while level:
            level = self._kept(nodes, level, limits)
            levels.append(nodes.level(level))
            running = self._running(nodes, level, speaker)
            if len(levels) >= limits.num_levels or not running or not goes_on(levels):
                break
            ranked = speaker.grow(
                running,
                [nodes.token_ids[node] for node in running],
                [nodes.parents[node] for node in running],
                self.num_children,
            )
            level = nodes.add(running, ranked)
        draft = nodes.draft(
            limits.num_nodes, nodes.paths_to(level) if self.name == "beam" else None
        )
        return Grown(draft, levels)

    def _kept(self, nodes: "_Nodes", level: list[int], limits: Limits) -> list[int]:
        """Return the nodes of a new level that may be in the draft, best first."""
        level = sorted(level, key=lambda node: -nodes.probs[node])
        if self.name == "beam":
            return level[: self.width]
        least = _LEAST_SHARE * nodes.probs[level[0]]
        return [node for node in level[: limits.num_nodes] if nodes.probs[node] >= least]

    def _running(self, nodes: "_Nodes", level: Sequence[int], speaker: Speaker) -> list[int]:
        """Return the nodes of a level to run."""
        return [node for node in level[: self.width] if not speaker.is_end(nodes.token_ids[node])]


class DrawnExpansion(NamedTuple):
    """The shape of drafts that are drawn at random, to be verified by rejection sampling.

    Each node has its tokens drawn one after another, without replacement, from what the model says.
    Which nodes have how many is decided by how often drawn tokens were accepted before, so that it
    does not depend on the tokens.

    Attributes:
        width: nodes of a level that are run for the next.
        num_children: tokens drawn after each at most.
        acceptance: probability that a token is accepted, if those beside it were not.
    """

    width: int
    num_children: int
    acceptance: float

    @classmethod
    def of(cls, name: ExpansionName, is_chain: bool, acceptance: float) -> "DrawnExpansion":
        """Return an expansion; beams are not drawn, since those kept would depend on the tokens.

        Raises:
            UnsupportedOptionError: beams are asked for.
        """
        if name == "beam":
            raise UnsupportedOptionError(
                "lade does not support expansion='beam' where drafts are drawn "
                "(Config(acceptance='rejection')): use 'tree' or 'chain'"
            )
        # Of an acceptance of 1, nothing would be left for the second token of a node.
        acceptance = min(max(acceptance, 0.05), 0.95)
        if name == "chain" or is_chain:
            return cls(1, 1, acceptance)
        return cls(_TREE_WIDTH, _TREE_CHILDREN, acceptance)

    def grow(
        self, speaker: Speaker, limits: Limits, goes_on: GoesOn, rng: np.random.Generator
    ) -> Grown:
        """Draw a tree, a level by each forward."""
        nodes = _DrawnNodes(rng)
        running = [-1]
        ranked = speaker.first(_MAX_SUPPORT)
        levels: list[Level] = []
        while True:
            level = self._drawn(nodes, running, ranked)
            if not level:
                break
            levels.append(nodes.level(level))
            best = sorted(level, key=lambda node: -nodes.probs[node])[: self.width]
            running = [
                node
                for node in best
                if nodes.probs[node] >= _LEAST_SHARE * nodes.probs[best[0]]
                and not speaker.is_end(nodes.token_ids[node])
            ]
            is_full = len(levels) >= limits.num_levels or len(nodes) >= limits.num_nodes
            if is_full or not running or not goes_on(levels):
                break
            ranked = speaker.grow(
                running,
                [nodes.token_ids[node] for node in running],
                [nodes.parents[node] for node in running],
                _MAX_SUPPORT,
            )
        return Grown(nodes.draft().first(limits.num_nodes), levels)

    def _drawn(self, nodes: "_DrawnNodes", parents: Sequence[int], ranked: Ranked) -> list[int]:
        """Draw the children of nodes that were run; return them."""
        best = max(nodes.prob_of(parent) for parent in parents)
        level: list[int] = []
        for parent, token_ids, probs in zip(parents, ranked.token_ids, ranked.probs, strict=True):
            left = np.where(probs > 0, probs, 0.0)  # NaN, too, is none
            prob = nodes.prob_of(parent) * self.acceptance
            for _ in range(self.num_children):
                total = left.sum()
                if not total > 0 or prob < _LEAST_SHARE * best * self.acceptance:
                    break
                left = left / total
                level.append(nodes.draw(parent, token_ids, left, prob))
                left = np.where(token_ids == nodes.token_ids[-1], 0.0, left)
                prob *= 1 - self.acceptance
        return level


class _Nodes:
    """The nodes of a draft that grows."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.probs: list[float] = []  # of the whole path
        self._token_probs: list[float] = []

    def add(self, parents: Sequence[int], ranked: Ranked) -> list[int]:
        """Add the ranked tokens as children of nodes, -1 for the text; return the new nodes."""
        first = len(self.token_ids)
        for parent, token_ids, probs in zip(
            parents, ranked.token_ids.tolist(), ranked.probs.tolist(), strict=True
        ):
            depth, of_parent = (
                (1, 1.0) if parent < 0 else (self.depths[parent] + 1, self.probs[parent])
            )
            for token_id, prob in zip(token_ids, probs, strict=True):
                if not prob > 0:  # ruled out by a processor
                    continue
                self.token_ids.append(token_id)
                self.parents.append(parent)
                self.depths.append(depth)
                self.probs.append(of_parent * prob)
                self._token_probs.append(prob)
        return [*range(first, len(self.token_ids))]

    def level(self, nodes: Sequence[int]) -> Level:
        """Return a level of these nodes, best first."""
        mass = sum(self.probs[node] for node in nodes)
        return Level(min(1.0, mass), self._token_probs[nodes[0]], len(nodes))

    def paths_to(self, leaves: Sequence[int]) -> set[int]:
        """Return the nodes on the paths to some nodes."""
        found: set[int] = set()
        for leaf in leaves:
            node = leaf
            while node >= 0 and node not in found:
                found.add(node)
                node = self.parents[node]
        return found

    def draft(self, num_nodes: int, among: set[int] | None = None) -> Draft:
        """Return the draft of the best nodes, best first."""
        nodes = [*range(len(self.token_ids))] if among is None else sorted(among)
        # Children are not likelier than their parents, and come later where they are as likely.
        nodes = sorted(nodes, key=lambda node: -self.probs[node])[:num_nodes]
        place = {node: index for index, node in enumerate(nodes)} | {-1: -1}
        return Draft(
            np.array([self.token_ids[node] for node in nodes], np.int32),
            np.array([place[self.parents[node]] for node in nodes], np.int32),
            np.array([self.depths[node] for node in nodes], np.int32),
            np.minimum(1.0, np.array([self.probs[node] for node in nodes], np.float64)),
        )


class _DrawnNodes:
    """The nodes of a drawn draft that grows."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.probs: list[float] = []  # of being accepted, as expected before the token was drawn
        self._token_probs: list[float] = []
        self._support_token_ids: list[NDArray[np.int64]] = []
        self._support_probs: list[NDArray[np.float64]] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    def prob_of(self, node: int) -> float:
        """Return the probability of a node, or of the text, -1."""
        return 1.0 if node < 0 else self.probs[node]

    def draw(
        self, parent: int, token_ids: NDArray[np.int64], probs: NDArray[np.float64], prob: float
    ) -> int:
        """Draw a child of a node from a distribution, and return it."""
        sums = probs.cumsum()
        # Never a token of probability 0: of equal sums, the first is found.
        place = int(sums.searchsorted(self._rng.random() * sums[-1], side="right"))
        place = min(place, int(probs.nonzero()[0][-1]))
        self.token_ids.append(int(token_ids[place]))
        self.parents.append(parent)
        self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        self.probs.append(prob)
        self._token_probs.append(float(probs[place]))
        self._support_token_ids.append(token_ids)
        self._support_probs.append(probs)
        return len(self.token_ids) - 1

    def level(self, nodes: Sequence[int]) -> Level:
        """Return a level of these nodes."""
        mass = sum(self.probs[node] for node in nodes)
        return Level(min(1.0, mass), self._token_probs[nodes[0]], len(nodes))

    def draft(self) -> SampledDraft:
        """Return the draft, in the order in which it was drawn."""
        if not self.token_ids:
            return SampledDraft.empty()
        return SampledDraft(
            np.array(self.token_ids, np.int32),
            np.array(self.parents, np.int32),
            np.array(self.depths, np.int32),
            np.array(self.probs, np.float64),
            np.stack(self._support_token_ids).astype(np.int32),
            np.stack(self._support_probs),
        )
