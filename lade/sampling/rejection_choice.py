"""Rejection choice: tokens with the target's distribution, by accepting or rejecting drafts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lade.batch import Row
from lade.machine.transfer import arrays_on
from lade.sampling.choice import OnChoice, RowNode, ScoredChoice, is_distribution, tokens_of
from lade.sampling.processors import Processors
from lade.sampling.rejection import try_children
from ngram_pool import SampledDraft


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
        scores = self._scores_at(nodes)
        probs = scores.softmax(dim=-1)
        of_nodes = [self._children_of(row, node) for row, node in nodes]
        children = _pack(of_nodes, self._device)
        trial = try_children(
            probs,
            children.token_ids,
            children.support_probs,
            children.support_token_ids,
            children.num_children,
            [*map(len, of_nodes)],
            [self._generators[row.index] for row, _ in nodes],
        )
        return tokens_of(trial.token_ids, is_distribution(probs))

    def _children_of(self, row: Row, node: int) -> list["_Child"]:
        """Return the children of a node in draft order."""
        draft = self._trees[row].draft
        children = []
        # Draft node i is tree node i + 1.
        for child in np.flatnonzero(draft.parents == node - 1).tolist():
            token_id = int(draft.token_ids[child])
            if isinstance(draft, SampledDraft):
                support = draft.support_token_ids[child], draft.support_probs[child]
                children.append(_Child(token_id, *support))
            else:  # not drawn, so proposed with certainty
                children.append(_Child(token_id, [token_id], [1.0]))
        return children


class _Child(NamedTuple):
    """A draft token, and the distribution that it was drawn from."""

    token_id: int
    support_token_ids: Sequence[int]
    support_probs: Sequence[float]


class _Children(NamedTuple):
    """The children of several nodes, padded, as `try_children` takes them."""

    token_ids: Tensor  # int64 [nodes, children]
    num_children: Tensor  # int64 [nodes]
    support_token_ids: Tensor  # int64 [nodes, children, support]
    support_probs: Tensor  # float64 [nodes, children, support]


def _pack(of_nodes: Sequence[Sequence[_Child]], device: torch.device) -> _Children:
    width = max(map(len, of_nodes))
    size = max((len(c.support_probs) for children in of_nodes for c in children), default=1)
    token_ids = np.zeros((len(of_nodes), width), np.int64)
    support_token_ids = np.zeros((*token_ids.shape, size), np.int64)
    support_probs = np.zeros(support_token_ids.shape)
    for i, children in enumerate(of_nodes):
        for j, child in enumerate(children):
            token_ids[i, j] = child.token_id
            support_token_ids[i, j, : len(child.support_token_ids)] = child.support_token_ids
            support_probs[i, j, : len(child.support_probs)] = child.support_probs
    num_children = np.array([len(children) for children in of_nodes])
    return _Children(*arrays_on(device, token_ids, num_children, support_token_ids, support_probs))


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
