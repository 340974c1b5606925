"""`SuccessorTable`: a target's likely successors of contexts of one and two tokens.

This file checks arguments and owns the arrays; `_kernels.py` does the work. Nothing here depends on
models or torch.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ngram_pool import _kernels
from ngram_pool._kernels import (
    MAX_OCCURRENCES,
    MAX_TOKEN_ID,
    NONE,
    Int32Array,
    Int64Array,
)
from ngram_pool.arrays import Header

DEFAULT_NUM_SUCCESSORS = MAX_OCCURRENCES  # a draft takes at most this many from each source
_LEAST_ROWS = 64


class Rows(NamedTuple):
    """The arrays of a table, by row."""

    keys: Int64Array  # [num_rows], NONE where empty
    token_ids: Int32Array  # [num_rows, num_successors], likeliest first, NONE where fewer are known
    costs: NDArray[np.uint16]  # as `token_ids`, -ln(prob) * COST_STEPS
    counts: Int32Array  # [num_rows], how often each context was put
    num_contexts: Int64Array  # [1], how many rows are in use
    header: Header  # of these arrays, for the kernels

    @classmethod
    def of(cls, *arrays: NDArray[Any]) -> "Rows":
        """Return a group that holds the first four arrays, without copying them."""
        keys, token_ids, costs, counts = arrays
        num_contexts = np.array([np.count_nonzero(keys != NONE)])
        return cls(keys, token_ids, costs, counts, num_contexts, Header(*arrays, num_contexts))


class SuccessorTable:
    """A bounded table of the likeliest successors of contexts; its pool's lock guards it.

    A context is the last token, or the last two. Memory is bounded: the arrays grow by doubling up
    to the capacity; a full bucket drops its least recently put context.

    Args:
        capacity: maximum number of contexts, rounded up to a power of two, at least 64. Buckets
            hold eight, so a few contexts are lost before the table is full.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = _power_of_two(max(capacity, _LEAST_ROWS))
        #: All arrays with their empty rows; replaced as a whole, and only kernels write to them.
        self.held = _empty(_LEAST_ROWS)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "held": [array.copy() for array in self.held[:4]]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Arrays from out-of-band buffers of a pickle can be read-only; copies are not.
        vars(self).update(state, held=Rows.of(*(array.copy() for array in state["held"])))

    def __len__(self) -> int:
        """Return the number of contexts held."""
        return self.held.num_contexts.item()

    @property
    def nbytes(self) -> int:
        """Bytes allocated now; grows by doubling with the contexts held."""
        return sum(array.nbytes for array in self.held[:4])

    def put(self, contexts: ArrayLike, token_ids: ArrayLike, probs: ArrayLike) -> None:
        """Learn successors of contexts, as `NGramPool.harvest` does."""
        self._put(*_checked(contexts, token_ids, probs), averages=True)

    def put_tree(
        self,
        previous: int,
        nodes: ArrayLike,
        parents: ArrayLike,
        token_ids: ArrayLike,
        probs: ArrayLike,
    ) -> None:
        """Learn successors of a tree's nodes, as `NGramPool.harvest_tree` does."""
        tree = np.asarray(nodes), np.asarray(parents), np.asarray(token_ids), np.asarray(probs)
        lasts, over, ids, floats = tree
        for name, array in (("nodes", lasts), ("parents", over), ("token_ids", ids)):
            if array.size and array.dtype.kind not in "iu":
                raise TypeError(f"expected {name} to be integers, got dtype {array.dtype}")
        is_tree = lasts.ndim == 1 and ids.ndim == 2 and ids.shape == floats.shape
        if not is_tree or not lasts.shape == over.shape == ids.shape[:1]:
            raise ValueError("expected a parent for each node, and a row of successors")
        if ids.dtype != np.int32:
            _check_range("token_ids", ids, NONE)
        kinds = np.int64, np.int64, np.int32, np.float32
        lasts, over, ids, floats = map(np.array, tree, kinds)  # writable, as kernels are compiled
        contexts = np.empty((2 * len(lasts), 2), np.int64)
        if not _kernels.find_tree_contexts(previous, lasts, over, ids, floats, contexts):
            raise ValueError(
                f"expected a parent before each node, tokens from 0 to {MAX_TOKEN_ID}, and probs "
                "from 0 to 1"
            )
        self._put(contexts, ids, floats, averages=False)

    def contexts(self) -> Int64Array:
        """Return the contexts held, int64 [num_contexts, 2], as `put` takes them."""
        previous, last = np.divmod(self.held.keys[self.held.keys != NONE], MAX_TOKEN_ID + 1)
        return np.stack([previous - 1, last], axis=1)

    def _put(
        self,
        contexts: Int64Array,
        token_ids: Int32Array,
        probs: NDArray[np.float32],
        averages: bool,
    ) -> None:
        """Learn successors of contexts, as the kernel takes them."""
        size = token_ids.shape[1] + DEFAULT_NUM_SUCCESSORS
        num_rows, num_wanted = len(self.held.keys), 2 * (len(self) + len(contexts))
        if num_wanted > num_rows < self._capacity:  # buckets overflow beyond half load
            self._resize(min(_power_of_two(num_wanted), self._capacity))
        row, scratch = self.held.header.row, (np.empty(size, np.int32), np.empty(size))
        _kernels.put_successors(row, contexts, token_ids, probs, averages, *scratch)

    def _resize(self, num_rows: int) -> None:
        """Move the contexts to `num_rows` rows: all or none, even if interrupted."""
        new = _empty(num_rows)
        _kernels.rehash(self.held.header.row, new.header.row)
        self.held = new


def _empty(num_rows: int) -> Rows:
    shape = num_rows, DEFAULT_NUM_SUCCESSORS
    return Rows.of(
        np.full(num_rows, NONE, np.int64),
        np.full(shape, NONE, np.int32),
        np.full(shape, _kernels.MAX_COST, np.uint16),
        np.zeros(num_rows, np.int32),
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _check_range(name: str, array: NDArray[Any], least: int) -> None:
    if array.size and not least <= array.min() <= array.max() <= MAX_TOKEN_ID:
        raise ValueError(f"expected {name} from {least} to {MAX_TOKEN_ID}")


def _checked(
    contexts: ArrayLike, token_ids: ArrayLike, probs: ArrayLike
) -> tuple[Int64Array, Int32Array, NDArray[np.float32]]:
    """Return the arguments of `put` as contiguous arrays, the last context first, or raise."""
    pairs, ids, floats = np.asarray(contexts), np.asarray(token_ids), np.asarray(probs)
    for name, array in (("contexts", pairs), ("token_ids", ids)):
        if array.size and array.dtype.kind not in "iu":
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
        _check_range(name, array, least)
    if floats.size and not (floats.min() >= 0 and floats.max() <= 1):  # False for NaN
        raise ValueError("expected probs from 0 to 1")
    return (
        np.array(pairs[::-1], np.int64, order="C"),
        np.array(ids[::-1], np.int32, order="C"),
        np.array(floats[::-1], np.float32, order="C"),
    )
