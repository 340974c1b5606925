"""Budgets: how many draft tokens a step verifies.

`MeasuredBudget` combines the measured costs of forwards (`costs.py`) with the measured trust in a
drafter (`trust.py`).
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lade.budget import _kernels
from lade.budget._kernels import KNOTS, Floats
from lade.budget.costs import PRIOR_SLOPE, Costs, interpolated
from lade.budget.trust import Hit, Outcome, Trust
from ngram_pool import Draft
from ngram_pool.compiling import compile_by

Probs = Sequence[Sequence[float] | Floats]


class Budget(Protocol):
    """Policy for the size of the tree; it can change the speed of decoding, never the text."""

    @property
    def max_draft_tokens(self) -> int:
        """Maximum number of draft tokens worth asking a drafter for."""

    @property
    def is_resting(self) -> bool:
        """Whether the next step does best without a draft."""

    def num_nodes(self, probs: Probs, num_pending: int) -> int:
        """Return how many nodes of each row's draft to verify, best first.

        Args:
            probs: for each row of the batch, the probabilities of its draft's nodes, best first.
            num_pending: tokens per row that the forward runs besides the root and the draft.
        """

    def nums_of_nodes(self, probs: Probs) -> list[int]:
        """Return how many nodes of each row's draft to verify where rows need no padding.

        Then a forward costs what all its tokens together cost, so rows get as many as they are
        worth: one of which little is known gets none, which lets another have more.

        Args:
            probs: for each row of the batch, the probabilities of its draft's nodes, best first.
        """

    def begin(self, temperature: float) -> None:
        """Begin a call: 0 for greedy decoding, else the temperature that it samples at."""

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


class _Unlearning:
    """Base of budgets that learn nothing."""

    is_resting = False

    def begin(self, temperature: float) -> None:
        """Expect nothing."""

    def record(
        self,
        num_rows: int,
        num_nodes: float,
        forward_sec: float | None,
        outcomes: Sequence[Outcome],
        num_emitted: Mapping[int, int],
    ) -> None:
        """Learn nothing."""


class FixedBudget(_Unlearning):
    """Budget of a fixed number of nodes, whatever they cost, for reproducible runs."""

    def __init__(self, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens

    def num_nodes(self, probs: Probs, num_pending: int) -> int:
        """Return the size of the largest draft."""
        return max(map(len, probs))

    def nums_of_nodes(self, probs: Probs) -> list[int]:
        """Return the sizes of the drafts."""
        return [*map(len, probs)]


_FADING = 0.9  # per step, of the number of nodes verified before
_LEAST_ASKED = 16  # nodes; fewer would hide drafts that pay only when they are large
_MAX_DRAFT_TOKENS = 63
# Nodes of all rows together that are chosen from: few, for a library prepares each size anew.
_SUMS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256)


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

    def after(self, hit: Hit) -> "_Row":
        """Return the row after a step."""
        return _Row(
            self.num_emitted,
            _MEMORY_OF_ROW * self.expected + hit.expected,
            _MEMORY_OF_ROW * self.came + hit.came,
        )


# Where drafts do not pay, steps rest: they have no draft. After so many steps whose draft was not
# worth verifying, and after so many more each time; then for twice as long as the last time,
# between these. Where the likeliest draft token comes after all, a few more steps have drafts.
_STEPS_BEFORE_REST = 8
_STEPS_BETWEEN_RESTS = 2
_STEPS_AFTER_HIT = 4
_FIRST_REST, _LAST_REST = 2, 16


class _Pace(NamedTuple):
    """How long drafts go on before the next rest, and how long it will be."""

    num_to_try: int = _STEPS_BEFORE_REST
    num_to_rest: int = 0
    next_rest: int = _FIRST_REST

    def after_refusal(self) -> "_Pace":
        """Return what follows a draft that was not worth verifying."""
        if self.num_to_try > 1:
            return self._replace(num_to_try=self.num_to_try - 1)
        next_rest = min(2 * self.next_rest, _LAST_REST)
        return _Pace(_STEPS_BETWEEN_RESTS, self.next_rest, next_rest)


class MeasuredBudget:
    """Budget that maximises the expected tokens per second, with no nodes at all if need be.

    The cost of a forward is measured per size during decoding, separately for each doubling of the
    batch; the state is some hundred numbers for each. Decisions depend only on what was recorded;
    nothing is drawn at random.

    Args:
        first_costs: seconds of forwards of one row by their tokens, as measured before, or empty.
    """

    def __init__(self, first_costs: Mapping[int, float] | None = None) -> None:
        self._recent_most = float(_MAX_DRAFT_TOKENS)  # most nodes verified lately, decayed
        self._costs: dict[int, Costs] = {}  # by the bit length of the batch size
        if first_costs:
            self._costs[1] = Costs.of(first_costs)
        self._trust = Trust()
        self._rows: dict[int, _Row] = {}  # the rows that the next step asks about
        self._pace = _Pace()
        compile_by(_run_kernels, _kernels)

    @property
    def max_draft_tokens(self) -> int:
        """A little over twice what was verified lately: nodes cost time to draft, used or not."""
        return min(_MAX_DRAFT_TOKENS, _LEAST_ASKED + int(2 * self._recent_most))

    @property
    def is_resting(self) -> bool:
        """Whether drafts have not been worth verifying for some time."""
        return self._pace.num_to_rest > 0

    def begin(self, temperature: float) -> None:
        """Expect less of drafts the more is left to chance; a greedy call goes on as the last."""
        if temperature > 0:
            self._trust.begin(1 / (1 + temperature**3))

    def num_nodes(self, probs: Probs, num_pending: int) -> int:
        """Return the number of nodes with the best ratio of expected tokens to measured time."""
        costs = self._costs_of(len(probs))
        factors, weights = self._of_rows(len(probs))
        chosen = _kernels.choose(
            costs.curve,
            costs.num,
            costs.counts,
            self._trust.worth,
            np.asarray(probs[0] if len(probs) == 1 else np.concatenate(probs), np.float64),
            np.array([0, *accumulate(map(len, probs))]),
            factors,
            weights,
            num_pending,
        )
        self._note_choice(chosen, probs, costs)
        return chosen

    def nums_of_nodes(self, probs: Probs) -> list[int]:
        """Return the numbers of nodes with the best ratio of expected tokens to measured time."""
        costs = self._costs_of(len(probs))
        worths = [
            weight * self._trust.believed(of_row, factor)
            for of_row, factor, weight in zip(probs, *self._of_rows(len(probs)), strict=True)
        ]
        ranking = _ranking(worths)
        num_nodes = len(ranking.rows)
        sums = np.array([0, *_SUMS[: bisect_left(_SUMS, num_nodes)], num_nodes], np.float64)
        gains = ranking.gains[sums.astype(np.int64)]
        sizes = 1.0 + sums / len(probs)
        best = _kernels.choose_size(costs.curve, costs.num, costs.counts, sizes, gains)
        chosen = ranking.first(int(sums[best]))
        self._note_choice(max(chosen), probs, costs)
        return chosen

    def _note_choice(self, most: int, probs: Probs, costs: Costs) -> None:
        """Learn how many nodes are verified, and for how long there were none."""
        self._recent_most = max(most, _FADING * self._recent_most)
        if most:
            self._pace = _Pace()
        elif any(map(len, probs)) and not costs.are_unknown:
            self._pace = self._pace.after_refusal()

    def record(
        self,
        num_rows: int,
        num_nodes: float,
        forward_sec: float | None,
        outcomes: Sequence[Outcome],
        num_emitted: Mapping[int, int],
    ) -> None:
        """Learn the cost of a forward of this size and how far to trust drafted probabilities."""
        if forward_sec is not None:
            self._costs_of(num_rows).record(num_nodes + 1, forward_sec)
        pace = self._pace
        if pace.num_to_rest > 0:
            self._pace = pace._replace(num_to_rest=pace.num_to_rest - 1)
        hits = self._trust.record(outcomes) if outcomes else []
        if hits and 2 * sum(hit.is_best for hit in hits) >= len(hits):
            self._pace = pace._replace(num_to_try=max(pace.num_to_try, _STEPS_AFTER_HIT))
        if num_rows > 1:
            self._record_rows(outcomes, hits, num_emitted)

    def _of_rows(self, num_rows: int) -> tuple[Floats, Floats]:
        """Return factors of the rows' probabilities, and what a token is worth in each."""
        rows = [*self._rows.values()]  # read once: calls of other threads replace it
        if num_rows == 1 or len(rows) != num_rows:
            # Nothing is known of them as a call begins, or while some rows wait.
            return np.ones(num_rows), np.full(num_rows, 1 / num_rows)
        num_emitted = np.array([row.num_emitted for row in rows])
        lags = np.exp((num_emitted.min() - num_emitted) / _LEAD)
        weights = _SHARE_OF_ALL / num_rows + (1 - _SHARE_OF_ALL) * lags / lags.sum()
        return np.array([row.trust for row in rows]), weights

    def _record_rows(
        self, outcomes: Sequence[Outcome], hits: Sequence[Hit], num_emitted: Mapping[int, int]
    ) -> None:
        """Learn how far each row is, and how well its next token was predicted."""
        rows = {}
        for row, num in num_emitted.items():
            known = self._rows.get(row, _Row())
            # A row that has become shorter belongs to another call.
            rows[row] = known._replace(num_emitted=num) if known.num_emitted <= num else _Row(num)
        for outcome, hit in zip(outcomes, hits, strict=True):
            if outcome.row in rows:
                rows[outcome.row] = rows[outcome.row].after(hit)
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


def _gains(probs: Probs, weights: Sequence[float]) -> Floats:
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
    costs, trust = Costs(np.ones(len(KNOTS))), Trust()
    for _ in range(2):
        costs.record(1, 1.0)
    trust.record([Outcome(0, Draft.empty(), [1])])
    _kernels.choose(
        costs.curve,
        costs.num,
        costs.counts,
        trust.worth,
        probs=np.ones(1),
        starts=np.array([0, 1]),
        factors=np.ones(1),
        weights=np.ones(1),
        num_pending=0,
    )
    _kernels.choose_size(costs.curve, costs.num, costs.counts, np.ones(1), np.ones(1))
