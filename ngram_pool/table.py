"""`SuccessorTable`: what a target finds likely behind contexts of one and two tokens.

This file checks arguments and owns the arrays; `_kernels.py` does the work. Nothing here knows of
models or of torch.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ngram_pool import _kernels
from ngram_pool._kernels import COST_STEPS, NONE, Float64Array, Int32Array, Int64Array
from ngram_pool.checks import MAX_TOKEN_ID, positive

DEFAULT_NUM_SUCCESSORS = 8
_LEAST_ROWS = 64
_LEAST_PIECE = 16


class SuccessorTable:
    """Hold the likeliest successors of contexts, as many contexts as it has room for.

    A context is the last token, or the last two. Memory is bounded: the arrays grow by doubling up
    to the capacity; where a bucket is full, the context of it that was not put for longest goes.

    Args:
        capacity: how many contexts have room; rounded up to a power of two, at least 64. Buckets
            are of eight, so a few contexts are lost before all room is taken.
        num_successors: how many are held of each context.
        averages: whether a context put again is averaged over the last ten times or so; else it is
            replaced.

    Raises:
        TypeError: a size is no integer.
        ValueError: a size is not positive.

    >>> table = SuccessorTable(capacity=1000)
    >>> table.put([[-1, 5], [4, 5]], [[6, 7], [8, 9]], [[0.5, 0.25], [0.75, 0.125]])
    >>> token_ids, probs = table.get(4, 5)
    >>> token_ids.tolist(), probs.round(3).tolist()
    ([8, 9], [0.75, 0.125])
    """

    def __init__(
        self,
        capacity: int,
        num_successors: int = DEFAULT_NUM_SUCCESSORS,
        averages: bool = True,
    ) -> None:
        self._capacity = _power_of_two(max(positive("capacity", capacity), _LEAST_ROWS))
        self._num_successors = positive("num_successors", num_successors)
        self._averages = averages
        self._num_contexts = 0
        self._allocate(_LEAST_ROWS)

    def __len__(self) -> int:
        """Return the number of contexts held."""
        return self._num_contexts

    def __repr__(self) -> str:
        return f"SuccessorTable(capacity={self._capacity}, held={len(self)}, nbytes={self.nbytes})"

    @property
    def capacity(self) -> int:
        """How many contexts have room."""
        return self._capacity

    @property
    def num_successors(self) -> int:
        """How many successors are held of each context."""
        return self._num_successors

    @property
    def nbytes(self) -> int:
        """Bytes allocated now; grows by doubling with the contexts held."""
        return sum(array.nbytes for array in (*self.rows, self._counts))

    @property
    def rows(self) -> tuple[Int64Array, Int32Array, NDArray[np.uint16]]:
        """Keys, successors and costs, as kernels read them; not to be written to."""
        return self._keys, self._successor_ids, self._costs

    def put(self, contexts: ArrayLike, token_ids: ArrayLike, probs: ArrayLike) -> None:
        """Learn what follows contexts.

        Args:
            contexts: integers [n, 2]: the token before the last one, or -1, and the last one.
            token_ids: integers [n, k], different ones in a row, likeliest first; -1 ends a row.
            probs: floats [n, k] from 0 to 1.

        Raises:
            TypeError: contexts or token ids are no integers.
            ValueError: shapes do not fit together, or a value is out of range. The table is
                unchanged after an error.
        """
        pairs, ids, floats = _checked(contexts, token_ids, probs)
        scratch_size = ids.shape[1] + self._num_successors
        scratch = np.empty(scratch_size, np.int32), np.empty(scratch_size, np.float64)
        start = 0
        while start < len(pairs):
            # Buckets overflow beyond half load, so growing comes before, in pieces.
            room = len(self._keys) // 2 - self._num_contexts
            if room < _LEAST_PIECE and len(self._keys) < self._capacity:
                self._grow()
                continue
            part = slice(start, start + max(room, _LEAST_PIECE))
            self._put(pairs[part], ids[part], floats[part], scratch)
            start = part.stop

    def get(self, previous: int, last: int) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
        """Return the successors of a context and their probabilities, or None; O(1).

        Args:
            previous: the token before the last one; -1 for the context of the last one alone.
            last: the last token.
        """
        if not (NONE <= previous <= MAX_TOKEN_ID and 0 <= last <= MAX_TOKEN_ID):
            return None
        row = _kernels.find_context(self._keys, previous, last)
        if row == NONE:
            return None
        held = self._successor_ids[row] != NONE
        probs = np.exp(self._costs[row, held] / -COST_STEPS).astype(np.float32)
        return self._successor_ids[row, held].copy(), probs

    # --- on disk ----------------------------------------------------------------------------

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return copies of all that is held, to be written to a file."""
        held = self._keys != NONE
        return {
            "keys": self._keys[held],
            "counts": self._counts[held],
            "token_ids": self._successor_ids[held],
            "costs": self._costs[held],
        }

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], capacity: int | None = None
    ) -> "SuccessorTable":
        """Return the table whose `arrays` these were.

        Args:
            arrays: as `arrays` returns them.
            capacity: of the new table; None for twice the contexts there are.

        Raises:
            ValueError: these are not arrays of a table.
        """
        dtypes = {"keys": np.int64, "counts": np.int32, "token_ids": np.int32, "costs": np.uint16}
        for name, dtype in dtypes.items():
            if name not in arrays or arrays[name].dtype != dtype:
                raise ValueError(f"expected an array {name!r} of {np.dtype(dtype)} in the table")
        keys, counts, ids, costs = (arrays[name] for name in dtypes)
        num = len(keys) if keys.ndim == 1 else -1
        if counts.shape != (num,) or ids.ndim != 2 or ids.shape != costs.shape or len(ids) != num:
            raise ValueError("expected the arrays of a table to have a row for each key")
        if ids.shape[1] < 1 or (num and min(keys.min(), counts.min() - 1, ids.min() + 1) < 0):
            raise ValueError("expected keys, counts and token ids of a table, got negative ones")
        table = cls(2 * (num + _LEAST_PIECE) if capacity is None else capacity, ids.shape[1])
        while len(table._keys) < min(2 * (num + _LEAST_PIECE), table._capacity):
            table._allocate(2 * len(table._keys))
        table._take(keys, counts, ids, costs)
        return table

    # --- inside -----------------------------------------------------------------------------

    def _allocate(self, num_rows: int) -> None:
        shape = (num_rows, self._num_successors)
        keys: Int64Array = np.full(num_rows, NONE, np.int64)
        counts: Int32Array = np.zeros(num_rows, np.int32)
        successor_ids: Int32Array = np.full(shape, NONE, np.int32)
        costs: NDArray[np.uint16] = np.full(shape, _kernels.MAX_COST, np.uint16)
        # All or nothing: where memory runs out, the table stays as it was.
        self._keys, self._counts = keys, counts
        self._successor_ids, self._costs = successor_ids, costs

    def _put(
        self,
        pairs: Int64Array,
        ids: Int32Array,
        probs: NDArray[np.float32],
        scratch: tuple[Int32Array, Float64Array],
    ) -> None:
        self._num_contexts += _kernels.put_successors(
            self._keys,
            self._counts,
            self._successor_ids,
            self._costs,
            pairs,
            ids,
            probs,
            self._averages,
            *scratch,
        )

    def _grow(self) -> None:
        old = (self._keys, self._counts, self._successor_ids, self._costs)
        self._allocate(2 * len(self._keys))
        self._take(*old)

    def _take(
        self,
        keys: Int64Array,
        counts: Int32Array,
        token_ids: Int32Array,
        costs: NDArray[np.uint16],
    ) -> None:
        self._num_contexts = _kernels.rehash(
            np.ascontiguousarray(keys),
            np.ascontiguousarray(counts),
            np.ascontiguousarray(token_ids),
            np.ascontiguousarray(costs),
            self._keys,
            self._counts,
            self._successor_ids,
            self._costs,
        )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _checked(
    contexts: ArrayLike, token_ids: ArrayLike, probs: ArrayLike
) -> tuple[Int64Array, Int32Array, NDArray[np.float32]]:
    """Return contiguous arrays of what was given to `put`, or raise."""
    pairs, ids, floats = np.asarray(contexts), np.asarray(token_ids), np.asarray(probs)
    for name, array in (("contexts", pairs), ("token_ids", ids)):
        if array.size and not np.issubdtype(array.dtype, np.integer):
            raise TypeError(f"expected {name} to be integers, got dtype {array.dtype}")
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"expected contexts of shape [n, 2], got shape {list(pairs.shape)}")
    if ids.ndim != 2 or ids.shape != floats.shape or len(ids) != len(pairs):
        raise ValueError(
            f"expected token_ids and probs of shape [{len(pairs)}, k], got shapes "
            f"{list(ids.shape)} and {list(floats.shape)}"
        )
    for name, array, least in (
        ("contexts", pairs[:, :1], NONE),
        ("contexts", pairs[:, 1:], 0),
        ("token_ids", ids, NONE),
    ):
        if array.size and not least <= array.min() <= array.max() <= MAX_TOKEN_ID:
            raise ValueError(f"expected {name} from {least} to {MAX_TOKEN_ID}")
    if floats.size and not (floats.min() >= 0 and floats.max() <= 1):  # False for NaN
        raise ValueError("expected probs from 0 to 1")
    return (
        np.ascontiguousarray(pairs, np.int64),
        np.ascontiguousarray(ids, np.int32),
        np.ascontiguousarray(floats, np.float32),
    )
