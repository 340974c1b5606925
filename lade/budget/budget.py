"""Budgets: how many draft tokens a step verifies.

`MeasuredBudget` combines the measured costs of forwards (`costs.py`) with the measured trust in a
drafter (`trust.py`).
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from lade.budget.costs import KNOTS, PRIOR_SLOPE, SIZES, Costs, Floats, interpolated, num_flat
from lade.budget.trust import Outcome, Trust


class Budget(Protocol):
    """Policy for the size of the tree; it can change the speed of decoding, never the text."""

    @property
    def max_draft_tokens(self) -> int:
        """Maximum number of draft tokens worth asking a drafter for."""

    def num_nodes(self, probs: Sequence[Sequence[float]], num_pending: int) -> int:
        """Return how many nodes of each row's draft to verify, best first.

        Args:
            probs: for each row of the batch, the probabilities of its draft's nodes, best first.
            num_pending: tokens per row that the forward runs besides the root and the draft.
        """

    def free_nodes(self, num_nodes: int, num_rows: int, num_pending: int) -> int:
        """Return how many more nodes per row a forward may run at no measurable cost.

        Args:
            num_nodes: nodes of each row's draft that the forward verifies.
            num_rows: rows of the batch.
            num_pending: as for `num_nodes`.
        """

    def record(
        self,
        num_rows: int,
        num_nodes: int,
        forward_sec: float | None,
        outcomes: Sequence[Outcome],
        num_emitted: Mapping[int, int],
    ) -> None:
        """Learn from a step.

        Args:
            num_rows: rows of the batch.
            num_nodes: tokens per row that the forward ran besides the root, pending ones included.
            forward_sec: seconds of the forward; None where not representative of others.
            outcomes: one for each row that emitted.
            num_emitted: by row, tokens emitted so far; the rows that the next step asks about, in
                that order.
        """


class _Unlearning:
    """Base of budgets that learn nothing."""

    def record(
        self,
        num_rows: int,
        num_nodes: int,
        forward_sec: float | None,
        outcomes: Sequence[Outcome],
        num_emitted: Mapping[int, int],
    ) -> None:
        """Learn nothing."""


class FixedBudget(_Unlearning):
    """Budget of a fixed number of nodes, whatever they cost, for reproducible runs."""

    def __init__(self, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens

    def num_nodes(self, probs: Sequence[Sequence[float]], num_pending: int) -> int:
        """Return the size of the largest draft."""
        return max(map(len, probs))

    def free_nodes(self, num_nodes: int, num_rows: int, num_pending: int) -> int:
        """Return 0: nothing is known of costs."""
        return 0


_FADING = 0.9  # per step, of the number of nodes verified before
_LEAST_ASKED = 16  # nodes; fewer would hide drafts that pay only when they are large
_MAX_DRAFT_TOKENS = 63


class PricedBudget(_Unlearning):
    """Budget by given step costs and the drafter's own probabilities, for reproducible runs.

    Args:
        step_costs: cost of a step, in any unit, by the number of tokens in the whole forward, all
            rows together; at least two sizes. Sizes between them are interpolated, larger ones
            extrapolated from the last two.
    """

    max_draft_tokens = _MAX_DRAFT_TOKENS

    def __init__(self, step_costs: Mapping[int, float]) -> None:
        self._sizes = np.array(sorted(step_costs), np.float64)
        self._costs = np.array([step_costs[size] for size in sorted(step_costs)], np.float64)

    def num_nodes(self, probs: Sequence[Sequence[float]], num_pending: int) -> int:
        """Return the number of nodes with the best ratio of expected tokens to the given cost."""
        gains = _gains(probs, [1 / len(probs)] * len(probs))
        tokens = len(probs) * (1.0 + num_pending + np.arange(len(gains), dtype=np.float64))
        return int((gains / interpolated(tokens, self._sizes, self._costs)).argmax())

    def free_nodes(self, num_nodes: int, num_rows: int, num_pending: int) -> int:
        """Return how far the given costs stay flat, up to the largest size given."""
        size = 1 + num_pending + num_nodes
        sizes = np.arange(size, max(size, int(self._sizes[-1]) // num_rows) + 1)
        costs = interpolated(num_rows * sizes.astype(np.float64), self._sizes, self._costs)
        return num_flat(costs) - 1


# A batch is done when its slowest row is done, so most of the weight goes to the rows that lag: e
# times less for each `_LEAD` tokens that a row is ahead of the last one. Rows ahead keep a share,
# because a batch that has lost them is cheaper to run. Replay of recorded answers with 8 rows and
# measured costs, relative to plain decoding: 1.00 with equal weights, 1.03 with these; shares of 0
# to 0.3 and leads of 2 to 8 differ little.
_LEAD = 4.0
_SHARE_OF_ALL = 0.2
# Rows differ in how predictable they are: each learns a factor on top of what all rows teach, with
# this memory and prior. (With a single row, such a factor gains nothing.)
_MEMORY_OF_ROW = 0.95
_PRIOR_OF_ROW = 1.0


class _Row(NamedTuple):
    """Progress and predictability of one row of a batch."""

    num_emitted: int = 0
    expected: float = 0.0  # expected number of steps whose next token was drafted, decayed
    came: float = 0.0  # actual number of them, decayed

    @property
    def trust(self) -> float:
        """Ratio of actual to expected, smoothed: how the row compares with all rows."""
        return (_PRIOR_OF_ROW + self.came) / (_PRIOR_OF_ROW + self.expected)


class MeasuredBudget:
    """Budget that maximises the expected tokens per second, with no nodes at all if need be.

    The cost of a forward is measured per size during decoding, separately for each doubling of the
    batch; the state is some hundred numbers for each. Decisions depend only on what was recorded;
    nothing is drawn at random.
    """

    def __init__(self) -> None:
        self._recent_most = float(_MAX_DRAFT_TOKENS)  # most nodes verified lately, decayed
        self._costs: dict[int, Costs] = {}  # by the bit length of the batch size
        self._trust = Trust()
        self._rows: dict[int, _Row] = {}  # the rows that the next step asks about

    @property
    def max_draft_tokens(self) -> int:
        """A little over twice what was verified lately: nodes cost time to draft, used or not."""
        return min(_MAX_DRAFT_TOKENS, _LEAST_ASKED + int(2 * self._recent_most))

    def num_nodes(self, probs: Sequence[Sequence[float]], num_pending: int) -> int:
        """Return the number of nodes with the best ratio of expected tokens to measured time."""
        costs = self._costs_of(len(probs))
        # Sizes of the whole forward, in tokens per row; the smallest has no draft.
        smallest, longest = 1 + num_pending, 1 + num_pending + max(map(len, probs))
        if costs.must_begin() or longest == smallest:
            return 0
        between = SIZES[bisect_right(SIZES, smallest) : bisect_right(SIZES, longest)]
        sizes = [smallest, *between]
        if sizes[-1] < longest:
            sizes.append(longest)  # the whole draft
        rows = self._rows_of(len(probs))
        trusted = [
            self._trust.believed(of_row, row.trust) for of_row, row in zip(probs, rows, strict=True)
        ]
        gains = _gains(trusted, _weights(rows))
        rates = gains[np.array(sizes) - smallest] / costs.hoped_for(sizes)
        best = int(rates.argmax())
        if costs.must_try_other(best > 0):
            best = 0 if best > 0 else 1 + int(rates[1:].argmax())
        chosen = sizes[best] - smallest
        self._recent_most = max(chosen, _FADING * self._recent_most)
        return chosen

    def free_nodes(self, num_nodes: int, num_rows: int, num_pending: int) -> int:
        """Return how far the measured costs stay flat, up to the largest size measured."""
        size = 1 + num_pending + num_nodes
        return self._costs_of(num_rows).flat_end(size) - size

    def record(
        self,
        num_rows: int,
        num_nodes: int,
        forward_sec: float | None,
        outcomes: Sequence[Outcome],
        num_emitted: Mapping[int, int],
    ) -> None:
        """Learn the cost of a forward of this size and how far to trust drafted probabilities."""
        if forward_sec is not None:
            self._costs_of(num_rows).record(num_nodes + 1, forward_sec)
        if num_rows > 1:
            self._record_rows(outcomes, num_emitted)
        if outcomes:
            self._trust.record(outcomes)

    def _rows_of(self, num_rows: int) -> list[_Row]:
        """Return what is known of the rows; nothing as a call begins or while some rows wait."""
        rows = [*self._rows.values()]  # read once: calls of other threads replace it
        if num_rows == 1 or len(rows) != num_rows:
            return [_Row()] * num_rows
        return rows

    def _record_rows(self, outcomes: Sequence[Outcome], num_emitted: Mapping[int, int]) -> None:
        """Learn how far each row is, and how well its next token was predicted."""
        rows = {}
        for row, num in num_emitted.items():
            known = self._rows.get(row, _Row())
            # A row that has become shorter belongs to another call.
            rows[row] = known._replace(num_emitted=num) if known.num_emitted <= num else _Row(num)
        for row, draft, token_ids in outcomes:
            if row in rows:
                is_next = draft.depths == 1
                expected = float(self._trust.believed(draft.probs[is_next]).sum())
                came = bool((draft.token_ids[is_next] == token_ids[0]).any())
                rows[row] = _Row(
                    rows[row].num_emitted,
                    _MEMORY_OF_ROW * rows[row].expected + expected,
                    _MEMORY_OF_ROW * rows[row].came + came,
                )
        self._rows = rows

    def _costs_of(self, num_rows: int) -> "Costs":
        num_bits = num_rows.bit_length()
        if num_bits not in self._costs:
            # Start from the nearest batch size: costs depend mostly on the tokens of all rows.
            known = [bits for bits, costs in dict(self._costs).items() if not costs.are_unknown]
            nearest = min(known, key=lambda bits: abs(bits - num_bits), default=None)
            if nearest is None:
                guess = 1 + PRIOR_SLOPE * num_rows * (KNOTS - 1)
            else:
                guess = self._costs[nearest].of_sizes(KNOTS * 2.0 ** (num_bits - nearest))
            self._costs[num_bits] = Costs(guess)
        return self._costs[num_bits]


def _weights(rows: Sequence[_Row]) -> Floats:
    """Return the worth of a token in each row; the weights sum to 1."""
    if len(rows) == 1:
        return np.ones(1)
    num_emitted = np.array([row.num_emitted for row in rows])
    lags = np.exp((num_emitted.min() - num_emitted) / _LEAD)
    weights: Floats = _SHARE_OF_ALL / len(rows) + (1 - _SHARE_OF_ALL) * lags / lags.sum()
    return weights


def _gains(probs: Sequence[Sequence[float] | Floats], weights: Sequence[float] | Floats) -> Floats:
    """Return the expected tokens of a step for 0, 1, … nodes verified in each row.

    Args:
        probs: probabilities of each row's nodes, best first.
        weights: one for each row; they sum to 1.
    """
    gains = np.zeros(1 + max(map(len, probs)))
    for of_row, weight in zip(probs, weights, strict=True):
        gains[1 : 1 + len(of_row)] += np.multiply(of_row, weight)
    gains[0] = 1.0
    return np.cumsum(gains, dtype=np.float64)
