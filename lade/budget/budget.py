"""Budgets: how many draft tokens a step verifies.

They combine the measured costs of forwards (`costs.py`) with how far a drafter's
probabilities are to be believed (`calibration.py`).
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lade.budget.asking import BackOff
from lade.budget.calibration import Calibration, Floats, Outcome
from lade.budget.costs import (
    KNOTS,
    Costs,
    ForwardCosts,
    Trials,
)

Probs = Sequence[Sequence[float] | Floats]


_FADING = 0.9  # per step, of the number of nodes verified before
_LEAST_ASKED = 16  # nodes; fewer would hide drafts that pay only when they are large
_MAX_DRAFT_TOKENS = 63
# A batch is done when its slowest row is done, so most of the weight goes to the rows that lag: e
# times less for each `_LEAD` tokens that a row is ahead of the last one. Rows ahead keep a share,
# because a batch that has lost them is cheaper to run. Replay of recorded answers with 8 rows and
# measured costs, relative to plain decoding: 1.00 with equal weights, 1.03 with these; shares of 0
# to 0.3 and leads of 2 to 8 differ little.
_LEAD = 4.0
_SHARE_OF_ALL = 0.2

# Where drafts do not pay, steps rest: they have no draft. After so many drafts that were not worth
# verifying, only one in as many steps is asked for, but for as many where the likeliest draft token
# of such a one comes after all.
_DRAFTS_BEFORE_REST = 8


class Budget:
    """Budget of one call: how many nodes a step verifies; it changes the speed, never the text.

    It maximises the expected tokens per second, if need be with no nodes. The cost of a forward is
    measured per size during decoding, separately for each doubling of the batch; the state is some
    hundred numbers for each. Decisions depend only on what was recorded; nothing is drawn at
    random.

    Args:
        costs: of forwards, which outlive the call; None for ones that only it measures.
        temperature: 0 for greedy decoding, else the temperature that the call samples at: the more
            is left to chance, the less is expected of drafts.
        most: maximum number of draft tokens to verify in a step; None for no other than the usual.
        fixed: for reproducible runs, how many to verify in each step, whatever they cost.
    """

    def __init__(
        self,
        costs: ForwardCosts | None = None,
        temperature: float = 0.0,
        most: int | None = None,
        *,
        fixed: int | None = None,
    ) -> None:
        self._costs = ForwardCosts() if costs is None else costs
        self._patience = self._costs.begin_call()
        self._known: dict[int, tuple[Costs, Trials]] = {}  # by the bit length of the batch size
        self._calibration = Calibration(1 / (1 + temperature**3))
        self._fixed = fixed
        self._most = _MAX_DRAFT_TOKENS if most is None else min(most, _MAX_DRAFT_TOKENS)
        self._recent_most = float(self._most)  # most nodes of a row verified lately, decayed
        # Of the rows that the next step asks about, in that order. They differ in how predictable
        # they are.
        self._num_emitted: dict[int, int] = {}
        self._of_rows: dict[int, Calibration] = {}
        self._has_refused = False  # whether the step verifies nothing, as nothing is worth its cost
        self._back_off = BackOff(1 / _DRAFTS_BEFORE_REST, _DRAFTS_BEFORE_REST, 1.0)

    @property
    def max_draft_tokens(self) -> int:
        """Maximum number of draft tokens worth asking a drafter for.

        A little over twice what was verified lately: nodes cost time to draft, used or not.
        """
        if self._fixed is not None:
            return self._fixed
        return min(self._most, _LEAST_ASKED + int(2 * self._recent_most))

    def step_sec(self, num_rows: int, num_nodes: int) -> float:
        """Return the seconds of a forward that verifies so many nodes of each row; 0 if unknown."""
        costs = self._costs.of(num_rows)
        if costs.are_unknown:
            return 0.0
        return float(np.interp(1 + num_nodes, KNOTS, costs.curve))

    @property
    def is_resting(self) -> bool:
        """Whether drafts have not been worth verifying for some time."""
        return self._back_off.left < 1.0

    def num_nodes(self, probs: Probs, num_pending: int, price: float | None = None) -> int:
        """Return how many nodes of each row's draft to verify: the best ratio of tokens to cost.

        Args:
            probs: for each row of the batch, the probabilities of its draft's nodes, best first.
            num_pending: tokens per row that the forward runs besides the root and the draft.
            price: tokens that each node of a lone row must add in a forward that other calls have a
                part in; None for others.
        """
        if self._fixed is not None:
            return max(map(len, probs))
        worths = self._worths(probs)
        gains = worths[0]
        if price is not None:
            chosen = int((np.minimum.accumulate(gains) >= price).sum())
            return self._noted(chosen)
        if len(worths) > 1:
            gains = np.zeros(max(map(len, probs)))
            for worth in worths:
                gains[: len(worth)] += worth
        nums = _options(num_pending, len(gains))
        sizes: Floats = nums + np.float64(1 + num_pending)
        expected = np.ones(1 + len(gains))
        expected[1:] += gains.cumsum()
        costs, trials = self._costs_of(len(probs))
        chosen = nums.item(costs.choose(trials, sizes, expected[nums]))
        return self._noted(chosen, not costs.are_unknown)

    def nums_of_nodes(self, probs: Probs, price: float | None = None) -> list[int]:
        """Return how many nodes of each row's draft to verify where rows need no padding.

        Then a forward costs what all its tokens together cost, so rows get as many as they are
        worth: one of which little is known gets none, which lets another have more. `probs` and
        `price` are as for `num_nodes`.
        """
        if self._fixed is not None:
            return [*map(len, probs)]
        # Of one row, nodes keep their order: the first ones are a tree.
        of_rows = [np.minimum.accumulate(each) for each in self._worths(probs)]
        if price is not None:
            priced = [int((len(probs) * each >= price).sum()) for each in of_rows]
            self._noted(max(priced))
            return priced
        worths = np.concatenate(of_rows)
        order = np.argsort(-worths, kind="stable")
        nums = _options(0, len(order))
        gains = 1.0 + np.concatenate([[0.0], worths[order].cumsum()])[nums]
        costs, trials = self._costs_of(len(probs))
        best = costs.choose(trials, 1.0 + nums / len(probs), gains)
        rows = np.repeat(np.arange(len(probs)), [*map(len, probs)])[order[: nums[best]]]
        chosen: list[int] = np.bincount(rows, minlength=len(probs)).tolist()
        self._noted(max(chosen), not costs.are_unknown)
        return chosen

    def _worths(self, probs: Probs) -> list[Floats]:
        """Return the expected tokens of each row's nodes, best first; rows together weigh 1."""
        if len(probs) == 1 and len(self._of_rows) != 1:
            return [self._calibration.believed(probs[0])]
        weights, calibrations = self._weights(len(probs)), [*self._of_rows.values()]
        if len(calibrations) != len(probs):  # as a call begins, or while some rows wait
            calibrations = [self._calibration] * len(probs)
        rows = zip(weights, calibrations, probs, strict=True)
        return [weight * calibration.believed(row) for weight, calibration, row in rows]

    def _noted(self, most: int, is_known: bool = True) -> int:
        """Remember the most nodes that a row gets, and whether that is none for their cost."""
        if most:
            self._back_off.granted(_DRAFTS_BEFORE_REST)
        self._has_refused = is_known and not most
        self._recent_most = max(most, _FADING * self._recent_most)
        return most

    def record(
        self,
        num_rows: int,
        num_nodes: float,
        forward_sec: float | None,
        outcomes: Sequence[Outcome],
        num_emitted: Mapping[int, int],
    ) -> None:
        """Learn the cost of a forward of this size and how far to believe drafted probabilities.

        Args:
            num_rows: rows of the batch.
            num_nodes: tokens per row that the forward ran besides the root, pending ones included;
                their mean where rows have no padding.
            forward_sec: seconds of the forward; None where not representative of others.
            outcomes: one for each row that emitted.
            num_emitted: by row, tokens emitted so far; the rows that the next step asks about, in
                that order.
        """
        if self._fixed is not None:
            return
        if forward_sec is not None:
            costs, trials = self._costs_of(num_rows)
            costs.record(num_nodes + 1, forward_sec, trials.end_step())
        hits = self._calibration.record(outcomes) if outcomes else []
        # A step that had nothing but tokens to explore has refused no draft.
        if self._has_refused and any(len(outcome.draft) for outcome in outcomes):
            self._back_off.spent(1.0)
        self._has_refused = False
        self._back_off.passed(1.0)
        if hits and 2 * sum(hits) >= len(hits):
            self._back_off.granted(_DRAFTS_BEFORE_REST)
        self._num_emitted = {**num_emitted} if num_rows > 1 else {}
        self._of_rows = {row: self._of_rows.get(row) or Calibration() for row in self._num_emitted}
        for outcome in outcomes:
            if outcome.row in self._of_rows:
                self._of_rows[outcome.row].record([outcome])

    def _weights(self, num_rows: int) -> Floats:
        """Return what a token is worth in each row."""
        if num_rows == 1 or len(self._num_emitted) != num_rows:
            return np.full(num_rows, 1 / num_rows)
        num_emitted = np.array([*self._num_emitted.values()])
        lags = np.exp((num_emitted.min() - num_emitted) / _LEAD)
        weights: Floats = _SHARE_OF_ALL / num_rows + (1 - _SHARE_OF_ALL) * lags / lags.sum()
        return weights

    def _costs_of(self, num_rows: int) -> tuple[Costs, Trials]:
        """Return the costs of such batches, and the call's trials with them."""
        num_bits = num_rows.bit_length()
        if num_bits not in self._known:
            costs = self._costs.of(num_rows)
            self._known[num_bits] = costs, costs.trials(self._patience)
        return self._known[num_bits]


def _options(num_pending: int, most: int) -> NDArray[np.int64]:
    """Return the numbers of nodes to choose from: 0, those of known sizes, and the most."""
    nums = KNOTS.astype(np.int64) - 1 - num_pending
    nums = nums[(nums > 0) & (nums < most)]
    return np.concatenate([[0], nums, [most]])
