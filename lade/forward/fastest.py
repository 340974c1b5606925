"""`Fastest`: the fastest of several ways to compute the same, by the times of a few calls."""

import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

_R = TypeVar("_R")
TORCHS = 0  # the way that is right by definition


# A product is timed only as the first of a round, as the others find the weights in the cache. Each
# is timed twice, unless it is so much slower that a second time would change nothing.
_NUM_TIMES = 2
_CLEAR, _CLEAR_SEC = 2.0, 3e-3
# Calls until ways are timed again, if all take about the same time, and in any case.
_LEAST_CALLS, _MOST_CALLS = 100, 20_000


class Fastest:
    """Finds the fastest of several ways, by the shortest times of a few calls.

    A busy machine may make a fast way look slow, so all are timed again now and then, in turn.

    Args:
        num_ways: number of ways; the first is torch's.

    Attributes:
        best: number of the fastest way; None until it is known.
        extra_sec: seconds of the last comparison, without those of the fastest way.
    """

    def __init__(self, num_ways: int) -> None:
        self.best: int | None = None
        self.extra_sec = 0.0
        self._sec = [math.inf] * num_ways  # the shortest time of each way
        self._rivals: Sequence[int] = range(num_ways)  # the ways that comparisons run
        self._place, self._num_rounds = 0, 0  # in a round, each way is the first once
        self._num_left = 0  # calls until the next comparison

    def compare(
        self,
        run: Callable[[int], _R],
        is_close: Callable[[_R, _R], bool],
        scale: float = 1.0,
    ) -> _R:
        """Run all rivals; return torch's result if torch is a rival, else another's.

        Args:
            run: runs one way.
            is_close: returns whether two results differ by rounding alone; warns if not.
            scale: factor of the times, which makes them comparable with those of other calls.
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
        """Seconds that the fastest way saves in a call; all of them until it is known."""
        return math.inf if self.best is None else self._sec[TORCHS] - self._sec[self.best]

    def is_due(self) -> bool:
        """Count a call; return whether it should compare all ways."""
        self._num_left -= 1
        return self._num_left == 0

    def _end_round(self) -> None:
        """Choose the fastest way, unless some rivals must be timed once more."""
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
        # A much slower way is tried so rarely that it costs a percent at most.
        self._num_left = int(min(_LEAST_CALLS * (slow / fast) ** 2, _MOST_CALLS))


def about(num_rows: int) -> int:
    """Return the class of a number of rows: up to a power of two, or above 1,024."""
    return min((num_rows - 1).bit_length(), 11)
