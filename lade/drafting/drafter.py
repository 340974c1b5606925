"""The `Drafter` protocol and its optional extensions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lade.drafting.successors import Successors
from lade.stats import SourceStats
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


@runtime_checkable
class ReportingDrafter(Drafter, Protocol):
    """Drafter that counts what became of the drafts of each of its sources."""

    @property
    def sources(self) -> Mapping[str, SourceStats]:
        """Counts and times by source, read when a call has ended."""


@dataclass(frozen=True, slots=True)
class DraftingCall:
    """What a drafter may know of the call that it drafts for.

    Attributes:
        model: The target's model; not to be changed.
        target: The target (`lade.targets.base.Target`), before its prefill.
        vocab_size: Exclusive upper bound of the token ids in a draft.
        num_rows: Sequences of the call; they are opened in the order of its rows.
        max_length: Maximum length of a row, prompt included.
        max_candidates: Paths of a draft that can be verified at once; None for no limit.
        processors: The call's logits processors; those that keep state must not be called.
        samples: Whether tokens are sampled; else decoding is greedy.
        rngs: Where drafts are drawn (`Config(acceptance="rejection")` and sampling), one for each
            row, to draw with; else None.
        make_pool_drafter: Returns a drafter by the call's own pools and table, as the call has
            without another drafter.
        is_strict: Whether what a drafter raises is to end the call (`Config(strict_drafter=True)`).
    """

    model: Any
    target: Any
    vocab_size: int
    num_rows: int
    max_length: int
    max_candidates: int | None
    processors: Sequence[Any]
    samples: bool
    rngs: Sequence[np.random.Generator] | None
    make_pool_drafter: Callable[[], Drafter]
    is_strict: bool = False


@runtime_checkable
class CallDrafter(Protocol):
    """Makes a drafter for each call, as one whose state belongs to the call does.

    Where drafts are drawn (`DraftingCall.rngs`), `draft` of the drafter that it makes may return a
    `SampledDraft`. It is verified whole: how many nodes it has must not depend on the tokens drawn
    for them, but whether node i exists may depend on the nodes before i.
    """

    def for_call(self, call: DraftingCall) -> Drafter:
        """Return a drafter for one call.

        Raises:
            LadeError, TypeError, ValueError: it cannot draft for this call. All three end the call
                before anything is generated.
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
