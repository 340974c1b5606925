"""Find tokens in a row in many texts. Nothing here depends on how these are held."""

import numpy as np
from numpy.typing import NDArray

from ngram_pool._kernels import Int32Array, Int64Array


def find_all(
    sought: Int64Array, token_ids: Int32Array, bounds: Int32Array
) -> tuple[int, NDArray[np.bool_]]:
    """Find every occurrence of tokens in a row, also of parts where a text begins or ends.

    A text may begin with their last ones, or end with their first, because the rest is not held
    with it. Such parts are not counted.

    Args:
        sought: at least one token.
        token_ids: of all texts, one after the other.
        bounds: text i is `token_ids[bounds[i] : bounds[i + 1]]`, at least one token.

    Returns:
        How many occurrences there are, and which tokens are part of one, bool [num_tokens].
    """
    num, ends = len(sought), np.repeat(bounds[1:], np.diff(bounds))
    starts = np.flatnonzero(np.arange(num, len(token_ids) + num) <= ends)
    for i, token_id in enumerate(sought):
        starts = starts[token_ids[starts + i] == token_id]
    steps = np.zeros(len(token_ids) + 1, np.int64)
    np.add.at(steps, starts, 1)
    np.add.at(steps, starts + num, -1)
    is_part = steps[:-1].cumsum() > 0
    for begin in np.flatnonzero(np.isin(token_ids[bounds[:-1]], sought[1:])):
        text = token_ids[bounds[begin] : bounds[begin + 1]]
        for size in num - 1 - np.flatnonzero(sought[1:] == text[0]):  # the longest part first
            if np.array_equal(text[:size], sought[num - size :]):
                is_part[bounds[begin] : bounds[begin] + size] = True
                break
    for end in np.flatnonzero(np.isin(token_ids[bounds[1:] - 1], sought[:-1])):
        text = token_ids[bounds[end] : bounds[end + 1]]
        for size in np.flatnonzero(sought[:-1] == text[-1])[::-1] + 1:
            if np.array_equal(text[-size:], sought[:size]):
                is_part[bounds[end + 1] - size : bounds[end + 1]] = True
                break
    return len(starts), is_part
