"""Rules for K as the user asks for them; what "measured" does is in `lade/budget/levels.py`."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

from lade.budget.levels import Level, Paying, Rule
from lade.budget.sources import Mean

LengthName = Literal["measured", "seed", "heuristic", "confidence"]

# Levels of a draft at most, by "confidence" and "measured": transformers has as many.
_MAX_LEVELS = 20
# Levels that a K that adapts may reach.
_MAX_ADAPTED_LEVELS = 64


class Adaptive(Rule):
    """A K that grows where drafts are accepted whole, and shrinks where they are rejected.

    Args:
        first: K of the first draft.
        more: what is added after a draft that was right to its end.
        threshold: the lowest probability of a token to go on after.
        most: levels at most.
    """

    def __init__(self, first: int, more: int, threshold: float, most: int) -> None:
        super().__init__(min(first, most), threshold)
        self._more = more
        self._most = most

    def learn(self, levels: Sequence[Level], num_right: int, is_ended: bool) -> None:
        """Change K; a draft that was cut tells nothing if its beginning was right."""
        super().learn(levels, num_right, is_ended)
        if not is_ended:
            return
        if num_right == len(levels):
            self.num_levels = min(self._most, self.num_levels + self._more)
        else:
            self.num_levels = max(1, self.num_levels - 1)


class Heuristic(NamedTuple):
    """The rule "heuristic" with a K to begin with."""

    first_levels: int


class Length:
    """A rule for K as the user asks for it, and what forwards cost, which is kept between calls.

    Args:
        length: the rule, or a constant K.
        confidence: threshold of "confidence" and "heuristic", and of "measured" at first.
        max_levels: levels at most, of all rules; None for what each has.
        first_levels: with which "heuristic" begins.

    Raises:
        ValueError: there is no such rule, or a number is out of range.
    """

    def __init__(
        self,
        length: LengthName | int | Heuristic = "measured",
        confidence: float = 0.4,
        max_levels: int | None = None,
        first_levels: int = _MAX_LEVELS,
    ) -> None:
        if isinstance(length, Heuristic):
            first_levels, length = length.first_levels, "heuristic"
        is_number = isinstance(length, int) and not isinstance(length, bool)
        if not is_number and length not in get_args(LengthName):
            names = ", ".join(map(repr, get_args(LengthName)))
            raise ValueError(f"expected length to be {names} or a number of tokens, got {length!r}")
        if isinstance(length, int) and length < 1:
            raise ValueError(f"expected length of at least 1, got {length}")
        if not 0 <= confidence <= 1:
            raise ValueError(f"expected confidence from 0 to 1, got {confidence!r}")
        self.is_measured = length == "measured"
        #: Seconds of a forward of the drafting model over a level.
        self.forward_sec = Mean()
        self._length = length
        self._confidence = confidence
        self._max_levels = max_levels
        self._first_levels = first_levels

    def rule(self, step_sec: Callable[[int], float] | None = None) -> Rule:
        """Return the rule of one sequence.

        Args:
            step_sec: of the call (`DraftingCall.step_sec`).
        """
        if isinstance(self._length, int):
            return Rule(min(self._length, self._max_levels or self._length))
        most = self._max_levels or _MAX_ADAPTED_LEVELS
        if self._length == "seed":
            return Adaptive(1, 1, 0.0, most)
        if self._length == "heuristic":
            return Adaptive(self._first_levels, 2, self._confidence, most)
        most = self._max_levels or _MAX_LEVELS
        if self._length == "confidence" or step_sec is None:
            return Rule(most, self._confidence)
        return Paying(most, self._confidence, step_sec, self.forward_sec)
