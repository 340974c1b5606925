"""Prompt lookup: what followed the last few tokens where the text had them first.

Next file: `lookahead.py`.
"""

from collections.abc import Sequence
from itertools import count

from lade.drafting.drafts import chain
from ngram_pool import Draft

_SIZES = (3, 2, 1)  # of the n-grams to match, in tokens, longest first
_NUM_TOKENS = 10  # to copy


class _Index:
    """A text, and where each of its n-grams ended first."""

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
        """Return what followed the longest end of the context that something followed."""
        for size in _SIZES:
            end = self._ends.get(tuple(context[-size:]), len(self.token_ids))
            if end < len(self.token_ids):
                return self.token_ids[end : end + num_tokens]
        return []


class PromptLookupDrafter:
    """Copy from prompt and answer, along one chain.

    An n-gram of three tokens is looked for, then of two, then of one, and the earliest place
    counts, as in transformers, which by default looks for two tokens and one; ten are copied.

    Source: Saxena, prompt-lookup-decoding (2023), with its own n = 3 and 10 tokens.
    """

    def __init__(self) -> None:
        self._handles = count()
        self._open: dict[int, _Index] = {}

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Index a prompt."""
        sequence = next(self._handles)
        self._open[sequence] = _Index()
        self._open[sequence].extend(prompt_ids)
        return sequence

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Copy up to ten tokens."""
        num_tokens = min(_NUM_TOKENS, max_draft_tokens)
        return chain(self._open[sequence].continuation(committed, num_tokens))

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Index what was committed."""
        self._open[sequence].extend(token_ids)

    def close(self, sequence: int) -> None:
        """Forget the text."""
        del self._open[sequence]
