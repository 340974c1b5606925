"""Whether a source of drafts is asked and how far its draft goes, K: by measured costs and gains.

A source is worth asking if the tokens that it adds to what cheaper ones propose are worth more, at
the seconds that a token takes at present, than the seconds of asking it. How many it adds depends
on how sure the cheaper ones are, so that is learned for a few levels of it, and on the text, so
each call learns it anew. What a draft costs is kept. A model's draft goes on by the same numbers.
"""

from bisect import bisect_right

from lade.budget.seconds import SHARE_OF_TRIALS, Seconds

# Tokens that cheaper sources are expected to yield, where one level ends and the next begins.
_LEVELS = (0.3, 1.0, 2.5)
MEMORY = 32.0  # measurements that a mean goes back to, or steps
_WEIGHT_OF_ALL = 2.0  # as if a source had added at each level twice what it added at all of them
# Drafts, at most a step's time at first, that asking where it does not pay may take at once.
_NUM_TRIALS = 4.0
# Where a source has more tokens of the text to run first, as at its first draft, what it promises
# must be worth the time that they take; so many times, as long as it was not measured, and never
# before a few steps. Of simulated calls of 64 tokens, a source that does not pay took up to 10 %
# with a factor of 1, and 4 % with this.
FEW_BEHIND = 16
_DOUBT = 9.0


class Mean:
    """Mean of measurements, the older the less they count.

    Args:
        value: until there are any.
        num: how many measurements that counts as.
    """

    def __init__(self, value: float = 0.0, num: float = 0.0) -> None:
        self.value = value
        self.num = num

    def add(self, value: float) -> None:
        """Take a measurement into account."""
        num = min(self.num + 1, MEMORY)
        self.value += (value - self.value) / num
        self.num = num  # last, for calls of other threads


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


# --- whether it is asked --------------------------------------------------------------------


class Pace:
    """What the steps of a call take."""

    def __init__(self) -> None:
        self._sec = self._num_tokens = self._num_steps = 0.0  # decayed sums

    def record(self, sec: float, num_tokens: int) -> None:
        """Learn what a step took, drafting included, and how many tokens all rows emitted."""
        kept = 1 - 1 / MEMORY
        self._sec = kept * self._sec + sec
        self._num_tokens = kept * self._num_tokens + num_tokens
        self._num_steps = kept * self._num_steps + 1.0

    @property
    def is_settled(self) -> bool:
        """Whether a few steps were measured."""
        return self._num_steps >= 2

    @property
    def token_sec(self) -> float:
        """Seconds that a token takes at present; 0 until a step was measured."""
        return self._sec / self._num_tokens if self._num_tokens else 0.0

    @property
    def step_sec(self) -> float:
        """Seconds of a step."""
        return self._sec / self._num_steps

    def steps_of(self, num_tokens: int) -> float:
        """Return about how many steps emit so many tokens."""
        return num_tokens * self._num_steps / self._num_tokens


class Asking:
    """Whether to ask a source in a call: by what it costs and adds.

    Decisions depend on what was recorded alone; nothing is drawn at random.

    Args:
        costs: what a draft takes, by the tokens that the source has to run, the newest included;
            measured on.
        pace: of the call.
    """

    def __init__(self, costs: Seconds, pace: Pace) -> None:
        self.costs = costs
        self._pace = pace
        self._gain = Mean(1.0, 1.0)  # tokens added; as if it had been one, once
        self._gains = [Mean() for _ in range(len(_LEVELS) + 1)]  # the same by level
        self._back_off: BackOff | None = None  # once its cost is known

    def is_worth(self, num_expected: float, num_behind: int, num_to_come: int) -> bool:
        """Return whether to ask now, because it pays or to learn whether it does.

        Args:
            num_expected: tokens expected of what cheaper sources propose.
            num_behind: tokens of the text that the source must run first.
            num_to_come: tokens that may still be emitted, which such a run may serve.
        """
        costs, pace = self.costs, self._pace
        is_behind = num_behind > FEW_BEHIND
        if is_behind and not pace.is_settled:
            return False
        if not pace.token_sec or not costs.is_known:
            return True
        draft_sec, asking_sec = costs.at(1.0), float(costs.at(1.0 + num_behind))
        behind_sec = asking_sec - float(draft_sec) if is_behind else 0.0
        net, doubt = self._net_gain(num_expected), 1.0 if self._gain.num > 1 else _DOUBT
        if net > 0 and net * pace.steps_of(num_to_come) >= behind_sec * doubt:
            return True
        if self._back_off is None:
            first = min(_NUM_TRIALS * float(draft_sec), pace.step_sec)
            self._back_off = BackOff(SHARE_OF_TRIALS, first, _NUM_TRIALS * asking_sec)
        left = self._back_off.left
        if self._gain.num <= _NUM_TRIALS:  # these may take what all of the call would save up
            left += SHARE_OF_TRIALS * num_to_come * pace.token_sec
        return left >= asking_sec

    def record_gain(self, num_expected: float, num_added: float, sec: float) -> None:
        """Learn what asking has added.

        Args:
            num_expected: as for `is_worth`.
            num_added: emitted tokens that would not have been without it.
            sec: seconds of asking, this time.
        """
        self._gain.add(num_added)
        self._gains[bisect_right(_LEVELS, num_expected)].add(num_added)
        lost = sec - num_added * self._pace.token_sec
        if self._back_off is not None and lost > 0 and self._net_gain(num_expected) <= 0:
            self._back_off.spent(lost)

    def passed(self, sec: float) -> None:
        """Save up for trials in a step of so many seconds."""
        if self._back_off is not None:
            self._back_off.passed(sec)

    def _net_gain(self, num_expected: float) -> float:
        """Return the seconds that asking is expected to save, below 0 for a loss."""
        here = self._gains[bisect_right(_LEVELS, num_expected)]
        of_all = _WEIGHT_OF_ALL * self._gain.value
        gain = (here.num * here.value + of_all) / (here.num + _WEIGHT_OF_ALL)
        return gain * self._pace.token_sec - float(self.costs.at(1.0))
