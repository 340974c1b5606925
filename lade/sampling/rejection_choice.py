"""Rejection choice: tokens with the target's distribution, by accepting or rejecting drafts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lade.machine.transfer import arrays_on
from lade.sampling.choice import OnChoice, RowNode, ScoredChoice, is_distribution, tokens_of
from lade.sampling.processors import Processors
from lade.sampling.rejection import try_children
from ngram_pool import Draft, SampledDraft


class RejectionChoice(ScoredChoice):
    """Choice that accepts or rejects draft tokens so that text has the target's distribution.

    There is one generator per row, so that no row's tokens depend on another's.
    """

    def __init__(
        self,
        processors: Processors,
        generators: Sequence[torch.Generator],
        device: torch.device,
        on_choice: OnChoice | None = None,
    ) -> None:
        super().__init__(processors, device, on_choice)
        self._generators = generators

    def tokens_at(self, nodes: Sequence[RowNode]) -> list[int]:
        """Try the children of each node; return the accepted one's token, or another."""
        probs = self._scores_at(nodes).softmax(dim=-1)
        children = _children([(self._trees[row].draft, node) for row, node in nodes])
        counts: list[int] = children[-1].tolist()
        token_ids, draft_probs, support_ids, num = arrays_on(self._device, *children)
        generators = [self._generators[row.index] for row, _ in nodes]
        trial = try_children(probs, token_ids, draft_probs, support_ids, num, counts, generators)
        return tokens_of(trial.token_ids, is_distribution(probs))


def _children(nodes: Sequence[tuple[Draft, int]]) -> tuple[NDArray[Any], ...]:
    """Return the children of nodes of drafts, in draft order, as `try_children` takes them."""
    # Draft node i is tree node i + 1.
    places = [np.flatnonzero(draft.parents == node - 1) for draft, node in nodes]
    counts = np.array([*map(len, places)])
    drawn = [draft for draft, _ in nodes if isinstance(draft, SampledDraft)]
    size = max((draft.support_probs.shape[1] for draft in drawn), default=1)
    token_ids = np.zeros((len(nodes), counts.max()), np.int64)
    support_token_ids = np.zeros((*token_ids.shape, size), np.int64)
    support_probs = np.zeros(support_token_ids.shape)
    for row, ((draft, _), at) in enumerate(zip(nodes, places, strict=True)):
        token_ids[row, : len(at)] = draft.token_ids[at]
        if isinstance(draft, SampledDraft):
            width = draft.support_probs.shape[1]
            support_token_ids[row, : len(at), :width] = draft.support_token_ids[at]
            support_probs[row, : len(at), :width] = draft.support_probs[at]
        else:  # not drawn, so proposed with certainty
            support_token_ids[row, : len(at), 0] = draft.token_ids[at]
            support_probs[row, : len(at), 0] = 1.0
    return token_ids, support_probs, support_token_ids, counts


def rejection_choice(
    num_rows: int, processors: Processors, device: torch.device, on_choice: OnChoice | None
) -> tuple[list[np.random.Generator], RejectionChoice]:
    """Return the generators that draw each row's drafts, and the choice that accepts or rejects.

    All are seeded from torch's default generator, so that `torch.manual_seed` repeats a call.
    """
    seeds = torch.randint(2**62, (num_rows, 2), dtype=torch.int64, device="cpu").tolist()
    generators = [torch.Generator(device).manual_seed(seed) for seed, _ in seeds]
    rngs = [np.random.default_rng(seed) for _, seed in seeds]
    return rngs, RejectionChoice(processors, generators, device, on_choice)
