"""How far a drafter's probabilities are to be believed, by what became of its nodes."""

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


# Of promises that a call begins with, as if so much had been promised at each probability.
_WEIGHT_AT_FIRST = 3.0


class Calibration:
    """How often nodes are accepted, by the probability that their drafter promised; of one call.

    Nodes that were not verified count as well, wherever the emitted tokens show what would have
    become of them: with verified nodes alone, a few early failures would switch drafting off for
    good. This is also how text that becomes predictable again is noticed without any probing.

    Args:
        share: of what is promised that is expected to come, until outcomes tell.
    """

    def __init__(self, share: float = 1.0) -> None:
        # Acceptance over promise, by interval of promises.
        self.worth = np.full(NUM_INTERVALS, share)
        self._sums = np.zeros((2, NUM_INTERVALS))  # of what was promised and of what came, decayed
        if share < 1.0:
            self._sums[:] = [[_WEIGHT_AT_FIRST], [share * _WEIGHT_AT_FIRST]]

    def believed(self, probs: Sequence[float] | Floats) -> Floats:
        """Return the corrected probabilities of nodes, at most 1."""
        worth = self.worth[PROMISES.searchsorted(probs, "right")]
        believed: Floats = np.minimum(1.0, worth * np.asarray(probs, np.float64))
        return believed

    def count(self, promised: Floats, came: Floats, num_rows: int = 1) -> None:
        """Learn from what was promised of some nodes, and whether each came, 1 or 0."""
        _kernels.renew_worth(self._sums, self.worth, promised, came, num_rows)

    def record(self, outcomes: Sequence[Outcome]) -> list[bool]:
        """Compare promises with what was emitted; return whether the likeliest nodes came."""
        came = [np.zeros(len(draft)) for _, draft, _ in outcomes]
        for (_, draft, token_ids), of_row in zip(outcomes, came, strict=True):
            nodes = draft.token_ids, draft.parents, draft.depths, draft.probs
            _kernels.look_at_outcome(*nodes, np.array(token_ids, np.int64), of_row)
        promised = np.concatenate([draft.probs for _, draft, _ in outcomes])
        self.count(promised, np.concatenate(came), len(outcomes))
        return [len(of_row) > 0 and of_row.item(0) == 1.0 for of_row in came]
