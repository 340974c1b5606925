"""`DraftChains`: how many texts go on, one likeliest path each, as arrays.

Nothing here depends on how they are found. Next file: `pool.py`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


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
