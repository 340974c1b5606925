"""Whether to ask a source of drafts: by measured costs and gains.

A source is worth asking if the tokens that it adds to the drafts of cheaper sources save more
seconds than asking takes. How many it adds depends on how sure the cheaper sources are, so the gain
is learned for a few levels of that, and on the text, so each call learns it again. The cost of a
draft is kept between calls.
"""

import math
from bisect import bisect_right

from lade.budget.seconds import MOST_TRIALS, SHARE_OF_TRIALS, Seconds

# Bounds between levels: the tokens that cheaper sources are expected to yield.
_LEVELS = (0.3, 1.0, 2.5)
_MEMORY = 32.0  # measurements, or steps, that a decaying mean covers
# A source may have to run more tokens of the text than this first, as at its first draft. Then its
# expected gain must exceed their time: by this factor until its gain is measured, and never before
# a few steps. In simulated calls of 64 tokens, a losing source took up to 10 % of the time with a
# factor of 1, and 4 % with this.
_FEW_BEHIND = 16
_DOUBT, _STEPS_BEFORE_RUNS = 9.0, 3


class Mean:
    """Mean of measurements; older ones count less.

    Args:
        value: the mean before any measurement.
        num: number of measurements that it counts as.
    """

    def __init__(self, value: float = 0.0, num: float = 0.0) -> None:
        self.value = value
        self.num = num

    def add(self, value: float) -> None:
        """Take a measurement into account."""
        num = min(self.num + 1, _MEMORY)
        self.value += (value - self.value) / num
        self.num = num  # last, for calls of other threads


class StepRate:
    """Measured time and tokens of a call's steps."""

    def __init__(self) -> None:
        self.step_sec = Mean()
        self.num_tokens = Mean()  # that all rows emitted in a step

    def record(self, sec: float, num_tokens: int) -> None:
        """Learn a step's seconds, drafting included, and how many tokens all rows emitted."""
        self.step_sec.add(sec)
        self.num_tokens.add(num_tokens)

    @property
    def token_sec(self) -> float:
        """Seconds that a token takes at present; 0 until a step was measured."""
        return self.step_sec.value / (self.num_tokens.value or math.inf)


class SourceGate:
    """Decides whether to ask a source in a call, by its cost and gain.

    Decisions depend only on recorded measurements; nothing is drawn at random.

    Args:
        costs: seconds of a draft by the tokens that the source has to run, the newest included;
            updated by further measurements.
        rate: the step rate of the call.
    """

    def __init__(self, costs: Seconds, rate: StepRate) -> None:
        self.costs = costs
        self._rate = rate
        self._gain = Mean(1.0, 1.0)  # tokens added; as if it had been one, once
        self._gains = [Mean() for _ in range(len(_LEVELS) + 1)]  # the same by level
        self._left: float | None = None  # seconds that trials may lose, once the cost is known
        self._most_left = 0.0

    def is_worth(self, num_expected: float, num_behind: int, num_to_come: int) -> bool:
        """Return whether to ask now, because it pays or to learn whether it does.

        Args:
            num_expected: expected tokens of the drafts of cheaper sources.
            num_behind: tokens of the text that the source must run first.
            num_to_come: tokens that may still be emitted, and so may profit from that run.
        """
        costs, rate = self.costs, self._rate
        is_behind = num_behind > _FEW_BEHIND
        if is_behind and rate.step_sec.num < _STEPS_BEFORE_RUNS:
            return False
        if not rate.token_sec or not costs.is_known:
            return True
        draft_sec, asking_sec = costs.at(1.0), float(costs.at(1.0 + num_behind))
        behind_sec = asking_sec - float(draft_sec) if is_behind else 0.0
        net, doubt = self._net_gain(num_expected), 1.0 if self._gain.num > 1 else _DOUBT
        if net > 0 and net * num_to_come / rate.num_tokens.value >= behind_sec * doubt:
            return True
        if self._left is None:
            self._left = min(MOST_TRIALS * float(draft_sec), rate.step_sec.value)
            self._most_left = MOST_TRIALS * asking_sec
        left = self._left
        if self._gain.num <= MOST_TRIALS:  # first trials may take the savings of the whole call
            left += SHARE_OF_TRIALS * num_to_come * rate.token_sec
        return left >= asking_sec

    def record_gain(self, num_expected: float, num_added: float, sec: float) -> None:
        """Learn how many tokens asking has added.

        Args:
            num_expected: as for `is_worth`.
            num_added: emitted tokens that the step owes to this source alone.
            sec: seconds that asking took.
        """
        self._gain.add(num_added)
        self._gains[bisect_right(_LEVELS, num_expected)].add(num_added)
        lost = sec - num_added * self._rate.token_sec
        if self._left is not None and lost > 0 and self._net_gain(num_expected) <= 0:
            self._left -= lost

    def passed(self, sec: float) -> None:
        """Save a share of a step's seconds for trials."""
        if self._left is not None:
            self._left = max(self._left, min(self._most_left, self._left + SHARE_OF_TRIALS * sec))

    def _net_gain(self, num_expected: float) -> float:
        """Return the seconds that asking is expected to save, below 0 for a loss."""
        here = self._gains[bisect_right(_LEVELS, num_expected)]
        gain = (here.num * here.value + self._gain.value) / (here.num + 1.0)  # all count as one
        return gain * self._rate.token_sec - float(self.costs.at(1.0))
