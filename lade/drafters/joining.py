"""Joining the drafts of several sources to one tree, each believed as far as it was right.

A source promises a probability for each node; `lade.budget.trust` says how much of such promises
came. Sources that propose the same node are taken to be wrong independently of each other, and as
they are not, what joined drafts promise is compared with what came in turn, by the set of sources
that agree. Of simulated sources (`tests/lade/drafters/test_joining.py`), probabilities by
independence alone are off by 0.1 to 0.2: those of disputed tokens are too high, and those of agreed
ones, too, where sources err together. So corrected, they are off by 0.03 at most.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lade.budget import _kernels as budget_kernels
from lade.budget._kernels import NUM_INTERVALS, PROMISES, Floats
from lade.budget.trust import Outcome, Trust
from lade.drafters import _kernels
from ngram_pool import Draft
from ngram_pool.compiling import compile_by


class Joined(NamedTuple):
    """One draft out of several."""

    draft: Draft
    sets: NDArray[np.int32]  # [num_nodes], one bit for each source that proposes the node
    promised: Floats  # [num_nodes], what the sources promise together
    drafts: Mapping[int, Draft]  # by source


class Joining:
    """How far to believe several sources, alone and together.

    Args:
        num_sources: at most 8.
    """

    def __init__(self, num_sources: int) -> None:
        self._trusts = [Trust() for _ in range(num_sources)]
        self._worths = np.ones((num_sources, NUM_INTERVALS))
        # By the set of sources that were asked: a source that proposes a node alone is less likely
        # to be right where others were asked, too.
        self._agreements: dict[int, _Agreement] = {}
        self._alone = np.ones((1 << num_sources, NUM_INTERVALS))
        compile_by(_run_kernels, _kernels)

    def join(self, drafts: Mapping[int, Draft], max_nodes: int) -> Joined:
        """Return one draft, best nodes first, out of drafts by source."""
        if len(drafts) == 1:
            (one,) = drafts.values()
            token_ids, parents, probs = one.token_ids, one.parents, one.probs
            starts = np.array([0, len(one)])
        else:
            each = [*drafts.values()]
            token_ids = np.concatenate([draft.token_ids for draft in each])
            parents = np.concatenate([draft.parents for draft in each])
            probs = np.concatenate([draft.probs for draft in each])
            starts = np.cumsum([0, *map(len, each)])
        num_all = len(token_ids)
        nodes, of_nodes = np.empty((4, num_all), np.int32), np.empty((2, num_all))
        num = _kernels.join(
            token_ids,
            parents,
            probs,
            starts,
            np.array([*drafts]),
            PROMISES,
            self._worths,
            self._worth_of(drafts),
            max_nodes,
            nodes,
            of_nodes,
        )
        draft = Draft(nodes[0, :num], nodes[1, :num], nodes[2, :num], of_nodes[0, :num])
        return Joined(draft, nodes[3, :num], of_nodes[1, :num], drafts)

    def learn(self, joined: Joined, token_ids: Sequence[int]) -> dict[int, int]:
        """Learn from the tokens that a step emitted; return how many each source had proposed."""
        emitted = np.array(token_ids, np.int64)
        matched = {}
        for source, draft in joined.drafts.items():
            matched[source] = 0
            if len(draft):
                self._trusts[source].record([Outcome(0, draft, token_ids)])
                self._worths[source] = self._trusts[source].worth
                matched[source] = _kernels.matched_depth(draft.token_ids, draft.parents, emitted)
        if len(joined.drafts) > 1:
            asked = _set_of(joined.drafts)
            if asked not in self._agreements:
                self._agreements[asked] = _Agreement(len(self._alone))
            self._agreements[asked].record(joined, emitted)
        return matched

    def _worth_of(self, sources: Mapping[int, Draft]) -> Floats:
        agreement = self._agreements.get(_set_of(sources)) if len(sources) > 1 else None
        return self._alone if agreement is None else agreement.worths


class _Agreement:
    """How often nodes come, by the set of sources that proposed them, of those that were asked."""

    def __init__(self, num_sets: int) -> None:
        self.worths = np.ones((num_sets, NUM_INTERVALS))
        self._sums = np.zeros((num_sets, 2, NUM_INTERVALS))

    def record(self, joined: Joined, emitted: NDArray[np.int64]) -> None:
        """Compare what was promised with what came."""
        sums = np.zeros_like(self._sums)
        draft = joined.draft
        _kernels.count_agreement(
            *(draft.token_ids, draft.parents, draft.depths, joined.sets, joined.promised),
            emitted,
            PROMISES,
            sums,
        )
        for which in np.flatnonzero(sums[:, 0].any(axis=1)).tolist():
            budget_kernels.renew_trust(self._sums[which], self.worths[which], sums[which], 1)


def matched_depth(draft: Draft, token_ids: Sequence[int]) -> int:
    """Return how many of the first emitted tokens are a path of a draft."""
    emitted = np.array(token_ids, np.int64)
    return int(_kernels.matched_depth(draft.token_ids, draft.parents, emitted))


def _set_of(sources: Mapping[int, Draft]) -> int:
    return sum(1 << source for source in sources)


def _run_kernels() -> None:
    """Run every kernel once, so that the first draft does not wait for a compiler."""
    ids, zeros = np.zeros(1, np.int32), np.zeros(1, np.int64)
    floats = np.ones(1)
    _kernels.join(
        *(ids, ids - 1, floats, np.array([0, 1]), zeros, PROMISES),
        *(np.ones((1, NUM_INTERVALS)), np.ones((2, NUM_INTERVALS)), 1),
        *(np.empty((4, 1), np.int32), np.empty((2, 1))),
    )
    sums = np.zeros((2, 2, NUM_INTERVALS))
    _kernels.count_agreement(ids, ids - 1, ids + 1, ids + 1, floats, zeros, PROMISES, sums)
    _kernels.matched_depth(ids, ids - 1, zeros)
