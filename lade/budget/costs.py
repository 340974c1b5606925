"""Costs of forwards by size, measured during decoding; and trials of what seems not to pay.

Costs are all that a call leaves to later ones: what depends on texts is of `budget.py`.
"""

from bisect import bisect_right
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Sizes of a forward, in tokens per row, that are chosen from and measured: few, so that each is
# soon known. Sizes beyond the longest drafts occur with pending tokens; larger ones count as 256.
SIZES = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64),
    *(80, 96, 128, 192, 256),
)
KNOTS = np.array(SIZES, np.float64)

# Until a size is measured, each further token, of any row, is assumed to cost this fraction of a
# one-token step. Optimistic on purpose: a size that looks better than it is gets tried, measured
# and abandoned. An accelerator's forward is nearly flat; with a tenth of this, first answers were
# within 2 % of as fast on simulated ones, and up to 6 % slower on two cores.
_PRIOR_SLOPE = 0.01
# A measurement is clipped to within a factor of the expected cost, another one until there are two.
_OUTLIER, FIRST_OUTLIER = 1.3, 2.0
# A cost may be lower than measured: by this fraction after one measurement, and by this over the
# square of their number after more. Measurements are gradually forgotten, down to two. The size
# that looks best at its lowest cost is measured again, so a bad start or a load that has ended is
# noticed.
_DOUBT_OF_ONE = 0.2
_LEAST_COUNTED, _MOST_COUNTED = 2.0, 9.0
_MEMORY = 0.997  # per step

# Steps of a call until drafting, or not drafting, is tried though the other has won throughout: a
# try every 128 steps costs 0.5 % where a second token makes a step 1.6 times as long, as in float32
# on some CPUs. The first comes early where costs were not measured yet (the first step of a size
# does not count, and two must), and in every so many calls, whatever their texts are.
FIRST_TRIAL, _STEPS_BETWEEN_TRIALS = 16, 128
_CALLS_BETWEEN_TRIALS = 8


class BackOff:
    """Lets what does not pay be tried for a small share of what passes without it.

    Steps or seconds, as its user counts. Nothing is drawn at random.

    Args:
        share: of what passes that trials may take.
        first: what they may take before any has passed.
        most: what is saved up for them at most.
    """

    def __init__(self, share: float, first: float, most: float) -> None:
        self.left = first
        self._share = share
        self._most = most

    def passed(self, amount: float) -> None:
        """Save up for trials."""
        if self.left < self._most:
            self.left = min(self._most, self.left + self._share * amount)

    def spent(self, amount: float) -> None:
        """Take a trial into account that did not pay."""
        self.left -= amount

    def granted(self, amount: float) -> None:
        """Let trials take so much, at least: what is tried looks promising."""
        self.left = max(self.left, amount)


class Trials:
    """When a call has drafted and has not, last, and when it is to try the other way for once."""

    def __init__(self, first: int) -> None:
        self._num_steps = 0
        self._last = [first - _STEPS_BETWEEN_TRIALS] * 2  # steps, by whether they drafted
        self._trial = -1  # the step that was the last trial

    def decide(self, is_drafting: bool) -> bool:
        """Return whether to draft: as it seems best, or for once the other way."""
        if self._num_steps - self._last[not is_drafting] >= _STEPS_BETWEEN_TRIALS:
            self._trial = self._num_steps
            is_drafting = not is_drafting
        self._last[is_drafting] = self._num_steps
        return is_drafting

    def end_step(self) -> bool:
        """Count a step; return whether it was a trial."""
        self._num_steps += 1
        return self._trial == self._num_steps - 1


class _Known(NamedTuple):
    """What is known of the sizes `KNOTS`; exchanged as a whole, for calls of other threads."""

    measured: Floats  # smoothed, in seconds
    num: Floats  # measurements, gradually forgotten
    curve: Floats  # seconds, also where nothing was measured
    lowest: Floats  # what each may cost at the lowest


class Costs:
    """Seconds of a forward by its size in tokens per row, for batches of about one size.

    Args:
        guess: costs of the sizes `KNOTS`, up to a factor.
    """

    def __init__(self, guess: Floats) -> None:
        self._guess = guess
        self._seen: set[int] = set()  # sizes that have run
        self._num_asked = 0
        nothing = np.zeros(len(KNOTS))
        self._known = _Known(nothing, nothing, guess, guess)
        #: Whether there are fewer than two measurements; a single one may be anything.
        self.are_unknown = True

    @property
    def curve(self) -> Floats:
        """Seconds of the sizes `KNOTS`."""
        return self._known.curve

    def choose(self, trials: Trials, sizes: Floats, gains: Floats) -> int:
        """Return the index of the size with the best ratio of tokens to time; 0 for no draft.

        Args:
            trials: of the call.
            sizes: [num_sizes], mean tokens per row; the first one has no draft.
            gains: [num_sizes], expected tokens.
        """
        self._num_asked += 1
        # Steps without a draft are measured first. After a few calls without a measurement the
        # guess has to do: where finished rows stay in the forward, only the others are asked about,
        # and what is measured counts for a larger batch.
        must_begin = self.are_unknown and self._num_asked <= FIRST_TRIAL
        if must_begin or sizes[-1] == sizes[0]:
            return 0
        rates = gains / np.interp(sizes, KNOTS, self._known.lowest)
        best = 1 + int(rates[1:].argmax())
        return best if trials.decide(bool(rates[best] > rates[0])) else 0

    def record(self, size: float, sec: float, is_trial: bool) -> None:
        """Learn from the seconds of one forward, of a step that may have been a trial."""
        known = self._known
        size, sec = min(size, SIZES[-1]), max(sec, 1e-9)  # a coarse clock may not have advanced
        if int(size) not in self._seen:
            # The first forward of a size does not count: libraries prepare kernels for it.
            self._seen.add(int(size))
            return
        # The size lies at a share of the way from one knot to the next.
        left = min(bisect_right(SIZES, size), len(SIZES) - 1) - 1
        share = (size - SIZES[left]) / (SIZES[left + 1] - SIZES[left])
        shares = [each for each in ((left, 1.0 - share), (left + 1, share)) if each[1] > 0.0]
        expected = float(np.interp(size, KNOTS, known.curve))
        ratio, is_guess = sec / expected, not known.num.any()  # which is known up to a factor
        least = float(known.num[shares[0][0] : shares[-1][0] + 1].min())
        # Forwards are often slower than they should be and hardly ever faster: where there are few
        # measurements, or none of late, a lower one is taken as it is.
        is_news = ratio < 1.0 and (is_trial or least <= _LEAST_COUNTED)
        shared = ratio if is_guess else 1.0
        if not is_news and not is_guess:
            most = FIRST_OUTLIER if least < _LEAST_COUNTED else _OUTLIER
            ratio = min(max(ratio, 1.0 / most), most)
            if least > 0:  # a wrong guess says nothing about the others
                # A longer text or a busy machine slows all of them.
                shared = 1.0 + (ratio - 1.0) / (1.0 + _MOST_COUNTED)
        if is_guess:  # all sizes share it then, this one too
            ratio = 1.0
        measured, curve = shared * known.measured, shared * known.curve
        num = np.maximum(_MEMORY * known.num, np.minimum(known.num, _LEAST_COUNTED))
        for knot, part in shares:
            counted = num.item(knot)
            before = measured.item(knot) if counted else curve.item(knot)
            weight = 1.0 if is_news else 1.0 / (1.0 + counted)
            measured[knot] = before * (1.0 + part * weight * (ratio - 1.0))
            num[knot] = min(_MOST_COUNTED, counted + part)
        self._know(measured, num)

    def _know(self, measured: Floats, num: Floats) -> None:
        """Correct the guess at the measured sizes, and in between and beyond as it is there."""
        places, guess = num.nonzero()[0], self._guess
        found = measured[places]
        curve = guess * np.interp(KNOTS, KNOTS[places], found / guess[places])
        # The guess for a size never measured is optimistic already.
        lowest = curve.copy()
        lowest[places] -= found * _DOUBT_OF_ONE / np.maximum(1.0, num[places]) ** 2
        self._known = _Known(measured, num, curve, lowest)
        self.are_unknown = float(num.sum()) < 1.5


class ForwardCosts:
    """Seconds of a model's forwards; all that calls leave to later ones, and may share."""

    def __init__(self) -> None:
        self._costs: dict[int, Costs] = {}  # by the bit length of the batch size
        self._calls = count(1)

    def begin_call(self) -> int:
        """Return how many steps a call goes before it tries the other way."""
        is_early = next(self._calls) % _CALLS_BETWEEN_TRIALS == 0
        return FIRST_TRIAL if is_early else _STEPS_BETWEEN_TRIALS

    def of(self, num_rows: int) -> Costs:
        """Return the costs of batches of about this size."""
        num_bits = num_rows.bit_length()
        if num_bits not in self._costs:
            guess = 1 + _PRIOR_SLOPE * num_rows * (KNOTS - 1)
            self._costs.setdefault(num_bits, Costs(guess))
        return self._costs[num_bits]
