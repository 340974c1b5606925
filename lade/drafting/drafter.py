"""`Drafter`, the base class of all drafters; `DraftingCall`, the call of one; `ForcedTokens`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lade.drafting.successors import Successors
from ngram_pool import Draft


class Drafter:
    """Base class of sources of drafts; a drafter can change the speed of decoding, never the text.

    Subclasses override `draft`, and `observe` if they learn. The other methods do nothing here.

    One object serves any number of sequences; each begins with `open` and ends with `close`. lade
    restores torch's global random state after each method, so random numbers that the method draws
    change no sampled text. All threads share that state: a drafter that draws in a thread, or
    beside other threads that do, must use a generator of its own.

    Attributes:
        name: Name of the drafter in `DecodeStats.sources`; if empty, the name of its class.
        num_successors: How many of the target's likeliest tokens `harvest` gets for each node; if
            0, `harvest` is not called.
        is_free: Whether a draft takes hardly any time. A free drafter is asked at every step;
            others are asked where their tokens are worth the time, if the call has several.
    """

    name: str = ""
    num_successors: int = 0
    is_free: bool = False

    def for_call(self, call: "DraftingCall") -> "Drafter":
        """Return the drafter for one call: this one, or one whose state belongs to the call.

        Raises:
            LadeError: the drafter cannot draft for this call; the call raises the error before
                anything is generated. Every other exception becomes a `lade.DrafterWarning`, and
                the call goes on without drafts.
        """
        return self

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a sequence with its prompt and return a handle for it."""
        return 0

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Propose at most `max_draft_tokens` tokens after `committed`, best first.

        `committed` includes the prompt. If a grammar forces the next tokens, `committed` ends with
        them, although they were not observed yet.
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
        """Learn the target's likeliest tokens after each node of a step, accepted or not.

        Called after `observe` of the same step. In the other order, `observe` would measure how far
        to trust successors that already contain the answer.

        Args:
            sequence: handle of the sequence.
            committed: the text up to and including the first node.
            token_ids: tokens of the nodes [num_nodes]. The first is committed: the root of a tree,
                or the first of several successive tokens of a prompt.
            parents: parents of the nodes [num_nodes], -1 for the first; parents[i] < i.
            successors: the target's likeliest tokens after each node [num_nodes, num_successors].
        """

    def close(self, sequence: int) -> None:
        """End the sequence; called once, also after an error."""


@dataclass(frozen=True, slots=True)
class DraftingCall:
    """Properties of the call that a drafter drafts for.

    Attributes:
        model: The target's model; the drafter must not change it.
        vocab_size: Exclusive upper bound of the token ids in a draft.
        max_length: Maximum length of a row, prompt included.
        device: Where the target chooses its tokens; None for the CPU.
        num_rows: Sequences of the call; they are opened in the order of its rows.
        max_candidates: Paths of a draft that can be verified at once; None for no limit.
        processors: The call's logits processors; the drafter must not call one that keeps state.
        samples: Whether tokens are sampled; else decoding is greedy.
        rngs: Random generators, one for each row, if drafts are drawn (sampling with
            `Config(acceptance="rejection")`); else None.
        make_pool_drafter: Returns a drafter by the call's pools and table, which is the drafter of
            a call without `drafter=`.
        record: Passes more arguments to forwards of the target, which then return hidden states.
            Returns a function that takes the number of tokens that the target has run, and returns
            the states of the tokens committed since its last call; None if their number differs.
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
    record: Callable[[Mapping[str, Any]], Callable[[int], Any]] = lambda _: lambda _: None


class ForcedTokens(ABC):
    """Base class of logits processors that know which tokens they will force.

    Only processors of this class are asked. A `prefix_allowed_tokens_fn` is not, because it may
    keep state.
    """

    @abstractmethod
    def forced_tokens(self, row: int, committed: Sequence[int], max_tokens: int) -> list[int]:
        """Return the tokens that must follow, as many as are known.

        Called between steps. By then, the processor was called once for each emitted token, so it
        has seen all of `committed` but the last token. This method must not change its later
        results.

        Args:
            row: the sequence's row in the batch that the processor is called with.
            committed: that row of its next `input_ids`: padding, prompt and emitted tokens.
            max_tokens: maximum number of tokens to return.
        """
