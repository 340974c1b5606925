"""How far a model's draft is grown, level by level: K."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lade.budget._kernels import Floats
from lade.budget.calibration import Calibration
from lade.budget.sources import Mean

# How often a level is right, as if that had been seen so many times before a call has seen any.
_RIGHT_AT_FIRST, _WEIGHT_AT_FIRST = 0.7, 4.0


class Level(NamedTuple):
    """What a level of a draft is: the nodes that one forward of the drafting model told."""

    mass: float  # sum of the path probabilities of the nodes kept
    token_prob: float  # of the best of these nodes, given its parent
    num_nodes: int  # kept


class Rule:
    """The rule for K in one sequence.

    Where times are known, another level is run if the tokens that it adds come faster than those
    before it: the tokens expected per second of the step, drafting included, must grow. Whether a
    first level pays is decided by `Sources`.

    Args:
        num_levels: levels of a draft at most.
        threshold: without times, the lowest probability of a token to go on after.
        step_sec: returns the seconds of a step that verifies so many nodes, 0 where unknown.
        forward_sec: of a forward of the drafting model over a level.
    """

    def __init__(
        self,
        num_levels: int,
        threshold: float = 0.0,
        step_sec: Callable[[int], float] = lambda num_nodes: 0.0,
        forward_sec: Mean | None = None,
    ) -> None:
        self.num_levels = num_levels
        self._threshold = threshold
        self._step_sec = step_sec
        self._forward_sec = forward_sec or Mean()
        self._right = Mean()
        self._calibration = Calibration()

    @property
    def mean_right(self) -> float:
        """How often a level was right, given the one before, of late."""
        known = self._right
        num = known.num + _WEIGHT_AT_FIRST
        return (known.num * known.value + _WEIGHT_AT_FIRST * _RIGHT_AT_FIRST) / num

    def goes_on(self, levels: Sequence[Level]) -> bool:
        """Return whether another level is worth a forward, after these; at least one."""
        forward_sec, num_nodes = self._forward_sec.value, sum(each.num_nodes for each in levels)
        step_sec = self._step_sec(num_nodes)
        if not forward_sec or not step_sec:
            return levels[-1].token_prob >= self._threshold
        right = np.cumprod(self._calibration.believed(_given(levels)))
        more = float(right[-1]) * self.mean_right
        more_sec = forward_sec + self._step_sec(num_nodes + levels[-1].num_nodes) - step_sec
        expected = 1.0 + float(right.sum())
        return more * (step_sec + len(levels) * forward_sec) > expected * more_sec

    def learn(self, levels: Sequence[Level], num_right: int, is_ended: bool) -> None:
        """Learn what became of a draft.

        Args:
            levels: of the draft.
            num_right: how many of them are on the path of the text.
            is_ended: whether the text left the draft, or went past its end.
        """
        came = np.arange(min(len(levels), num_right + is_ended)) < num_right
        for is_right in came.tolist():
            self._right.add(is_right)
        if len(came):
            self._calibration.count(_given(levels[: len(came)]), came.astype(np.float64))


def _given(levels: Sequence[Level]) -> Floats:
    """Return the probability of each level, given the one before."""
    masses = np.array([1.0, *(level.mass for level in levels)])
    before = masses[:-1]
    given: Floats = np.divide(masses[1:], before, out=np.zeros(len(levels)), where=before > 0)
    return given
