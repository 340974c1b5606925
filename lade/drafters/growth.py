"""How a model's drafts grow, as the user asks for it; "measured" is in `lade/budget/levels.py`."""

from collections.abc import Callable
from typing import Literal, get_args

from lade.budget.levels import Rule
from lade.budget.sources import Mean

LengthName = Literal["measured", "confidence"]
ExpansionName = Literal["tree", "chain"]

_MAX_LEVELS = 20  # of a draft whose K is no number: transformers has as many


class Growth:
    """How far drafts go and which tree they are; and what forwards cost, kept between calls.

    Args:
        max_draft_tokens: tokens of a draft at most, and so levels; None for no limit.
        confidence: threshold of "confidence", and of "measured" at first.

    Raises:
        ValueError: there is no such rule or shape, or a number is out of range.
    """

    def __init__(
        self,
        length: LengthName | int = "measured",
        expansion: ExpansionName = "tree",
        max_draft_tokens: int | None = None,
        confidence: float = 0.4,
    ) -> None:
        is_number = isinstance(length, int) and not isinstance(length, bool)
        if not is_number and length not in get_args(LengthName):
            names = ", ".join(map(repr, get_args(LengthName)))
            raise ValueError(f"expected length to be {names} or a number of tokens, got {length!r}")
        if isinstance(length, int) and length < 1:
            raise ValueError(f"expected length of at least 1, got {length}")
        if expansion not in get_args(ExpansionName):
            names = " or ".join(map(repr, get_args(ExpansionName)))
            raise ValueError(f"expected expansion to be {names}, got {expansion!r}")
        if max_draft_tokens is not None and max_draft_tokens < 1:
            raise ValueError(f"expected max_draft_tokens of at least 1, got {max_draft_tokens}")
        if not 0 <= confidence <= 1:
            raise ValueError(f"expected confidence from 0 to 1, got {confidence!r}")
        self.is_measured = length == "measured"
        self.is_chain = expansion == "chain"
        self.max_draft_tokens = max_draft_tokens
        #: Seconds of a forward of the drafting model over a level.
        self.forward_sec = Mean()
        self._length = length
        self._confidence = confidence

    def rule(self, step_sec: Callable[[int], float] | None = None) -> Rule:
        """Return the rule of one sequence."""
        if isinstance(self._length, int):
            return Rule(min(self._length, self.max_draft_tokens or self._length))
        most = self.max_draft_tokens or _MAX_LEVELS
        if self._length == "confidence" or step_sec is None:
            return Rule(most, self._confidence)
        return Rule(most, self._confidence, step_sec, self.forward_sec)
