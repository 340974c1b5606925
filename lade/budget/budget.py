"""Budgets: how many draft tokens a step verifies.

`MeasuredBudget` combines the measured costs of forwards (`costs.py`) with how far a drafter's
probabilities are to be believed (`calibration.py`).
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lade.budget import _kernels
from lade.budget._kernels import KNOTS, Floats
from lade.budget.back_off import BackOff
from lade.budget.calibration import Calibration, Outcome
from lade.budget.costs import Costs, ForwardCosts, interpolated
from ngram_pool import Draft
from ngram_pool._kernels import Int64Array
from ngram_pool.compiling import compile_by

Probs = Sequence[Sequence[float] | Floats]


class Budget:
    """Policy for the size of the tree; it can change the speed of decoding, never the text.

    Base of all budgets; it verifies whole drafts and learns nothing.

    Args:
        max_draft_tokens: maximum number of draft tokens worth asking a drafter for.
    """

    is_resting: bool = False  # whether the next step does best without a draft

    def __init__(self, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens

    def num_nodes(self, probs: Probs, num_pending: int) -> int:
        """Return how many nodes of each row's draft to verify, best first.

        Args:
            probs: for each row of the batch, the probabilities of its draft's nodes, best first.
            num_pending: tokens per row that the forward runs besides the root and the draft.
        """
        return max(map(len, probs))

    def nums_of_nodes(self, probs: Probs) -> list[int]:
        """Return how many nodes of each row's draft to verify where rows need no padding.

        Then a forward costs what all its tokens together cost, so rows get as many as they are
        worth: one of which little is known gets none, which lets another have more.

        Args:
            probs: for each row of the batch, the probabilities of its draft's nodes, best first.
        """
        return [*map(len, probs)]

    def record(
        self,
        num_rows: int,
        num_nodes: float,
        forward_sec: float | None,
        outcomes: Sequence[Outcome],
        num_emitted: Mapping[int, int],
    ) -> None:
        """Learn from a step.

        Args:
            num_rows: rows of the batch.
            num_nodes: tokens per row that the forward ran besides the root, pending ones included;
                their mean where rows have no padding.
            forward_sec: seconds of the forward; None where not representative of others.
            outcomes: one for each row that emitted.
            num_emitted: by row, tokens emitted so far; the rows that the next step asks about, in
                that order.
        """

    def step_sec(self, num_rows: int, num_nodes: int) -> float:
        """Return the seconds of a forward that verifies so many nodes of each row; 0 if unknown."""
        return 0.0


class FixedBudget(Budget):
    """Budget of a fixed number of nodes, whatever they cost, for reproducible runs."""


_FADING = 0.9  # per step, of the number of nodes verified before
_LEAST_ASKED = 16  # nodes; fewer would hide drafts that pay only when they are large
_MAX_DRAFT_TOKENS = 63
# Nodes of all rows together that are chosen from: few, for a library prepares each size anew.
_SUMS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256)


class PricedBudget(Budget):
    """Budget by given step costs and the drafter's own probabilities, for reproducible runs.

    Args:
        step_costs: cost of a step, in any unit, by the number of tokens in the whole forward, all
            rows together; at least two sizes. Sizes between them are interpolated, larger ones
            extrapolated from the last two.
    """

    def __init__(self, step_costs: Mapping[int, float]) -> None:
        super().__init__(_MAX_DRAFT_TOKENS)
        self._sizes = np.array(sorted(step_costs), np.float64)
        self._costs = np.array([step_costs[size] for size in sorted(step_costs)], np.float64)

    def num_nodes(self, probs: Probs, num_pending: int) -> int:
        """Return the number of nodes with the best ratio of expected tokens to the given cost."""
        gains = _gains(probs, [1 / len(probs)] * len(probs))
        tokens = len(probs) * (1.0 + num_pending + np.arange(len(gains), dtype=np.float64))
        return int((gains / interpolated(tokens, self._sizes, self._costs)).argmax())

    def nums_of_nodes(self, probs: Probs) -> list[int]:
        """Return the numbers of nodes with the best ratio of expected tokens to the given cost."""
        ranking = _ranking([np.array(of_row) / len(probs) for of_row in probs])
        tokens = len(probs) + np.arange(len(ranking.gains), dtype=np.float64)
        costs = interpolated(tokens, self._sizes, self._costs)
        return ranking.first(int((ranking.gains / costs).argmax()))


# A batch is done when its slowest row is done, so most of the weight goes to the rows that lag: e
# times less for each `_LEAD` tokens that a row is ahead of the last one. Rows ahead keep a share,
# because a batch that has lost them is cheaper to run. Replay of recorded answers with 8 rows and
# measured costs, relative to plain decoding: 1.00 with equal weights, 1.03 with these; shares of 0
# to 0.3 and leads of 2 to 8 differ little.
_LEAD = 4.0
_SHARE_OF_ALL = 0.2

# Where drafts do not pay, steps rest: they have no draft. After so many drafts that were not worth
# verifying, only one in so many steps is asked for, but for a few more where the likeliest draft
# token of such a one comes after all.
_DRAFTS_BEFORE_REST = 8
_STEPS_BETWEEN_DRAFTS = 8
_DRAFTS_AFTER_HIT = 4


class MeasuredBudget(Budget):
    """Budget of one call that maximises the expected tokens per second, if need be with no nodes.

    The cost of a forward is measured per size during decoding, separately for each doubling of the
    batch; the state is some hundred numbers for each. Decisions depend only on what was recorded;
    nothing is drawn at random.

    Args:
        costs: of forwards, which outlive the call; None for ones that only it measures.
        temperature: 0 for greedy decoding, else the temperature that the call samples at: the more
            is left to chance, the less is expected of drafts.
    """

    def __init__(self, costs: ForwardCosts | None = None, temperature: float = 0.0) -> None:
        compile_by(_run_kernels, _kernels)
        self._costs = ForwardCosts() if costs is None else costs
        self._patience = self._costs.begin_call()
        self._turns: dict[int, Int64Array] = {}  # by the bit length of the batch size
        self._calibration = Calibration(1 / (1 + temperature**3))
        self._recent_most = float(_MAX_DRAFT_TOKENS)  # most nodes verified lately, decayed
        # Of the rows that the next step asks about, in that order. They differ in how predictable
        # they are.
        self._num_emitted: dict[int, int] = {}
        self._of_rows: dict[int, Calibration] = {}
        self._has_refused = False  # whether the step verifies nothing, as nothing is worth its cost
        self._back_off = BackOff(1 / _STEPS_BETWEEN_DRAFTS, _DRAFTS_BEFORE_REST, 1.0)

    @property
    def max_draft_tokens(self) -> int:  # type: ignore[override]
        """A little over twice what was verified lately: nodes cost time to draft, used or not."""
        return min(_MAX_DRAFT_TOKENS, _LEAST_ASKED + int(2 * self._recent_most))

    def step_sec(self, num_rows: int, num_nodes: int) -> float:
        """Return the seconds of a forward that verifies so many nodes of each row; 0 if unknown."""
        costs = self._costs.of(num_rows)
        if costs.are_unknown:
            return 0.0
        return float(np.interp(1 + num_nodes, KNOTS, costs.curve))

    @property
    def is_resting(self) -> bool:  # type: ignore[override]
        """Whether drafts have not been worth verifying for some time."""
        return self._back_off.left < 1.0

    def num_nodes(self, probs: Probs, num_pending: int) -> int:
        """Return the number of nodes with the best ratio of expected tokens to measured time."""
        gains = _gains(self._believed(probs), self._weights(len(probs)))
        sizes = KNOTS[(1 + num_pending < KNOTS) & (num_pending + len(gains) > KNOTS)]
        sizes = np.array([1.0 + num_pending, *sizes, num_pending + len(gains)])
        nums = sizes.astype(np.int64) - 1 - num_pending
        chosen = int(nums[self._best(sizes, gains[nums], len(probs))])
        self._note_choice(chosen, len(probs))
        return chosen

    def nums_of_nodes(self, probs: Probs) -> list[int]:
        """Return the numbers of nodes with the best ratio of expected tokens to measured time."""
        weights = self._weights(len(probs))
        ranking = _ranking([w * row for w, row in zip(weights, self._believed(probs), strict=True)])
        num_nodes = len(ranking.rows)
        sums = np.array([0, *_SUMS[: bisect_left(_SUMS, num_nodes)], num_nodes], np.float64)
        gains = ranking.gains[sums.astype(np.int64)]
        chosen = ranking.first(int(sums[self._best(1.0 + sums / len(probs), gains, len(probs))]))
        self._note_choice(max(chosen), len(probs))
        return chosen

    def _best(self, sizes: Floats, gains: Floats, num_rows: int) -> int:
        costs, turns = self._costs_of(num_rows)
        return _kernels.choose_size(costs.curve, costs.num, costs.counts, turns, sizes, gains)

    def _note_choice(self, most: int, num_rows: int) -> None:
        """Learn how many nodes are verified, and for how long there were none."""
        self._recent_most = max(most, _FADING * self._recent_most)
        if most:
            self._back_off.granted(_DRAFTS_BEFORE_REST)
        self._has_refused = not most and not self._costs.of(num_rows).are_unknown

    def record(
        self,
        num_rows: int,
        num_nodes: float,
        forward_sec: float | None,
        outcomes: Sequence[Outcome],
        num_emitted: Mapping[int, int],
    ) -> None:
        """Learn the cost of a forward of this size and how far to believe drafted probabilities."""
        if forward_sec is not None:
            costs, turns = self._costs_of(num_rows)
            costs.record(turns, num_nodes + 1, forward_sec)
        hits = self._calibration.record(outcomes) if outcomes else []
        # A step that had nothing but tokens to explore has refused no draft.
        if self._has_refused and any(len(outcome.draft) for outcome in outcomes):
            self._back_off.spent(1.0)
        self._has_refused = False
        self._back_off.passed(1.0)
        if hits and 2 * sum(hits) >= len(hits):
            self._back_off.granted(_DRAFTS_AFTER_HIT)
        self._num_emitted = {**num_emitted} if num_rows > 1 else {}
        of_rows = {row: self._of_rows.get(row) or Calibration() for row in self._num_emitted}
        for outcome in outcomes:
            if outcome.row in of_rows:
                of_rows[outcome.row].record([outcome])
        self._of_rows = of_rows

    def _believed(self, probs: Probs) -> list[Floats]:
        """Return the corrected probabilities of each row's nodes."""
        calibrations = [*self._of_rows.values()]
        if len(calibrations) != len(probs):  # as a call begins, or while some rows wait
            calibrations = [self._calibration] * len(probs)
        return [each.believed(row) for each, row in zip(calibrations, probs, strict=True)]

    def _weights(self, num_rows: int) -> Floats:
        """Return what a token is worth in each row."""
        if num_rows == 1 or len(self._num_emitted) != num_rows:
            return np.full(num_rows, 1 / num_rows)
        num_emitted = np.array([*self._num_emitted.values()])
        lags = np.exp((num_emitted.min() - num_emitted) / _LEAD)
        weights: Floats = _SHARE_OF_ALL / num_rows + (1 - _SHARE_OF_ALL) * lags / lags.sum()
        return weights

    def _costs_of(self, num_rows: int) -> tuple[Costs, Int64Array]:
        """Return the costs of such batches, and the call's `turns` with them."""
        costs, num_bits = self._costs.of(num_rows), num_rows.bit_length()
        if num_bits not in self._turns:
            self._turns[num_bits] = costs.turns(self._patience)
        return costs, self._turns[num_bits]


class _Ranking(NamedTuple):
    """The nodes of all rows in the order in which they are worth verifying."""

    rows: NDArray[np.intp]  # [num_nodes], the row of each, best node first
    num_rows: int
    gains: Floats  # [1 + num_nodes], expected tokens of a step with the first 0, 1, … of them

    def first(self, num_nodes: int) -> list[int]:
        """Return how many of the first nodes each row has."""
        nums: list[int] = np.bincount(self.rows[:num_nodes], minlength=self.num_rows).tolist()
        return nums


def _ranking(worths: Sequence[Floats]) -> _Ranking:
    """Rank the nodes of all rows by what they are worth, [num_nodes] for each row, best first.

    Of one row, nodes keep their order: the first ones are a tree.
    """
    of_nodes = np.concatenate([np.minimum.accumulate(worth) for worth in worths])
    order = np.argsort(-of_nodes, kind="stable")
    rows = np.repeat(np.arange(len(worths)), [*map(len, worths)])[order]
    return _Ranking(rows, len(worths), 1.0 + np.concatenate([[0.0], of_nodes[order].cumsum()]))


def _gains(probs: Probs, weights: Sequence[float] | Floats) -> Floats:
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


def _run_kernels() -> None:
    """Run every kernel once, so that the first step does not wait for a compiler."""
    costs, calibration = Costs(np.ones(len(KNOTS))), Calibration()
    turns = costs.turns(1)
    for _ in range(2):
        costs.record(turns, 1, 1.0)
    calibration.record([Outcome(0, Draft.empty(), [1])])
    _kernels.choose_size(costs.curve, costs.num, costs.counts, turns, np.ones(1), np.ones(1))
