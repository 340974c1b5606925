"""Drafts of a model, grown level by level: its likeliest paths, or paths drawn at random.

How far they go, "measured", is decided in `lade/budget/asking.py`. Next file: `model_drafter.py`.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from lade.budget.asking import Level, Mean, Rule
from ngram_pool import Draft, SampledDraft

LengthName = Literal["measured", "confidence"]
ExpansionName = Literal["tree", "chain"]

_MAX_LEVELS = 20  # of a draft whose K is no number: transformers has as many
# Nodes of a level that are run for the next, and children that each may have. Nodes far less likely
# than the best of their level are left out: hardly any text takes them.
TREE_WIDTH = 4
TREE_CHILDREN = 4
_LEAST_SHARE = 0.1
# Tokens that a drawn token is drawn from: the likeliest, with their probabilities scaled to 1. That
# is the distribution that it is verified with, so the text is not affected.
_MAX_SUPPORT = 256


class Growth:
    """How far drafts go and which tree they are; and what forwards cost, kept between calls.

    Args:
        max_draft_tokens: tokens of a draft at most, and so levels; None for no limit.
        confidence: threshold of "confidence", and of "measured" at first.

    Raises:
        ValueError: there is no such rule or shape, or a number is out of range.
    """

    def __init__(
        self,
        length: LengthName | int = "measured",
        expansion: ExpansionName = "tree",
        max_draft_tokens: int | None = None,
        confidence: float = 0.4,
    ) -> None:
        is_number = isinstance(length, int) and not isinstance(length, bool)
        if not is_number and length not in get_args(LengthName):
            names = ", ".join(map(repr, get_args(LengthName)))
            raise ValueError(f"expected length to be {names} or a number of tokens, got {length!r}")
        if isinstance(length, int) and length < 1:
            raise ValueError(f"expected length of at least 1, got {length}")
        if expansion not in get_args(ExpansionName):
            names = " or ".join(map(repr, get_args(ExpansionName)))
            raise ValueError(f"expected expansion to be {names}, got {expansion!r}")
        if max_draft_tokens is not None and max_draft_tokens < 1:
            raise ValueError(f"expected max_draft_tokens of at least 1, got {max_draft_tokens}")
        if not 0 <= confidence <= 1:
            raise ValueError(f"expected confidence from 0 to 1, got {confidence!r}")
        self.is_measured = length == "measured"
        self.is_chain = expansion == "chain"
        self.max_draft_tokens = max_draft_tokens
        #: Seconds of a forward of the drafting model over a level.
        self.forward_sec = Mean()
        self._length = length
        self._confidence = confidence

    def rule(self, step_sec: Callable[[int], float] | None = None) -> Rule:
        """Return the rule of one sequence."""
        if isinstance(self._length, int):
            return Rule(min(self._length, self.max_draft_tokens or self._length))
        most = self.max_draft_tokens or _MAX_LEVELS
        if self._length == "confidence" or step_sec is None:
            return Rule(most, self._confidence)
        return Rule(most, self._confidence, step_sec, self.forward_sec)


class RankedTokens(NamedTuple):
    """The likeliest tokens after nodes, best first, on the host."""

    token_ids: NDArray[np.int64]  # [num_nodes, num_ranked]
    probs: NDArray[np.float64]  # [num_nodes, num_ranked]


class GrowingTree:
    """The nodes of a draft that grows: the likeliest tokens after others, or drawn ones.

    Drawn ones are verified by rejection sampling. Each node has its tokens drawn one after another,
    without replacement, from what the model says. Which nodes have how many is decided by how often
    drawn tokens were accepted before, so that it does not depend on the tokens; their probabilities
    are those that were expected before.

    Args:
        num_nodes: of a draft at most.
        is_chain: whether each node has one child.
        rng: to draw with; None for the likeliest.
        acceptance: probability that a drawn token is accepted, if those beside it were not.
    """

    def __init__(
        self,
        num_nodes: int,
        is_chain: bool = False,
        rng: np.random.Generator | None = None,
        acceptance: float = 1.0,
    ) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.probs: list[float] = []  # of the whole path
        self._depths: list[int] = []
        self._token_probs: list[float] = []
        self._supports: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []  # of drawn ones
        self._num_nodes = num_nodes
        self._num_children = 1 if is_chain else TREE_CHILDREN
        #: How many of the likeliest tokens after a node are wanted.
        self.num_ranked = self._num_children if rng is None else _MAX_SUPPORT
        self._rng = rng
        # Of an acceptance of 1, nothing would be left for the second token of a node.
        self._acceptance = min(max(acceptance, 0.05), 0.95)

    def grow(
        self,
        say: Callable[[Sequence[int]], RankedTokens],
        num_levels: int,
        goes_on: Callable[[Sequence[Level]], bool],
        ends: frozenset[int] = frozenset(),
    ) -> list[Level]:
        """Grow, a level by each forward of a model; return the levels as rules for K see them.

        Args:
            say: runs nodes, -1 for the text alone, and returns the likeliest tokens after each.
            num_levels: levels at most.
            goes_on: whether another level is worth a forward.
            ends: tokens that nothing follows.
        """
        running, levels = [-1], list[Level]()
        add = self._add_likeliest if self._rng is None else self._draw
        while level := add(running, say(running)):
            mass = min(1.0, sum(self.probs[node] for node in level))
            levels.append(Level(mass, self._token_probs[level[0]], len(level)))
            best = sorted(level, key=lambda node: -self.probs[node])[:TREE_WIDTH]
            least = _LEAST_SHARE * self.probs[best[0]]
            running = [
                node
                for node in best
                if self.probs[node] >= least and self.token_ids[node] not in ends
            ]
            # A later node may be likelier, but is not drawn in the place of an earlier one.
            is_full = self._rng is not None and len(self.token_ids) >= self._num_nodes
            if len(levels) >= num_levels or is_full or not running or not goes_on(levels):
                break
        return levels

    def _add_likeliest(self, parents: Sequence[int], ranked: RankedTokens) -> list[int]:
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
        least = _LEAST_SHARE * self.probs[level[0]] if level else 0.0
        return [node for node in level[: self._num_nodes] if self.probs[node] >= least]

    def _draw(self, parents: Sequence[int], ranked: RankedTokens) -> list[int]:
        """Draw the children of nodes that were run; return them."""
        assert self._rng is not None
        least = _LEAST_SHARE * max(map(self._prob_of, parents)) * self._acceptance
        level: list[int] = []
        for parent, token_ids, probs in zip(parents, ranked.token_ids, ranked.probs, strict=True):
            left = np.where(probs > 0, probs, 0.0)  # NaN, too, is none
            prob = self._prob_of(parent) * self._acceptance
            for _ in range(self._num_children):
                total = left.sum()
                if not total > 0 or prob < least:
                    break
                left = left / total
                sums = left.cumsum()
                # Never a token of probability 0: of equal sums, the first is found.
                place = int(sums.searchsorted(self._rng.random() * sums[-1], side="right"))
                place = min(place, int(left.nonzero()[0][-1]))
                self._supports.append((token_ids, left))
                level.append(self._add(parent, int(token_ids[place]), prob, float(left[place])))
                left = np.where(token_ids == token_ids[place], 0.0, left)
                prob *= 1 - self._acceptance
        return level

    def draft(self) -> Draft:
        """Return the draft of the best nodes, best first; of drawn ones, the first."""
        if self._rng is not None:
            nodes = [*range(min(self._num_nodes, len(self.probs)))]
        else:
            # Children are not likelier than their parents, and come later where they are as likely.
            nodes = sorted(range(len(self.probs)), key=lambda node: -self.probs[node])
            nodes = nodes[: self._num_nodes]
        place = {node: index for index, node in enumerate(nodes)} | {-1: -1}
        draft = Draft(
            np.array([self.token_ids[node] for node in nodes], np.int32),
            np.array([place[self.parents[node]] for node in nodes], np.int32),
            np.array([self._depths[node] for node in nodes], np.int32),
            np.minimum(1.0, np.array([self.probs[node] for node in nodes], np.float64)),
        )
        if self._rng is None:
            return draft
        if not nodes:
            return SampledDraft.empty()
        ids, probs = (np.stack(each) for each in zip(*self._supports[: len(nodes)], strict=True))
        whole = draft.token_ids, draft.parents, draft.depths, draft.probs
        return SampledDraft(*whole, ids.astype(np.int32), probs)

    def _prob_of(self, node: int) -> float:
        """Return the probability of a node, or of the text, -1."""
        return 1.0 if node < 0 else self.probs[node]

    def _add(self, parent: int, token_id: int, prob: float, token_prob: float) -> int:
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self._depths.append(1 if parent < 0 else self._depths[parent] + 1)
        self.probs.append(prob)
        self._token_probs.append(token_prob)
        return len(self.token_ids) - 1
