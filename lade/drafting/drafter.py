"""The `Drafter` protocol and its optional extensions."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lade.drafting.successors import Successors
from ngram_pool import Draft, SampledDraft


class Drafter(Protocol):
    """Source of drafts; it can change the speed of decoding, never the text.

    One object serves any number of sequences; each begins with `open` and ends with `close`.
    """

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a sequence with its prompt and return a handle for it."""

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Propose at most `max_draft_tokens` tokens after `committed`, best first.

        `committed` includes the prompt. Where a grammar forces the next tokens, it ends with those,
        whether observed or not.
        """

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Learn the tokens that a step committed."""

    def close(self, sequence: int) -> None:
        """End the sequence; called once, also after an error."""


@runtime_checkable
class SamplingDrafter(Drafter, Protocol):
    """Drafter that can also draw drafts at random, with the distribution of each token."""

    def sample(
        self,
        sequence: int,
        committed: Sequence[int],
        max_draft_tokens: int,
        rng: np.random.Generator,
    ) -> SampledDraft:
        """Draw at most `max_draft_tokens` tokens after `committed`.

        Node i may depend only on the draws of nodes before i, so that `SampledDraft.first` is
        unbiased.
        """


@runtime_checkable
class HarvestingDrafter(Drafter, Protocol):
    """Drafter that also learns what the target found likely after every node, accepted or not."""

    @property
    def num_successors(self) -> int:
        """Top-k target tokens to report per node; 0 for none."""

    def harvest(
        self,
        sequence: int,
        committed: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        successors: Successors,
    ) -> None:
        """Learn the successors of nodes that were run.

        Called after the tokens that they led to were observed. Otherwise what is harvested would
        contain the very answer from which `observe` learns how far to trust what was known.

        Args:
            sequence: handle of the sequence.
            committed: the text up to and including the first node; keep no reference to it.
            token_ids: tokens of the nodes [num_nodes]. The first is committed: the root of a tree,
                or the first of several successive tokens of a prompt.
            parents: parents of the nodes [num_nodes], -1 for the first; parents[i] < i.
            successors: the target's likeliest tokens after each node [num_nodes, num_successors].
        """


@runtime_checkable
class ExploringDrafter(HarvestingDrafter, Protocol):
    """Drafter that also names tokens worth running for what is harvested there."""

    def explore(
        self, sequence: int, excluded: NDArray[np.int32], max_tokens: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """Name tokens to run as further children of the root, whatever the text is.

        Args:
            sequence: handle of the sequence.
            excluded: tokens not to name, as they are run anyway, int32 [num_excluded].
            max_tokens: maximum number of tokens to name, at least 1.

        Returns:
            Token ids, int32 [num_tokens], and how many tokens each is expected to save in the long
            run, float64 [num_tokens], never increasing.
        """


@runtime_checkable
class NgramDrafter(Drafter, Protocol):
    """Drafter that also learns n-grams that the target produced outside of any text."""

    def observe_ngrams(self, sequence: int, ngrams: NDArray[np.int32]) -> None:
        """Learn n-grams [num_ngrams, ngram_size] of a lookahead window.

        The first token of each is the one that was assumed there; the others are the target's
        likeliest, each found one step later than the one before it.
        """


class NoDrafter:
    """Drafter that proposes nothing."""

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a sequence."""
        return 0

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Propose nothing."""
        return Draft.empty()

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Learn nothing."""

    def close(self, sequence: int) -> None:
        """End a sequence."""


def num_successors_of(drafter: Drafter) -> int:
    """Return the number of top target tokens that a drafter wants per node; 0 for none."""
    return drafter.num_successors if isinstance(drafter, HarvestingDrafter) else 0
