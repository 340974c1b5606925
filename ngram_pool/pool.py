"""`NGramPool`: the text seen so far, the target's successors, and drafts from both.

This file checks arguments, owns the arrays and calls one kernel per operation; `_kernels.py`, next
to read, explains how the arrays are laid out. Nothing here depends on models or torch.
"""

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ngram_pool import _kernels
from ngram_pool._kernels import (
    ANSWER,
    LOWERED_THEN,
    MAX_TOKEN_ID,
    NEVER,
    NEXT,
    NEXT_POSITION,
    NONE,
    PREVIOUS,
    PROMPT,
    TAIL,
    TOKEN,
    Float64Array,
    Int32Array,
    Int64Array,
)
from ngram_pool.checks import positive, token_ids_of
from ngram_pool.compiling import compile_by
from ngram_pool.draft import Draft, SampledDraft
from ngram_pool.locks import alone, lock_of_pool
from ngram_pool.table import SuccessorTable
from ngram_pool.weights import first_weights

DEFAULT_CAPACITY_TOKENS = 2**20
# On the answers of docs/notes/drafting.md, 6 accepted no more tokens than 5, and 4 up to 1 % fewer.
DEFAULT_MAX_NGRAM_SIZE = 5
MAX_CAPACITY_TOKENS = 2**29  # so that positions can count three times as many
_FIRST_NUM_ROWS = 2**12  # allocated first; doubled when full, up to the capacity
_POSITION_LIMIT = 2**31 - 1  # positions are int32 and are lowered before they overflow
# Longer input is observed in pieces, so that Python notices an interrupt within a few ms.
_PIECE = 2**16
# Capacity for harvested contexts, per token of the pool's capacity: at most 8 bytes per token.
_CONTEXTS_PER_TOKEN = 1 / 16
# Tokens whose expected counts are kept: 12 bytes each. Rarer ones hardly matter.
_NUM_UNIGRAMS = 2**12
_NO_TABLE = SuccessorTable(1)
# How far one token of an answer moves the weights of the sources. From the initial weights, fitted
# to the same model, a rate of 0 accepted 0.4 % fewer tokens, 0.01 2 % fewer, and 0.03 9 % fewer.
_LEARNING_RATE = 0.003
_UNBEGUN = (NONE, NEVER, NEVER, 0)  # the state of a sequence without text
_FIRST_PURGE = 64  # sequences held before those whose handle is gone are first dropped
# Attributes that a copy of a pool allocates anew.
_NOT_COPIED = {"_lock", "_sequences", "_purge_at", "_no_sequence", "_for_one", "_scratch"}


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Sequence:
    """A sequence, open for as long as it is referenced."""

    prewarmed: SuccessorTable
    #: The kernels' `sequence`, int64 [4].
    state: Int64Array = field(default_factory=lambda: np.array(_UNBEGUN, np.int64))


class _Handle(int):
    """The number of an open sequence, and a reference to it; copies and pickles are plain ints."""

    sequence: _Sequence

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


class _Held(NamedTuple):
    """The arrays of the text; see `_kernels.py`."""

    text: Int32Array
    links: Int32Array
    heads: Int32Array


class _Unigrams(NamedTuple):
    """How often the target would use a token, by all that was harvested."""

    token_ids: Int32Array  # [_NUM_UNIGRAMS], NONE where empty
    counts: Float64Array  # [_NUM_UNIGRAMS], expected; 0 where empty

    @classmethod
    def empty(cls) -> "_Unigrams":
        return cls(np.full(_NUM_UNIGRAMS, NONE, np.int32), np.zeros(_NUM_UNIGRAMS))


class _ForOne(NamedTuple):
    """Scratch arrays of the kernels for one context."""

    context: Int64Array
    found: Int64Array
    features: Float64Array
    summed: Float64Array
    found_probs: Float64Array


class _Scratch(NamedTuple):
    """Scratch arrays of the kernels for a tree."""

    candidates: Int64Array
    candidate_probs: Float64Array
    left_ids: Int64Array
    left_probs: Float64Array
    nodes: Int64Array
    node_probs: Float64Array
    support_probs: Float64Array


class NGramPool:
    """A pool that learns token sequences as they are written, and drafts how one may go on.

    Drafts come from several sources: the text, by contexts of 1 to N tokens and more; harvested
    successors (`harvest`); a prewarmed table of successors (`open_sequence`). How far to trust each
    is learned as answers are observed.

    Memory is bounded by `capacity_tokens`: the arrays grow by doubling up to it, then the oldest
    text is forgotten first. The same calls give the same drafts in every process, and as long as
    nothing was harvested and no answer observed, the pool behaves like a new one that was given the
    newest `capacity_tokens` tokens. Methods may be called from several threads; each runs alone,
    without holding the GIL. Wherever a method is interrupted, the pool is consistent: as before or
    after it, or between two pieces of long input. A pool can be copied or pickled at any time; the
    copy is independent, and only sequence 0 is open in it.

    Args:
        capacity_tokens: maximum number of tokens held; each takes up to 20 + 8 N bytes, 60 with the
            default N. The largest draft takes another 2.7 kB per node, for at least 64 nodes, and
            the target's unigrams 48 kB.
        max_ngram_size: N; contexts of 1 to N tokens are indexed and matched.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a size is not positive, or the capacity exceeds 2**29 tokens.

    >>> pool = NGramPool(capacity_tokens=1000)
    >>> pool.observe([5, 6, 7, 8, 9, 5, 6])
    >>> draft = pool.draft([5, 6], max_draft_tokens=2)
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
        self._num_opened = 1
        # Averaging over the last ten times of a context accepted as many tokens.
        num_contexts = max(1, int(self._capacity * _CONTEXTS_PER_TOKEN))
        self._harvested = SuccessorTable(num_contexts, averages=False)
        self._unigrams = _Unigrams.empty()
        self._weights = first_weights()
        self._learning_rate = _LEARNING_RATE
        self._counts = np.zeros(2, np.int64)
        self._held = self._empty(min(_FIRST_NUM_ROWS, self._capacity))
        self._sequence_0 = _Sequence(_NO_TABLE)
        self._allocate_the_rest()
        compile_by(self._run_kernels)

    @alone
    def __getstate__(self) -> dict[str, Any]:
        return copy.deepcopy({k: v for k, v in vars(self).items() if k not in _NOT_COPIED})

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Arrays from out-of-band buffers of a pickle can be read-only; copies are not.
        vars(self).update(copy.deepcopy(state))
        self._allocate_the_rest()
        NGramPool(1)  # so that the first token does not wait for a compiler

    def _allocate_the_rest(self) -> None:
        """Allocate the attributes in `_NOT_COPIED`, which every copy has of its own."""
        self._lock = lock_of_pool()
        # Weak references, so that a sequence is closed when its handle is gone.
        self._sequences = {0: weakref.ref(self._sequence_0)}
        self._purge_at = _FIRST_PURGE
        self._no_sequence = _Sequence(_NO_TABLE)
        self._for_one = self._room_for_one()
        self._scratch = self._room_for_tree(64)

    # --- what is held -----------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of tokens held, at most `capacity_tokens`."""
        return min(self._counts.item(NEXT_POSITION), len(self._held.text))

    def __repr__(self) -> str:
        return (
            f"NGramPool(capacity_tokens={self._capacity}, max_ngram_size={self._max_ngram_size}, "
            f"held={len(self)}, nbytes={self.nbytes})"
        )

    @property
    def capacity_tokens(self) -> int:
        """Maximum number of tokens held."""
        return self._capacity

    @property
    def max_ngram_size(self) -> int:
        """N, the number of tokens in the longest indexed context."""
        return self._max_ngram_size

    @property
    def max_match(self) -> int:
        """How many of a context's last tokens matter; matches are followed back no further."""
        return max(_kernels.MAX_MATCH, self._max_ngram_size)

    @property
    def nbytes(self) -> int:
        """Bytes allocated now, all arrays together; grows by doubling with the text held."""
        arrays = (*self._held, *self._for_one, *self._scratch, *self._unigrams, self._weights)
        return sum(array.nbytes for array in arrays) + self._harvested.nbytes

    @property
    def num_open_sequences(self) -> int:
        """Number of open sequences besides sequence 0; linear in that number."""
        return sum(opened() is not None for opened in list(self._sequences.values())) - 1

    # --- writing ----------------------------------------------------------------------------

    def open_sequence(self, prewarmed: SuccessorTable | None = None) -> int:
        """Open one more sequence and return its handle for `observe`; amortised O(1).

        Sequence 0 is always open. No n-gram runs across two sequences, however their tokens are
        interleaved, but a draft for one uses the text of all.

        The handle is a number that no other sequence gets, and an object: when its last reference
        is gone, for example because an exception ended the function that was to close it, the
        sequence is closed. While it lives, any equal number names the sequence as well.

        Args:
            prewarmed: table of what the sequence's target finds likely after single tokens and
                pairs; read, never written.

        Raises:
            TypeError: `prewarmed` is not a `SuccessorTable`.

        >>> pool = NGramPool()
        >>> sequence = pool.open_sequence()
        >>> pool.num_open_sequences
        1
        >>> del sequence
        >>> pool.num_open_sequences
        0
        """
        if not isinstance(prewarmed, SuccessorTable | None):
            raise TypeError(f"expected prewarmed to be a SuccessorTable, got {prewarmed!r}")
        return self._open_sequence(_NO_TABLE if prewarmed is None else prewarmed)

    @alone
    def close_sequence(self, sequence: int) -> None:
        """Forget the handle but keep the text; O(1). Sequence 0 starts afresh instead.

        Raises:
            ValueError: the sequence is not open.
        """
        opened = self._sequence(sequence)
        if sequence == 0:
            opened.state[:] = _UNBEGUN
        else:
            del self._sequences[sequence]

    def observe(
        self,
        token_ids: Sequence[int] | NDArray[np.integer[Any]],
        sequence: int = 0,
        is_answer: bool = False,
    ) -> None:
        """Append tokens to a sequence; amortised O(N) per token, whatever the pool holds.

        Args:
            token_ids: integers [num_tokens] from 0 to 2**31 - 1; may be empty.
            sequence: 0, or a handle from `open_sequence`.
            is_answer: whether the target chose these tokens. From them the pool learns how far to
                trust its sources, and it tells them apart from the sequence's prompt.

        Raises:
            TypeError: ids are not integers.
            ValueError: an id is negative or too large, the shape is not one-dimensional, or the
                sequence is not open. The pool is unchanged after such an error, or if there is no
                memory to grow. After an interrupt, it has observed a first part of the tokens.
        """
        self._observe(token_ids_of("token_ids", token_ids), sequence, is_answer)

    @alone
    def harvest(self, contexts: ArrayLike, token_ids: ArrayLike, probs: ArrayLike) -> None:
        """Learn what a target finds likely after contexts of one and two tokens; O(1) each.

        The arguments and errors are those of `SuccessorTable.put`. There is room for a sixteenth as
        many contexts as `capacity_tokens`, rounded up as in `SuccessorTable`.
        """
        self._harvested.put(contexts, token_ids, probs)
        self._count_unigrams(token_ids, probs)

    @alone
    def harvest_tree(
        self,
        previous: int,
        nodes: ArrayLike,
        parents: ArrayLike,
        token_ids: ArrayLike,
        probs: ArrayLike,
    ) -> None:
        """Learn what a target finds likely after each node of a tree, in one call.

        The arguments and errors are those of `SuccessorTable.put_tree`.
        """
        self._harvested.put_tree(previous, nodes, parents, token_ids, probs)
        self._count_unigrams(token_ids, probs)

    # --- reading ----------------------------------------------------------------------------

    def draft(
        self,
        context: Sequence[int] | NDArray[np.integer[Any]],
        max_draft_tokens: int,
        max_candidates: int | None = None,
        sequence: int | None = None,
    ) -> Draft:
        """Propose how `context` goes on, likeliest nodes first; O(N) lookups per node.

        Every node's own context, of N tokens down to one, is looked up in the text and in the
        tables, and what followed there becomes its children. `probs` estimates the acceptance of
        each node, that is, of its whole path. The likeliest path goes on as long as anything is
        known and nodes are left; side branches less likely than 0.1 % are not drafted.

        Args:
            context: integers [num_tokens], oldest first; only the last `max_match` matter. Need
                not have been observed.
            max_draft_tokens: maximum number of tokens to propose.
            max_candidates: G, the maximum number of root-to-leaf paths; None for no limit.
            sequence: the open sequence of the context, for its table and to tell its own text from
                others'; None for neither.

        Returns:
            A draft of at most `max_draft_tokens` tokens; empty where no successor is known.

        Raises:
            TypeError, ValueError: as for `observe`; sizes must be positive integers.

        >>> pool = NGramPool()
        >>> pool.observe([1, 2, 3, 1, 2, 4, 1, 2, 3])
        >>> pool.draft([9, 1, 2], max_draft_tokens=2).candidates()
        [[3], [4]]
        >>> len(pool.draft([8], max_draft_tokens=2))
        0
        """
        ids, max_draft_tokens, max_leaves = self._check_draft(
            context, max_draft_tokens, max_candidates
        )
        return self._draft(ids, max_draft_tokens, max_leaves, sequence)

    def sample(
        self,
        context: Sequence[int] | NDArray[np.integer[Any]],
        max_draft_tokens: int,
        rng: np.random.Generator,
        max_candidates: int | None = None,
        sequence: int | None = None,
    ) -> SampledDraft:
        """Propose how `context` goes on, drawn at random; O(N) lookups per node.

        Every node's token is drawn from the successors that `draft` would choose among, in
        proportion to their probabilities, children of one parent without replacement. The place
        with the greatest expected probability is filled first; further children that expect less
        than 0.1 % are not drawn. A place never depends on the token drawn there, so rejection
        sampling by the returned distributions is unbiased (`SampledDraft` says which nodes may be
        left out).

        Args:
            context: integers [num_tokens], oldest first; only the last `max_match` matter. Need
                not have been observed.
            max_draft_tokens: maximum number of tokens to propose.
            rng: gives `max_draft_tokens` uniforms, whatever is found, so that equal generators give
                equal drafts and stay equal.
            max_candidates: G, the maximum number of root-to-leaf paths; None for no limit.
            sequence: the open sequence of the context, for its table and to tell its own text from
                others'; None for neither.

        Returns:
            A draft of at most `max_draft_tokens` tokens; empty where no successor is known.

        Raises:
            TypeError, ValueError: as for `draft`; `rng` must be a numpy Generator.

        >>> pool = NGramPool()
        >>> pool.observe([1, 2, 3, 1, 2, 4, 1, 2])
        >>> draft = pool.sample([1, 2], max_draft_tokens=2, rng=np.random.default_rng(0))
        >>> np.flatnonzero(draft.dense_probs(vocab_size=6)[0]).tolist()
        [3, 4]
        """
        ids, max_draft_tokens, max_leaves = self._check_draft(
            context, max_draft_tokens, max_candidates
        )
        if not isinstance(rng, np.random.Generator):
            raise TypeError(f"expected rng to be a numpy.random.Generator, got {rng!r}")
        return self._draw(ids, max_draft_tokens, max_leaves, rng, sequence)

    def explore(
        self,
        max_tokens: int,
        excluded: Sequence[int] | NDArray[np.integer[Any]] = (),
        sequence: int | None = None,
    ) -> tuple[Int32Array, Float64Array]:
        """Name tokens worth running anywhere in a text, for what is harvested there.

        A token is worth its unigram probability in all that was harvested, five times as much if
        its successors are not known: they are, once it was run. Nothing is named before something
        was harvested. Linear in 4,096, the number of tokens whose counts are kept.

        Args:
            max_tokens: maximum number of tokens to name.
            excluded: integers [num_excluded], tokens not to name.
            sequence: the open sequence that will run them, for its table; None for no table.

        Returns:
            Token ids, int32 [num_tokens], and what each is worth, float64 [num_tokens] in expected
            tokens, never increasing.

        Raises:
            TypeError, ValueError: as for `observe`; `max_tokens` must be a positive integer.

        >>> pool = NGramPool()
        >>> pool.harvest([[-1, 5]], [[5, 6]], [[0.75, 0.25]])
        >>> pool.explore(max_tokens=2)[0].tolist()
        [6, 5]
        """
        ids = token_ids_of("excluded", excluded)
        return self._explore(positive("max_tokens", max_tokens), ids, sequence)

    # --- checking ---------------------------------------------------------------------------

    @alone
    def check(self) -> None:
        """Verify every invariant of the arrays; O(tokens held * N) in plain Python, for tests.

        Raises:
            AssertionError: an invariant is broken, which only a bug in this package can cause.
        """
        text, links, heads = self._held
        num_rows, num_orders, first = len(text), self._max_ngram_size, self._first
        num_observed = self._counts.item(NEXT_POSITION)
        assert num_rows <= self._capacity
        assert links.shape == (num_rows, num_orders)
        assert num_observed - first <= num_rows
        assert num_observed <= _POSITION_LIMIT
        assert num_rows == self._capacity or num_observed <= num_rows
        assert np.isfinite(self._weights).all()
        assert np.isfinite(self._unigrams.counts).all()
        assert (self._unigrams.counts[self._unigrams.token_ids == NONE] == 0).all()
        for opened in [ref() for ref in self._sequences.values()]:
            if opened is None:
                continue
            state = opened.state.copy()
            _kernels.lower(state, self._counts)
            assert NONE <= state[TAIL] < num_observed
            assert state[TAIL] < first or text[state[TAIL] % num_rows, NEXT] == NONE
            assert 0 <= state[PROMPT] <= state[ANSWER]
            assert opened.state[LOWERED_THEN] <= state[LOWERED_THEN]
        expected: dict[tuple[int, int], list[int]] = {}
        for position in range(first, num_observed):
            row = text[position % num_rows]
            assert 0 <= row[TOKEN] <= MAX_TOKEN_ID
            assert NONE <= row[PREVIOUS] < position
            assert row[NEXT] == NONE or position < row[NEXT] < num_observed
            if row[PREVIOUS] >= first:
                assert text[row[PREVIOUS] % num_rows, NEXT] == position
            if row[NEXT] != NONE:
                assert text[row[NEXT] % num_rows, PREVIOUS] == position
            hashed, reached = 0, position
            for order in range(num_orders):
                if reached < first:
                    break
                reached_row = text[reached % num_rows]
                hashed = _kernels.hash_step(hashed, int(reached_row[TOKEN]))
                bucket = hashed & (heads.shape[1] - 1)
                expected.setdefault((order, bucket), []).insert(0, position)
                reached = int(reached_row[PREVIOUS])
        for order in range(num_orders):
            for bucket in range(heads.shape[1]):
                chain, position = [], int(heads[order, bucket])
                while position >= first:
                    if self._starts_at(position, order) >= first:
                        chain.append(position)
                    older = int(links[position % num_rows, order])
                    assert older < position, "links lead to older positions"
                    position = older
                assert chain == expected.get((order, bucket), [])

    # --- inside, without the lock -----------------------------------------------------------

    def _check_draft(
        self,
        context: Sequence[int] | NDArray[np.integer[Any]],
        max_draft_tokens: int,
        max_candidates: int | None,
    ) -> tuple[Int64Array, int, int]:
        """Return the part of the context that matters and both sizes, or raise."""
        ids = token_ids_of("context", context)[-self.max_match :]
        max_draft_tokens = positive("max_draft_tokens", max_draft_tokens)
        if max_candidates is None:
            return ids, max_draft_tokens, max_draft_tokens
        return ids, max_draft_tokens, positive("max_candidates", max_candidates)

    # --- inside, under the lock -------------------------------------------------------------

    @property
    def _first(self) -> int:
        """Oldest position held."""
        return self._counts.item(NEXT_POSITION) - len(self)

    def _sequence(self, handle: int) -> _Sequence:
        try:
            opened = self._sequences[handle]()
        except (KeyError, TypeError):
            opened = None
        if opened is None:
            raise ValueError(f"expected an open sequence, got {handle!r}")
        return opened

    def _starts_at(self, position: int, order: int) -> int:
        for _ in range(order):
            if position < self._first:
                return NONE
            position = int(self._held.text[position % len(self._held.text), PREVIOUS])
        return position

    @alone
    def _open_sequence(self, prewarmed: SuccessorTable) -> int:
        if len(self._sequences) >= self._purge_at:
            living = {k: ref for k, ref in self._sequences.items() if ref() is not None}
            self._sequences, self._purge_at = living, 2 * len(living) + _FIRST_PURGE
        number = self._num_opened
        handle = _Handle(number)
        handle.sequence = _Sequence(prewarmed)
        self._num_opened = number + 1
        self._sequences[number] = weakref.ref(handle.sequence)  # the handle itself would live on
        return handle

    @alone
    def _observe(self, ids: Int64Array, sequence: int, is_answer: bool) -> None:
        opened = self._sequence(sequence)
        num_tokens = self._counts.item(NEXT_POSITION) + len(ids)
        if len(self._held.text) < min(num_tokens, self._capacity):
            self._grow(num_tokens)
        # In pieces that fit the capacity, so that positions can count them.
        piece = min(self._capacity, _PIECE)
        for start in range(0, len(ids), piece):
            self._append(ids[start : start + piece], opened, is_answer)

    @alone
    def _draft(
        self, ids: Int64Array, max_draft_tokens: int, max_leaves: int, sequence: int | None
    ) -> Draft:
        opened = self._no_sequence if sequence is None else self._sequence(sequence)
        if not len(ids):
            return Draft.empty()
        scratch = self._scratch_for(max_draft_tokens)
        reversed_context = np.ascontiguousarray(ids[::-1])
        num_nodes = self._grow_tree(reversed_context, max_draft_tokens, max_leaves, opened, scratch)
        token_ids, parents, depths = scratch.nodes[:3, :num_nodes].astype(np.int32)
        return Draft(token_ids, parents, depths, scratch.node_probs[:num_nodes].copy())

    @alone
    def _draw(
        self,
        ids: Int64Array,
        max_draft_tokens: int,
        max_leaves: int,
        rng: np.random.Generator,
        sequence: int | None,
    ) -> SampledDraft:
        opened = self._no_sequence if sequence is None else self._sequence(sequence)
        uniforms = rng.random(max_draft_tokens)
        if not len(ids):
            return SampledDraft.empty()
        scratch = self._scratch_for(max_draft_tokens)
        reversed_context = np.ascontiguousarray(ids[::-1])
        num_nodes = self._sample_tree(
            reversed_context, max_draft_tokens, max_leaves, uniforms, opened, scratch
        )
        token_ids, parents, depths = scratch.nodes[:3, :num_nodes].astype(np.int32)
        return SampledDraft(
            token_ids,
            parents,
            depths,
            scratch.node_probs[:num_nodes].copy(),
            scratch.left_ids[parents + 1].astype(np.int32),
            scratch.support_probs[:num_nodes].copy(),
        )

    def _count_unigrams(self, token_ids: ArrayLike, probs: ArrayLike) -> None:
        ids, floats = np.ascontiguousarray(token_ids, np.int32), np.ascontiguousarray(probs, "f4")
        _kernels.count_unigrams(*self._unigrams, ids, floats)

    @alone
    def _explore(
        self, max_tokens: int, excluded: Int64Array, sequence: int | None
    ) -> tuple[Int32Array, Float64Array]:
        opened = self._no_sequence if sequence is None else self._sequence(sequence)
        token_ids, worths = np.empty(max_tokens, np.int32), np.empty(max_tokens)
        num = _kernels.find_worthwhile(
            *self._unigrams,
            self._harvested.rows,
            opened.prewarmed.rows,
            excluded,
            token_ids,
            worths,
        )
        return token_ids[:num], worths[:num]

    # --- arrays -----------------------------------------------------------------------------
    #
    # Each group of arrays is replaced as a whole, in one store: if memory runs out or an interrupt
    # comes, the pool stays as it was.

    def _empty(self, num_rows: int) -> _Held:
        # One bucket per row, rounded down to a power of two: a bucket holds 1 to 2 positions.
        num_buckets = 1 << (num_rows.bit_length() - 1)
        return _Held(
            np.full((num_rows, 3), NONE, np.int32),
            np.full((num_rows, self._max_ngram_size), NONE, np.int32),
            np.full((self._max_ngram_size, num_buckets), NONE, np.int32),
        )

    def _grow(self, num_tokens: int) -> None:
        old = self._held.text
        num_rows = len(old)
        while num_rows < min(num_tokens, self._capacity):
            num_rows = min(2 * num_rows, self._capacity)
        new = self._empty(num_rows)
        # Arrays grow before the first overwrite, so a position still is its own row.
        new.text[: len(old)] = old
        _kernels.reindex(*new, self._counts)
        self._held = new

    def _scratch_for(self, max_draft_tokens: int) -> _Scratch:
        if max_draft_tokens > self._scratch.nodes.shape[1]:
            self._scratch = self._room_for_tree(max_draft_tokens)
        return self._scratch

    def _room_for_tree(self, max_draft_tokens: int) -> _Scratch:
        width = _kernels.MAX_FOUND
        return _Scratch(
            candidates=np.empty((3, max_draft_tokens * width), np.int64),
            candidate_probs=np.empty(max_draft_tokens * width, np.float64),
            left_ids=np.empty((max_draft_tokens + 1, width), np.int64),
            left_probs=np.empty((max_draft_tokens + 1, width), np.float64),
            nodes=np.empty((5, max_draft_tokens), np.int64),
            node_probs=np.empty(max_draft_tokens, np.float64),
            support_probs=np.empty((max_draft_tokens, width), np.float64),
        )

    def _room_for_one(self) -> _ForOne:
        width = _kernels.MAX_FOUND
        return _ForOne(
            context=np.empty(self.max_match, np.int64),
            found=np.empty((8, max(width, self._max_ngram_size + 1)), np.int64),
            features=np.empty((width, _kernels.NUM_FEATURES), np.float64),
            summed=np.empty(_kernels.NUM_WEIGHTS, np.float64),
            found_probs=np.empty(width, np.float64),
        )

    # --- kernels ----------------------------------------------------------------------------

    def _append(self, ids: Int64Array, sequence: _Sequence, is_answer: bool) -> None:
        if self._counts.item(NEXT_POSITION) + len(ids) > _POSITION_LIMIT:
            _kernels.rebase(*self._held, self._counts)
        room = self._for_one
        _kernels.append(
            *self._held,
            self._counts,
            sequence.state,
            ids,
            self._learning_rate if is_answer else 0.0,
            self._harvested.rows,
            sequence.prewarmed.rows,
            self._weights,
            room.context,
            room.found,
            room.features,
            room.summed,
            room.found_probs,
        )

    def _grow_tree(
        self,
        reversed_context: Int64Array,
        max_draft_tokens: int,
        max_leaves: int,
        sequence: _Sequence,
        scratch: _Scratch,
    ) -> int:
        room = self._for_one
        return _kernels.grow_tree(
            *self._held,
            self._counts,
            sequence.state,
            self._harvested.rows,
            sequence.prewarmed.rows,
            self._weights,
            reversed_context,
            max_draft_tokens,
            max_leaves,
            room.context,
            room.found,
            room.features,
            room.summed,
            room.found_probs,
            scratch.candidates,
            scratch.candidate_probs,
            scratch.nodes,
            scratch.node_probs,
        )

    def _sample_tree(
        self,
        reversed_context: Int64Array,
        max_draft_tokens: int,
        max_leaves: int,
        uniforms: Float64Array,
        sequence: _Sequence,
        scratch: _Scratch,
    ) -> int:
        room = self._for_one
        return _kernels.sample_tree(
            *self._held,
            self._counts,
            sequence.state,
            self._harvested.rows,
            sequence.prewarmed.rows,
            self._weights,
            reversed_context,
            max_draft_tokens,
            max_leaves,
            uniforms,
            room.context,
            room.found,
            room.features,
            room.summed,
            room.found_probs,
            scratch.candidates,
            scratch.candidate_probs,
            scratch.left_ids,
            scratch.left_probs,
            scratch.nodes,
            scratch.node_probs,
            scratch.support_probs,
        )

    def _run_kernels(self) -> None:
        """Run every kernel once, so that the first token does not wait for a compiler."""
        self._append(np.empty(0, np.int64), self._no_sequence, False)
        _kernels.reindex(*self._held, self._counts)
        _kernels.rebase(*self._held, self._counts)
        nothing, scratch = np.zeros(1, np.int64), self._scratch
        self._grow_tree(nothing, 1, 1, self._no_sequence, scratch)
        self._sample_tree(nothing, 1, 1, np.zeros(1), self._no_sequence, scratch)
        self._count_unigrams(np.empty((0, 1)), np.empty((0, 1)))
        self._explore(1, nothing, None)
        table = SuccessorTable(1)
        table.put(np.zeros((1, 2), np.int64), np.zeros((1, 1), np.int32), np.ones((1, 1)))
        table.put_tree(NONE, [0], [NONE], [[0]], [[1.0]])
        SuccessorTable.from_arrays(table.arrays())
