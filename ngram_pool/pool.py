"""`NGramPool`: the text seen so far, indexed by its n-grams, and drafts out of it.

This file checks arguments, owns the arrays and calls one kernel per operation; `_kernels.py`, next
to read, explains how the arrays are laid out. Nothing here knows of models or of torch.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngram_pool import _kernels
from ngram_pool._kernels import (
    NEXT,
    NONE,
    PREVIOUS,
    TOKEN,
    Float64Array,
    Int32Array,
    Int64Array,
)
from ngram_pool.checks import MAX_TOKEN_ID, positive, token_ids_of
from ngram_pool.draft import Draft, SampledDraft

DEFAULT_CAPACITY_TOKENS = 2**20
# 6 accepted no more tokens than 5 on the answers described in ARCHITECTURE.md, 4 up to 1 % fewer.
DEFAULT_MAX_NGRAM_SIZE = 5
MAX_CAPACITY_TOKENS = 2**29  # so that three times as many positions can be counted
_FIRST_NUM_ROWS = 2**12  # allocated at once; doubled when full, up to the capacity
_POSITION_LIMIT = 2**31 - 1  # positions are int32; before they overflow they are lowered


class NGramPool:
    """Learn token sequences as they are written and draft how one may go on.

    Memory is bounded by `capacity_tokens`: the arrays grow by doubling up to it, then the oldest
    text is forgotten first, and the pool behaves like a new one that was given the same newest
    `capacity_tokens` tokens. The same observations give the same drafts in every process. Methods
    may be called from several threads; each runs alone, without holding the GIL.

    Args:
        capacity_tokens: how many tokens are held at most; up to 52 bytes each.
        max_ngram_size: N; contexts of 1 to N tokens are indexed and matched.

    Raises:
        TypeError: a size is no integer.
        ValueError: a size is not positive, or the capacity exceeds 2**29 tokens.

    >>> pool = NGramPool(capacity_tokens=1000)
    >>> pool.observe([5, 6, 7, 8, 9, 5, 6])
    >>> draft = pool.draft([5, 6], max_nodes=2)
    >>> draft.token_ids.tolist(), draft.parents.tolist()
    ([7, 8], [-1, 0])
    """

    def __init__(
        self,
        capacity_tokens: int = DEFAULT_CAPACITY_TOKENS,
        max_ngram_size: int = DEFAULT_MAX_NGRAM_SIZE,
    ) -> None:
        self._capacity = positive("capacity_tokens", capacity_tokens)
        self._max_ngram_size = positive("max_ngram_size", max_ngram_size)
        if self._capacity > MAX_CAPACITY_TOKENS:
            raise ValueError(
                f"expected capacity_tokens of at most {MAX_CAPACITY_TOKENS}, got {self._capacity}"
            )
        self._lock = threading.Lock()
        self._num_observed = 0  # the next position
        self._tails: dict[int, int] = {0: NONE}  # open sequence -> its last position
        self._num_opened = 1
        self._allocate(min(_FIRST_NUM_ROWS, self._capacity))
        self._allocate_scratch(64)
        self._compile()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()

    # --- what is held -----------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of tokens held, at most `capacity_tokens`."""
        return self._num_observed - self._first

    def __repr__(self) -> str:
        return (
            f"NGramPool(capacity_tokens={self._capacity}, max_ngram_size={self._max_ngram_size}, "
            f"held={len(self)}, nbytes={self.nbytes})"
        )

    @property
    def capacity_tokens(self) -> int:
        """The greatest number of tokens that can be held."""
        return self._capacity

    @property
    def max_ngram_size(self) -> int:
        """N, the number of tokens of the longest context."""
        return self._max_ngram_size

    @property
    def max_match(self) -> int:
        """How many tokens of a context matter: matches of N are followed back so far."""
        return max(_kernels.MAX_MATCH, self._max_ngram_size)

    @property
    def nbytes(self) -> int:
        """Bytes allocated now, all arrays together; grows by doubling with the text held."""
        tables = (self._text, self._links, self._heads, self._context, self._found)
        scratch = (self._found_probs, self._candidates, self._candidate_probs)
        drawing = (self._left_ids, self._left_probs, self._support_probs)
        nodes = (self._nodes, self._node_probs)
        return sum(array.nbytes for array in (*tables, *scratch, *drawing, *nodes))

    # --- writing ----------------------------------------------------------------------------

    def open_sequence(self) -> int:
        """Open one more sequence and return its handle for `observe`; O(1).

        Sequence 0 is always open. No n-gram runs across two sequences, however their tokens are
        interleaved, but a draft for one uses the text of all.
        """
        with self._lock:
            sequence = self._num_opened
            self._num_opened += 1
            self._tails[sequence] = NONE
            return sequence

    def close_sequence(self, sequence: int) -> None:
        """Forget the handle, not the text; O(1). Sequence 0 starts afresh instead.

        Raises:
            ValueError: the sequence is not open.
        """
        with self._lock:
            self._tail(sequence)
            if sequence == 0:
                self._tails[0] = NONE
            else:
                del self._tails[sequence]

    def observe(
        self, token_ids: Sequence[int] | NDArray[np.integer[Any]], sequence: int = 0
    ) -> None:
        """Append tokens to a sequence; amortised O(N) a token, whatever the pool holds.

        Args:
            token_ids: integers [num_tokens] from 0 to 2**31 - 1; may be empty.
            sequence: 0, or a handle of `open_sequence`.

        Raises:
            TypeError: ids are not integers.
            ValueError: an id is negative or too large, the shape is not one-dimensional, or the
                sequence is not open. The pool is unchanged after an error.
        """
        ids = token_ids_of("token_ids", token_ids)
        with self._lock:
            self._tail(sequence)
            # Longer input than is held is dropped at once, in steps that positions can count.
            for start in range(0, len(ids), self._capacity):
                self._append(ids[start : start + self._capacity], sequence)

    # --- reading ----------------------------------------------------------------------------

    def draft(
        self,
        context: Sequence[int] | NDArray[np.integer[Any]],
        max_nodes: int,
        max_candidates: int | None = None,
    ) -> Draft:
        """Propose how `context` goes on, likeliest nodes first; O(N) lookups a node.

        Every node's own context, of N tokens down to one, is looked up in the text, and what
        followed there becomes its children. `probs` estimates that the target accepts a node, that
        is, that its whole path is right. The likeliest path goes on as long as the text does and
        nodes are left; side branches less likely than 0.4 % are not drafted.

        Args:
            context: integers [num_tokens], oldest first; only the last `max_match` matter. Need
                not have been observed.
            max_nodes: the greatest number of nodes.
            max_candidates: G, the greatest number of root-to-leaf paths; None for no limit.

        Returns:
            A draft of at most `max_nodes` nodes; empty where the last token never went on.

        Raises:
            TypeError, ValueError: as for `observe`; sizes must be positive integers.

        >>> pool = NGramPool()
        >>> pool.observe([1, 2, 3, 1, 2, 4, 1, 2, 3])
        >>> pool.draft([9, 1, 2], max_nodes=2).candidates()
        [[3], [4]]
        >>> len(pool.draft([8], max_nodes=2))
        0
        """
        ids, max_nodes, max_leaves = self._check_draft(context, max_nodes, max_candidates)
        if not len(ids):
            return Draft.empty()
        with self._lock:
            if max_nodes > self._nodes.shape[1]:
                self._allocate_scratch(max_nodes)
            num_nodes = self._grow_tree(np.ascontiguousarray(ids[::-1]), max_nodes, max_leaves)
            token_ids, parents, depths = self._nodes[:3, :num_nodes].astype(np.int32)
            return Draft(token_ids, parents, depths, self._node_probs[:num_nodes].copy())

    def sample(
        self,
        context: Sequence[int] | NDArray[np.integer[Any]],
        max_nodes: int,
        rng: np.random.Generator,
        max_candidates: int | None = None,
    ) -> SampledDraft:
        """Propose how `context` goes on by drawing; O(N) lookups a node.

        Every node's token is drawn from the successors that `draft` would choose among, in
        proportion to their probabilities, children of one parent without replacement. The place
        with the greatest expectation is filled first; further children that expect less than 0.4 %
        are not drawn. A place never depends on the token drawn there, so rejection sampling by the
        returned distributions is unbiased (`SampledDraft` says which nodes may be left out).

        Args:
            context: integers [num_tokens], oldest first; only the last `max_match` matter. Need
                not have been observed.
            max_nodes: the greatest number of nodes.
            rng: gives `max_nodes` uniforms, whatever is found, so that equal generators give equal
                drafts and stay equal.
            max_candidates: G, the greatest number of root-to-leaf paths; None for no limit.

        Returns:
            A draft of at most `max_nodes` nodes; empty where the last token never went on.

        Raises:
            TypeError, ValueError: as for `draft`; `rng` must be a numpy Generator.

        >>> pool = NGramPool()
        >>> pool.observe([1, 2, 3, 1, 2, 4, 1, 2])
        >>> draft = pool.sample([1, 2], max_nodes=2, rng=np.random.default_rng(0))
        >>> draft.dense_probs(vocab_size=6)[0].tolist()
        [0.0, 0.0, 0.0, 0.5, 0.5, 0.0]
        """
        ids, max_nodes, max_leaves = self._check_draft(context, max_nodes, max_candidates)
        if not isinstance(rng, np.random.Generator):
            raise TypeError(f"expected rng to be a numpy.random.Generator, got {rng!r}")
        uniforms = rng.random(max_nodes)
        if not len(ids):
            return SampledDraft.empty()
        with self._lock:
            if max_nodes > self._nodes.shape[1]:
                self._allocate_scratch(max_nodes)
            reversed_context = np.ascontiguousarray(ids[::-1])
            num_nodes = self._sample_tree(reversed_context, max_nodes, max_leaves, uniforms)
            token_ids, parents, depths = self._nodes[:3, :num_nodes].astype(np.int32)
            return SampledDraft(
                token_ids,
                parents,
                depths,
                self._node_probs[:num_nodes].copy(),
                self._left_ids[parents + 1].astype(np.int32),
                self._support_probs[:num_nodes].copy(),
            )

    # --- checking ---------------------------------------------------------------------------

    def check(self) -> None:
        """Verify every invariant of the arrays; O(tokens held * N) in plain Python, for tests.

        Raises:
            AssertionError: an invariant is broken, which only a bug of this package can do.
        """
        with self._lock:
            num_rows, num_orders, first = len(self._text), self._max_ngram_size, self._first
            assert num_rows <= self._capacity
            assert self._links.shape == (num_rows, num_orders)
            assert self._num_observed - first <= num_rows
            assert self._num_observed <= _POSITION_LIMIT
            assert num_rows == self._capacity or self._num_observed <= num_rows
            for tail in self._tails.values():
                assert NONE <= tail < self._num_observed
                assert tail < first or self._text[tail % num_rows, NEXT] == NONE
            expected: dict[tuple[int, int], list[int]] = {}
            for position in range(first, self._num_observed):
                row = self._text[position % num_rows]
                assert 0 <= row[TOKEN] <= MAX_TOKEN_ID
                assert NONE <= row[PREVIOUS] < position
                assert row[NEXT] == NONE or position < row[NEXT] < self._num_observed
                if row[PREVIOUS] >= first:
                    assert self._text[row[PREVIOUS] % num_rows, NEXT] == position
                if row[NEXT] != NONE:
                    assert self._text[row[NEXT] % num_rows, PREVIOUS] == position
                state, reached = 0, position
                for order in range(num_orders):
                    if reached < first:
                        break
                    reached_row = self._text[reached % num_rows]
                    state = _kernels.hash_step(state, int(reached_row[TOKEN]))
                    bucket = state & (self._heads.shape[1] - 1)
                    expected.setdefault((order, bucket), []).insert(0, position)
                    reached = int(reached_row[PREVIOUS])
            for order in range(num_orders):
                for bucket in range(self._heads.shape[1]):
                    chain, position = [], int(self._heads[order, bucket])
                    while position >= first:
                        if self._starts_at(position, order) >= first:
                            chain.append(position)
                        older = int(self._links[position % num_rows, order])
                        assert older < position, "links lead to older positions"
                        position = older
                    assert chain == expected.get((order, bucket), [])

    # --- inside, without the lock -----------------------------------------------------------

    def _check_draft(
        self,
        context: Sequence[int] | NDArray[np.integer[Any]],
        max_nodes: int,
        max_candidates: int | None,
    ) -> tuple[Int64Array, int, int]:
        """Return the part of the context that matters and both sizes, or raise."""
        ids = token_ids_of("context", context)[-self.max_match :]
        max_nodes = positive("max_nodes", max_nodes)
        if max_candidates is None:
            return ids, max_nodes, max_nodes
        return ids, max_nodes, positive("max_candidates", max_candidates)

    # --- inside, under the lock -------------------------------------------------------------

    @property
    def _first(self) -> int:
        """The oldest position held."""
        return max(0, self._num_observed - len(self._text))

    def _tail(self, sequence: int) -> int:
        try:
            return self._tails[sequence]
        except (KeyError, TypeError):
            raise ValueError(f"expected an open sequence, got {sequence!r}") from None

    def _starts_at(self, position: int, order: int) -> int:
        for _ in range(order):
            if position < self._first:
                return NONE
            position = int(self._text[position % len(self._text), PREVIOUS])
        return position

    def _append(self, ids: Int64Array, sequence: int) -> None:
        if self._num_observed + len(ids) > _POSITION_LIMIT:
            self._rebase()
        num_rows = len(self._text)
        while num_rows < min(self._num_observed + len(ids), self._capacity):
            num_rows = min(2 * num_rows, self._capacity)
        if num_rows > len(self._text):
            self._grow(num_rows)
        self._tails[sequence] = _kernels.append(
            self._text, self._links, self._heads, self._num_observed, self._tails[sequence], ids
        )
        self._num_observed += len(ids)

    def _allocate(self, num_rows: int) -> None:
        text: Int32Array = np.full((num_rows, 3), NONE, np.int32)
        links: Int32Array = np.full((num_rows, self._max_ngram_size), NONE, np.int32)
        # One bucket a row, rounded down to a power of two: a bucket holds 1 to 2 positions.
        num_buckets = 1 << (num_rows.bit_length() - 1)
        heads: Int32Array = np.full((self._max_ngram_size, num_buckets), NONE, np.int32)
        # All or nothing: where memory runs out, the pool stays as it was.
        self._text, self._links, self._heads = text, links, heads

    def _grow(self, num_rows: int) -> None:
        # Growing happens before the first overwrite, so a position still is its own row.
        held = self._text[: self._num_observed]
        self._allocate(num_rows)
        self._text[: len(held)] = held
        _kernels.reindex(self._text, self._links, self._heads, 0, len(held))

    def _rebase(self) -> None:
        first, num_rows = self._first, len(self._text)
        shift = first // num_rows * num_rows  # so that every position keeps its row
        _kernels.rebase(self._text, self._links, self._heads, first, shift)
        for sequence, tail in self._tails.items():
            self._tails[sequence] = tail - shift if tail >= first else NONE
        self._num_observed -= shift

    def _allocate_scratch(self, max_nodes: int) -> None:
        num_candidates = max_nodes * _kernels.MAX_OCCURRENCES
        self._context = np.empty(self.max_match, np.int64)
        self._found = np.empty(
            (6, max(_kernels.MAX_OCCURRENCES, self._max_ngram_size + 1)), np.int64
        )
        self._found_probs = np.empty(_kernels.MAX_OCCURRENCES, np.float64)
        self._candidates = np.empty((3, num_candidates), np.int64)
        self._candidate_probs = np.empty(num_candidates, np.float64)
        self._nodes = np.empty((5, max_nodes), np.int64)
        self._node_probs = np.empty(max_nodes, np.float64)
        self._left_ids = np.empty((max_nodes + 1, _kernels.MAX_OCCURRENCES), np.int64)
        self._left_probs = np.empty((max_nodes + 1, _kernels.MAX_OCCURRENCES), np.float64)
        self._support_probs = np.empty((max_nodes, _kernels.MAX_OCCURRENCES), np.float64)

    def _grow_tree(self, reversed_context: Int64Array, max_nodes: int, max_leaves: int) -> int:
        return _kernels.grow_tree(
            self._text,
            self._links,
            self._heads,
            self._first,
            reversed_context,
            max_nodes,
            max_leaves,
            self._context,
            self._found,
            self._found_probs,
            self._candidates,
            self._candidate_probs,
            self._nodes,
            self._node_probs,
        )

    def _sample_tree(
        self, reversed_context: Int64Array, max_nodes: int, max_leaves: int, uniforms: Float64Array
    ) -> int:
        return _kernels.sample_tree(
            self._text,
            self._links,
            self._heads,
            self._first,
            reversed_context,
            max_nodes,
            max_leaves,
            uniforms,
            self._context,
            self._found,
            self._found_probs,
            self._candidates,
            self._candidate_probs,
            self._left_ids,
            self._left_probs,
            self._nodes,
            self._node_probs,
            self._support_probs,
        )

    def _compile(self) -> None:
        """Run every kernel on nothing, so that the first token does not wait for a compiler."""
        nothing = np.empty(0, np.int64)
        _kernels.append(self._text, self._links, self._heads, 0, NONE, nothing)
        _kernels.reindex(self._text, self._links, self._heads, 0, 0)
        _kernels.rebase(self._text, self._links, self._heads, 0, 0)
        self._grow_tree(np.zeros(1, np.int64), 1, 1)
        self._sample_tree(np.zeros(1, np.int64), 1, 1, np.zeros(1, np.float64))
