"""How far a drafter's probabilities are to be believed, by what became of its nodes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ngram_pool import Draft

Floats = NDArray[np.float64]

# Promised probabilities are grouped into intervals; these are the lower bounds but the first.
_PROMISES = np.array(
    [0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
)
_NUM_INTERVALS = len(_PROMISES) + 1
# Weight that the past keeps per step: a short memory, because the worst case is a text that stops
# being predictable.
_MEMORY = 0.9
# As if this many tokens had been promised, and had come true; and, where less is expected as a call
# begins, at each probability.
_PRIOR_WEIGHT = 2.0


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
        self._worth = np.full(_NUM_INTERVALS, share)
        # Decayed sums of what was promised and of what came.
        self._promised = np.full(_NUM_INTERVALS, _PRIOR_WEIGHT if share < 1.0 else 0.0)
        self._came = share * self._promised

    def believed(self, probs: Sequence[float] | Floats) -> Floats:
        """Return the corrected probabilities of nodes, at most 1."""
        worth = self._worth[_PROMISES.searchsorted(probs, "right")]
        believed: Floats = np.minimum(1.0, worth * probs)
        return believed

    def count(self, promised: Floats, came: Floats) -> None:
        """Learn from what was promised of some nodes, and whether each came, 1 or 0."""
        promises, outcomes = _MEMORY * self._promised, _MEMORY * self._came
        if len(promised):
            intervals = _PROMISES.searchsorted(promised, "right")
            promises += np.bincount(intervals, promised, _NUM_INTERVALS)
            outcomes += np.bincount(intervals, came, _NUM_INTERVALS)
        prior = _PRIOR_WEIGHT
        of_all = (outcomes.sum() + prior) / (promises.sum() + prior)
        self._worth = (outcomes + prior * of_all) / (promises + prior)
        self._promised, self._came = promises, outcomes

    def learn(self, draft: Draft, token_ids: Sequence[int]) -> bool:
        """Compare promises with what was emitted; return whether the likeliest node came."""
        came = came_of(draft, token_ids)
        self.count(draft.probs, came)
        return len(came) > 0 and came.item(0) == 1.0


def came_of(draft: Draft, token_ids: Sequence[int]) -> Floats:
    """Return whether the path of each node was emitted: 1, 0, or a probability where unknown.

    The fate of a node beyond the last emitted token is unknown if its path up to there was emitted.
    It counts with the drafter's probability, given that path. If it were left out, only the
    failures beside it would count, and teach that long drafts are worth nothing.
    """
    came, parents = np.zeros(len(draft)), draft.parents.tolist()
    last, depth, most = -1, 0, len(token_ids)
    for node, (parent, token_id) in enumerate(zip(parents, draft.token_ids.tolist(), strict=True)):
        if parent == last and token_id == token_ids[depth]:
            came[node], last, depth = 1.0, node, depth + 1
            if depth == most:
                break
    if depth == most and last >= 0:
        known, probs, beyond = draft.probs.item(last), draft.probs.tolist(), {last}
        for node in range(last + 1, len(draft)):
            if parents[node] in beyond and known > 0 and probs[node] > 0:
                beyond.add(node)
                came[node] = min(1.0, probs[node] / known)
    return came
