"""Who proposes tokens: the `Drafter` protocol and what a drafter may do besides."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lade.drafting.successors import Successors
from ngram_pool import Draft, SampledDraft


class Drafter(Protocol):
    """Proposes how sequences go on. It can change the speed of decoding, never the text.

    One object serves any number of sequences; each begins with `open` and ends with `close`.
    """

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a sequence with its prompt and return a handle for it."""

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Propose at most `max_draft_tokens` tokens after `committed`, prompt included; best first.

        Where a grammar forces the next tokens, `committed` ends with those, observed or not.
        """

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Learn the tokens that a step committed."""

    def close(self, sequence: int) -> None:
        """End the sequence; called once, also after an error."""


@runtime_checkable
class SamplingDrafter(Drafter, Protocol):
    """Can also draw its drafts at random and tell the distribution of each token."""

    def sample(
        self,
        sequence: int,
        committed: Sequence[int],
        max_draft_tokens: int,
        rng: np.random.Generator,
    ) -> SampledDraft:
        """Draw at most `max_draft_tokens` tokens after `committed`, in an order fair to `first`."""


@runtime_checkable
class HarvestingDrafter(Drafter, Protocol):
    """Also learns what the target found likely behind every node it ran, accepted or not."""

    @property
    def num_successors(self) -> int:
        """How many of the target's likeliest tokens to be told of at each node; 0 for none."""

    def harvest(
        self,
        sequence: int,
        committed: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        successors: Successors,
    ) -> None:
        """Learn of nodes that were run; called after what they led to was observed.

        Learned before, the very answer would teach how far to trust what was known.

        Args:
            sequence: whose.
            committed: the text up to and including the first node; not to be kept.
            token_ids: of the nodes [num_nodes], the first of which is committed: the root of a
                tree, or the first of several successive tokens of a prompt.
            parents: of the nodes [num_nodes], -1 for the first; parents[i] < i.
            successors: [num_nodes, num_successors].
        """


@runtime_checkable
class NgramDrafter(Drafter, Protocol):
    """Also learns n-grams that are no text: what the target would write behind such tokens."""

    def observe_ngrams(self, sequence: int, ngrams: NDArray[np.int32]) -> None:
        """Learn n-grams [num_ngrams, ngram_size] that a lookahead window has come to.

        The first token of each is what was assumed there; the others are the target's likeliest,
        each from one step later than the one before it.
        """


class NoDrafter:
    """Drafts nothing."""

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
    """Return how many of the target's likeliest tokens a drafter wants to know at each node."""
    return drafter.num_successors if isinstance(drafter, HarvestingDrafter) else 0
