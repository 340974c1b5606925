"""SSSD: all continuations of a context in prompt and answer, as a tree of their frequencies.

Next file: `catalogue.py`.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from benchmarks.rivals.growing import GrowingDraft, IndexingDrafter
from ngram_pool import Draft

_SIZES = (4, 3, 2, 1)  # of the contexts to match, in tokens, longest first
_MAX_DEPTH = 10


@dataclass(slots=True)
class _Places:
    """A text, and where each of its short n-grams ended."""

    token_ids: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=lambda: defaultdict(list))

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index the next tokens."""
        for token_id in token_ids:
            self.token_ids.append(token_id)
            for size in _SIZES:
                if size <= len(self.token_ids):
                    self.ends[tuple(self.token_ids[-size:])].append(len(self.token_ids))

    def after(self, ends: Sequence[int]) -> dict[int, list[int]]:
        """Return the tokens that stand at some places, each with the places behind it."""
        found: dict[int, list[int]] = defaultdict(list)
        for end in ends:
            if end < len(self.token_ids):
                found[self.token_ids[end]].append(end + 1)
        return found

    def grow(self, growing: GrowingDraft, ends: Sequence[int]) -> None:
        """Add what followed some places, best first by its share among them."""
        queue: list[tuple[float, int, tuple[int, ...], list[int]]] = [(-1.0, 0, (), [*ends])]
        numbers = count(1)  # of equals, the first found comes first
        while queue and growing.room:
            negative, _, path, places = heappop(queue)
            growing.add_path(path)
            following = self.after(places) if len(path) < _MAX_DEPTH else {}
            num = sum(map(len, following.values()))
            for token_id, behind in following.items():
                share = negative * len(behind) / num
                heappush(queue, (share, next(numbers), (*path, token_id), behind))


class SssdDrafter(IndexingDrafter[_Places]):
    """Drafter of all that followed the last tokens in prompt and answer, merged into one tree.

    The continuations of the longest context that occurred come first, best first by their
    frequency; those of shorter contexts fill the room that is left. The method sets the number of
    draft tokens by what the hardware verifies for nothing: take the width that costs measured here
    favour. Its lengths of contexts and continuations are not published with it; these are ours.
    There is no datastore, which the original can have besides, and everything starts afresh with
    each prompt.

    Source: Marzollo et al., SSSD: Simply-Scalable Speculative Decoding (arXiv 2411.05894).
    """

    def __init__(self) -> None:
        super().__init__(_Places)

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Grow a tree from the longest context to the shortest."""
        growing, index = GrowingDraft(max_draft_tokens), self._open[sequence]
        for size in _SIZES:
            index.grow(growing, index.ends.get(tuple(committed[-size:]), []))
        return growing.build()
