"""`NGramPool`: the text seen so far and what the target thought of it, and drafts out of both.

This file checks arguments, owns the arrays and calls one kernel per operation; `_kernels.py`, next
to read, explains how the arrays are laid out. Nothing here knows of models or of torch.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
from ngram_pool.table import SuccessorTable
from ngram_pool.weights import first_weights

DEFAULT_CAPACITY_TOKENS = 2**20
# 6 accepted no more tokens than 5 on the answers described in ARCHITECTURE.md, 4 up to 1 % fewer.
DEFAULT_MAX_NGRAM_SIZE = 5
MAX_CAPACITY_TOKENS = 2**29  # so that three times as many positions can be counted
_FIRST_NUM_ROWS = 2**12  # allocated at once; doubled when full, up to the capacity
_POSITION_LIMIT = 2**31 - 1  # positions are int32; before they overflow they are lowered
# Room for what was harvested, in contexts for each token of the capacity: 8 bytes a token at most.
_CONTEXTS_PER_TOKEN = 1 / 16
_NO_PRIOR = SuccessorTable(1)
# How far one token of an answer moves the weights of the sources. With the weights that a pool
# begins with, fitted to the same model, 0 accepted 0.4 % fewer tokens, 0.01 2 % fewer, 0.03 9 %.
_LEARNING_RATE = 0.003


@dataclass(slots=True)
class _Sequence:
    """An open sequence."""

    prior: SuccessorTable
    tail: int = NONE  # its last position
    #: The positions from which on text counts as its prompt and its answer; later than all if none.
    starts: Int64Array = field(default_factory=lambda: np.full(2, _POSITION_LIMIT, np.int64))


class NGramPool:
    """Learn token sequences as they are written and draft how one may go on.

    Drafts come from several sources: the text, by contexts of 1 to N tokens and more; what a target
    was seen to find likely (`harvest`); a table of what it finds likely (`open_sequence`). How far
    each is to be trusted is learned as answers are observed.

    Memory is bounded by `capacity_tokens`: the arrays grow by doubling up to it, then the oldest
    text is forgotten first. The same calls give the same drafts in every process, and as long as
    nothing was harvested and no answer observed, the pool behaves like a new one that was given the
    newest `capacity_tokens` tokens. Methods may be called from several threads; each runs alone,
    without holding the GIL.

    Args:
        capacity_tokens: how many tokens are held at most; up to 60 bytes each.
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
        self._sequences = {0: _Sequence(_NO_PRIOR)}  # the open ones
        self._num_opened = 1
        # Averaging a context's last ten times accepted as many tokens.
        num_contexts = max(1, int(self._capacity * _CONTEXTS_PER_TOKEN))
        self._harvested = SuccessorTable(num_contexts, averages=False)
        self._weights = first_weights()
        self._learning_rate = _LEARNING_RATE
        self._allocate(min(_FIRST_NUM_ROWS, self._capacity))
        self._allocate_for_one()
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
        blend = (self._features, self._summed, self._weights)
        arrays = (*tables, *scratch, *drawing, *nodes, *blend)
        return sum(array.nbytes for array in arrays) + self._harvested.nbytes

    # --- writing ----------------------------------------------------------------------------

    def open_sequence(self, prior: SuccessorTable | None = None) -> int:
        """Open one more sequence and return its handle for `observe`; O(1).

        Sequence 0 is always open. No n-gram runs across two sequences, however their tokens are
        interleaved, but a draft for one uses the text of all.

        Args:
            prior: what the sequence's target finds likely behind single tokens and pairs, known
                before; read, never written.

        Raises:
            TypeError: `prior` is no such table.
        """
        if not isinstance(prior, SuccessorTable | None):
            raise TypeError(f"expected prior to be a SuccessorTable, got {prior!r}")
        with self._lock:
            sequence = self._num_opened
            self._num_opened += 1
            self._sequences[sequence] = _Sequence(prior if prior is not None else _NO_PRIOR)
            return sequence

    def close_sequence(self, sequence: int) -> None:
        """Forget the handle, not the text; O(1). Sequence 0 starts afresh instead.

        Raises:
            ValueError: the sequence is not open.
        """
        with self._lock:
            self._sequence(sequence)
            if sequence == 0:
                self._sequences[0] = _Sequence(_NO_PRIOR)
            else:
                del self._sequences[sequence]

    def observe(
        self,
        token_ids: Sequence[int] | NDArray[np.integer[Any]],
        sequence: int = 0,
        is_answer: bool = False,
    ) -> None:
        """Append tokens to a sequence; amortised O(N) a token, whatever the pool holds.

        Args:
            token_ids: integers [num_tokens] from 0 to 2**31 - 1; may be empty.
            sequence: 0, or a handle of `open_sequence`.
            is_answer: whether these are tokens that the target chose. From them the pool learns how
                far to trust its sources; and they are told apart from the sequence's prompt.

        Raises:
            TypeError: ids are not integers.
            ValueError: an id is negative or too large, the shape is not one-dimensional, or the
                sequence is not open. The pool is unchanged after an error.
        """
        ids = token_ids_of("token_ids", token_ids)
        with self._lock:
            opened = self._sequence(sequence)
            # Longer input than is held is dropped at once, in steps that positions can count.
            for start in range(0, len(ids), self._capacity):
                self._append(ids[start : start + self._capacity], opened, is_answer)

    def harvest(self, contexts: ArrayLike, token_ids: ArrayLike, probs: ArrayLike) -> None:
        """Learn what a target finds likely behind contexts of one and two tokens; O(1) each.

        The arguments and errors are those of `SuccessorTable.put`. As many contexts are held as a
        sixteenth of `capacity_tokens`.
        """
        with self._lock:
            self._harvested.put(contexts, token_ids, probs)

    # --- reading ----------------------------------------------------------------------------

    def draft(
        self,
        context: Sequence[int] | NDArray[np.integer[Any]],
        max_nodes: int,
        max_candidates: int | None = None,
        sequence: int | None = None,
    ) -> Draft:
        """Propose how `context` goes on, likeliest nodes first; O(N) lookups a node.

        Every node's own context, of N tokens down to one, is looked up in the text and in the
        tables, and what followed there becomes its children. `probs` estimates that the target
        accepts a node, that is, that its whole path is right. The likeliest path goes on as long as
        anything is known and nodes are left; side branches less likely than 0.1 % are not drafted.

        Args:
            context: integers [num_tokens], oldest first; only the last `max_match` matter. Need
                not have been observed.
            max_nodes: the greatest number of nodes.
            max_candidates: G, the greatest number of root-to-leaf paths; None for no limit.
            sequence: the open sequence that the context is of, for its table and to tell its own
                text from others'; None for neither.

        Returns:
            A draft of at most `max_nodes` nodes; empty where nothing is known of what may follow.

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
        with self._lock:
            opened = self._no_sequence if sequence is None else self._sequence(sequence)
            if not len(ids):
                return Draft.empty()
            if max_nodes > self._nodes.shape[1]:
                self._allocate_scratch(max_nodes)
            num_nodes = self._grow_tree(
                np.ascontiguousarray(ids[::-1]), max_nodes, max_leaves, opened
            )
            token_ids, parents, depths = self._nodes[:3, :num_nodes].astype(np.int32)
            return Draft(token_ids, parents, depths, self._node_probs[:num_nodes].copy())

    def sample(
        self,
        context: Sequence[int] | NDArray[np.integer[Any]],
        max_nodes: int,
        rng: np.random.Generator,
        max_candidates: int | None = None,
        sequence: int | None = None,
    ) -> SampledDraft:
        """Propose how `context` goes on by drawing; O(N) lookups a node.

        Every node's token is drawn from the successors that `draft` would choose among, in
        proportion to their probabilities, children of one parent without replacement. The place
        with the greatest expectation is filled first; further children that expect less than 0.1 %
        are not drawn. A place never depends on the token drawn there, so rejection sampling by the
        returned distributions is unbiased (`SampledDraft` says which nodes may be left out).

        Args:
            context: integers [num_tokens], oldest first; only the last `max_match` matter. Need
                not have been observed.
            max_nodes: the greatest number of nodes.
            rng: gives `max_nodes` uniforms, whatever is found, so that equal generators give equal
                drafts and stay equal.
            max_candidates: G, the greatest number of root-to-leaf paths; None for no limit.
            sequence: the open sequence that the context is of, for its table and to tell its own
                text from others'; None for neither.

        Returns:
            A draft of at most `max_nodes` nodes; empty where nothing is known of what may follow.

        Raises:
            TypeError, ValueError: as for `draft`; `rng` must be a numpy Generator.

        >>> pool = NGramPool()
        >>> pool.observe([1, 2, 3, 1, 2, 4, 1, 2])
        >>> draft = pool.sample([1, 2], max_nodes=2, rng=np.random.default_rng(0))
        >>> np.flatnonzero(draft.dense_probs(vocab_size=6)[0]).tolist()
        [3, 4]
        """
        ids, max_nodes, max_leaves = self._check_draft(context, max_nodes, max_candidates)
        if not isinstance(rng, np.random.Generator):
            raise TypeError(f"expected rng to be a numpy.random.Generator, got {rng!r}")
        with self._lock:
            opened = self._no_sequence if sequence is None else self._sequence(sequence)
            uniforms = rng.random(max_nodes)
            if not len(ids):
                return SampledDraft.empty()
            if max_nodes > self._nodes.shape[1]:
                self._allocate_scratch(max_nodes)
            reversed_context = np.ascontiguousarray(ids[::-1])
            num_nodes = self._sample_tree(reversed_context, max_nodes, max_leaves, uniforms, opened)
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
            assert np.isfinite(self._weights).all()
            for opened in self._sequences.values():
                assert NONE <= opened.tail < self._num_observed
                assert opened.tail < first or self._text[opened.tail % num_rows, NEXT] == NONE
                assert opened.starts[0] <= opened.starts[1]
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

    def _sequence(self, handle: int) -> _Sequence:
        try:
            return self._sequences[handle]
        except (KeyError, TypeError):
            raise ValueError(f"expected an open sequence, got {handle!r}") from None

    def _starts_at(self, position: int, order: int) -> int:
        for _ in range(order):
            if position < self._first:
                return NONE
            position = int(self._text[position % len(self._text), PREVIOUS])
        return position

    def _append(self, ids: Int64Array, sequence: _Sequence, is_answer: bool) -> None:
        if self._num_observed + len(ids) > _POSITION_LIMIT:
            self._rebase()
        num_rows = len(self._text)
        while num_rows < min(self._num_observed + len(ids), self._capacity):
            num_rows = min(2 * num_rows, self._capacity)
        if num_rows > len(self._text):
            self._grow(num_rows)
        for i in range(1 + is_answer):
            sequence.starts[i] = min(sequence.starts[i], self._num_observed)
        sequence.tail = self._append_kernel(ids, sequence, is_answer)
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
        for sequence in self._sequences.values():
            sequence.tail = sequence.tail - shift if sequence.tail >= first else NONE
            began = sequence.starts < _POSITION_LIMIT
            sequence.starts[began] = np.maximum(sequence.starts[began] - shift, 0)
        self._num_observed -= shift

    def _allocate_scratch(self, max_nodes: int) -> None:
        width = _kernels.MAX_FOUND
        candidates = np.empty((3, max_nodes * width), np.int64)
        candidate_probs = np.empty(max_nodes * width, np.float64)
        nodes, node_probs = np.empty((5, max_nodes), np.int64), np.empty(max_nodes, np.float64)
        left_ids = np.empty((max_nodes + 1, width), np.int64)
        left_probs = np.empty((max_nodes + 1, width), np.float64)
        support_probs = np.empty((max_nodes, width), np.float64)
        # All or nothing, as in `_allocate`: kernels go by the size of one of these.
        self._candidates, self._candidate_probs = candidates, candidate_probs
        self._nodes, self._node_probs = nodes, node_probs
        self._left_ids, self._left_probs = left_ids, left_probs
        self._support_probs = support_probs

    def _allocate_for_one(self) -> None:
        """Allocate what one context needs."""
        width = _kernels.MAX_FOUND
        self._context = np.empty(self.max_match, np.int64)
        self._found = np.empty((8, max(width, self._max_ngram_size + 1)), np.int64)
        self._features = np.empty((width, _kernels.NUM_FEATURES), np.float64)
        self._summed = np.empty(_kernels.NUM_WEIGHTS, np.float64)
        self._found_probs = np.empty(width, np.float64)

    def _grow_tree(
        self, reversed_context: Int64Array, max_nodes: int, max_leaves: int, sequence: _Sequence
    ) -> int:
        return _kernels.grow_tree(
            self._text,
            self._links,
            self._heads,
            self._first,
            sequence.starts,
            self._harvested.rows,
            sequence.prior.rows,
            self._weights,
            reversed_context,
            max_nodes,
            max_leaves,
            self._context,
            self._found,
            self._features,
            self._summed,
            self._found_probs,
            self._candidates,
            self._candidate_probs,
            self._nodes,
            self._node_probs,
        )

    def _sample_tree(
        self,
        reversed_context: Int64Array,
        max_nodes: int,
        max_leaves: int,
        uniforms: Float64Array,
        sequence: _Sequence,
    ) -> int:
        return _kernels.sample_tree(
            self._text,
            self._links,
            self._heads,
            self._first,
            sequence.starts,
            self._harvested.rows,
            sequence.prior.rows,
            self._weights,
            reversed_context,
            max_nodes,
            max_leaves,
            uniforms,
            self._context,
            self._found,
            self._features,
            self._summed,
            self._found_probs,
            self._candidates,
            self._candidate_probs,
            self._left_ids,
            self._left_probs,
            self._nodes,
            self._node_probs,
            self._support_probs,
        )

    def _append_kernel(self, ids: Int64Array, sequence: _Sequence, is_answer: bool) -> int:
        return _kernels.append(
            self._text,
            self._links,
            self._heads,
            self._num_observed,
            sequence.tail,
            ids,
            self._learning_rate if is_answer else 0.0,
            sequence.starts,
            self._harvested.rows,
            sequence.prior.rows,
            self._weights,
            self._context,
            self._found,
            self._features,
            self._summed,
            self._found_probs,
        )

    def _compile(self) -> None:
        """Run every kernel on nothing, so that the first token does not wait for a compiler."""
        self._no_sequence = _Sequence(_NO_PRIOR)
        self._append_kernel(np.empty(0, np.int64), self._no_sequence, False)
        _kernels.reindex(self._text, self._links, self._heads, 0, 0)
        _kernels.rebase(self._text, self._links, self._heads, 0, 0)
        self._grow_tree(np.zeros(1, np.int64), 1, 1, self._no_sequence)
        self._sample_tree(np.zeros(1, np.int64), 1, 1, np.zeros(1, np.float64), self._no_sequence)
        table = SuccessorTable(1)
        table.put(np.zeros((1, 2), np.int64), np.zeros((1, 1), np.int32), np.ones((1, 1)))
        SuccessorTable.from_arrays(table.arrays())
