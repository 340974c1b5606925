"""Find a text in tokens, however it was tokenised there."""

from collections.abc import Callable, Iterator
from typing import Any

from ngram_pool import NGramPool

_WINDOW = 2**12  # tokens that are decoded at once


def forget(pool: NGramPool, tokenizer: Any, text: str) -> int:
    """Remove all tokens that a text takes part in, until a search finds it no more.

    Returns:
        The number of occurrences removed.
    """
    num_removed = 0
    # Many occurrences are of the same tokens: all of those go at once.
    while (
        run := next((run for ids in pool.texts() for run in runs_with(tokenizer, ids, text)), None)
    ) is not None:
        removed = pool.forget(run)
        assert removed, "what was found can be removed"
        num_removed += removed
    return num_removed


def runs_with(tokenizer: Any, token_ids: Any, text: str) -> Iterator[tuple[int, ...]]:
    """Yield the shortest runs of tokens in which a text occurs, from left to right.

    How a text is tokenised depends on what stands around it: tokens are decoded and searched, and
    those at its ends count whole.
    """

    def has(ids: list[int]) -> bool:
        return text in tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    overlap = len(text.encode())  # a token takes one byte at least
    token_ids = [int(each) for each in token_ids]
    for start in range(0, len(token_ids), _WINDOW):
        window = token_ids[max(0, start - overlap) : start + _WINDOW]
        while has(window):
            end = _least(len(window), lambda n, w=window: has(w[:n]))
            lead = _least(end, lambda n, w=window, e=end: has(w[e - n : e]))
            yield tuple(window[end - lead : end])
            window = window[end - lead + 1 :]


def _least(limit: int, holds: Callable[..., bool]) -> int:
    """Return the least number from 1 to `limit` for which something holds, as for all above."""
    low, high = 1, limit
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
