"""Which sources of drafts are worth asking in a call: what each costs and adds, measured.

A source is worth asking if the tokens that it adds to what cheaper ones propose are worth more, at
the seconds that a token takes at present, than the seconds of asking it. How many it adds depends
on how sure the cheaper ones are, so that is learned for a few levels of it, and on the text, so
each call learns it anew. What a draft costs is kept.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

from lade.budget.back_off import BackOff

# Tokens that cheaper sources are expected to yield, where one level ends and the next begins.
_LEVELS = (0.3, 1.0, 2.5)
_MEMORY = 32.0  # measurements that a mean goes back to
_MEMORY_OF_STEPS = 1 - 1 / 64
# As if a source had added so many tokens once, before it is measured; then, as if it had added at
# each level twice what it added at all of them.
_FIRST_GAIN = 1.0
_WEIGHT_OF_ALL = 2.0
# Sources that cost less than this share of a step are always asked.
_CHEAP = 0.01
# Of the time, what asking may take where it does not pay; the first drafts, at most a step's time;
# and so many drafts' time saved up.
_SHARE_OF_TRIALS = 0.005
_FIRST_TRIALS, _MOST_TRIALS = 4.0, 8.0
# Tokens of the text that a source has not seen are run in about the time of one, up to so many.
# Where there are more, as at its first draft, what it promises must be worth the time that they
# take; so many times, as long as it was not measured, and never before so many steps. Of simulated
# calls of 64 tokens, a source that does not pay took up to 10 % with factors of 1 and 0.5 steps,
# and 4 % with these.
FEW_BEHIND = 16
_DOUBT = 9.0
_LEAST_STEPS = 2.5
_OUTLIER = 4.0  # a time may be this many times the mean: others use the machine, or the user pauses
_NUM_FIRST = 3  # of the first few times, the shortest counts: libraries prepare kernels


class Mean:
    """Mean of measurements, the older the less they count."""

    def __init__(self) -> None:
        self.num = 0.0
        self.value = 0.0

    def add(self, value: float) -> None:
        """Take a measurement into account."""
        num = min(self.num + 1, _MEMORY)
        self.value += (value - self.value) / num
        self.num = num  # last, for calls of other threads

    def add_sec(self, sec: float) -> None:
        """Take a time into account, which may be too long, but hardly too short."""
        if 0 < self.num < _NUM_FIRST:
            self.num, self.value = self.num + 1, min(self.value, sec)
        else:
            self.add(min(sec, _OUTLIER * self.value) if self.num else sec)


class SourceCosts:
    """Seconds of a source: all that a call leaves to later ones, which may share it."""

    def __init__(self) -> None:
        self._warm_sec = Mean()  # of a draft
        self._cold_sec = Mean()  # of one that had to run much of the text before
        self.behind_sec = Mean()  # of that, beyond a usual one, per token of the text

    @property
    def draft_sec(self) -> float:
        """Seconds of a draft, as far as they are known."""
        return self._warm_sec.value if self._warm_sec.num else self._cold_sec.value

    @property
    def are_known(self) -> bool:
        """Whether they were measured often enough, also where all answers are short."""
        return self._warm_sec.num > 0 or self._cold_sec.num > 1

    def record(self, sec: float, num_behind: int) -> None:
        """Learn the seconds of a draft by a source that had to run so many tokens before."""
        if num_behind <= FEW_BEHIND:
            self._warm_sec.add_sec(sec)
        else:
            self._cold_sec.add_sec(sec)
            self.behind_sec.add_sec(max(0.0, sec - self._warm_sec.value) / num_behind)


class _Source:
    """What is known of a source in a call."""

    def __init__(self, costs: SourceCosts) -> None:
        self.costs = costs
        self.gain = Mean()  # tokens added
        self.gains = [Mean() for _ in range(len(_LEVELS) + 1)]  # the same by level
        self.back_off: BackOff | None = None  # once its cost is known


class Sources:
    """What sources cost and add in a call, and which of them to ask.

    Decisions depend on what was recorded alone; nothing is drawn at random.

    Args:
        costs: of the sources, which are named by their index; measured on.
    """

    def __init__(self, costs: Sequence[SourceCosts]) -> None:
        self._sources = [_Source(each) for each in costs]
        self._step_sec = 0.0  # decayed sums
        self._num_tokens = 0.0
        self._num_steps = 0.0

    @property
    def _token_sec(self) -> float:
        """Seconds that a token takes at present; 0 until a step was measured."""
        return self._step_sec / self._num_tokens if self._num_tokens else 0.0

    def by_cost(self, sources: Sequence[int]) -> list[int]:
        """Return sources with the cheapest first; those of unknown cost last."""
        return sorted(sources, key=lambda each: self._sources[each].costs.draft_sec or math.inf)

    def _net_gain(self, known: _Source, num_expected: float) -> float:
        """Return the seconds that asking a source is expected to save, below 0 for a loss."""
        of_all, here = known.gain, known.gains[bisect_right(_LEVELS, num_expected)]
        mean = (_FIRST_GAIN + of_all.num * of_all.value) / (1 + of_all.num)
        gain = (here.num * here.value + _WEIGHT_OF_ALL * mean) / (here.num + _WEIGHT_OF_ALL)
        return gain * self._token_sec - known.costs.draft_sec

    def is_worth_asking(
        self, source: int, num_expected: float, num_behind: int = 0, num_to_come: int = 0
    ) -> bool:
        """Return whether to ask a source now, because it pays or to learn whether it does.

        Args:
            source: the source.
            num_expected: tokens expected of what cheaper sources propose.
            num_behind: tokens of the text that it must run first.
            num_to_come: tokens that may still be emitted, which such a run may serve.
        """
        known = self._sources[source]
        costs = known.costs
        is_behind = num_behind > FEW_BEHIND
        if is_behind and self._num_steps < _LEAST_STEPS:
            return False
        if not self._num_tokens or not costs.are_known:
            return True
        step_sec = self._step_sec / self._num_steps
        behind_sec = num_behind * costs.behind_sec.value if is_behind else 0.0
        asking_sec = costs.draft_sec + behind_sec
        if asking_sec <= _CHEAP * step_sec:
            return True
        net = self._net_gain(known, num_expected)
        num_steps = num_to_come * self._num_steps / self._num_tokens
        doubt = 1.0 if known.gain.num else _DOUBT
        if net > 0 and net * num_steps >= behind_sec * doubt:
            return True
        if known.back_off is None:
            first = min(_FIRST_TRIALS * costs.draft_sec, step_sec)
            known.back_off = BackOff(_SHARE_OF_TRIALS, first, _MOST_TRIALS * asking_sec)
        left = known.back_off.left
        if known.gain.num < _FIRST_TRIALS:  # these may take what all of the call would save up
            left += _SHARE_OF_TRIALS * num_to_come * self._token_sec
        return left >= asking_sec

    def record_gain(self, source: int, num_expected: float, num_added: float, sec: float) -> None:
        """Learn what a source that was asked has added to what cheaper ones proposed.

        Args:
            source, num_expected: as for `is_worth_asking`.
            num_added: emitted tokens that would not have been without it.
            sec: seconds of asking it, this time.
        """
        known = self._sources[source]
        known.gain.add(num_added)
        known.gains[bisect_right(_LEVELS, num_expected)].add(num_added)
        lost = sec - num_added * self._token_sec
        if known.back_off is not None and lost > 0 and self._net_gain(known, num_expected) <= 0:
            known.back_off.spent(lost)

    def record_step(self, sec: float, num_tokens: int, num_steps: float = 1.0) -> None:
        """Learn what steps took, drafting included, and how many tokens all rows emitted."""
        if self._num_steps >= 2:
            sec = min(sec, _OUTLIER * num_steps * self._step_sec / self._num_steps)
        self._step_sec = _MEMORY_OF_STEPS * self._step_sec + sec
        self._num_tokens = _MEMORY_OF_STEPS * self._num_tokens + num_tokens
        self._num_steps = _MEMORY_OF_STEPS * self._num_steps + num_steps
        for source in self._sources:
            if source.back_off is not None:
                source.back_off.passed(sec)
