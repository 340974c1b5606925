"""`Drafter`, the base class of all drafters; `DraftingCall`, the call of one; `ForcedTokens`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lade.drafting.successors import Successors
from ngram_pool import Draft


class Drafter:
    """Source of drafts; it can change the speed of decoding, never the text.

    Subclass it, and write `draft`, and `observe` where it learns; the rest does nothing by itself.

    One object serves any number of sequences; each begins with `open` and ends with `close`. After
    each of its methods, torch's global random state is put back, so that what it draws or seeds
    there changes no sampled text. It should have a generator of its own all the same: the state is
    that of all threads. What a thread of the drafter draws between two methods is not undone, and
    what other threads draw during one is.

    Attributes:
        name: Of this source in `DecodeStats.sources`; its class if empty.
        num_successors: Top-k target tokens per node that `harvest` gets; 0 for none, and then
            it is not called.
        learns_ngrams: Whether `observe_ngrams` learns; needed for `Config(lookahead=…)`.
        is_free: Whether a draft takes so little time that it is asked at every step; else it is
            asked where that pays, as long as there are others.
    """

    name: str = ""
    num_successors: int = 0
    learns_ngrams: bool = False
    is_free: bool = False

    def for_call(self, call: "DraftingCall") -> "Drafter":
        """Return what drafts for one call: itself, or a drafter whose state belongs to the call.

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
            committed: the text up to and including the first node.
            token_ids: tokens of the nodes [num_nodes]. The first is committed: the root of a tree,
                or the first of several successive tokens of a prompt.
            parents: parents of the nodes [num_nodes], -1 for the first; parents[i] < i.
            successors: the target's likeliest tokens after each node [num_nodes, num_successors].
        """

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
        device: Where the target chooses its tokens; None for the CPU.
        num_rows: Sequences of the call; they are opened in the order of its rows.
        max_candidates: Paths of a draft that can be verified at once; None for no limit.
        processors: The call's logits processors; those that keep state must not be called.
        samples: Whether tokens are sampled; else decoding is greedy.
        rngs: Where lade's own drafters draw (`Config(acceptance="rejection")` and sampling), one
            for each row, to draw with; else None.
        make_pool_drafter: Returns a drafter by the call's own pools and table, as the call has
            without another drafter.
        step_sec: Returns the seconds of a step that verifies so many tokens in each row, as far as
            measured, else 0.
    """

    model: Any
    vocab_size: int
    max_length: int
    device: Any = None
    num_rows: int = 1
    max_candidates: int | None = None
    processors: Sequence[Any] = ()
    samples: bool = False
    rngs: Sequence[np.random.Generator] | None = None
    make_pool_drafter: Callable[[], Drafter] = Drafter
    step_sec: Callable[[int], float] = lambda num_tokens: 0.0


class ForcedTokens(ABC):
    """Foresight of what a logits processor will enforce; a base class of processors that have it.

    A processor of another class is never asked, whatever its methods are called. Nor is a
    `prefix_allowed_tokens_fn`, which may keep state.
    """

    @abstractmethod
    def forced_tokens(self, row: int, committed: Sequence[int], max_tokens: int) -> list[int]:
        """Return the tokens that must follow, as far as they are known.

        Called between steps: the processor was called once for each emitted token, so it has seen
        all of `committed` but the last token. This must not change what the processor does later.

        Args:
            row: the sequence's row in the batch that the processor is called with.
            committed: that row of its next `input_ids`: padding, prompt and emitted tokens.
            max_tokens: maximum number of tokens to return.
        """
