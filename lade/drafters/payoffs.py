"""Which sources are worth asking: what each costs and brings, measured; a bandit.

A step yields tokens and takes seconds. A source is worth asking if the tokens that it adds to what
cheaper sources propose, at the seconds that a token takes at present, are worth more than the
seconds of asking it and of verifying its nodes. How many it adds depends on how sure the cheaper
sources are, so all of this is learned for a few levels of that.

Next file: `merged.py`.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

# Tokens that cheaper sources are expected to yield, where one level ends and the next begins.
_LEVELS = (0.3, 1.0, 2.5)
_MEMORY = 32.0  # measurements that a mean goes back to
_MEMORY_OF_PACE = 64.0  # steps
# As if a source had added so many tokens so many times, before it is measured; then, as if it had
# added at each level what it added at all of them.
_FIRST_GAIN, _FIRST_WEIGHT = 1.0, 1.0
_WEIGHT_OF_ALL = 2.0
# Sources that cost less than this share of a step are always asked.
_CHEAP = 0.01
# Asking where it does not seem to pay may lose this share of the time: what is not lost is saved
# for later, up to some trials, of which a source has a few to begin with.
_SHARE_OF_TRIALS = 0.005
# Those are no dearer than so many tokens, which a draft may add in all.
_FIRST_TRIALS, _MOST_TRIALS = 4.0, 8.0
_MOST_TOKENS = 8.0
# Drafts between two trials at a level: doubled after each that lost, from the first to the last;
# the first again after one that gained. Where a source pays, it is left out as rarely as the last,
# to measure the step without its nodes.
_FIRST_GAP, _LAST_GAP = 1, 1024
_GAP_WITHOUT = 64
_OUTLIER = 4.0  # a step may take this many times the mean; a pause of the user's is none of ours


class _Mean:
    """Mean of measurements, the older the less they count."""

    __slots__ = ("num", "value")

    def __init__(self) -> None:
        self.num = 0.0
        self.value = 0.0

    def add(self, value: float) -> None:
        self.num = min(self.num + 1, _MEMORY)
        self.value += (value - self.value) / self.num


class _Level:
    """What is known of a source where the cheaper ones are about equally sure."""

    __slots__ = ("gain", "gap", "num_since", "num_with", "rest_with", "rest_without")

    def __init__(self) -> None:
        self.gain = _Mean()  # tokens added
        self.rest_with = _Mean()  # seconds of a step besides drafting, with its nodes
        self.rest_without = _Mean()
        self.gap = _FIRST_GAP
        self.num_since = 0  # drafts since it was asked
        self.num_with = 0  # drafts since it was not

    @property
    def extra_sec(self) -> float:
        """Seconds that its nodes take to verify, as far as they are known."""
        num = min(self.rest_with.num, self.rest_without.num)
        return (self.rest_with.value - self.rest_without.value) * num / (num + 4.0)


class _Source:
    """What is known of a source."""

    def __init__(self) -> None:
        self.sec = _Mean()  # of a draft
        self.cold_sec = _Mean()  # of the first draft of a sequence
        self.opening_sec = _Mean()  # of that first one, beyond a usual one, per token of the prompt
        self.gain = _Mean()
        self.levels = [_Level() for _ in range(len(_LEVELS) + 1)]
        self.savings: float | None = None  # seconds that trials may lose; None until its cost shows


class Payoffs:
    """What sources cost and bring, and which of them to ask.

    Decisions depend on what was recorded alone; nothing is drawn at random. The loss against never
    asking a source that does not pay is at most `_FIRST_TRIALS` of its drafts, its first ones, and
    `_SHARE_OF_TRIALS` of the time; against always asking one that does, what the trials take until
    it shows.

    Args:
        num_sources: sources, named by their index.
    """

    def __init__(self, num_sources: int) -> None:
        self._sources = [_Source() for _ in range(num_sources)]
        self._step_sec = 0.0  # decayed sums
        self._num_tokens = 0.0
        self._num_steps = 0.0

    # --- decisions ----------------------------------------------------------------------------

    @property
    def token_sec(self) -> float:
        """Seconds that a token takes at present; 0 until a step was measured."""
        return self._step_sec / self._num_tokens if self._num_tokens else 0.0

    def by_cost(self, sources: Sequence[int]) -> list[int]:
        """Return sources with the cheapest first; those of unknown cost last."""
        return sorted(
            sources, key=lambda source: self._cost(source) if self.is_known(source) else math.inf
        )

    def is_known(self, source: int) -> bool:
        """Return whether the cost of a source was measured."""
        known = self._sources[source]
        return known.sec.num + known.cold_sec.num > 0

    def is_cheap(self, source: int) -> bool:
        """Return whether asking a source costs next to nothing, as far as is known."""
        is_known = self.is_known(source) and self._num_steps > 0
        return is_known and self._cost(source) * self._num_steps <= _CHEAP * self._step_sec

    def level_of(self, num_expected: float) -> int:
        """Return the level of how sure cheaper sources are, by the tokens expected of them."""
        return bisect_right(_LEVELS, num_expected)

    def net_gain(self, source: int, level: int) -> float:
        """Return the seconds that asking a source is expected to save, below 0 for a loss."""
        known = self._sources[source]
        of_all = known.gain
        mean = (_FIRST_GAIN * _FIRST_WEIGHT + of_all.num * of_all.value) / (
            _FIRST_WEIGHT + of_all.num
        )
        here = known.levels[level].gain
        gain = (here.num * here.value + _WEIGHT_OF_ALL * mean) / (here.num + _WEIGHT_OF_ALL)
        return gain * self.token_sec - self._cost(source) - known.levels[level].extra_sec

    def is_worth_asking(
        self, source: int, level: int, num_prompt: int = 0, num_to_come: int = 0
    ) -> bool:
        """Return whether to ask a source now, because it pays or to learn whether it does.

        Args:
            source: the source.
            level: of how sure cheaper sources are.
            num_prompt: tokens that it must run first; 0 if it has run the text before.
            num_to_come: tokens that may still be emitted, which such a run may serve.
        """
        if not self._num_tokens:
            return False  # until the pace is known
        known, here = self._sources[source], self._sources[source].levels[level]
        here.num_since += 1
        opening_sec = num_prompt * known.opening_sec.value
        net = self.net_gain(source, level)
        pays = net > 0
        if pays and opening_sec:
            num_steps = num_to_come * self._num_steps / self._num_tokens
            pays = net * num_steps > opening_sec
        if pays:
            here.num_with += 1
            if here.num_with < _GAP_WITHOUT or known.savings is None or known.savings < net:
                return True
            here.num_with = 0
            known.savings -= net
            return False
        if known.savings is None:  # nothing is known of its cost
            return True
        return here.num_since >= here.gap and known.savings >= self._cost(source) + opening_sec

    # --- what became of them ------------------------------------------------------------------

    def record_asking(self, source: int, sec: float, num_prompt: int = 0) -> None:
        """Learn how long a source took to draft, and how many tokens it had to run before that."""
        known = self._sources[source]
        if num_prompt:
            known.cold_sec.add(sec)
            usual = known.sec.value if known.sec.num else 0.0
            known.opening_sec.add(max(0.0, sec - usual) / num_prompt)
        else:
            if known.sec.num >= 2:
                sec = min(sec, _OUTLIER * known.sec.value)
            known.sec.add(sec)

    def record_gain(self, source: int, level: int, num_added: float, sec: float) -> None:
        """Learn what a source that was asked has added to what cheaper ones proposed.

        Args:
            source: the source.
            level: of how sure cheaper sources were.
            num_added: emitted tokens that would not have been without it.
            sec: seconds of asking it, this time.
        """
        known, here = self._sources[source], self._sources[source].levels[level]
        known.gain.add(num_added)
        here.gain.add(num_added)
        lost = sec - num_added * self.token_sec
        here.num_since = 0
        here.gap = min(2 * here.gap, _LAST_GAP) if lost > 0 else _FIRST_GAP
        if known.savings is not None and lost > 0 and self.net_gain(source, level) <= 0:
            known.savings -= lost

    def record_rest(self, source: int, level: int, was_asked: bool, rest_sec: float) -> None:
        """Learn how long a step takes besides drafting, with a source's nodes or without."""
        here = self._sources[source].levels[level]
        (here.rest_with if was_asked else here.rest_without).add(rest_sec)

    def record_step(self, sec: float, num_tokens: int, num_steps: float = 1.0) -> None:
        """Learn what steps took, drafting included, and how many tokens all rows emitted."""
        if self._num_steps >= 2:
            sec = min(sec, _OUTLIER * num_steps * self._step_sec / self._num_steps)
        memory = 1 - 1 / _MEMORY_OF_PACE
        self._step_sec = memory * self._step_sec + sec
        self._num_tokens = memory * self._num_tokens + num_tokens
        self._num_steps = memory * self._num_steps + num_steps
        for source in self._sources:
            if source.savings is not None:
                most = _MOST_TRIALS * (self._cost_of(source) + source.cold_sec.value)
                source.savings = min(source.savings + _SHARE_OF_TRIALS * sec, most)
            elif source.sec.num or source.cold_sec.num > 1:  # the latter where answers are short
                source.savings = self._first_savings(source)

    def _first_savings(self, source: _Source) -> float:
        return min(_FIRST_TRIALS * self._cost_of(source), _MOST_TOKENS * self.token_sec)

    def _cost(self, source: int) -> float:
        return self._cost_of(self._sources[source])

    @staticmethod
    def _cost_of(source: _Source) -> float:
        return source.sec.value if source.sec.num else source.cold_sec.value
