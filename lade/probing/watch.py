"""When to hold a committed token against a forward of one token: rarely, and for next to nothing.

A check of a model speaks for the model that was checked. `structure.py` sees most changes of it;
what it cannot see, as a forward that was edited in place, is noticed here: now and then, the token
that a step kept last is run once more, alone, as plain decoding would.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lade.closeness import distance
from lade.targets.base import Alone

# Steps before the first look, and between two looks: twice as many each time, up to the last. A
# look costs about as much as a step without a draft, so this is 0.26 % of the time at first.
_FIRST, _LAST = 384, 4096
# In half precision logits of the same text differ by chance, and those of experts chosen by a
# near-tie by more than a check allows: only what is seen so often, look after look, counts.
_NUM_IN_HALF_PRECISION = 3


class Watch:
    """Counts steps, and tells which of them to look at.

    Args:
        first: steps before the first look.
        last: the most steps between two looks.
    """

    def __init__(self, first: int = _FIRST, last: int = _LAST) -> None:
        self._interval = first
        self._last = last
        self._num_steps = 0
        self._num_apart = 0

    def is_due(self) -> bool:
        """Count a step, and tell whether to look at it."""
        self._num_steps += 1
        return self._num_steps >= self._interval

    def is_wrong(self, distance: float, limit: float, is_exact: bool) -> bool:
        """Learn how far apart logits were at a look, and tell whether to trust no draft any more.

        Args:
            distance: of the logits.
            limit: what a right way may differ by.
            is_exact: whether text is promised to be that of plain decoding, token for token.
        """
        self._num_steps = 0
        if distance <= limit:
            self._num_apart = 0
            self._interval = min(2 * self._interval, self._last)
            return False
        self._num_apart += 1
        if is_exact or self._num_apart >= _NUM_IN_HALF_PRECISION:
            self._num_apart = 0
            return True
        self._num_steps = self._interval  # look again at once
        return False


@dataclass(frozen=True, slots=True)
class Watching:
    """When to hold a committed token against a forward over it alone, and what may lie between.

    Attributes:
        watch: counts steps, also those of earlier calls.
        limit: of the distance of logits.
        is_exact: whether text is promised to be that of plain decoding.
    """

    watch: Watch
    limit: float
    is_exact: bool

    def flaw(self, alone: Alone, logits: Tensor) -> str | None:
        """Return why drafts are not to be trusted any more, or None.

        Args:
            alone: a committed token of each row, run alone.
            logits: of the step that committed them, [rows, width, vocab_size].
        """
        nodes = torch.tensor(alone.nodes, device=logits.device)
        mine = logits[torch.arange(len(nodes), device=logits.device), nodes]
        apart = distance(mine, alone.logits.to(mine.device))
        if not self.watch.is_wrong(apart, self.limit, self.is_exact):
            return None
        return (
            f"its logits for a draft differ from those for the same token alone by {apart:.2g} of "
            f"their standard deviation (expected at most {self.limit:.2g})"
        )
