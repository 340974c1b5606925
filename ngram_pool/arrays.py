"""The arrays that a pool's kernels work on, in groups; `_kernels.py` says what they hold.

Next file: `table.py`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ngram_pool import _kernels
from ngram_pool._kernels import NEVER, NONE, Float64Array, Int32Array, Int64Array
from ngram_pool.table import SuccessorTable

# Tokens whose expected counts are kept: 12 bytes each. Rarer ones hardly matter.
_NUM_UNIGRAMS = 2**12
_NO_TABLE = SuccessorTable(1)
_UNBEGUN = (NONE, NEVER, NEVER, 0)  # the state of a sequence without text


class Header:
    """What kernels know of a pool, a sequence or scratch: addresses of arrays, and their sizes."""

    def __init__(self, values: Sequence[int], held: tuple[Any, ...]) -> None:
        self.row = np.array(values, np.int64)
        self.address: int = self.row.ctypes.data
        #: All that the addresses are in, so that whoever holds the header may read by it.
        self.held = held


class OpenSequence:
    """A sequence, open for as long as it is referenced.

    Args:
        prewarmed: table of successors; None for none.
        layers: pools that are only read; `headers`: theirs.
        state: as the kernels' `sequence`.
    """

    def __init__(
        self,
        prewarmed: SuccessorTable | None = None,
        layers: Sequence[Any] = (),
        headers: Sequence[Header] = (),
        state: Sequence[int] | Int64Array = _UNBEGUN,
    ) -> None:
        self.prewarmed = _NO_TABLE if prewarmed is None else prewarmed
        self.layers = layers
        self.state = np.array(state, np.int64)
        self._layers = np.array([header.address for header in headers], np.int64)
        self._headers = headers
        self._header: Header | None = None

    def __reduce__(self) -> tuple[type["OpenSequence"], tuple[Any, ...]]:
        # Only sequence 0 is ever copied, which has neither a table nor layers.
        return OpenSequence, (None, (), (), self.state)

    def begin(self) -> None:
        """Begin anew, without text."""
        self.state[:] = _UNBEGUN

    def header(self) -> Header:
        """Return the kernels' header, with the table as it is now."""
        table, known = self.prewarmed.held, self._header
        if known is None or known.held[0] is not table:
            arrays = self.state, self._layers, table.header
            state_at, layers_at, prewarmed_at = (array.ctypes.data for array in arrays)
            values = state_at, layers_at, len(self.layers), prewarmed_at
            known = self._header = Header(values, (table, *arrays, self._headers))
        return known


class TextArrays(NamedTuple):
    """The arrays of the text; see `_kernels.py`."""

    text: Int32Array
    links: Int32Array
    heads: Int32Array


class Unigrams(NamedTuple):
    """How often the target would use a token, by all that was harvested."""

    token_ids: Int32Array  # [_NUM_UNIGRAMS], NONE where empty
    counts: Float64Array  # [_NUM_UNIGRAMS], expected; 0 where empty

    @classmethod
    def empty(cls) -> "Unigrams":
        """Return the counts of nothing harvested."""
        return cls(np.full(_NUM_UNIGRAMS, NONE, np.int32), np.zeros(_NUM_UNIGRAMS))

    def as_dict(self) -> dict[int, float]:
        """Return the expected counts by token."""
        is_held = self.token_ids != NONE
        return dict(
            zip(self.token_ids[is_held].tolist(), self.counts[is_held].tolist(), strict=True)
        )


class Room:
    """Scratch of the kernels, for one thread; they say what the arrays hold."""

    def __init__(
        self, num_nodes: int, num_layers: int, max_match: int, max_ngram_size: int
    ) -> None:
        width = _kernels.MAX_FOUND + _kernels.MAX_OCCURRENCES * num_layers
        found_shape = 8 + num_layers, max(width, max_ngram_size + 1)
        self.nodes = np.empty((5, num_nodes), np.int64)
        self.node_probs = np.empty(num_nodes, np.float64)
        self.left_ids = np.empty((num_nodes + 1, width), np.int64)
        self.support_probs = np.empty((num_nodes, width), np.float64)
        self.arrays = (
            np.empty(max_match, np.int64),  # context
            np.empty(found_shape, np.int64),  # found
            np.empty((width, _kernels.NUM_FEATURES), np.float64),  # features
            np.empty(_kernels.NUM_WEIGHTS, np.float64),  # summed
            np.empty(width, np.float64),  # found_probs
            np.empty((3, num_nodes * width), np.int64),  # candidates
            np.empty(num_nodes * width, np.float64),  # candidate_probs
            self.left_ids,
            np.empty((num_nodes + 1, width), np.float64),  # left_probs
            self.nodes,
            self.node_probs,
            self.support_probs,
        )
        places = [array.ctypes.data for array in self.arrays]
        sizes = (num_nodes, width, max_match, *found_shape, num_nodes + 1, num_nodes * width)
        self.row = np.array([*places, *sizes], np.int64)
