"""The n-gram pool of Lookahead Decoding, keyed by one token.

Next file: `recycling.py`.
"""

from collections.abc import Iterable, Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from benchmarks.rivals.growing import GrowingDraft
from lade.drafting.drafter import Drafter
from ngram_pool import Draft

NGRAM_SIZE = 5  # N: one token to look up, four to propose
_NUM_CANDIDATES = 7  # G, kept for each token


class _Pool:
    """For each token, the G latest sequences of N - 1 tokens that followed it, newest last."""

    def __init__(self) -> None:
        self._tail: list[int] = []  # the last N - 1 tokens
        self._candidates: dict[int, dict[tuple[int, ...], None]] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the n-grams that end in the next tokens of the text."""
        text = [*self._tail, *token_ids]
        for start in range(len(text) - NGRAM_SIZE + 1):
            self.add(text[start : start + NGRAM_SIZE])
        self._tail = text[1 - NGRAM_SIZE :]

    def add(self, ngram: Sequence[int]) -> None:
        """Add an n-gram, or make it the newest again."""
        kept = self._candidates.setdefault(ngram[0], {})
        candidate = tuple(ngram[1:])
        kept.pop(candidate, None)
        kept[candidate] = None
        if len(kept) > _NUM_CANDIDATES:
            del kept[next(iter(kept))]

    def candidates(self, token_id: int) -> Iterable[tuple[int, ...]]:
        """Return what followed a token, newest first."""
        return reversed(self._candidates.get(token_id, {}))


class LookaheadDrafter(Drafter):
    """Drafter of the last token's G latest continuations, merged into a tree, newest first.

    N = 5 and G = 7 are the authors' setting for 7B models. The pool starts afresh with every prompt
    and takes in its n-grams (their POOL_FROM_PROMPT). The original gets all others from its Jacobi
    window; without one, the n-grams of the answer itself stand in for them.

    Source: Fu et al., Break the Sequential Dependency of LLM Inference Using Lookahead Decoding
    (arXiv 2402.02057), section 3.
    """

    learns_ngrams = True

    def __init__(self, has_window: bool = False) -> None:
        self._has_window = has_window
        self._handles = count()
        self._open: dict[int, _Pool] = {}

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a pool with the n-grams of a prompt."""
        sequence = next(self._handles)
        self._open[sequence] = _Pool()
        self._open[sequence].extend(prompt_ids)
        return sequence

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Merge candidates until there is no room; the oldest are left out first."""
        growing = GrowingDraft(max_draft_tokens)
        for candidate in self._open[sequence].candidates(committed[-1]):
            growing.add_path(candidate)
        return growing.build()

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Add the n-grams of the committed tokens, unless a window provides n-grams."""
        if not self._has_window:
            self._open[sequence].extend(token_ids)

    def observe_ngrams(self, sequence: int, ngrams: NDArray[np.int32]) -> None:
        """Add the n-grams [num_ngrams, N] of a window."""
        for ngram in ngrams.tolist():
            self._open[sequence].add(ngram)

    def close(self, sequence: int) -> None:
        """Forget the pool."""
        del self._open[sequence]
