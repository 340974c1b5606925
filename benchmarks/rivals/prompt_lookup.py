"""Prompt lookup: copy what followed the first occurrence of the last few tokens.

Next file: `recycling.py`.
"""

from collections.abc import Sequence

from benchmarks.rivals.growing import IndexingDrafter
from lade.drafting.drafts import chain
from ngram_pool import Draft

_SIZES = (3, 2, 1)  # of the n-grams to match, in tokens, longest first
_NUM_TOKENS = 10  # to copy


class _Index:
    """A text, and where each of its n-grams first ended."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        text = self.token_ids
        for token_id in token_ids:
            text.append(token_id)
            for size in _SIZES:
                if size <= len(text):
                    self._ends.setdefault(tuple(text[-size:]), len(text))

    def continuation(self, context: Sequence[int], num_tokens: int) -> list[int]:
        """Return what followed the longest suffix of the context that anything followed."""
        for size in _SIZES:
            end = self._ends.get(tuple(context[-size:]), len(self.token_ids))
            if end < len(self.token_ids):
                return self.token_ids[end : end + num_tokens]
        return []


class PromptLookupDrafter(IndexingDrafter[_Index]):
    """Drafter that copies a single candidate from prompt and answer.

    It looks for the last three tokens, then two, then one, and copies ten tokens from the earliest
    place, as transformers does, which by default looks for two tokens and one.

    Source: Saxena, prompt-lookup-decoding (2023), with its own n = 3 and 10 tokens.
    """

    def __init__(self) -> None:
        super().__init__(_Index)

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Copy up to ten tokens."""
        num_tokens = min(_NUM_TOKENS, max_draft_tokens)
        return chain(self._open[sequence].continuation(committed, num_tokens))
