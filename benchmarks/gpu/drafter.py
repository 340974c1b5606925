"""A drafter with a prescribed number of right tokens in each draft, as many as were recorded.

Next file: `measure.py`.
"""

import heapq
from collections.abc import Sequence
from itertools import count
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lade.drafting.drafter import Drafter
from lade.drafting.sources import PoolDrafter
from lade.drafting.successors import Successors
from ngram_pool import DEFAULT_NUM_SUCCESSORS, Draft, NGramPool

# Trees grow as if the first child of every node had probability _FIRST, and each further one _NEXT
# times that of the one before it.
_FIRST = 0.6
_NEXT = 0.25


# How many steps accepted 0, 1, 2, … draft tokens: greedy answers of SmolLM2-135M-Instruct in
# bfloat16 to the six prompts of `lade demo`, at most 192 tokens each, none ending in a loop.
# Drafted by one pool without a table, 31 tokens per step; 279 steps, MAT 3.08.
_RECORDED = (125, 58, 28, 16, 11, 10, 9, 3, 3, 2, 3, 1, 2, 2, 1, 2, 1, *[0] * 8, 1, *[0] * 4, 1)
_STEPS = [count for count, num in enumerate(_RECORDED) for _ in range(num)]

#: Tokens that a step adds on average, the bonus token included.
MAT = 1 + sum(_STEPS) / len(_STEPS)


def counts_for(num_new_tokens: int) -> list[int]:
    """Return the counts of an answer's steps.

    They are evenly spaced quantiles of the recorded ones, in random order, so that few steps have
    about the mean of many.
    """
    num_steps = max(1, round((num_new_tokens - 1) / MAT))  # one token is the prefill's
    counts = [_STEPS[int((step + 0.5) / num_steps * len(_STEPS))] for step in range(num_steps)]
    Random(0).shuffle(counts)
    return counts


class _Outline(NamedTuple):
    """A tree without tokens, best node first; its spine is the path that will be accepted."""

    parents: NDArray[np.int32]
    depths: NDArray[np.int32]
    probs: NDArray[np.float64]
    #: For each node, its parent, and the offset of its token id from the right one.
    places: list[tuple[int, int]]


class ReplayedDrafter(Drafter):
    """Drafter of trees of a fixed size; each step accepts a prescribed number of nodes.

    A pool does all the work that it would do for lade; only its drafts are thrown away.

    Args:
        successors: [vocab_size], the token that the target emits after each token.
        counts: how many draft tokens successive steps of a sequence accept; then they repeat.
        num_draft_tokens: nodes of every tree; fewer where the end of the text leaves less room.
    """

    num_successors = DEFAULT_NUM_SUCCESSORS

    def __init__(
        self, successors: Sequence[int], counts: Sequence[int], num_draft_tokens: int
    ) -> None:
        self._successors = successors
        self._counts = counts
        self._outlines = {
            num_accepted: _outline(num_accepted, num_draft_tokens) for num_accepted in {*counts}
        }
        self._pool = PoolDrafter(NGramPool(seed=0))
        self._num_observed: dict[int, int] = {}  # by sequence; first, the prefill's token

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a sequence with the first count."""
        sequence = self._pool.open(prompt_ids)
        self._num_observed[sequence] = 0
        return sequence

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Propose a tree with a path of as many right tokens as prescribed; all others are wrong.

        The path's nodes are not the first of the tree: those beside it have to be moved away.
        """
        self._pool.draft(sequence, committed, max_draft_tokens)
        step = max(0, self._num_observed[sequence] - 1)
        outline = self._outlines[self._counts[step % len(self._counts)]]
        successors, vocab_size = self._successors, len(self._successors)
        token_ids = [committed[-1]]
        for parent, offset in outline.places:
            token_ids.append((successors[token_ids[parent + 1]] + offset) % vocab_size)
        drafted = np.array(token_ids[1:], np.int32)
        return Draft(drafted, outline.parents, outline.depths, outline.probs).first(
            max_draft_tokens
        )

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Observe the tokens and count the step."""
        self._pool.observe(sequence, token_ids)
        self._num_observed[sequence] += 1

    def harvest(
        self,
        sequence: int,
        committed: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        successors: Successors,
    ) -> None:
        """Feed the target's successors to the pool."""
        self._pool.harvest(sequence, committed, token_ids, parents, successors)

    def close(self, sequence: int) -> None:
        """End the sequence."""
        self._pool.close(sequence)
        del self._num_observed[sequence]


class _Node(NamedTuple):
    """A node of a growing tree; sorts by falling probability, so parents come before children."""

    minus_prob: float
    number: int
    parent: int  # the parent's number
    depth: int
    rank: int  # among the children of its parent
    is_right: bool


def _outline(num_accepted: int, num_nodes: int) -> _Outline:
    """Grow a tree best first; it contains the accepted path even where that goes deeper."""
    numbers = count()
    chosen: dict[int, _Node] = {}
    heap = [_Node(-_FIRST, next(numbers), -1, 1, 0, num_accepted > 0)]
    num_right = 0
    while len(chosen) < num_nodes:
        node = heapq.heappop(heap)
        num_left = num_nodes - len(chosen)
        if not node.is_right and num_left <= num_accepted - num_right:
            continue  # the remaining nodes are reserved for the path
        chosen[node.number] = node
        num_right += node.is_right
        child_is_right = node.is_right and node.depth < num_accepted
        prob, depth = node.minus_prob, node.depth
        child = _Node(prob * _FIRST, next(numbers), node.number, depth + 1, 0, child_is_right)
        heapq.heappush(heap, child)
        next_rank = node.rank + 1
        heapq.heappush(
            heap, _Node(prob * _NEXT, next(numbers), node.parent, depth, next_rank, False)
        )
    nodes = [*chosen.values()]  # in order of probability, as they were popped
    index = {node.number: place for place, node in enumerate(nodes)} | {-1: -1}
    parents = [index[node.parent] for node in nodes]
    # After a wrong node, or after the path, the first child already is a wrong token.
    offsets = [0 if node.is_right else node.rank + 1 for node in nodes]
    return _Outline(
        np.array(parents, np.int32).reshape(-1),
        np.array([node.depth for node in nodes], np.int32).reshape(-1),
        np.array([-node.minus_prob for node in nodes]).reshape(-1),
        [*zip(parents, offsets, strict=True)],
    )
