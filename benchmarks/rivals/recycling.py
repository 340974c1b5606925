"""Token Recycling: the target's own successors of each token, laid out as one fixed tree.

Next file: `sam.py`.
"""

from collections.abc import Sequence
from itertools import count
from math import prod
from typing import NamedTuple

from benchmarks.rivals.growing import ROOT, GrowingDraft
from lade.drafting.drafter import Drafter
from lade.drafting.successors import Successors
from ngram_pool import Draft

_NUM_SUCCESSORS = 8  # kept for each token
_LEVEL_SIZES = (8, 21, 25, 15, 8, 3)  # nodes by depth, 80 in all


class TreePlace(NamedTuple):
    """A node of the fixed tree, before it has a token."""

    parent: int  # the parent's place; ROOT for children of the root
    rank: int  # which successor of its parent's token it takes, from 0


def static_tree(level_sizes: Sequence[int], num_successors: int) -> list[TreePlace]:
    """Return a tree with a given number of nodes at each depth, best place first.

    The paper's tree was merged from measured ones, and only its sizes are used here. The rule
    instead: the r-th successor of a token weighs 1/r, a place the product along its path; each
    depth takes the heaviest children of the places above. (The 8, 21 and 25 places at depths 1 to 3
    are then all those of weights down to 1/8, 1/9 and 1/6: the sizes themselves suggest 1/r.)
    """
    chosen: list[tuple[int, ...]] = []  # paths of ranks from 1
    level: list[tuple[int, ...]] = [()]
    for size in level_sizes:
        children = [(*path, rank) for path in level for rank in range(1, num_successors + 1)]
        level = sorted(children, key=lambda path: (prod(path), path))[:size]
        chosen += level
    chosen.sort(key=lambda path: (prod(path), len(path), path))
    places = {path: place for place, path in enumerate(chosen)} | {(): ROOT}
    return [TreePlace(places[path[:-1]], path[-1] - 1) for path in chosen]


_TREE = static_tree(_LEVEL_SIZES, _NUM_SUCCESSORS)


class RecyclingDrafter(Drafter):
    """Drafter of the latest top 8 successors of each token, laid out as a fixed tree of 80 nodes.

    Every node that the target ran, accepted or not, replaces the successors of its token; of
    several nodes with the same token, the last one counts. One matrix serves all sequences and
    stays warm. Places under a token whose successors are not known yet stay empty (the original
    fills them with token 0). The paper fills the places level by level; here they come best first,
    so that the best are used where there is room for fewer than 80. Of the prompt, only what
    `harvest` receives is learned.

    Source: Luo et al., Turning Trash into Treasure: Accelerating Inference of Large Language Models
    with Token Recycling (arXiv 2408.08696), section 3.
    """

    num_successors = _NUM_SUCCESSORS

    def __init__(self) -> None:
        self._handles = count()
        self._successors: dict[int, list[int]] = {}  # the matrix, for the tokens seen

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a sequence; it keeps no state."""
        return next(self._handles)

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Fill the fixed tree, best places first."""
        growing = GrowingDraft(max_draft_tokens)
        # By place, the root first; places that stay empty have no successors.
        nodes, rows = [ROOT], [self._successors.get(committed[-1], [])]
        for parent, rank in _TREE:
            if growing.room == 0:
                break
            row = rows[parent + 1]
            if rank < len(row):
                nodes.append(growing.add(nodes[parent + 1], row[rank]))
                rows.append(self._successors.get(row[rank], []))
            else:
                nodes.append(ROOT)
                rows.append([])
        return growing.build()

    def harvest(
        self,
        sequence: int,
        committed: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        successors: Successors,
    ) -> None:
        """Replace the successors of the tokens that were run."""
        self._successors.update(zip(token_ids, successors.token_ids.tolist(), strict=True))

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Learn nothing: committed tokens were harvested."""

    def close(self, sequence: int) -> None:
        """End the sequence; the matrix stays."""
