"""`SuccessorTable`: a target's likely successors of contexts of one and two tokens.

This file checks arguments and owns the arrays; `_kernels.py` does the work. Nothing here depends on
models or torch.
"""

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ngram_pool import _kernels
from ngram_pool._kernels import (
    COST_STEPS,
    MAX_OCCURRENCES,
    MAX_TOKEN_ID,
    NONE,
    Int32Array,
    Int64Array,
)
from ngram_pool.arrays import Header, positive

DEFAULT_NUM_SUCCESSORS = MAX_OCCURRENCES  # a draft takes at most this many from each source
_LEAST_ROWS = 64
# The arrays of a table in a file.
_SAVED = {"keys": np.int64, "counts": np.int32, "token_ids": np.int32, "costs": np.uint16}


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
    """A bounded table of the likeliest successors of contexts.

    A context is the last token, or the last two. Memory is bounded: the arrays grow by doubling up
    to the capacity; a full bucket drops its least recently put context.
    Methods may be called from several threads, and a copied or pickled table is independent. A pool
    reads a prewarmed table at every draft without waiting for threads that may write to it.

    Args:
        capacity: maximum number of contexts, rounded up to a power of two, at least 64. Buckets
            hold eight, so a few contexts are lost before the table is full.
        num_successors: how many to hold per context.
        averages: whether a context that is put again is averaged over about the last ten times;
            otherwise it is replaced.

    Raises:
        TypeError: a size is not an integer.
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
        self._lock: Any = threading.RLock()  # a signal handler may call during a method
        #: All arrays with their empty rows; replaced as a whole, and only kernels write to them.
        self.held = self._empty(_LEAST_ROWS)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {**vars(self), "_lock": None, "held": [array.copy() for array in self.held[:4]]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Arrays from out-of-band buffers of a pickle can be read-only; copies are not.
        held = Rows.of(*(array.copy() for array in state["held"]))
        vars(self).update(state, _lock=threading.RLock(), held=held)

    def __len__(self) -> int:
        """Return the number of contexts held."""
        return self.held.num_contexts.item()

    def __repr__(self) -> str:
        return f"SuccessorTable(capacity={self._capacity}, held={len(self)}, nbytes={self.nbytes})"

    @property
    def capacity(self) -> int:
        """Maximum number of contexts."""
        return self._capacity

    @property
    def num_successors(self) -> int:
        """Maximum number of successors per context."""
        return self._num_successors

    @property
    def nbytes(self) -> int:
        """Bytes allocated now; grows by doubling with the contexts held."""
        return sum(array.nbytes for array in self.held[:4])

    def put(self, contexts: ArrayLike, token_ids: ArrayLike, probs: ArrayLike) -> None:
        """Learn successors of contexts.

        Args:
            contexts: integers [n, 2]: the token before the last one, or -1, and the last one.
            token_ids: integers [n, k], distinct within a row, likeliest first; -1 ends a row.
            probs: floats [n, k] from 0 to 1.

        Raises:
            TypeError: contexts or token ids are not integers.
            ValueError: shapes do not match, or a value is out of range. The table is unchanged
                after such an error. After an interrupt, it has learned a first part.
        """
        self._put(*_checked(contexts, token_ids, probs))

    def update(self, other: "SuccessorTable") -> None:
        """Learn the contexts of another table, each put as often as it was put there.

        Args:
            other: a table of the same number of successors or fewer; unchanged.
        """
        arrays = {name: array[::-1] for name, array in other.arrays().items()}  # newest last
        counts = arrays.pop("counts")
        pairs, ids = _pairs_of(arrays["keys"]), arrays["token_ids"]
        probs = np.where(ids == NONE, 0.0, np.exp(arrays["costs"] / -COST_STEPS))
        for times in range(counts.max(initial=0) if self._averages else min(1, len(counts))):
            is_put = counts > times
            self.put(pairs[is_put], ids[is_put], probs[is_put])

    def put_tree(
        self,
        previous: int,
        nodes: ArrayLike,
        parents: ArrayLike,
        token_ids: ArrayLike,
        probs: ArrayLike,
    ) -> None:
        """Learn successors of a tree's nodes, for each node alone, and for it and its parent.

        Of equal contexts, the first node's is kept.

        Args:
            previous: the token before the root, or -1.
            nodes: integers [n], tokens of the nodes, the root first.
            parents: integers [n], -1 for the root; parents[i] < i.
            token_ids, probs: as for `put`, a row for each node.

        Raises:
            TypeError, ValueError: as for `put`. The table is unchanged after such an error.
        """
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
        self._put(contexts, ids, floats)

    def get(self, previous: int, last: int) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
        """Return the successors of a context and their probabilities, or None; O(1).

        Args:
            previous: the token before the last one; -1 for the context of the last one alone.
            last: the last token.
        """
        if not (NONE <= previous <= MAX_TOKEN_ID and 0 <= last <= MAX_TOKEN_ID):
            return None
        with self._lock:
            held = self.held
            row = _kernels.find_context(held.header.row, previous, last)
            if row == NONE:
                return None
            is_known = held.token_ids[row] != NONE
            probs = np.exp(held.costs[row, is_known] / -COST_STEPS).astype(np.float32)
            return held.token_ids[row, is_known], probs

    def contexts(self) -> Int64Array:
        """Return the contexts held, int64 [num_contexts, 2], as `put` takes them."""
        return _pairs_of(self.arrays()["keys"])

    # --- on disk ----------------------------------------------------------------------------

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return copies of the arrays, for writing to a file; newest first in each bucket."""
        with self._lock:
            held = self.held._asdict()
            is_held = held["keys"] != NONE
            return {name: held[name][is_held] for name in _SAVED}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], capacity: int | None = None
    ) -> "SuccessorTable":
        """Return a table restored from its arrays.

        Args:
            arrays: as `arrays` returns them.
            capacity: capacity of the new table; None for about twice the number of contexts. If it
                is too small, contexts are dropped as by `put`.

        Raises:
            ValueError: these are not the arrays of a table.
        """
        for name, dtype in _SAVED.items():
            if name not in arrays or arrays[name].dtype != dtype:
                raise ValueError(f"expected an array {name!r} of {np.dtype(dtype)} in the table")
        keys, counts, ids, costs = (arrays[name] for name in _SAVED)
        num = len(keys) if keys.ndim == 1 else -1
        if counts.shape != (num,) or ids.ndim != 2 or ids.shape != costs.shape or len(ids) != num:
            raise ValueError("expected the arrays of a table to have a row for each key")
        if ids.shape[1] < 1 or (num and min(keys.min(), counts.min() - 1, ids.min() + 1) < 0):
            raise ValueError("expected keys, counts and token ids of a table, got negative ones")
        table = cls(max(2 * num, 1) if capacity is None else capacity, ids.shape[1])
        num_rows = min(_power_of_two(max(2 * num, _LEAST_ROWS)), table._capacity)
        keys, ids, costs, counts = map(np.ascontiguousarray, (keys, ids, costs, counts))
        table._resize(Rows.of(keys, ids, costs, counts), num_rows)
        return table

    # --- inside -----------------------------------------------------------------------------

    def _empty(self, num_rows: int) -> Rows:
        shape = (num_rows, self._num_successors)
        return Rows.of(
            np.full(num_rows, NONE, np.int64),
            np.full(shape, NONE, np.int32),
            np.full(shape, _kernels.MAX_COST, np.uint16),
            np.zeros(num_rows, np.int32),
        )

    def _put(self, contexts: Int64Array, token_ids: Int32Array, probs: NDArray[np.float32]) -> None:
        """Learn successors of contexts, as the kernel takes them."""
        size = token_ids.shape[1] + self._num_successors
        scratch = np.empty(size, np.int32), np.empty(size)
        with self._lock:
            num_rows, num_held = len(self.held.keys), self.held.num_contexts.item()
            num_wanted = 2 * (num_held + len(contexts))  # buckets overflow beyond half load
            if num_wanted > num_rows < self._capacity:
                self._resize(self.held, min(_power_of_two(num_wanted), self._capacity))
            row, averages = self.held.header.row, self._averages
            _kernels.put_successors(row, contexts, token_ids, probs, averages, *scratch)

    def _resize(self, old: Rows, num_rows: int) -> None:
        """Move the contexts of `old` to `num_rows` rows: all or none, even if interrupted."""
        new = self._empty(num_rows)
        _kernels.rehash(old.header.row, new.header.row)
        self.held = new


def _pairs_of(keys: Int64Array) -> Int64Array:
    """Return the contexts of keys, as `put` takes them."""
    previous, last = np.divmod(keys, MAX_TOKEN_ID + 1)
    return np.stack([previous - 1, last], axis=1)


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
