"""SuffixDecoding: frequent continuations, from the request itself and from earlier answers.

Next file: `catalogue.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from benchmarks.rivals.growing import ROOT, GrowingDraft
from lade.drafting.drafter import Drafter
from ngram_pool import Draft

_MAX_DEPTH = 24  # of the tries, match and draft together
_TOKENS_PER_MATCH = 1.0  # maximum draft tokens per matched token
_MORE_TOKENS = 0  # added to that maximum
_MIN_PROB = 0.1  # of a node's path

_END = -1  # separates texts


@dataclass(slots=True)
class _Node:
    """A sequence of tokens that occurred twice or more."""

    num: int  # how often
    children: "dict[int, _Place]" = field(default_factory=dict)  # by the next token


# A node or, for a sequence that occurred once, the position of its last token in the text.
_Place = _Node | int


class SuffixTrie:
    """How often each sequence of tokens, up to a length, occurred in some texts.

    Sequences that occurred once need no nodes, so there are few dicts per token instead of one per
    length. A token is added in O(depth).
    """

    def __init__(self) -> None:
        self._text: list[int] = []  # all texts, each but the current one followed by _END
        self._root = _Node(0)
        self._growing: list[tuple[_Node, int]] = []  # where the text's own suffixes end, and depths

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the next tokens of the current text."""
        for token_id in token_ids:
            self._text.append(token_id)
            self._growing = [
                (child, depth + 1)
                for node, depth in [*self._growing, (self._root, 0)]
                if (child := self._count(node, token_id)) is not None and depth + 1 < _MAX_DEPTH
            ]

    def end_text(self) -> None:
        """End the current text; what is added next does not follow it."""
        self._text.append(_END)
        self._growing = []

    def find(self, token_ids: Sequence[int]) -> _Place | None:
        """Return the place of a sequence; None if it did not occur."""
        place: _Place | None = self._root
        for token_id in token_ids:
            if isinstance(place, _Node):
                place = place.children.get(token_id)
            elif place is not None:
                place = place + 1 if self._token_id(place + 1) == token_id else None
        return place

    def following(self, place: _Place) -> Iterator[tuple[int, _Place, float]]:
        """Yield each token that followed, with its place and its share of the occurrences."""
        if isinstance(place, _Node):
            for token_id, child in place.children.items():
                num = child.num if isinstance(child, _Node) else 1
                yield token_id, child, num / place.num
        elif (next_token_id := self._token_id(place + 1)) != _END:
            yield next_token_id, place + 1, 1.0

    def _count(self, node: _Node, token_id: int) -> _Node | None:
        """Count the token just added, after a node; return its node if it was there before."""
        child = node.children.get(token_id)
        if child is None:
            node.children[token_id] = len(self._text) - 1
            return None
        if not isinstance(child, _Node):
            node.children[token_id] = child = self._node_at(child)
        child.num += 1
        return child

    def _node_at(self, position: int) -> _Node:
        """Return a node for a sequence that occurred once so far."""
        next_token_id = self._token_id(position + 1)
        return _Node(1, {} if next_token_id == _END else {next_token_id: position + 1})

    def _token_id(self, position: int) -> int:
        return self._text[position] if position < len(self._text) else _END


class _Speculation(NamedTuple):
    """A draft and its score."""

    score: float  # the sum of its path probabilities
    draft: Draft


def _speculate(
    trie: SuffixTrie, place: _Place, max_draft_tokens: int, max_depth: int
) -> _Speculation:
    """Grow the most frequent continuations of a place, likeliest path first."""
    growing, score = GrowingDraft(max_draft_tokens), 0.0
    order = count()
    heap: list[tuple[float, int, int, int, _Place]] = []

    def push(parent: int, place: _Place, prob: float) -> None:
        for token_id, child, share in trie.following(place):
            if prob * share >= _MIN_PROB:
                heappush(heap, (-prob * share, next(order), parent, token_id, child))

    push(ROOT, place, 1.0)
    while heap and growing.room:
        negated_prob, _, parent, token_id, child = heappop(heap)
        node = growing.add(parent, token_id, -negated_prob)
        score -= negated_prob
        if growing.depth(node) < max_depth:
            push(node, child, -negated_prob)
    return _Speculation(score, growing.build())


class _Request:
    """A prompt and its answer so far."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.trie = SuffixTrie()
        self.trie.extend(prompt_ids)
        self.answer_ids: list[int] = []


class SuffixDrafter(Drafter):
    """Drafter of the most frequent continuations of the most promising match.

    One trie holds the prompt and answer of a request; another, for all sequences, holds the answers
    that ended before. Both know sequences of up to 24 tokens. Every suffix of the text that
    occurred is tried in both: nodes are added by the probability of their path, a ratio of
    frequencies, until it falls below 0.1 or there is a node per matched token. The draft with the
    greatest sum of these probabilities is taken; of equals, the request's own, then the longer
    match.

    The settings are the defaults of the authors' library in vLLM, except that trees are drafted,
    which is off there. It adds answers to the shared trie as they grow, and keeps 10 000 of them;
    here they are added when they end, and all are kept, as a pass has fewer.

    Source: Oliaro et al., SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications
    (arXiv 2411.04975), section 3.
    """

    def __init__(self) -> None:
        self._handles = count()
        self._open: dict[int, _Request] = {}
        self._answers = SuffixTrie()

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a trie with a prompt."""
        sequence = next(self._handles)
        self._open[sequence] = _Request(prompt_ids)
        return sequence

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Return the best draft over all matches."""
        best = _Speculation(0.0, Draft.empty())
        for trie in (self._open[sequence].trie, self._answers):
            places = _matches(trie, committed)
            for length, place in zip(range(len(places), 0, -1), reversed(places), strict=True):
                most = min(max_draft_tokens, int(_TOKENS_PER_MATCH * length + _MORE_TOKENS))
                if most > best.score:  # no score is greater than the number of nodes
                    made = _speculate(trie, place, most, _MAX_DEPTH - length)
                    best = max(best, made, key=lambda each: each.score)  # the first of equals
        return best.draft

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Add the committed tokens to the request."""
        request = self._open[sequence]
        request.trie.extend(token_ids)
        request.answer_ids += token_ids

    def close(self, sequence: int) -> None:
        """Forget the request; its answer stays."""
        self._answers.extend(self._open.pop(sequence).answer_ids)
        self._answers.end_text()


def _matches(trie: SuffixTrie, committed: Sequence[int]) -> list[_Place]:
    """Return the places of the last token, the last two and so on, for as long as they occurred."""
    places: list[_Place] = []
    for length in range(1, min(len(committed), _MAX_DEPTH - 1) + 1):
        place = trie.find(committed[-length:])
        if place is None:
            break
        places.append(place)
    return places
