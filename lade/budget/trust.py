"""How far to trust a drafter's probabilities, by what became of its nodes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lade.budget.costs import Floats
from ngram_pool import Draft


class Outcome(NamedTuple):
    """What a step showed about one row's draft."""

    row: int
    draft: Draft  # all that was proposed, verified or not
    token_ids: Sequence[int]  # emitted by the step


# Promised probabilities are grouped into intervals; these are the lower bounds but the first.
_PROMISES = np.array(
    [0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
)
# Weight that the past keeps per step: a short memory, because the worst case is a text that stops
# being predictable.
_MEMORY = 0.9
_PRIOR_WEIGHT = 2.0  # as if this many tokens had been promised, and had come true


class Trust:
    """How often nodes are accepted, by the probability that their drafter promised.

    Nodes that were not verified count as well, wherever the emitted tokens show what would have
    become of them: with verified nodes alone, a few early failures would switch drafting off for
    good. This is also how text that becomes predictable again is noticed without any probing.
    """

    def __init__(self) -> None:
        self._promised = np.zeros(len(_PROMISES) + 1)  # decayed sums over nodes, by interval
        self._came = np.zeros(len(_PROMISES) + 1)
        self._worth = np.ones(len(_PROMISES) + 1)  # acceptance over promise

    def believed(self, probs: Sequence[float] | Floats, factor: float = 1.0) -> Floats:
        """Return the corrected probabilities of nodes, times a factor, at most 1."""
        worth: Floats = self._worth[_PROMISES.searchsorted(probs, "right")]
        return np.minimum(1.0, factor * worth * probs)

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Compare promises with what was emitted; all rows together weigh as one."""
        probs = np.concatenate([outcome.draft.probs for outcome in outcomes])
        came = [part for outcome in outcomes for part in _what_came(outcome)]
        places = _PROMISES.searchsorted(probs, "right")
        for sums, new in ((self._promised, probs), (self._came, came)):
            sums *= _MEMORY
            sums += np.bincount(places, new, len(sums)) / len(outcomes)
        of_all = (self._came.sum() + _PRIOR_WEIGHT) / (self._promised.sum() + _PRIOR_WEIGHT)
        self._worth = (self._came + _PRIOR_WEIGHT * of_all) / (self._promised + _PRIOR_WEIGHT)


def _what_came(outcome: Outcome) -> list[float]:
    """Return whether the path of each node was emitted: 1, 0, or a probability if unknown.

    The fate of a node beyond the last emitted token is unknown if its path up to there was emitted.
    It counts with the drafter's probability, given that path. If it were left out, only the
    failures beside it would count, and teach that long drafts are worth nothing.
    """
    draft, token_ids = outcome.draft, outcome.token_ids
    came: list[float] = []
    known_prob: list[float] = []  # of the last node on each path whose fate is known
    nodes = zip(
        draft.token_ids.tolist(),
        draft.parents.tolist(),
        draft.depths.tolist(),
        draft.probs.tolist(),
        strict=True,
    )
    for token_id, parent, depth, prob in nodes:
        of_parent, known = (came[parent], known_prob[parent]) if parent >= 0 else (1.0, 1.0)
        if depth > len(token_ids):
            came.append(min(1.0, prob / known) if of_parent and known else 0.0)
            known_prob.append(known)
        else:
            came.append(float(of_parent > 0 and token_id == token_ids[depth - 1]))
            known_prob.append(prob)
    return came
