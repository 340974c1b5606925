"""Goose: a spine copied from the context, and branches of the target's own successors beside it.

Next file: `sssd.py`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import ceil
from typing import NamedTuple

from benchmarks.rivals.growing import ROOT, GrowingDraft
from lade.drafting.drafter import Drafter
from lade.drafting.drafts import chain
from lade.drafting.successors import Successors
from ngram_pool import Draft

_NUM_NODES = 60  # of a tree, root included
_MAX_DRAFT_TOKENS = 100  # of a tree, and of a spine, at full confidence
_SIZES = (5, 4, 3)  # of the n-grams to match, longest first
_MAX_COPIED = 20  # per match
_LONG_COPY = 8  # tokens that make a copy trustworthy
_EXTENDING_CONFIDENCE = 0.6  # above it, matching goes on from the end of the copy
_NUM_SUCCESSORS = 10
_MIN_SCORE = 0.01
_MAX_DEPTH = 6  # of the nodes of branches
_SPINE_BRANCHES = 0.5  # share of the branches that hang from the spine, not from the root
_SHARES = ((0.2, 0.15), (0.4, 0.3))  # (spine acceptance below, share of the nodes for the spine)
_LARGEST_SHARE = 0.5
_SMOOTHING = 0.3  # weight of the newest spine acceptance


class Scored(NamedTuple):
    """Likely tokens after a token, best first; two lists, as there are many of these."""

    token_ids: list[int]
    scores: list[float]


_NOTHING = Scored([], [])


@dataclass(slots=True)
class _Occurrences:
    """Earlier occurrences of an n-gram."""

    position: int  # after the earliest
    num: int = 1
    agree: bool = True  # whether all were followed by the same token


class Copy(NamedTuple):
    """The tokens that followed a context before."""

    token_ids: list[int]
    confidence: float


class _CountedText:
    """A text, and the earlier occurrences of its n-grams."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._occurrences: dict[tuple[int, ...], _Occurrences] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            for size in _SIZES:
                if size <= len(self.token_ids):
                    self._count(tuple(self.token_ids[-size:]), token_id)
            self.token_ids.append(token_id)

    def _count(self, ngram: tuple[int, ...], next_token_id: int) -> None:
        found = self._occurrences.get(ngram)
        if found is None:
            self._occurrences[ngram] = _Occurrences(len(self.token_ids))
        else:
            found.num += 1
            found.agree = found.agree and self.token_ids[found.position] == next_token_id

    def copy(self, context: Sequence[int]) -> Copy:
        """Return what followed the earliest occurrence of the context's last tokens."""
        for size in _SIZES:
            found = self._occurrences.get(tuple(context[-size:]))
            if found is not None:
                copied = self.token_ids[found.position : found.position + _MAX_COPIED]
                return Copy(copied, _confidence(len(copied), found))
        return Copy([], 0.0)

    def long_copy(self, context: Sequence[int]) -> Copy:
        """Return a copy, extended from its own end for as long as it is trusted."""
        copied, confidence = self.copy(context)
        if confidence <= _EXTENDING_CONFIDENCE:
            return Copy(copied, confidence)
        while len(copied) < int(_MAX_DRAFT_TOKENS * confidence):
            more = self.copy([*context[-_SIZES[0] :], *copied])
            copied = copied + more.token_ids
            # Full confidence lasts only as long as further matches have it, too.
            if not more.token_ids or more.confidence < confidence == 1:
                break
        return Copy(copied, confidence)


def _confidence(num_copied: int, found: _Occurrences) -> float:
    """Return the confidence in a copy, from 0 to 1."""
    if found.num > 1 and found.agree:
        return 1.0
    if num_copied >= _LONG_COPY:
        return min(0.9, 0.7 + 0.2 * (num_copied - _LONG_COPY) / 12)
    return 0.6 * num_copied / _LONG_COPY


@dataclass(slots=True)
class _GooseSequence:
    """The state of one prompt and its answer."""

    text: _CountedText = field(default_factory=_CountedText)
    #: The target's likeliest tokens after a token, and after a pair of tokens.
    of_token: dict[int, Scored] = field(default_factory=dict)
    of_pair: dict[tuple[int, int], Scored] = field(default_factory=dict)
    acceptance: float = 0.5  # of spines, smoothed
    spine: list[int] = field(default_factory=list)  # of the last draft
    spine_position: int = 0  # where in the text it would begin

    def successors(self, previous_token_id: int | None, token_id: int) -> Scored:
        """Return the likely tokens after a token: by the pair if known, else by the token."""
        if previous_token_id is not None and (previous_token_id, token_id) in self.of_pair:
            return self.of_pair[previous_token_id, token_id]
        return self.of_token.get(token_id, _NOTHING)

    def spine_share(self) -> float:
        """Return the share of the nodes that the spine gets."""
        return next((share for limit, share in _SHARES if self.acceptance < limit), _LARGEST_SHARE)

    def judge_spine(self, token_ids: Sequence[int]) -> None:
        """Update the acceptance by how much of the last spine was emitted."""
        if self.spine:
            emitted = token_ids[self.spine_position - len(self.text.token_ids) :]
            pairs = zip(self.spine, emitted, strict=False)
            num_right = next((i for i, (a, b) in enumerate(pairs) if a != b), len(emitted))
            rate = min(num_right, len(self.spine)) / len(self.spine)
            self.acceptance += _SMOOTHING * (rate - self.acceptance)
            self.spine = []


class _Branching:
    """Builder of one tree: the spine, branches at the root and the spine, then their extensions."""

    def __init__(self, state: _GooseSequence, committed: Sequence[int], num_nodes: int) -> None:
        self._state = state
        self._ending = committed[-2:]
        self.growing = GrowingDraft(num_nodes)
        self._growable: deque[tuple[int, float]] = deque()  # branches and their scores

    def grow(self, spine: Sequence[int]) -> Draft:
        """Build the tree along a spine."""
        nodes = self.growing.add_path(spine)
        room = self.growing.room
        on_spine = max(1, int(room * _SPINE_BRANCHES)) if nodes and room else 0
        self._attach(ROOT, room - on_spine, spine[0] if nodes else None)
        shares = _harmonic_shares(on_spine, len(nodes))
        for i, (node, share) in enumerate(zip(nodes, shares, strict=True)):
            self._attach(node, share, spine[i + 1] if i + 1 < len(nodes) else None)
        while self._growable and self.growing.room:
            self._extend(*self._growable.popleft())
        return self.growing.build()

    def _attach(self, node: int, most: int, spine_token_id: int | None) -> None:
        """Add at most `most` branches to a node, besides its child on the spine."""
        beside = [each for each in self._successors(node) if each[0] != spine_token_id]
        for token_id, score in beside[:most]:
            self._branch(node, token_id, score)

    def _extend(self, node: int, score: float) -> None:
        """Extend a branch: the likelier and the shallower it is, the wider."""
        widest = max(1, _NUM_SUCCESSORS // self.growing.depth(node))
        width = min(widest, ceil(self.growing.room * score), self.growing.room)
        for token_id, next_score in self._successors(node)[:width]:
            self._branch(node, token_id, next_score)

    def _branch(self, node: int, token_id: int, score: float) -> None:
        child = self.growing.add(node, token_id)
        if self.growing.depth(child) < _MAX_DEPTH:
            self._growable.append((child, score))

    def _successors(self, node: int) -> list[tuple[int, float]]:
        growing, ending = self.growing, self._ending
        previous: int | None
        if node == ROOT:
            previous, token_id = ending[-2] if len(ending) > 1 else None, ending[-1]
        else:
            parent, token_id = growing.parent(node), growing.token_id(node)
            previous = ending[-1] if parent == ROOT else growing.token_id(parent)
        scored = self._state.successors(previous, token_id)
        return [each for each in zip(*scored, strict=True) if each[1] >= _MIN_SCORE]


def _harmonic_shares(num: int, num_places: int) -> list[int]:
    """Split a number: the n-th place gets 1/n of the first's, at least 1 while any is left."""
    total = sum(1 / place for place in range(1, num_places + 1))
    shares: list[int] = []
    for place in range(1, num_places + 1):
        shares.append(min(max(1, int(num / (place * total))), num - sum(shares)))
    return shares


class GooseDrafter(Drafter):
    """Drafter of a copied spine, with branches of the target's own successors beside it.

    The spine is what followed the earliest occurrence of the last 5, 4 or 3 tokens in prompt and
    answer: 20 tokens, or up to 100 where matching goes on from its own end. Branches are what the
    target found likely after the same pair of tokens, else after the same token: of its top 10,
    those with 1 % of their probability or more. The spine gets 15, 30 or 50 % of the nodes by its
    smoothed acceptance (below 0.2, below 0.4, above). Half of the others hang from the root and
    half from the spine, where the n-th node gets 1/n of the first's share; what these leave extends
    branches, down to depth 6. A tree has 60 nodes with the root. The more the copy can be trusted,
    because it is long or all occurrences agree, the more nodes there are, up to 100, and the more
    of them are spine. With less room, the same shares apply. If the tables know nothing of the last
    token, the copy is all. Everything starts afresh with each prompt.

    The original also fills its tables with the logits of the whole prompt. Here, only what
    `harvest` receives of it, its end, teaches anything, so the first steps have fewer branches.

    Source: Jin, Nguyen and Inoue, Goose: Anisotropic Speculation Trees for Training-Free
    Speculative Decoding (arXiv 2604.02047), section 4, with the settings of its table 5.
    """

    num_successors = _NUM_SUCCESSORS

    def __init__(self) -> None:
        self._handles = count()
        self._open: dict[int, _GooseSequence] = {}

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin with empty tables."""
        sequence = next(self._handles)
        self._open[sequence] = _GooseSequence()
        self._open[sequence].text.extend(prompt_ids)
        return sequence

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Grow a tree, the spine first, so that it is the last to be cut."""
        state = self._open[sequence]
        if committed[-1] not in state.of_token:
            return chain(state.text.copy(committed).token_ids[:max_draft_tokens])
        copied, confidence = state.text.long_copy(committed)
        size = _NUM_NODES + int(confidence * (_MAX_DRAFT_TOKENS - _NUM_NODES))
        size = min(size, max_draft_tokens + 1)
        share = state.spine_share()
        share += confidence * (1 - share)
        state.spine = copied[: min(int(size * share), max_draft_tokens)]
        state.spine_position = len(committed)
        # The root takes no node from a spine that has all of them.
        num_nodes = max(size - 1, len(state.spine))
        return _Branching(state, committed, num_nodes).grow(state.spine)

    def harvest(
        self,
        sequence: int,
        committed: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        successors: Successors,
    ) -> None:
        """Replace the successors of the tokens that were run, and of the pairs they end."""
        state = self._open[sequence]
        scores = successors.probs / successors.probs.sum(axis=-1, keepdims=True)
        rows = zip(successors.token_ids.tolist(), scores.tolist(), strict=True)
        for node, (token_id, parent, row) in enumerate(zip(token_ids, parents, rows, strict=True)):
            scored = Scored(*row)
            state.of_token[token_id] = scored
            if node > 0:
                state.of_pair[token_ids[parent], token_id] = scored
            elif len(committed) > 1:
                state.of_pair[committed[-2], token_id] = scored

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Judge the last spine by the committed tokens, and index these."""
        state = self._open[sequence]
        state.judge_spine(token_ids)
        state.text.extend(token_ids)

    def close(self, sequence: int) -> None:
        """Forget text and tables."""
        del self._open[sequence]
