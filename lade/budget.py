"""How many draft nodes to verify now, by what a step of each size costs on this machine.

`MeasuredBudget` joins two things it learns: what forwards cost (`_Costs`), and how far to believe
the drafter (`_Trust`). Next file: `stats.py`.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ngram_pool import Draft

_Floats = NDArray[np.float64]


class Outcome(NamedTuple):
    """What a step showed about one row's draft."""

    row: int
    draft: Draft  # all that was proposed, verified or not
    token_ids: Sequence[int]  # what the step emitted


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

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes

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
_MAX_NODES = 63


class PricedBudget:
    """Verify as many nodes as pay by given costs and the drafter's own word: runs repeat exactly.

    Args:
        step_costs: by tokens of a whole forward, all rows together, what a step costs, in any unit;
            at least two sizes. Those between are interpolated, those beyond the largest go on as
            between the last two.
    """

    max_nodes = _MAX_NODES

    def __init__(self, step_costs: Mapping[int, float]) -> None:
        self._sizes = np.array(sorted(step_costs), np.float64)
        self._costs = np.array([step_costs[size] for size in sorted(step_costs)], np.float64)

    def num_nodes(self, probs: Sequence[Sequence[float]], num_pending: int) -> int:
        """Return the number of nodes with the best ratio of expected tokens to given cost."""
        gains = _gains(probs, [1 / len(probs)] * len(probs))
        tokens = len(probs) * (1.0 + num_pending + np.arange(len(gains), dtype=np.float64))
        return int((gains / _interpolated(tokens, self._sizes, self._costs)).argmax())

    def record(
        self,
        num_rows: int,
        num_nodes: int,
        forward_sec: float | None,
        outcomes: Sequence[Outcome],
        num_emitted: Mapping[int, int],
    ) -> None:
        """Learn nothing."""


# Sizes of a forward, in tokens of one row, that are chosen from and measured: few, so that each is
# soon known. Those beyond `_MAX_NODES` come about with pending tokens; larger ones count as 256.
_SIZES = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64),
    *(80, 96, 128, 192, 256),
)
_KNOTS = np.array(_SIZES, np.float64)

# Steps until the other of drafting and not drafting is tried again, where one has won throughout:
# twice as many each time, from the first to the last of these. Every 128 steps cost 0.5 % where
# the second token makes a step 1.6 times as long, as in float32 on some CPUs.
_FIRST_PROBE, _LAST_PROBE = 16, 128

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
        self._recent_most = float(_MAX_NODES)  # nodes that were verified lately, the most of them
        self._costs: dict[int, _Costs] = {}  # by the batch size's number of bits
        self._trust = _Trust()
        self._rows: dict[int, _Row] = {}  # those that the next step asks about

    @property
    def max_nodes(self) -> int:
        """Twice what was verified lately: every node that is asked for takes time, used or not."""
        return min(_MAX_NODES, _LEAST_ASKED + int(2 * self._recent_most))

    def num_nodes(self, probs: Sequence[Sequence[float]], num_pending: int) -> int:
        """Return the number of nodes with the best ratio of expected tokens to measured time."""
        costs = self._costs_of(len(probs))
        # Sizes of the whole forward; the smallest has no draft.
        smallest, longest = 1 + num_pending, 1 + num_pending + max(map(len, probs))
        if costs.must_begin() or longest == smallest:
            return 0
        between = _SIZES[bisect_right(_SIZES, smallest) : bisect_right(_SIZES, longest)]
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

    def _costs_of(self, num_rows: int) -> "_Costs":
        num_bits = num_rows.bit_length()
        if num_bits not in self._costs:
            # Learn from the batch size next to this one: what counts is mostly all rows' tokens.
            known = [bits for bits, costs in dict(self._costs).items() if not costs.are_unknown]
            nearest = min(known, key=lambda bits: abs(bits - num_bits), default=None)
            if nearest is None:
                guess = 1 + _PRIOR_SLOPE * num_rows * (_KNOTS - 1)
            else:
                guess = self._costs[nearest].of_sizes(_KNOTS * 2.0 ** (num_bits - nearest))
            self._costs[num_bits] = _Costs(guess)
        return self._costs[num_bits]


# Until a size is measured, each token more, of any row, is taken to cost so much of a one-token
# step. Optimistic on purpose: a size that looks better than it is gets tried, measured and left.
_PRIOR_SLOPE = 0.01
_PATIENCE_AT_FIRST = 4  # steps; the first of a size is not counted, and two are to be
# Weights of a new measurement: on all sizes, for a longer text or a busy machine slows all of them,
# and on its own, where the first few are averaged.
_SHARED_WEIGHT = 0.1
_OWN_WEIGHT = 0.1
_OUTLIER = 1.3  # a measurement counts as at most so many times what was expected, or as little
_FIRST_OUTLIER = 2.0  # until there have been two
# A cost may be lower than it was measured: by so much after one measurement, and by this over the
# square of their number after more. Measurements are forgotten by and by, down to two. What looks
# best at its lowest is measured again, so a bad start or a load that has gone is found out.
_DOUBT_OF_ONE = 0.2
_MOST_COUNTED = 10.0
_LEAST_COUNTED = 2.0
_MEMORY_OF_COSTS = 0.997  # per step


class _Costs:
    """Seconds of a forward by its size, in tokens of one row, for batches of about one size.

    Args:
        guess: of what the sizes `_KNOTS` cost, up to a factor.
    """

    def __init__(self, guess: _Floats) -> None:
        self._guess = guess
        self._sec = np.zeros(len(_KNOTS))  # smoothed measurements
        self._num = np.zeros(len(_KNOTS))  # of them; one between two knots counts in part for each
        self._curve = guess  # seconds, also where there are no measurements
        self._seen: set[int] = set()
        self._num_asked = self._num_steps = 0
        self._last_tried = {True: 0, False: 0}  # the step that drafted, or did not
        self._patience = _FIRST_PROBE

    @property
    def are_unknown(self) -> bool:
        """Whether less than two measurements are there; a single one may be anything."""
        return float(self._num.sum()) < 1.5

    def must_begin(self) -> bool:
        """Tell whether to measure steps without a draft first.

        Asked in vain, go by the guess: where finished rows stay in the forward, only the others are
        asked about, and what is measured counts for a larger batch.
        """
        self._num_asked += 1
        return self.are_unknown and self._num_asked <= _PATIENCE_AT_FIRST

    def of_sizes(self, sizes: _Floats) -> _Floats:
        """Return what forwards of these sizes cost."""
        return _interpolated(sizes, _KNOTS, self._curve)

    def hoped_for(self, sizes: Sequence[int]) -> _Floats:
        """Return what forwards of these sizes may cost at the lowest."""
        doubt = _DOUBT_OF_ONE / np.maximum(1.0, self._num) ** 2
        # What was never measured is a hopeful guess as it is.
        lowest = self._curve * (1 - doubt * (self._num > 0))
        return np.interp(sizes, _KNOTS, lowest)

    def must_try_other(self, is_drafting: bool) -> bool:
        """Note what is about to be done, and tell whether to do the other thing for once."""
        other_is_due = self._num_steps - self._last_tried[not is_drafting] >= self._patience
        if other_is_due:
            self._patience = min(2 * self._patience, _LAST_PROBE)
        self._last_tried[is_drafting != other_is_due] = self._num_steps
        return other_is_due

    def record(self, size: int, sec: float) -> None:
        """Take in one measurement."""
        self._num_steps += 1
        size, sec = min(size, _SIZES[-1]), max(sec, 1e-9)  # a clock may stand still
        if size not in self._seen:
            # The first forward of a size is not counted: libraries prepare kernels for it.
            self._seen.add(size)
            return
        right = min(bisect_right(_SIZES, size), len(_SIZES) - 1)
        share = (size - _SIZES[right - 1]) / (_SIZES[right] - _SIZES[right - 1])
        of_knots = [(right - 1, 1 - share), (right, share)]
        self._smooth_in([(knot, part) for knot, part in of_knots if part > 0], sec)
        self._update_curve()

    def _smooth_in(self, of_knots: Sequence[tuple[int, float]], sec: float) -> None:
        """Move the knots beside the size, and a little all others, towards a measurement."""
        if not self._num.any():
            self._curve = self._guess * (sec / sum(p * self._guess[knot] for knot, p in of_knots))
        num = min(self._num[knot] for knot, _ in of_knots)
        ratio = sec / sum(part * self._curve[knot] for knot, part in of_knots)
        # Forwards are often slower than they should be and hardly ever faster: where there are few
        # measurements, a lower one is taken as it is.
        is_news = ratio < 1 and num <= _LEAST_COUNTED
        if not is_news:
            most = _OUTLIER if num >= _LEAST_COUNTED else _FIRST_OUTLIER
            ratio = min(max(ratio, 1 / most), most)
            if num > 0:  # a wrong guess says nothing about the others
                self._sec *= 1 + _SHARED_WEIGHT * (ratio - 1)
        faded = np.maximum(_LEAST_COUNTED, _MEMORY_OF_COSTS * self._num)
        self._num = np.where(self._num > _LEAST_COUNTED, faded, self._num)
        for knot, part in of_knots:
            if self._num[knot] == 0:
                self._sec[knot] = self._curve[knot]
            weight = 1.0 if is_news else max(1 / (1 + self._num[knot]), _OWN_WEIGHT)
            self._sec[knot] *= 1 + part * weight * (ratio - 1)
            self._num[knot] = min(_MOST_COUNTED, self._num[knot] + part)

    def _update_curve(self) -> None:
        known = self._num.nonzero()[0]
        self._curve = np.interp(_KNOTS, _KNOTS[known], self._sec[known])
        first, last = known[0], known[-1]
        self._curve[:first] *= self._guess[:first] / self._guess[first]
        self._curve[last + 1 :] *= self._guess[last + 1 :] / self._guess[last]


# What nodes are promised is told apart in these intervals; lower ends but the first.
_PROMISES = np.array(
    [0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
)
# Weight that the past keeps per step: short, for the worst is a text that stops being predictable.
_MEMORY = 0.9
_PRIOR_WEIGHT = 2.0  # as if so many tokens had been promised, and had come


class _Trust:
    """How often nodes are accepted, by what their drafter promises.

    Nodes that were not verified teach as well, wherever the emitted tokens show what would have
    become of them: learned from verified drafts alone, a few early failures switch drafting off for
    good. For the same reason text that becomes predictable again is noticed without any probing.
    """

    def __init__(self) -> None:
        self._promised = np.zeros(len(_PROMISES) + 1)  # sums over nodes, the past fading away
        self._came = np.zeros(len(_PROMISES) + 1)
        self._worth = np.ones(len(_PROMISES) + 1)  # of a promise

    def believed(self, probs: Sequence[float] | _Floats, factor: float = 1.0) -> _Floats:
        """Return what to expect of nodes with these promises, times a factor."""
        worth: _Floats = self._worth[_PROMISES.searchsorted(probs, "right")]
        return np.minimum(1.0, factor * worth * probs)

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Hold promises against what came; rows together weigh as one."""
        probs = np.concatenate([outcome.draft.probs for outcome in outcomes])
        came = [part for outcome in outcomes for part in _what_came(outcome)]
        places = _PROMISES.searchsorted(probs, "right")
        for sums, new in ((self._promised, probs), (self._came, came)):
            sums *= _MEMORY
            sums += np.bincount(places, new, len(sums)) / len(outcomes)
        of_all = (self._came.sum() + _PRIOR_WEIGHT) / (self._promised.sum() + _PRIOR_WEIGHT)
        self._worth = (self._came + _PRIOR_WEIGHT * of_all) / (self._promised + _PRIOR_WEIGHT)


def _what_came(outcome: Outcome) -> list[float]:
    """Return 1 for each node whose path was emitted and 0 for the others.

    Of a node beyond the last emitted token, all of whose known ancestors came, nobody knows: then
    the drafter's word is taken, given those that came. Left out, the failures beside it would
    stand alone and teach that long drafts are worth nothing.
    """
    draft, token_ids = outcome.draft, outcome.token_ids
    came: list[float] = []
    known_prob: list[float] = []  # of the last node on each path that is known to have come
    nodes = zip(
        draft.token_ids.tolist(),
        draft.parents.tolist(),
        draft.depths.tolist(),
        draft.probs.tolist(),
        strict=True,
    )
    for token_id, parent, depth, prob in nodes:
        of_parent, known = (came[parent], known_prob[parent]) if parent >= 0 else (1.0, 1.0)
        if depth > len(token_ids):
            came.append(min(1.0, prob / known) if of_parent and known else 0.0)
            known_prob.append(known)
        else:
            came.append(float(of_parent > 0 and token_id == token_ids[depth - 1]))
            known_prob.append(prob)
    return came


def _weights(rows: Sequence[_Row]) -> _Floats:
    """Return how much a token is worth in each row; they sum to 1."""
    if len(rows) == 1:
        return np.ones(1)
    num_emitted = np.array([row.num_emitted for row in rows])
    lags = np.exp((num_emitted.min() - num_emitted) / _LEAD)
    weights: _Floats = _SHARE_OF_ALL / len(rows) + (1 - _SHARE_OF_ALL) * lags / lags.sum()
    return weights


def _gains(
    probs: Sequence[Sequence[float] | _Floats], weights: Sequence[float] | _Floats
) -> _Floats:
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


def _interpolated(sizes: _Floats, known_sizes: _Floats, costs: _Floats) -> _Floats:
    """Return costs of sizes from those of some, going on beyond the last as between the last two.

    Where the last two say that more costs less, it costs the same.
    """
    slope = max(0.0, (costs[-1] - costs[-2]) / (known_sizes[-1] - known_sizes[-2]))
    beyond = np.maximum(0.0, sizes - known_sizes[-1])
    result: _Floats = np.interp(sizes, known_sizes, costs) + slope * beyond
    return result
