"""How far to trust a drafter's probabilities, by what became of its nodes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lade.budget import _kernels
from lade.budget._kernels import NUM_INTERVALS, PROMISES, Floats
from ngram_pool import Draft


class Outcome(NamedTuple):
    """What a step showed about one row's draft."""

    row: int
    draft: Draft  # all that was proposed, verified or not
    token_ids: Sequence[int]  # emitted by the step


class Hit(NamedTuple):
    """What a step showed about one row's next token."""

    expected: float  # how likely it was thought to be in the draft
    came: bool  # whether it was
    is_best: bool  # whether it was the draft's likeliest node


# Of promises that a call begins with, as if so much had been promised at each probability.
_WEIGHT_AT_FIRST = 3.0


class Trust:
    """How often nodes are accepted, by the probability that their drafter promised.

    Nodes that were not verified count as well, wherever the emitted tokens show what would have
    become of them: with verified nodes alone, a few early failures would switch drafting off for
    good. This is also how text that becomes predictable again is noticed without any probing.
    """

    def __init__(self) -> None:
        self.worth = np.ones(NUM_INTERVALS)  # acceptance over promise, by interval of promises
        self._sums = np.zeros((2, NUM_INTERVALS))  # of what was promised and of what came, decayed

    def begin(self, share: float) -> None:
        """Expect, until outcomes tell, that so large a share of what is promised comes."""
        self._sums[:] = [[_WEIGHT_AT_FIRST], [share * _WEIGHT_AT_FIRST]]
        self.worth[:] = share

    def believed(self, probs: Sequence[float] | Floats, factor: float) -> Floats:
        """Return the corrected probabilities of nodes, times a factor, at most 1."""
        worth = self.worth[PROMISES.searchsorted(probs, "right")]
        return np.minimum(1.0, factor * worth * np.asarray(probs, np.float64))

    def record(self, outcomes: Sequence[Outcome]) -> list[Hit]:
        """Compare promises with what was emitted, and return what became of the next tokens."""
        sums = np.zeros_like(self._sums)
        hits = []
        for _, draft, token_ids in outcomes:
            came = np.zeros(len(draft))
            expected, is_drafted = _kernels.look_at_outcome(
                draft.token_ids,
                draft.parents,
                draft.depths,
                draft.probs,
                np.array(token_ids, np.int64),
                self.worth,
                came,
                sums,
            )
            hits.append(Hit(expected, is_drafted, len(came) > 0 and came.item(0) == 1.0))
        _kernels.renew_trust(self._sums, self.worth, sums, len(outcomes))
        return hits
