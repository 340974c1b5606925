"""Which of some ways to compute the same is the fastest, by the times of a few calls."""

import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

_R = TypeVar("_R")
TORCHS = 0  # the way that is right by definition


# A product is timed when it runs first, as the others find the weights in the cache. Twice for
# each, unless one is so much slower that another time would cost more than it can tell.
_NUM_TIMES = 2
_CLEAR, _CLEAR_SEC = 2.0, 3e-3
# Calls until one is timed again, if all take about the same time, and in any case.
_LEAST_CALLS, _MOST_CALLS = 100, 20_000


class Fastest:
    """Which of some ways is the fastest, by the shortest times of a few calls.

    A busy machine may make the wrong one look slow, so they are timed again now and then, in turn.

    Args:
        num_ways: the first is torch's.

    Attributes:
        best: None as long as it is not known.
        extra_sec: what the last comparison took, besides the fastest way.
    """

    def __init__(self, num_ways: int) -> None:
        self.best: int | None = None
        self.extra_sec = 0.0
        self._sec = [math.inf] * num_ways  # the shortest of each
        self._rivals: Sequence[int] = range(num_ways)  # that run when they are compared
        self._place, self._num_rounds = 0, 0  # in a round, each of them is the first once
        self._num_left = 0  # calls until one is timed again

    def compare(
        self,
        run: Callable[[int], _R],
        is_close: Callable[[_R, _R], bool],
        scale: float = 1.0,
    ) -> _R:
        """Run the rivals, and return torch's result if it is one, else another.

        Args:
            run: runs one of them.
            is_close: whether two results differ by rounding alone; says so where they do not.
            scale: what times are multiplied by, so that they can be held against others'.
        """
        rivals, is_known = self._rivals, self.best is not None
        begin, least = perf_counter(), math.inf
        self._place = (self._place + 1) % len(rivals)
        first = rivals[self._place]
        results = {}
        for which in [first, *(each for each in rivals if each != first)]:
            start = perf_counter()
            results[which] = run(which)
            least = min(least, perf_counter() - start)
            if which == first:
                self._sec[which] = min(self._sec[which], scale * (perf_counter() - start))
        result = results.pop(rivals[0])
        if not all(is_close(other, result) for other in results.values()):
            self.best, self._num_left = TORCHS, -1
            return result if rivals[0] == TORCHS else run(TORCHS)
        self.extra_sec = perf_counter() - begin - least
        if is_known:
            self._choose()
        elif self._place == 0:
            self._end_round()
        return result

    @property
    def saved_sec(self) -> float:
        """What a call saves by the best; as much as it takes while that is not known."""
        return math.inf if self.best is None else self._sec[TORCHS] - self._sec[self.best]

    def is_due(self) -> bool:
        """Count a call; return whether all ways are to be compared."""
        self._num_left -= 1
        return self._num_left == 0

    def _end_round(self) -> None:
        """Choose, unless some rivals are to be timed once more."""
        self._num_rounds += 1
        fast = min(self._sec)
        rivals = [i for i, sec in enumerate(self._sec) if sec < max(_CLEAR * fast, _CLEAR_SEC)]
        if len(rivals) > 1 and self._num_rounds < _NUM_TIMES:
            self._rivals = rivals
        else:
            self._rivals = range(len(self._sec))
            self._choose()

    def _choose(self) -> None:
        fast, slow = min(self._sec), max(self._sec)
        self.best = self._sec.index(fast)
        # What takes so many times as long is tried so rarely that it costs a percent at most.
        self._num_left = int(min(_LEAST_CALLS * (slow / fast) ** 2, _MOST_CALLS))


def about(num_rows: int) -> int:
    """Return the class of a number of rows: up to a power of two, or above 1,024."""
    return min((num_rows - 1).bit_length(), 11)
