"""`Drafter`, the base class of all that drafts, and what one is told of its call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lade.drafting.successors import Successors
from lade.stats import SourceStats
from ngram_pool import Draft, SampledDraft


class Drafter:
    """Source of drafts; it can change the speed of decoding, never the text.

    Subclass it, and override what your drafter does: as it is, it drafts nothing.

    One object serves any number of sequences; each begins with `open` and ends with `close`. After
    each of its methods, torch's global random state is put back, so that what it draws or seeds
    there changes no sampled text. It should have a generator of its own all the same: the state is
    that of all threads. What a thread of the drafter draws between two methods is not undone, and
    what other threads draw during one is.

    Attributes:
        num_successors: Top-k target tokens per node that `harvest` is told; 0 for none, and then
            neither `harvest` nor `explore` is called.
        draws: Whether `sample` draws drafts at random.
        learns_ngrams: Whether `observe_ngrams` learns; needed for `Config(lookahead=…)`.
        takes_pool: Whether the pool of the call drafts, too, so that `pool=` may be given besides.
        has_table: Whether it has a prewarmed table. Then the ends of prompts are not harvested:
            that took more time (0.7 % of an answer) than it saved.
    """

    num_successors: int = 0
    draws: bool = False
    learns_ngrams: bool = False
    takes_pool: bool = False
    has_table: bool = False

    @property
    def sources(self) -> Mapping[str, SourceStats]:
        """Counts and times by source of its drafts, read when a call has ended."""
        return {}

    def for_call(self, call: "DraftingCall") -> "Drafter":
        """Return what drafts for one call: itself, or a drafter whose state belongs to the call.

        Where drafts are drawn (`DraftingCall.rngs`), `draft` of one that is made for the call may
        return a `SampledDraft`. It is verified whole: how many nodes it has must not depend on the
        tokens drawn for them, but whether node i exists may depend on the nodes before i.

        Raises:
            LadeError: it cannot draft for this call, which ends before anything is generated. Of
                the subclasses, `lade.UnsupportedOptionError` is also a `ValueError`. Anything else
                that is raised is a `lade.DrafterWarning`, and the call goes on without drafts.
        """
        return self

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a sequence with its prompt and return a handle for it."""
        return 0

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Propose at most `max_draft_tokens` tokens after `committed`, best first.

        `committed` includes the prompt. Where a grammar forces the next tokens, it ends with those,
        whether observed or not.
        """
        return Draft.empty()

    def sample(
        self,
        sequence: int,
        committed: Sequence[int],
        max_draft_tokens: int,
        rng: np.random.Generator,
    ) -> Draft:
        """Draw at most `max_draft_tokens` tokens after `committed`, if it `draws`.

        Node i may depend only on the draws of nodes before i, so that `SampledDraft.first` is
        unbiased.
        """
        return SampledDraft.empty()

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Learn the tokens that a step committed."""

    def harvest(
        self,
        sequence: int,
        committed: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        successors: Successors,
    ) -> None:
        """Learn what the target found likely after nodes that were run, accepted or not.

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

    def explore(
        self, sequence: int, excluded: NDArray[np.int32], max_tokens: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """Name tokens to run as further children of the root, for what is harvested there.

        Args:
            sequence: handle of the sequence.
            excluded: tokens not to name, as they are run anyway, int32 [num_excluded].
            max_tokens: maximum number of tokens to name, at least 1.

        Returns:
            Token ids, int32 [num_tokens], and how many tokens each is expected to save in the long
            run, float64 [num_tokens], never increasing.
        """
        return np.empty(0, np.int32), np.empty(0)

    def observe_ngrams(self, sequence: int, ngrams: NDArray[np.int32]) -> None:
        """Learn n-grams [num_ngrams, ngram_size] of a lookahead window, outside of any text.

        The first token of each is the one that was assumed there; the others are the target's
        likeliest, each found one step later than the one before it.
        """

    def close(self, sequence: int) -> None:
        """End the sequence; called once, also after an error."""


@dataclass(frozen=True, slots=True)
class DraftingCall:
    """What a drafter may know of the call that it drafts for.

    Attributes:
        model: The target's model; not to be changed.
        vocab_size: Exclusive upper bound of the token ids in a draft.
        max_length: Maximum length of a row, prompt included.
        target: The target (`lade.targets.base.Target`), before its prefill; None in tests.
        num_rows: Sequences of the call; they are opened in the order of its rows.
        max_candidates: Paths of a draft that can be verified at once; None for no limit.
        processors: The call's logits processors; those that keep state must not be called.
        samples: Whether tokens are sampled; else decoding is greedy.
        rngs: Where drafts are drawn (`Config(acceptance="rejection")` and sampling), one for each
            row, to draw with; else None.
        make_pool_drafter: Returns a drafter by the call's own pools and table, as the call has
            without another drafter.
        is_strict: Whether what a drafter raises is to end the call (`Config(strict_drafter=True)`).
        is_part: Whether it is asked by another drafter, which decides when.
        step_sec: Returns the seconds of a step that verifies so many tokens in each row, as far as
            measured, else 0; None for not at all.
    """

    model: Any
    vocab_size: int
    max_length: int
    target: Any = None
    num_rows: int = 1
    max_candidates: int | None = None
    processors: Sequence[Any] = ()
    samples: bool = False
    rngs: Sequence[np.random.Generator] | None = None
    make_pool_drafter: Callable[[], Drafter] = Drafter
    is_strict: bool = False
    is_part: bool = False
    step_sec: Callable[[int], float] | None = None


class Abilities(NamedTuple):
    """What a drafter says that it does, looked at once in a call; see `Drafter`."""

    num_successors: int = 0
    draws: bool = False
    learns_ngrams: bool = False
    has_table: bool = False

    @classmethod
    def of(cls, drafter: Drafter) -> "Abilities":
        """Look at a drafter.

        Raises:
            TypeError, ValueError: `num_successors` is no number, or below 0.
        """
        wanted: Any = drafter.num_successors
        if isinstance(wanted, bool) or not isinstance(wanted, int | np.integer):
            raise TypeError(f"expected num_successors to be an int, got {wanted!r}")
        if wanted < 0:
            raise ValueError(f"expected num_successors of at least 0, got {wanted}")
        flags = (drafter.draws, drafter.learns_ngrams, drafter.has_table)
        return cls(int(wanted), *map(bool, flags))


def sources_of(drafter: Drafter) -> dict[str, SourceStats]:
    """Return what each source of a drafter did; empty if it does not say.

    Raises:
        TypeError: it says something else.
    """
    sources = {**drafter.sources}
    for name, stats in sources.items():
        if not (isinstance(name, str) and isinstance(stats, SourceStats)):
            raise TypeError(f"expected sources to be SourceStats by name, got {name!r}: {stats!r}")
    return sources
