"""When to compare a committed token with a forward of one token: rarely, at almost no cost.

A check is valid only for the model that was checked. `structure.py` sees most changes of a model;
those it cannot see, such as a forward edited in place, are noticed here: now and then, the last
token that a step kept is run once more, alone, as in plain decoding.
"""

from dataclasses import dataclass

from torch import Tensor

from lade.closeness import distance
from lade.targets.base import Alone

# Steps before the first look; doubled after each good look, up to the maximum between two looks. A
# look costs about as much as a step without a draft, so this is 0.26 % of the time at first.
_FIRST, _LAST = 384, 4096
# In half precision, logits of the same text differ by chance, and where experts are chosen by a
# near-tie, by more than a check allows: only this many bad looks in a row count.
_NUM_IN_HALF_PRECISION = 3


class Watch:
    """A counter of steps that decides which of them to look at.

    Args:
        first: steps before the first look.
        last: maximum number of steps between two looks.
    """

    def __init__(self, first: int = _FIRST, last: int = _LAST) -> None:
        self._interval = first
        self._last = last
        self._num_steps = 0
        self._num_apart = 0

    def is_due(self) -> bool:
        """Count a step; return whether to look at it."""
        self._num_steps += 1
        return self._num_steps >= self._interval

    def is_wrong(self, distance: float, limit: float, is_exact: bool) -> bool:
        """Record the result of a look; return whether drafts can no longer be trusted.

        Args:
            distance: between the logits of the step and those of the token alone.
            limit: largest distance of a correct method.
            is_exact: whether the text must be that of plain decoding, token for token.
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
        self._num_steps = self._interval  # look again at the next step
        return False


@dataclass(frozen=True, slots=True)
class Watching:
    """When to compare a committed token with a forward over it alone, and the allowed difference.

    Attributes:
        watch: counts steps, including those of earlier calls.
        limit: largest allowed distance of logits.
        is_exact: whether the text must be that of plain decoding, token for token.
    """

    watch: Watch
    limit: float
    is_exact: bool

    def flaw(self, alone: Alone, logits: Tensor) -> str | None:
        """Return why drafts can no longer be trusted, or None.

        Args:
            alone: a committed token of each row, run alone.
            logits: of the step that committed those tokens, [rows, vocab_size].
        """
        apart = distance(logits, alone.logits.to(logits.device))
        if not self.watch.is_wrong(apart, self.limit, self.is_exact):
            return None
        return (
            f"its logits for a draft differ from those for the same token alone by {apart:.2g} of "
            f"their standard deviation (expected at most {self.limit:.2g})"
        )
