"""How many draft nodes to verify now, by what a step of each size costs on this machine.

Next file: `stats.py`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol


class Budget(Protocol):
    """Decides the size of the tree; it can change the speed of decoding, never the text."""

    @property
    def max_nodes(self) -> int:
        """The greatest number of draft nodes worth asking for."""

    def num_nodes(self, probs: Sequence[Sequence[float]], num_pending: int) -> int:
        """Return how many of the best nodes of each row's draft to verify.

        Args:
            probs: for each row of the batch the probabilities of its draft, best first.
            num_pending: tokens of each row that the forward runs besides the root and the draft.
        """

    def record(
        self, num_rows: int, num_nodes: int, forward_sec: float, expected: float, came: float
    ) -> None:
        """Learn from a step.

        Args:
            num_rows: rows of the batch.
            num_nodes: draft nodes it verified in each row, pending tokens included.
            forward_sec: time of its forward.
            expected: probability the drafter gave to its guesses of the next token, all together,
                whether they were verified or not; the mean of the rows that emitted.
            came: whether the next token was among them; the mean too.
        """


class FixedBudget:
    """Verify up to a given number of nodes, whatever they cost: for runs that repeat exactly."""

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes

    def num_nodes(self, probs: Sequence[Sequence[float]], num_pending: int) -> int:
        """Return the size of the largest draft."""
        return max(map(len, probs))

    def record(
        self, num_rows: int, num_nodes: int, forward_sec: float, expected: float, came: float
    ) -> None:
        """Learn nothing."""


# Sizes of a forward, root included, that are chosen from: few, so that each is measured soon.
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
# Until a size is measured, each token more, of any row, is taken to cost so much of a one-token
# step. Optimistic on purpose: a size that looks better than it is gets tried, measured and left.
_PRIOR_SLOPE = 0.01
_SMOOTHING = 0.2  # weight of a new measurement
_OUTLIER = 2.0  # a measurement counts as at most so many times what was expected
_PROBE_EVERY = 32  # steps between trying a neighbour of the best size, and re-measuring size 1
_MEMORY = 0.98  # weight that the past keeps per step in comparing what was expected with what came


class MeasuredBudget:
    """Verify as many nodes as maximise the expected tokens per second, down to none.

    The cost of a forward is measured per size as decoding goes, apart for small and large batches;
    the probabilities of the drafter are scaled by how often the next token was among its guesses so
    far. The state is a few dozen numbers for each doubling of the batch.
    """

    max_nodes = _SIZES[-1] - 1

    def __init__(self) -> None:
        self._costs: dict[int, _Costs] = {}  # by the batch size's number of bits
        # As if one token had been expected and had come: early steps move the scale gently.
        self._expected = self._came = 1.0

    def num_nodes(self, probs: Sequence[Sequence[float]], num_pending: int) -> int:
        """Return the number of nodes with the best ratio of expected tokens to measured time."""
        costs = self._costs_of(len(probs))
        if costs.plain_is_due():
            return 0
        # Sizes of the whole forward; the smallest has no draft.
        smallest, longest = 1 + num_pending, 1 + num_pending + max(map(len, probs))
        between = _SIZES[bisect_right(_SIZES, smallest) : bisect_right(_SIZES, longest)]
        sizes = [smallest, *between]
        if sizes[-1] < longest:
            sizes.append(longest)  # the whole draft
        scale = self._came / self._expected
        sums = [[0.0, *accumulate(of_row)] for of_row in probs]
        rates = [
            sum(1 + scale * of_row[min(size - smallest, len(of_row) - 1)] for of_row in sums) / sec
            for size, sec in zip(sizes, costs.estimates(sizes, len(probs)), strict=True)
        ]
        best = rates.index(max(rates))
        return sizes[max(0, min(best + costs.detour(), len(sizes) - 1))] - smallest

    def record(
        self, num_rows: int, num_nodes: int, forward_sec: float, expected: float, came: float
    ) -> None:
        """Smooth the measurements in; see `_SMOOTHING`, `_OUTLIER` and `_MEMORY`."""
        # Learned from guesses that were not verified too: drafting less must not teach to stop.
        self._expected = 1.0 + _MEMORY * (self._expected - 1.0) + expected
        self._came = 1.0 + _MEMORY * (self._came - 1.0) + came
        self._costs_of(num_rows).record(num_nodes + 1, forward_sec)

    def _costs_of(self, num_rows: int) -> "_Costs":
        return self._costs.setdefault(num_rows.bit_length(), _Costs())


class _Costs:
    """Seconds of a forward by its size, in tokens of one row, for batches of about one size."""

    def __init__(self) -> None:
        self._sec: dict[int, float] = {}  # size -> smoothed measurement
        self._seen: set[int] = set()
        self._num_steps = 0
        self._last_plain = 0  # the step at which size 1 was measured last

    def plain_is_due(self) -> bool:
        """Tell whether to measure a step without a draft: at first, and now and then."""
        return 1 not in self._sec or self._num_steps - self._last_plain >= 2 * _PROBE_EVERY

    def detour(self) -> int:
        """Return how many places in `_SIZES` to go beside the best, to measure neighbours."""
        phase = self._num_steps % _PROBE_EVERY
        return 1 if phase == 0 else -1 if phase == _PROBE_EVERY // 2 else 0

    def record(self, size: int, sec: float) -> None:
        """Take in one measurement."""
        self._num_steps += 1
        if size == 1:
            self._last_plain = self._num_steps
        if size not in self._seen:
            # The first forward of a size is not counted: libraries prepare kernels for it.
            self._seen.add(size)
        elif size not in self._sec:
            self._sec[size] = sec
        else:
            old = self._sec[size]
            self._sec[size] = old + _SMOOTHING * (min(sec, _OUTLIER * old) - old)

    def estimates(self, sizes: Sequence[int], num_rows: int) -> list[float]:
        """Return seconds for each of `sizes`, interpolated between the measured ones."""
        known = sorted(self._sec)
        slope = _PRIOR_SLOPE * num_rows
        costs = []
        for size in sizes:
            right = bisect_right(known, size)
            left_size = known[right - 1]  # size 1 is always known here
            cost = self._sec[left_size]
            if right == len(known):
                prior = (1 + slope * (size - 1)) / (1 + slope * (left_size - 1))
                costs.append(cost * prior)
            else:
                share = (size - left_size) / (known[right] - left_size)
                costs.append(cost + share * (self._sec[known[right]] - cost))
        return costs
