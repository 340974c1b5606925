"""What a token of a forward costs that several calls have a part in."""

from bisect import bisect_right

from lade.budget.asking import MEMORY
from lade.budget.costs import FIRST_OUTLIER, SIZES

# Assumed before anything is measured: what one more token adds, as a share of one token's forward.
_SLOPE = 0.04
_KEPT = 1 - 1 / MEMORY  # weight of the past, per forward
_DOUBT = 200.0  # squared tokens by which sizes must have differed before the slope is believed


class JointCosts:
    """Seconds of joint forwards by their tokens: a line, fitted to those of late."""

    def __init__(self) -> None:
        self._seen: set[int] = set()  # sizes that have run
        self._weight = 0.0
        self._size = self._sec = 0.0  # means
        self._of_sizes = self._of_both = 0.0  # sums of squares and products about the means

    def record(self, num_tokens: int, sec: float) -> None:
        """Learn from a forward, if it is not the first of about its size (see `Costs`)."""
        if (size := bisect_right(SIZES, num_tokens)) not in self._seen:
            self._seen.add(size)
            return
        if self._weight:
            sec = min(sec, FIRST_OUTLIER * self._expected(num_tokens))
        before = _KEPT * self._weight
        self._weight = before + 1.0
        size_off, sec_off = num_tokens - self._size, sec - self._sec
        share = before / self._weight
        self._of_sizes = _KEPT * self._of_sizes + share * size_off**2
        self._of_both = _KEPT * self._of_both + share * size_off * sec_off
        self._size += size_off / self._weight
        self._sec += sec_off / self._weight

    def price(self, num_tokens: int, num_committed: float) -> float:
        """Return how many tokens a draft token must add for all calls together to gain by it.

        Args:
            num_tokens: of a forward like the next.
            num_committed: tokens that all calls commit by it.
        """
        if not self._weight:
            return num_committed * _SLOPE / (1.0 + _SLOPE * (num_tokens - 1))
        return num_committed * self._slope / max(self._expected(num_tokens), 1e-9)

    @property
    def _slope(self) -> float:
        assumed = self._sec * _SLOPE / (1.0 + _SLOPE * (self._size - 1.0))
        slope = (self._of_both + _DOUBT * assumed) / (self._of_sizes + _DOUBT)
        # No token costs less than nothing, and all together cost no more than was measured.
        return min(max(0.0, slope), self._sec / self._size)

    def _expected(self, num_tokens: int) -> float:
        return self._sec + self._slope * (num_tokens - self._size)
