"""`ModelDrafter`: drafts of a model, which grow level by level up to a length K.

A level is the result of one forward of the drafting model: the likeliest tokens after the nodes of
the level before, or tokens drawn there. Next file: `runner.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lade.budget.asking import FEW_BEHIND, Mean
from lade.budget.budget import Calibration
from lade.budget.seconds import Floats, Seconds
from lade.drafters.runner import ModelRunner
from lade.drafting.drafter import Drafter, DraftingCall
from lade.drafting.drafts import draft_of, matched_depth
from lade.machine.transfer import HostCopy
from lade.sampling.processors import HypotheticalProcessors
from ngram_pool import Draft, SampledDraft

_MAX_LEVELS = 20  # of a draft without a fixed K, as in transformers
_SURE = 0.4  # without measured times, a less probable token ends a draft, as in transformers
TREE_WIDTH = 4  # nodes of a level that the next level extends, and children of each
# Nodes less likely than this share of their level's best are left out: they are hardly ever right.
_LEAST_SHARE = 0.1
# Tokens that a drawn token is drawn from: the likeliest, with their probabilities scaled to 1. That
# is the distribution that it is verified with, so the text is not affected.
_MAX_SUPPORT = 256


# --- how far a draft goes ---------------------------------------------------------------------


class Level(NamedTuple):
    """A level of a draft: the nodes that one forward of the drafting model found."""

    mass: float  # sum of the path probabilities of the nodes kept
    token_prob: float  # probability of the best node, given its parent
    num_nodes: int  # number of nodes kept


class Rule:
    """The rule for K in one sequence.

    With measured times, another level is run if it raises the expected tokens per second of the
    step, drafting included. `lade/budget/asking.py` decides whether a first level pays.

    Args:
        forward_sec: seconds of the drafting model's forwards, by level; None for a fixed K.
        step_sec: returns the seconds of a step that verifies so many nodes, 0 if unknown.
    """

    def __init__(self, forward_sec: Seconds | None, step_sec: Callable[[int], float]) -> None:
        self._forward_sec, self._step_sec = forward_sec, step_sec
        #: How often a level was right lately, given the one before; at first, a guess.
        self.right = Mean(0.7, 4.0)
        self._calibration = Calibration()

    def goes_on(self, levels: Sequence[Level]) -> bool:
        """Return whether another level is worth a forward, after one or more levels."""
        if self._forward_sec is None:
            return True
        forward_sec = float(self._forward_sec.at(1.0)) if self._forward_sec.is_known else 0.0
        num_nodes = sum(each[2] for each in levels)
        step_sec = self._step_sec(num_nodes)
        if not forward_sec or not step_sec:
            return levels[-1].token_prob >= _SURE
        right = np.cumprod(self._calibration.believed(_given(levels)))
        more = float(right[-1]) * self.right.value
        more_sec = forward_sec + self._step_sec(num_nodes + levels[-1].num_nodes) - step_sec
        expected = 1.0 + float(right.sum())
        return more * (step_sec + len(levels) * forward_sec) > expected * more_sec

    def learn(self, levels: Sequence[Level], num_right: int, is_ended: bool) -> None:
        """Learn from the outcome of a draft.

        Args:
            levels: levels of the draft.
            num_right: number of levels on the path of the text.
            is_ended: whether the text left the draft, or went past its end.
        """
        came = np.arange(min(len(levels), num_right + is_ended)) < num_right
        for is_right in came.tolist():
            self.right.add(is_right)
        if len(came):
            self._calibration.count(_given(levels[: len(came)]), came.astype(np.float64))


def _given(levels: Sequence[Level]) -> Floats:
    """Return the probability of each level, given the one before."""
    masses = np.array([1.0, *(level.mass for level in levels)])
    before = masses[:-1]
    given: Floats = np.divide(masses[1:], before, out=np.zeros(len(levels)), where=before > 0)
    return given


# --- which tree it is -------------------------------------------------------------------------


# The likeliest tokens after nodes, best first, and their probabilities: [num_nodes, num_ranked].
RankedTokens = tuple[NDArray[np.int64], Floats]


class _GrownNode(NamedTuple):
    token_id: int
    parent: int  # -1 for the text
    prob: float  # of the whole path
    token_prob: float  # given its parent
    support: tuple[NDArray[np.int64], Floats] | None = None  # of a drawn one


class GrowingTree:
    """The nodes of a growing draft: the likeliest tokens, or drawn tokens.

    Drawn tokens are verified by rejection sampling. A node's children are drawn from the model's
    distribution, without replacement. Their number depends on how often drawn tokens were accepted
    before, and not on the drawn tokens; their probabilities are those expected before the draw.

    Args:
        num_nodes: maximum number of nodes.
        is_chain: whether each node has one child.
        rng: random generator for draws; None for the likeliest tokens.
        acceptance: probability that a drawn token is accepted, if its earlier siblings were not.
    """

    def __init__(
        self,
        num_nodes: int,
        is_chain: bool = False,
        rng: np.random.Generator | None = None,
        acceptance: float = 1.0,
    ) -> None:
        self.nodes: list[_GrownNode] = []
        self._num_nodes = num_nodes
        self._num_children = 1 if is_chain else TREE_WIDTH
        #: Number of likeliest tokens to rank after each node.
        self.num_ranked = self._num_children if rng is None else _MAX_SUPPORT
        self._rng = rng
        # With an acceptance of 1, a node's second token would have probability 0.
        self._acceptance = min(max(acceptance, 0.05), 0.95)

    def grow(
        self,
        say: Callable[[Sequence[int]], RankedTokens],
        num_levels: int,
        goes_on: Callable[[Sequence[Level]], bool],
        ends: frozenset[int] = frozenset(),
    ) -> list[Level]:
        """Grow the draft, a level for each forward of a model; return the levels.

        Args:
            say: runs nodes, -1 for the text alone, and returns the likeliest tokens after each.
            num_levels: maximum number of levels.
            goes_on: returns whether another level is worth a forward.
            ends: tokens that end a text.
        """
        running, levels, nodes = [-1], list[Level](), self.nodes
        add = self._add_likeliest if self._rng is None else self._draw
        while level := add(running, say(running)):
            mass = min(1.0, sum(nodes[node].prob for node in level))
            levels.append(Level(mass, nodes[level[0]].token_prob, len(level)))
            best = sorted(level, key=self._order)[:TREE_WIDTH]
            running = [node for node in best if nodes[node].token_id not in ends]
            # A later drawn node does not replace an earlier one, even if it is likelier.
            is_full = self._rng is not None and len(nodes) >= self._num_nodes
            if len(levels) >= num_levels or is_full or not running or not goes_on(levels):
                break
        return levels

    def path(self, node: int) -> list[int]:
        """Return the tokens from the text to a node; none for the text itself, -1."""
        return [] if node < 0 else [*self.path(self.nodes[node].parent), self.nodes[node].token_id]

    def draft(self) -> Draft:
        """Return the draft of the best nodes, best first; of drawn nodes, the first drawn."""
        order = [*range(len(self.nodes))]
        if self._rng is None:
            # A child is at most as likely as its parent, and comes later if equally likely.
            order.sort(key=self._order)
        order = order[: self._num_nodes]
        kept = [self.nodes[node] for node in order]
        new_index = {node: index for index, node in enumerate(order)} | {-1: -1}
        draft = draft_of(
            [node.token_id for node in kept],
            [new_index[node.parent] for node in kept],
            [min(1.0, node.prob) for node in kept],
        )
        if self._rng is None:
            return draft
        supports = [node.support for node in kept if node.support is not None]
        if not supports:
            return SampledDraft.empty()
        ids, probs = (np.stack(each) for each in zip(*supports, strict=True))
        whole = draft.token_ids, draft.parents, draft.depths, draft.probs
        return SampledDraft(*whole, ids.astype(np.int32), probs)

    def _order(self, node: int) -> float:
        return -self.nodes[node].prob

    def _prob_of(self, node: int) -> float:
        """Return the probability of a node, or of the text, -1."""
        return 1.0 if node < 0 else self.nodes[node].prob

    def _add_likeliest(self, parents: Sequence[int], ranked: RankedTokens) -> list[int]:
        """Add ranked tokens as children; return the ones that may be in the draft, best first."""
        first = len(self.nodes)
        self.nodes += [
            _GrownNode(token_id, parent, self._prob_of(parent) * prob, prob)
            for parent, token_ids, probs in zip(
                parents, *(part.tolist() for part in ranked), strict=True
            )
            for token_id, prob in zip(token_ids, probs, strict=True)
            if prob > 0  # else a processor rules it out
        ]
        level = sorted(range(first, len(self.nodes)), key=self._order)[: self._num_nodes]
        least = _LEAST_SHARE * self.nodes[level[0]].prob if level else 0.0
        return [node for node in level if self.nodes[node].prob >= least]

    def _draw(self, parents: Sequence[int], ranked: RankedTokens) -> list[int]:
        """Draw the children of nodes that were run; return them."""
        assert self._rng is not None
        first = len(self.nodes)
        least = _LEAST_SHARE * max(map(self._prob_of, parents)) * self._acceptance
        for parent, token_ids, probs in zip(parents, *ranked, strict=True):
            left = np.where(probs > 0, probs, 0.0)  # NaN, too, is none
            prob = self._prob_of(parent) * self._acceptance
            for _ in range(self._num_children):
                total = left.sum()
                if not total > 0 or prob < least:
                    break
                left = left / total
                index = int(self._rng.choice(len(left), p=left))
                token_id, token_prob = int(token_ids[index]), float(left[index])
                self.nodes.append(_GrownNode(token_id, parent, prob, token_prob, (token_ids, left)))
                left = np.where(token_ids == token_id, 0.0, left)
                prob *= 1 - self._acceptance
        return [*range(first, len(self.nodes))]


# --- a drafter of one call --------------------------------------------------------------------


@dataclass(slots=True)
class _DraftedText:
    """The state of one sequence."""

    row: int
    rule: Rule
    runner: ModelRunner | None = None
    num_followed: int = 0  # tokens of the text that the runner has seen
    # The last draft, and its levels until their outcome is known.
    draft: Draft = field(default_factory=Draft.empty)
    levels: list[Level] = field(default_factory=list)


class ModelDrafter(Drafter):
    """The drafter of one call that drafts with a model.

    Args:
        open_runner: returns the model's runner for a sequence; called at its first draft.
        length: K, levels of a draft; None for as many as make decoding faster.
        forward_sec: seconds of the model's forwards, by level; kept between calls.
        max_length: the model's context length, for text and draft together.
    """

    def __init__(
        self,
        call: DraftingCall,
        open_runner: Callable[[], ModelRunner],
        length: int | None,
        forward_sec: Seconds,
        max_length: int | None = None,
    ) -> None:
        self.is_measured = length is None
        self._call = call
        self._open_runner = open_runner
        self._num_levels = length or _MAX_LEVELS
        self._forward_sec = forward_sec
        self._max_length = min(call.max_length - 1, max_length or call.max_length)
        self._texts: dict[int, _DraftedText] = {}
        self._num_opened = 0
        self._processors = HypotheticalProcessors(call.processors, call.num_rows)
        ids = getattr(getattr(call.model, "generation_config", None), "eos_token_id", None)
        self._ends = frozenset([ids] if isinstance(ids, int) else ids or [])

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a sequence."""
        handle = self._num_opened
        self._num_opened += 1
        forward_sec = self._forward_sec if self.is_measured else None
        self._texts[handle] = _DraftedText(handle, Rule(forward_sec, self._call.step_sec))
        return handle

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Grow a draft after the text."""
        state, call = self._texts[sequence], self._call
        state.levels = []
        room = self._max_length - len(committed)
        num_levels = min(max_draft_tokens, room, self._num_levels)
        # The model has not run the newest token of the text.
        if num_levels < 1 or len(committed) < 2:
            return Draft.empty()
        if state.runner is None:
            state.runner = self._open_runner()
        # No path of a drawn tree may be left out afterwards.
        few = call.max_candidates is not None and (call.rngs is not None or call.max_candidates < 2)
        is_chain = state.runner.is_chain or few
        rng = None if call.rngs is None else call.rngs[state.row]
        tree = GrowingTree(max_draft_tokens, is_chain, rng, state.rule.right.value)
        say = partial(self._said, state, state.runner, tree, committed)
        state.levels = tree.grow(say, num_levels, state.rule.goes_on, self._ends)
        state.draft = tree.draft()
        return state.draft

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Learn from the outcome of the last draft."""
        state = self._texts[sequence]
        if state.levels:
            num_right = matched_depth(state.draft, token_ids)
            is_ended = num_right < len(token_ids)
            state.rule.learn(state.levels, min(num_right, len(state.levels)), is_ended)
            state.levels = []

    def close(self, sequence: int) -> None:
        """End a sequence; free its KV cache."""
        state = self._texts.pop(sequence)
        if state.runner is not None:
            state.runner.close()

    @torch.no_grad()
    def _said(
        self,
        state: _DraftedText,
        runner: ModelRunner,
        tree: GrowingTree,
        committed: Sequence[int],
        nodes: Sequence[int],
    ) -> RankedTokens:
        """Run nodes of a growing draft, and return the likeliest tokens after each.

        The logits processors of the call apply to them, each with the path of its node.
        """
        start = perf_counter()
        if nodes == [-1]:
            logits = runner.follow(committed)[None]
        else:
            grown = [tree.nodes[node] for node in nodes]
            logits = runner.grow(nodes, [n.token_id for n in grown], [n.parent for n in grown])
        scores = logits[:, : self._call.vocab_size].float()
        if self._processors:
            # Where the call has them, as some processors hold tensors there. Some write into the
            # scores, and these may be the model's own.
            scores = scores.to(self._call.device or scores.device, copy=True)
            prefixes = [[*committed, *tree.path(node)] for node in nodes]
            scores = self._processors(state.row, prefixes, scores)
        best = scores.topk(min(tree.num_ranked, scores.shape[1]), dim=-1)
        probs = (best.values - scores.logsumexp(dim=-1, keepdim=True)).exp()
        ids, on_host = HostCopy(best.indices, probs).get()
        if len(committed) - state.num_followed <= FEW_BEHIND:
            self._forward_sec.record(1, perf_counter() - start)
        state.num_followed = len(committed)
        return ids.numpy(), on_host.numpy().astype(np.float64)
