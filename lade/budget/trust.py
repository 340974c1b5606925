"""How far to believe the drafter: what became of nodes that were promised so much."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lade.budget.costs import Floats
from ngram_pool import Draft


class Outcome(NamedTuple):
    """What a step showed about one row's draft."""

    row: int
    draft: Draft  # all that was proposed, verified or not
    token_ids: Sequence[int]  # what the step emitted


# What nodes are promised is told apart in these intervals; lower ends but the first.
_PROMISES = np.array(
    [0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
)
# Weight that the past keeps per step: short, for the worst is a text that stops being predictable.
_MEMORY = 0.9
_PRIOR_WEIGHT = 2.0  # as if so many tokens had been promised, and had come


class Trust:
    """How often nodes are accepted, by what their drafter promises.

    Nodes that were not verified teach as well, wherever the emitted tokens show what would have
    become of them: learned from verified drafts alone, a few early failures switch drafting off for
    good. For the same reason text that becomes predictable again is noticed without any probing.
    """

    def __init__(self) -> None:
        self._promised = np.zeros(len(_PROMISES) + 1)  # sums over nodes, the past fading away
        self._came = np.zeros(len(_PROMISES) + 1)
        self._worth = np.ones(len(_PROMISES) + 1)  # of a promise

    def believed(self, probs: Sequence[float] | Floats, factor: float = 1.0) -> Floats:
        """Return what to expect of nodes with these promises, times a factor."""
        worth: Floats = self._worth[_PROMISES.searchsorted(probs, "right")]
        return np.minimum(1.0, factor * worth * probs)

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Hold promises against what came; rows together weigh as one."""
        probs = np.concatenate([outcome.draft.probs for outcome in outcomes])
        came = [part for outcome in outcomes for part in _what_came(outcome)]
        places = _PROMISES.searchsorted(probs, "right")
        for sums, new in ((self._promised, probs), (self._came, came)):
            sums *= _MEMORY
            sums += np.bincount(places, new, len(sums)) / len(outcomes)
        of_all = (self._came.sum() + _PRIOR_WEIGHT) / (self._promised.sum() + _PRIOR_WEIGHT)
        self._worth = (self._came + _PRIOR_WEIGHT * of_all) / (self._promised + _PRIOR_WEIGHT)


def _what_came(outcome: Outcome) -> list[float]:
    """Return 1 for each node whose path was emitted and 0 for the others.

    Of a node beyond the last emitted token, all of whose known ancestors came, nobody knows: then
    the drafter's word is taken, given those that came. Left out, the failures beside it would
    stand alone and teach that long drafts are worth nothing.
    """
    draft, token_ids = outcome.draft, outcome.token_ids
    came: list[float] = []
    known_prob: list[float] = []  # of the last node on each path that is known to have come
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
