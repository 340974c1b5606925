"""`DraftChains`: how many texts go on, one likeliest path each, as arrays; `TextRows`: these texts.

Nothing here depends on how they are found. Next file: `pool.py`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ngram_pool import _kernels
from ngram_pool._kernels import MAX_TOKEN_ID, NONE, Int32Array, Int64Array


class DraftChains(NamedTuple):
    """One proposed path of tokens for each of several texts.

    A path hangs under the last token of its text. Beyond `lengths`, the arrays hold nothing.
    """

    token_ids: NDArray[np.int32]  # [num_rows, max_draft_tokens]
    probs: NDArray[np.float64]  # as `token_ids`, estimated acceptance of the path up to there
    lengths: NDArray[np.int64]  # [num_rows], from 0 to max_draft_tokens

    def tolist(self) -> list[list[int]]:
        """Return the token ids of each path."""
        rows = zip(self.token_ids.tolist(), self.lengths.tolist(), strict=True)
        return [ids[:length] for ids, length in rows]


class TextRows(NamedTuple):
    """The texts of `draft_chains`, checked."""

    texts: Int32Array  # [num_rows, width]
    lengths: Int64Array  # [num_rows], like the others
    num_new: Int64Array
    max_draft_tokens: Int64Array


def checked_rows(
    texts: ArrayLike,
    lengths: ArrayLike,
    max_draft_tokens: ArrayLike,
    num_new: ArrayLike | None,
    max_match: int,
) -> TextRows:
    """Return the texts of `NGramPool.draft_chains`, or raise.

    Of a text, only what is new and the last `max_match` tokens are looked at.
    """
    ids = np.asarray(texts)
    if ids.ndim != 2:
        raise ValueError(f"expected texts of shape [num_rows, width], got shape {list(ids.shape)}")
    if not np.issubdtype(ids.dtype, np.integer) and ids.size:
        raise TypeError(f"expected texts to be integers, got dtype {ids.dtype}")
    if ids.dtype != np.int32 and ids.max(initial=0) > MAX_TOKEN_ID:
        raise ValueError(f"expected token ids from 0 to {MAX_TOKEN_ID}, got {ids.max()}")
    num_rows, width = ids.shape
    counts = {
        "lengths": (lengths, width),
        "num_new": (0 if num_new is None else num_new, width),
        "max_draft_tokens": (max_draft_tokens, MAX_TOKEN_ID),
    }
    checked = {}
    for name, (values, most) in counts.items():
        array = np.asarray(values)
        if not np.issubdtype(array.dtype, np.integer) and array.size:
            raise TypeError(f"expected {name} to be integers, got dtype {array.dtype}")
        if array.shape != (num_rows,) and (name == "lengths" or array.ndim):
            raise ValueError(f"expected {name} of shape [{num_rows}], got {list(array.shape)}")
        if array.size and (array.min() < 0 or array.max() > most):
            raise ValueError(f"expected {name} from 0 to {most}, got {array.tolist()}")
        # Writable, or kernels were compiled once more.
        checked[name] = np.require(np.broadcast_to(array, num_rows), np.int64, ("C", "W"))
    if (checked["num_new"] > checked["lengths"]).any():
        raise ValueError("expected num_new of at most lengths, got more")
    rows = TextRows(np.require(ids, np.int32, ("C", "W")), **checked)
    num_read = np.maximum(rows.num_new, max_match)
    negative = _kernels.find_negative(rows.texts, rows.lengths, num_read)
    if negative != NONE:
        raise ValueError(f"expected token ids from 0 to {MAX_TOKEN_ID}, got less in row {negative}")
    return rows
