"""Budgets: how many draft tokens a step verifies.

They combine measured step costs (`seconds.py`) with a calibration of the drafter's probabilities.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lade.budget.seconds import KNOTS, Floats, Seconds
from lade.stats import WidthStats
from lade.tree import matched_path
from ngram_pool import Draft

_Row = TypeVar("_Row", bound=Hashable)

MAX_DRAFT_TOKENS = 63
#: Numbers of draft tokens that `Budget.widths` reports; each entry covers those up to the next.
WIDTHS = KNOTS[KNOTS <= 1 + MAX_DRAFT_TOKENS].astype(np.int64) - 1
# A batch is done when its slowest row is done, so the weight goes to the rows that lag: e times
# less for each `_LEAD` tokens that a row is ahead of the last one. Leads of 2 to 8 differ little.
_LEAD = 4.0

# If drafts do not pay, steps have none (they rest). After this many drafts that were not worth
# verifying, only one step in as many asks for a draft. If the likeliest draft token of such a
# step comes true, as many further steps ask for one.
_DRAFTS_BEFORE_REST = 8
_LEAST_ASKED = 16  # nodes; fewer would hide drafts that pay only when they are large

# Promised probabilities are grouped into intervals; these are the lower bounds but the first.
_PROMISES = np.array(
    [0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
)
_NUM_INTERVALS = len(_PROMISES) + 1
# `_MEMORY` is the weight that the past keeps per step. It is short, because the worst case is a
# text that stops being predictable. The mean over all intervals begins with `_PRIOR_WEIGHT`
# promised tokens with the expected share of hits; each interval begins with `_ALIKE` promised
# tokens, as true as that mean. Without `_ALIKE`, steps of recorded texts were 0.7 % slower on six
# simulated machines.
_MEMORY, _PRIOR_WEIGHT, _ALIKE = 0.9, 2.0, 16.0


class Calibration:
    """How often nodes are accepted, by the probability that their drafter promised; of one call.

    Nodes that were not verified count as well, wherever the emitted tokens show what would have
    become of them: with verified nodes alone, a few early failures would switch drafting off for
    good. This is also how text that becomes predictable again is noticed without any probing.

    Args:
        share: of the drafts' probabilities that acceptance is expected to reach, until outcomes
            are known.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        # Acceptance divided by promise, by interval of promises.
        self._worth = np.full(_NUM_INTERVALS, share)
        # Decayed sums of promised probabilities, and of nodes that came true.
        self._promised = np.zeros(_NUM_INTERVALS)
        self._came = np.zeros(_NUM_INTERVALS)

    def believed(self, probs: Sequence[float] | Floats) -> Floats:
        """Return the corrected probabilities of nodes, at most 1."""
        worth = self._worth[_PROMISES.searchsorted(probs, "right")]
        believed: Floats = np.minimum(1.0, worth * probs)
        return believed

    def learn(self, draft: Draft, token_ids: Sequence[int]) -> bool:
        """Compare promises with the emitted tokens; return whether the likeliest node came true.

        The outcome of a node beyond the last emitted token is unknown if its path up to there was
        emitted. Then the node counts with the drafter's probability, given that path. Without it,
        only the failures beside it would count, and teach that long drafts are worth nothing.
        """
        probs, came = draft.probs, np.zeros(len(draft))
        path = matched_path(draft, token_ids)
        came[path] = 1.0
        if path and len(path) == len(token_ids):
            known, beyond = probs.item(path[-1]), {path[-1]}
            for node, parent in enumerate(draft.parents.tolist()):
                if parent in beyond and known > 0 and probs[node] > 0:
                    beyond.add(node)
                    came[node] = min(1.0, probs[node] / known)
        intervals = _PROMISES.searchsorted(probs, "right")
        self._promised = _MEMORY * self._promised + np.bincount(intervals, probs, _NUM_INTERVALS)
        self._came = _MEMORY * self._came + np.bincount(intervals, came, _NUM_INTERVALS)
        promised, came_true = self._promised.sum() + _PRIOR_WEIGHT, self._came.sum()
        of_all = (came_true + self._share * _PRIOR_WEIGHT) / promised
        self._worth = (self._came + _ALIKE * of_all) / (self._promised + _ALIKE)
        return len(came) > 0 and came.item(0) == 1.0


class Budget:
    """Budget of one call: how many nodes a step verifies; it changes the speed, never the text.

    It maximises the expected tokens per second, if need be with no nodes. Step costs are measured
    during decoding, separately for each doubling of the batch; the state is some thousand numbers
    for each. Decisions depend only on recorded measurements; nothing is drawn at random.

    Args:
        costs: step costs, by the bit length of the number of rows; they outlive the call, and calls
            may share them. None for costs that only this call measures.
        temperature: 0 for greedy decoding, else the temperature of sampling: the higher it is, the
            lower is the acceptance that the budget expects at first.
        most: maximum number of draft tokens to verify in a step; None for `MAX_DRAFT_TOKENS`.
        fixed: for reproducible runs, how many to verify in each step, whatever they cost.
    """

    def __init__(
        self,
        costs: dict[int, Seconds] | None = None,
        temperature: float = 0.0,
        most: int | None = None,
        *,
        fixed: int | None = None,
    ) -> None:
        self._costs = {} if costs is None else costs
        self._share = 1 / (1 + temperature**3)
        self._fixed = fixed
        usual = MAX_DRAFT_TOKENS if most is None else min(most, MAX_DRAFT_TOKENS)
        self._most = usual if fixed is None else fixed
        self._recent_most = float(self._most)
        # By row, because rows are not equally predictable.
        self._calibrations: dict[Hashable, Calibration] = {}
        self._num_emitted: Mapping[Any, int] = {}
        self._has_refused = False  # whether this step's draft was not worth its cost
        self._num_left = float(_DRAFTS_BEFORE_REST)  # drafts that may be asked for
        # Of `widths`: steps, tokens and seconds, by number of draft tokens.
        self._sums = np.zeros((3, len(WIDTHS)))

    @property
    def widths(self) -> dict[int, WidthStats]:
        """How often each number of draft tokens was chosen, and its expected tokens and seconds.

        Each key is the lowest number of its entry. Expectations are for all steps of a call alone,
        by the estimates of each step; empty if nothing was chosen.
        """
        sums = zip(WIDTHS.tolist(), self._sums.T.tolist(), strict=True) if self._sums.any() else ()
        return {width: WidthStats(int(num), *rest) for width, (num, *rest) in sums}

    @property
    def wish(self) -> int:
        """Number of draft tokens that a step is worth asking for.

        A little over twice the recently verified number: unused nodes cost drafting time, too.
        """
        return min(self._most, _LEAST_ASKED + int(2 * self._recent_most))

    @property
    def is_resting(self) -> bool:
        """Whether drafts have not been worth verifying for some time."""
        return self._num_left < 1.0

    def nums_of_nodes(
        self,
        probs: Mapping[_Row, Sequence[float] | Floats],
        num_pending: int = 0,
        marginal_cost: float | None = None,
    ) -> dict[_Row, int]:
        """Return how many nodes of each row's draft to verify: the best ratio of tokens to cost.

        The cost of a forward depends on all its tokens together, so the likeliest nodes of all rows
        compete: an unpredictable row may get none, and another row more.

        Args:
            probs: by row, the probabilities of its draft's nodes, best first.
            num_pending: tokens per row that the forward runs besides the root and the draft.
            marginal_cost: tokens that each node of a lone row must add to pay in a forward of
                several calls; None for other forwards.
        """
        if self._fixed is not None:
            return {row: len(each) for row, each in probs.items()}
        worths = [self._calibration(row).believed(each) for row, each in probs.items()]
        if len(worths) > 1:
            worths = [w * each for w, each in zip(self._weights(probs), worths, strict=True)]
        # The nodes of a row keep their order: any first ones are a tree.
        bounds = [*map(np.minimum.accumulate, worths)]
        is_known = True
        if marginal_cost is not None:
            chosen = [int((len(probs) * each >= marginal_cost).sum()) for each in bounds]
        else:
            order = np.argsort(-np.concatenate(bounds), kind="stable")
            gains = np.concatenate([[1.0], np.concatenate(worths)[order]]).cumsum()
            costs, num_rows = self._costs_of(len(probs)), len(probs)
            nums = _options(num_pending, len(order))
            best = costs.choose(1.0 + num_pending + nums / num_rows, gains[nums])
            chosen = [nums.item(best)]
            is_known = costs.is_known
            if is_known:
                self._tally(chosen[0], num_rows, num_pending, gains, costs)
            if num_rows > 1:
                rows = np.repeat(range(num_rows), [*map(len, worths)])[order[: chosen[0]]]
                chosen = np.bincount(rows, minlength=num_rows).tolist()
        if any(chosen):
            self._num_left = float(_DRAFTS_BEFORE_REST)
        self._recent_most = max(*chosen, _MEMORY * self._recent_most)
        self._has_refused = is_known and not any(chosen)
        return dict(zip(probs, chosen, strict=True))

    def record(self, num_rows: int, num_nodes: float, sec: float) -> None:
        """Learn the cost of a step.

        Args:
            num_rows: rows of the batch.
            num_nodes: tokens per row that its forward ran besides the root, pending ones included;
                their mean where rows have no padding.
            sec: seconds of the whole step, if it took as long as others of its size.
        """
        if self._fixed is None:
            self._costs_of(num_rows).record(num_nodes + 1, sec)

    def learn(
        self,
        outcomes: Mapping[_Row, tuple[Draft, Sequence[int]]],
        num_emitted: Mapping[_Row, int],
    ) -> None:
        """Calibrate drafted probabilities by the outcome of a step.

        Args:
            outcomes: for each row that emitted, its whole draft, verified or not, and the tokens
                that the step emitted.
            num_emitted: by row, tokens emitted so far.
        """
        if self._fixed is not None:
            return
        hits = [self._calibration(row).learn(draft, ids) for row, (draft, ids) in outcomes.items()]
        # A step without a draft has refused none.
        if self._has_refused and any(len(draft) for draft, _ in outcomes.values()):
            self._num_left -= 1.0
        self._has_refused = False
        self._num_left = max(self._num_left, min(1.0, self._num_left + 1 / _DRAFTS_BEFORE_REST))
        if hits and 2 * sum(hits) >= len(hits):
            self._num_left = float(_DRAFTS_BEFORE_REST)
        self._num_emitted = num_emitted

    def _tally(
        self, chosen: int, num_rows: int, num_pending: int, gains: Floats, costs: Seconds
    ) -> None:
        """Add a step to `widths`."""
        nums = np.minimum(WIDTHS * num_rows, len(gains) - 1)
        self._sums[0, int(WIDTHS.searchsorted(chosen / num_rows, "right")) - 1] += 1
        self._sums[1] += num_rows * gains[nums]
        self._sums[2] += costs.at(1.0 + num_pending + nums / num_rows)

    def _calibration(self, row: Hashable) -> Calibration:
        if row not in self._calibrations:
            self._calibrations[row] = Calibration(self._share)
        return self._calibrations[row]

    def _weights(self, rows: Iterable[Hashable]) -> Floats:
        """Return the weight of a token in each row; the weights sum to 1."""
        num_emitted = np.array([self._num_emitted.get(row, 0) for row in rows])
        lags = np.exp((num_emitted.min() - num_emitted) / _LEAD)
        weights: Floats = lags / lags.sum()
        return weights

    def _costs_of(self, num_rows: int) -> Seconds:
        """Return the costs of steps of batches of about this size, by tokens per row."""
        num_bits = num_rows.bit_length()
        if num_bits not in self._costs:
            self._costs.setdefault(num_bits, Seconds(num_rows))
        return self._costs[num_bits]


@lru_cache(256)
def _options(num_pending: int, most: int) -> NDArray[np.int64]:
    """Return the numbers of nodes to choose from: 0, the sizes in `KNOTS`, and `most`."""
    nums = KNOTS.astype(np.int64) - 1 - num_pending
    nums = nums[(nums > 0) & (nums < most)]
    return np.concatenate([[0], nums, [most]])
