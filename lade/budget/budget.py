"""How many draft tokens to verify now.

`MeasuredBudget` joins what forwards cost (`costs.py`) and how far to believe a drafter
(`trust.py`).
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from lade.budget.costs import KNOTS, PRIOR_SLOPE, SIZES, Costs, Floats, interpolated
from lade.budget.trust import Outcome, Trust


class Budget(Protocol):
    """Decides the size of the tree; it can change the speed of decoding, never the text."""

    @property
    def max_draft_tokens(self) -> int:
        """The greatest number of draft nodes worth asking for."""

    def num_nodes(self, probs: Sequence[Sequence[float]], num_pending: int) -> int:
        """Return how many of the best nodes of each row's draft to verify.

        Args:
            probs: for each row of the batch the probabilities of its draft, best first.
            num_pending: tokens of each row that the forward runs besides the root and the draft.
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
            num_nodes: draft nodes it verified in each row, pending tokens included.
            forward_sec: time of its forward; None where that says nothing of others.
            outcomes: of the rows that emitted.
            num_emitted: tokens so far, by row, of the rows that the next step asks about, in order.
        """


class FixedBudget:
    """Verify up to a given number of nodes, whatever they cost: for runs that repeat exactly."""

    def __init__(self, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens

    def num_nodes(self, probs: Sequence[Sequence[float]], num_pending: int) -> int:
        """Return the size of the largest draft."""
        return max(map(len, probs))

    def record(
        self,
        num_rows: int,
        num_nodes: int,
        forward_sec: float | None,
        outcomes: Sequence[Outcome],
        num_emitted: Mapping[int, int],
    ) -> None:
        """Learn nothing."""


_FADING = 0.9  # of what was verified before, a step
_LEAST_ASKED = 16  # nodes; fewer would hide drafts that pay only when they are large
_MAX_DRAFT_TOKENS = 63


class PricedBudget:
    """Verify as many nodes as pay by given costs and the drafter's own word: runs repeat exactly.

    Args:
        step_costs: by tokens of a whole forward, all rows together, what a step costs, in any unit;
            at least two sizes. Those between are interpolated, those beyond the largest go on as
            between the last two.
    """

    max_draft_tokens = _MAX_DRAFT_TOKENS

    def __init__(self, step_costs: Mapping[int, float]) -> None:
        self._sizes = np.array(sorted(step_costs), np.float64)
        self._costs = np.array([step_costs[size] for size in sorted(step_costs)], np.float64)

    def num_nodes(self, probs: Sequence[Sequence[float]], num_pending: int) -> int:
        """Return the number of nodes with the best ratio of expected tokens to given cost."""
        gains = _gains(probs, [1 / len(probs)] * len(probs))
        tokens = len(probs) * (1.0 + num_pending + np.arange(len(gains), dtype=np.float64))
        return int((gains / interpolated(tokens, self._sizes, self._costs)).argmax())

    def record(
        self,
        num_rows: int,
        num_nodes: int,
        forward_sec: float | None,
        outcomes: Sequence[Outcome],
        num_emitted: Mapping[int, int],
    ) -> None:
        """Learn nothing."""


# A batch is done when its slowest row is done. So most of the weight lies on the rows that are
# behind, e times less for each `_LEAD` tokens that another one is ahead; rows ahead keep a share,
# for a batch that has lost them is cheaper to run. Replay of recorded answers by 8 rows, measured
# costs, against plain decoding: 1.00 with equal weights, 1.03 with these; shares of 0 to 0.3 and
# leads of 2 to 8 differ little.
_LEAD = 4.0
_SHARE_OF_ALL = 0.2
# Rows differ in how well they can be foreseen; so quickly is that learned, beside what all rows
# teach. (A factor for the text at hand gains nothing where there is one row.)
_MEMORY_OF_ROW = 0.95
_PRIOR_OF_ROW = 1.0


class _Row(NamedTuple):
    """How one row of a batch is doing."""

    num_emitted: int = 0
    expected: float = 0.0  # next tokens foreseen, the past fading away
    came: float = 0.0  # how many really were

    @property
    def trust(self) -> float:
        """How much better its promises are than those of all rows."""
        return (_PRIOR_OF_ROW + self.came) / (_PRIOR_OF_ROW + self.expected)


class MeasuredBudget:
    """Verify as many nodes as maximise the expected tokens per second, down to none.

    The cost of a forward is measured per size as decoding goes, apart for each doubling of the
    batch; the state is some hundred numbers for each. Decisions follow from what was recorded, and
    nothing is drawn at random.
    """

    def __init__(self) -> None:
        self._recent_most = float(
            _MAX_DRAFT_TOKENS
        )  # nodes that were verified lately, the most of them
        self._costs: dict[int, Costs] = {}  # by the batch size's number of bits
        self._trust = Trust()
        self._rows: dict[int, _Row] = {}  # those that the next step asks about

    @property
    def max_draft_tokens(self) -> int:
        """Twice what was verified lately: every node that is asked for takes time, used or not."""
        return min(_MAX_DRAFT_TOKENS, _LEAST_ASKED + int(2 * self._recent_most))

    def num_nodes(self, probs: Sequence[Sequence[float]], num_pending: int) -> int:
        """Return the number of nodes with the best ratio of expected tokens to measured time."""
        costs = self._costs_of(len(probs))
        # Sizes of the whole forward; the smallest has no draft.
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

    def record(
        self,
        num_rows: int,
        num_nodes: int,
        forward_sec: float | None,
        outcomes: Sequence[Outcome],
        num_emitted: Mapping[int, int],
    ) -> None:
        """Learn what a forward of this size costs, and how often nodes of each promise came."""
        if forward_sec is not None:
            self._costs_of(num_rows).record(num_nodes + 1, forward_sec)
        if num_rows > 1:
            self._record_rows(outcomes, num_emitted)
        if outcomes:
            self._trust.record(outcomes)

    def _rows_of(self, num_rows: int) -> list[_Row]:
        """Return what is known of the rows; nothing in a call that begins, or where some wait."""
        rows = [*self._rows.values()]  # at once: calls of other threads replace them
        if num_rows == 1 or len(rows) != num_rows:
            return [_Row()] * num_rows
        return rows

    def _record_rows(self, outcomes: Sequence[Outcome], num_emitted: Mapping[int, int]) -> None:
        """Learn how far each row is, and how well its next token was foreseen."""
        rows = {}
        for row, num in num_emitted.items():
            known = self._rows.get(row, _Row())
            # One that has become shorter belongs to another call.
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
            # Learn from the batch size next to this one: what counts is mostly all rows' tokens.
            known = [bits for bits, costs in dict(self._costs).items() if not costs.are_unknown]
            nearest = min(known, key=lambda bits: abs(bits - num_bits), default=None)
            if nearest is None:
                guess = 1 + PRIOR_SLOPE * num_rows * (KNOTS - 1)
            else:
                guess = self._costs[nearest].of_sizes(KNOTS * 2.0 ** (num_bits - nearest))
            self._costs[num_bits] = Costs(guess)
        return self._costs[num_bits]


def _weights(rows: Sequence[_Row]) -> Floats:
    """Return how much a token is worth in each row; they sum to 1."""
    if len(rows) == 1:
        return np.ones(1)
    num_emitted = np.array([row.num_emitted for row in rows])
    lags = np.exp((num_emitted.min() - num_emitted) / _LEAD)
    weights: Floats = _SHARE_OF_ALL / len(rows) + (1 - _SHARE_OF_ALL) * lags / lags.sum()
    return weights


def _gains(probs: Sequence[Sequence[float] | Floats], weights: Sequence[float] | Floats) -> Floats:
    """Return how many tokens a step is expected to emit by nodes verified in each row, from 0.

    Args:
        probs: of the nodes of each row.
        weights: of the rows; they sum to 1.
    """
    gains = np.zeros(1 + max(map(len, probs)))
    for of_row, weight in zip(probs, weights, strict=True):
        gains[1 : 1 + len(of_row)] += np.multiply(of_row, weight)
    gains[0] = 1.0
    return np.cumsum(gains, dtype=np.float64)
