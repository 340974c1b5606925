"""The groups of arrays that a pool's kernels work on, and checks of the arrays of callers.

`_kernels.py` documents their contents. Next file: `table.py`.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ngram_pool import _kernels
from ngram_pool._kernels import MAX_TOKEN_ID, NEVER, NONE, Float64Array, Int32Array, Int64Array

# Tokens whose expected counts are kept: 12 bytes each. Rarer ones hardly matter.
NUM_UNIGRAMS = 2**12


def positive(name: str, value: SupportsIndex) -> int:
    """Return `value` as an integer of at least 1, or raise."""
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"expected {name} to be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"expected {name} to be an integer, got {value!r}") from None
    if number < 1:
        raise ValueError(f"expected {name} to be positive, got {number}")
    return number


def token_ids_of(name: str, values: Sequence[int] | NDArray[np.integer[Any]]) -> Int64Array:
    """Return `values` as a contiguous int64 array, or raise."""
    try:
        ids = np.asarray(values)
    except (ValueError, OverflowError) as error:  # such as for ragged lists
        raise ValueError(f"expected {name} to be one-dimensional integers: {error}") from None
    if ids.ndim != 1:
        raise ValueError(f"expected {name} of shape [num_tokens], got shape {list(ids.shape)}")
    if not len(ids):
        return np.empty(0, np.int64)
    if ids.dtype == object and all(isinstance(value, int) for value in ids):
        raise ValueError(f"expected {name} from 0 to {MAX_TOKEN_ID}, got {max(ids, key=abs)}")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"expected {name} to be integers, got dtype {ids.dtype}")
    checked = np.ascontiguousarray(ids, np.int64)
    if not 0 <= np.bitwise_or.reduce(checked) <= MAX_TOKEN_ID:  # all bits of the largest are set
        low, high = int(ids.min()), int(ids.max())
        raise ValueError(
            f"expected {name} from 0 to {MAX_TOKEN_ID}, got {low if low < 0 else high}"
        )
    return checked


class Header:
    """A row of integers that describes a group of arrays to kernels: addresses and shapes."""

    def __init__(self, *arrays: NDArray[Any]) -> None:
        numbers = [number for array in arrays for number in (array.ctypes.data, *array.shape)]
        self.row = np.array(numbers, np.int64)
        self.arrays = arrays  # kept alive as long as the header


def begin_state() -> Int64Array:
    """Return the state of a sequence without text, as the kernels' `sequence`."""
    return np.array([NONE, NEVER, NEVER], np.int64)


class TextArrays(NamedTuple):
    """The arrays of the text; see `_kernels.py`."""

    text: Int32Array
    links: Int32Array
    heads: Int32Array


class Unigrams(NamedTuple):
    """The expected counts of tokens, by all harvested probabilities of the target."""

    token_ids: Int32Array  # [NUM_UNIGRAMS], NONE where empty
    counts: Float64Array  # [NUM_UNIGRAMS], expected; 0 where empty


class Scratch:
    """Memory that kernels write to during a call, as large as any call needed so far.

    Args:
        max_match: length of the longest context that matters.
        max_ngram_size: N of the pool.
    """

    def __init__(self, max_match: int, max_ngram_size: int) -> None:
        self._max_match, self._max_ngram_size = max_match, max_ngram_size
        self._sizes = 0, 0
        self.header = Header()

    def row_for(self, num_nodes: int, num_layers: int) -> Int64Array:
        """Return the kernels' header of scratch for at least this many nodes and layers."""
        sizes = max(num_nodes, self._sizes[0]), max(num_layers, self._sizes[1])
        if sizes == self._sizes:
            return self.header.row
        num_nodes, num_layers = sizes
        width = _kernels.MAX_FOUND + _kernels.MAX_OCCURRENCES * num_layers
        found_shape = 8 + num_layers, max(width, self._max_ngram_size + 1)
        self.header = Header(
            np.empty(self._max_match, np.int64),  # context
            np.empty(found_shape, np.int64),  # found
            np.empty(width, np.float64),  # found_probs
            np.empty((width, _kernels.NUM_FEATURES), np.float64),  # features
            np.empty(_kernels.NUM_WEIGHTS, np.float64),  # summed
            np.empty((5, num_nodes), np.int64),  # nodes
            np.empty(num_nodes, np.float64),  # node_probs
            np.empty((3, num_nodes * width), np.int64),  # candidates
            np.empty(num_nodes * width, np.float64),  # candidate_probs
            np.empty((num_nodes + 1, width), np.int64),  # left_ids
            np.empty((num_nodes + 1, width), np.float64),  # left_probs
            np.empty((num_nodes, width), np.float64),  # support_probs
        )
        self._sizes = sizes
        return self.header.row


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
) -> TextRows:
    """Return the texts of `NGramPool.draft_chains`, or raise; negative ids pass."""
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
        # Writable; otherwise Numba would compile the kernels again.
        checked[name] = np.require(np.broadcast_to(array, num_rows), np.int64, ("C", "W"))
    if (checked["num_new"] > checked["lengths"]).any():
        raise ValueError("expected num_new of at most lengths, got more")
    return TextRows(np.require(ids, np.int32, ("C", "W")), **checked)
