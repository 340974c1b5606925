"""Tokens that a grammar forces, so that they can be drafted for nothing.

A forecast is a draft like any other: a wrong one costs time and never changes the text.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence


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
