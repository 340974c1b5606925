"""`NGramPool`: the text seen so far, the target's successors, and drafts from both.

This file checks arguments, owns the arrays and calls one kernel per operation; `_kernels.py`, next
to read, explains how the arrays are laid out. Nothing here depends on models or torch.
"""

import copy
import os
import secrets
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ngram_pool import _kernels
from ngram_pool._kernels import (
    ANSWER,
    HASH_MASK,
    HASH_MULTIPLIER,
    LOWERED,
    LOWERED_THEN,
    MAX_TOKEN_ID,
    MULTIPLIER,
    NEVER,
    NEXT,
    NEXT_POSITION,
    NONE,
    PREVIOUS,
    PROMPT,
    SEED,
    TAIL,
    TOKEN,
    Float64Array,
    Int32Array,
    Int64Array,
)
from ngram_pool.chains import DraftChains
from ngram_pool.checks import positive, token_ids_of
from ngram_pool.compiling import compile_by
from ngram_pool.delta import PoolDelta, PoolStamp
from ngram_pool.draft import Draft, SampledDraft
from ngram_pool.errors import PoolFileError, ReadOnlyPoolError
from ngram_pool.files import StoredPool, read_pool, write_pool
from ngram_pool.locks import lock_of_pool, reading, writing
from ngram_pool.table import SuccessorTable, keys_of, probs_of
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
_NO_LAYERS = np.empty((0, _kernels.NUM_LAYER_COLUMNS), np.int64)
# Bits of a seed: 31 of the hash's first state, and 29 of its multiplier, which stays odd and large.
_SEED_BITS = 60
# Scratch for drafts is kept for this many threads at a time; further ones allocate theirs anew.
_MAX_ROOMS = 8
_MAX_CHAIN_TOKENS = 2**16  # far above what any model verifies at once
_LEAST_ROOM = 64  # nodes that scratch is for at least
# How far one token of an answer moves the weights of the sources. From the initial weights, fitted
# to the same model, a rate of 0 accepted 0.4 % fewer tokens, 0.01 2 % fewer, and 0.03 9 % fewer.
_LEARNING_RATE = 0.003
_UNBEGUN = (NONE, NEVER, NEVER, 0)  # the state of a sequence without text
_FIRST_PURGE = 64  # sequences held before those whose handle is gone are first dropped
# Pools whose last delta is remembered, so that it is not taken twice, and sequences of theirs that
# may go on in their next ones; those that came longest ago are dropped.
_MAX_ORIGINS = 4096
_MAX_CONTINUED = 1024
# Stretches of text that came from other pools. Beyond that, the text between the two oldest ones
# counts as other pools', too.
_MAX_STRETCHES = 1024
# Attributes that a copy of a pool allocates anew.
_NOT_COPIED = {
    *("_lock", "_sequences", "_purge_at", "_no_sequence", "_rooms", "_keeper"),
    *("_origin", "_continued", "_known_row"),
}


class _Row:
    """What the kernels know of a pool or a sequence whose arrays they find by address.

    It holds none of these arrays: whoever reads them by it does.
    """

    def __init__(self, values: Sequence[int], arrays: Sequence[NDArray[Any]]) -> None:
        self.values = np.array(values, np.int64)
        self.address: int = self.values.ctypes.data
        self._arrays = [weakref.ref(array) for array in arrays]

    def is_of(self, arrays: Sequence[NDArray[Any]]) -> bool:
        """Return whether these are the arrays whose addresses it has."""
        return all(ref() is array for ref, array in zip(self._arrays, arrays, strict=True))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy has other arrays


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Sequence:
    """A sequence, open for as long as it is referenced."""

    prewarmed: SuccessorTable
    #: Pools that are only read: held here, as the kernels know their arrays by address alone.
    layers: tuple["NGramPool", ...] = ()
    #: The kernels' `layers`.
    layer_rows: Int64Array = field(default_factory=lambda: _NO_LAYERS)
    #: The kernels' `sequence`, int64 [4].
    state: Int64Array = field(default_factory=lambda: np.array(_UNBEGUN, np.int64))
    #: As of the last call of `row`.
    known_row: _Row | None = None

    def row(self) -> tuple[_Row, NamedTuple]:
        """Return the kernels' row, and what must be held while they read by it."""
        held, known = self.prewarmed.held, self.known_row
        if known is None or not known.is_of((held.keys,)):
            places = [array.ctypes.data for array in (self.state, self.layer_rows, *held[:3])]
            num_keys = 0 if self.prewarmed is _NO_TABLE else len(held.keys)
            sizes = (num_keys, held.token_ids.shape[1])
            values = (places[0], places[1], len(self.layers), *places[2:], *sizes)
            known = self.known_row = _Row(values, (held.keys,))
        return known, held


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

    def copy(self) -> "_Unigrams":
        return _Unigrams._make(array.copy() for array in self)

    def as_dict(self) -> dict[int, float]:
        is_held = self.token_ids != NONE
        return dict(
            zip(self.token_ids[is_held].tolist(), self.counts[is_held].tolist(), strict=True)
        )


class _Room(NamedTuple):
    """Scratch arrays of the kernels, for one thread."""

    # for one context
    context: Int64Array
    found: Int64Array
    features: Float64Array
    summed: Float64Array
    found_probs: Float64Array
    # for a tree
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
    text is forgotten first. As long as nothing was harvested and no answer observed, the pool
    behaves like a new one that was given the newest `capacity_tokens` tokens. Methods may be called
    from several threads, and run without holding the GIL: those that only read, beside each other;
    those that write, alone. Wherever a method is interrupted, the pool is consistent: as before or
    after it, or between two pieces of long input. A pool can be copied or pickled at any time; the
    copy is independent, and only sequence 0 is open in it.

    A pool that is only read (`as_read_only`) can be a *layer* of any number of sequences of other
    pools, in any number of threads: their drafts come from its text, too (`open_sequence`).

    Args:
        capacity_tokens: maximum number of tokens held; each takes up to 20 + 8 N bytes, 60 with the
            default N, and half as much again for the moment in which the arrays grow. The largest
            draft takes another 2.7 kB per node, for at least 64 nodes and each of up to 8 threads
            that draft at once, and the target's unigrams 48 kB.
        max_ngram_size: N; contexts of 1 to N tokens are indexed and matched.
        seed: from 0 to 2**60 - 1, of the hashes; None for a secret one, so that nobody can make
            texts that slow the pool down. The same calls give the same drafts only in pools of the
            same seed, though others hardly ever differ.

    Raises:
        TypeError: a size or the seed is not an integer.
        ValueError: a size is not positive, the capacity exceeds 2**29 tokens, or the seed is out of
            range.

    >>> pool = NGramPool(capacity_tokens=1000)
    >>> pool.observe([5, 6, 7, 8, 9, 5, 6])
    >>> draft = pool.draft([5, 6], max_draft_tokens=2)
    >>> draft.token_ids.tolist(), draft.parents.tolist()
    ([7, 8], [-1, 0])
    """

    #: Forgets in the file too, where the pool is that of a store.
    _keeper: Callable[[Int64Array], int] | None = None

    def __init__(
        self,
        capacity_tokens: int = DEFAULT_CAPACITY_TOKENS,
        max_ngram_size: int = DEFAULT_MAX_NGRAM_SIZE,
        seed: int | None = None,
    ) -> None:
        self._capacity = positive("capacity_tokens", capacity_tokens)
        self._max_ngram_size = positive("max_ngram_size", max_ngram_size)
        if self._capacity > MAX_CAPACITY_TOKENS:
            raise ValueError(
                f"expected capacity_tokens of at most {MAX_CAPACITY_TOKENS}, got {self._capacity}"
            )
        #: Fingerprints, opaque here, of the tokenizer of the text and of the model whose harvested
        #: successors these are; "" where unknown.
        self.tokenizer = ""
        self.model = ""
        self._begin(seed)
        self._allocate_the_rest()
        compile_by(self._run_kernels)

    def _begin(self, seed: int | None) -> None:
        """Hold nothing yet."""
        self._is_read_only = False
        self._num_opened = 1
        # Averaging over the last ten times of a context accepted as many tokens.
        num_contexts = max(1, int(self._capacity * _CONTEXTS_PER_TOKEN))
        self._harvested = SuccessorTable(num_contexts, averages=False)
        self._unigrams = _Unigrams.empty()
        self._weights = first_weights()
        self._learning_rate = _LEARNING_RATE
        self._counts = _first_counts(seed)
        self._held = self._empty(min(_FIRST_NUM_ROWS, self._capacity))
        self._sequence_0 = _Sequence(_NO_TABLE)
        # From where to where text came from other pools, counted as `_num_observed` counts.
        self._taken: tuple[tuple[int, int], ...] = ()
        # By origin, in the order in which they came: the epoch until which deltas were taken.
        self._taken_until: OrderedDict[str, int] = OrderedDict()

    @reading
    def __getstate__(self) -> dict[str, Any]:
        return copy.deepcopy({k: v for k, v in vars(self).items() if k not in _NOT_COPIED})

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Arrays from out-of-band buffers of a pickle can be read-only; copies are not.
        self._become(copy.deepcopy(state))
        NGramPool(1, seed=0)  # so that the first token does not wait for a compiler

    def _become(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._allocate_the_rest()

    def __copy__(self) -> "NGramPool":
        copied = type(self).__new__(type(self))
        copied._become(self.__getstate__())  # which is a copy, unlike that of a pickle
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "NGramPool":
        return copy.copy(self)

    def beside(self) -> "NGramPool":
        """Return a new, empty pool of the same sizes and seed, written together with this one.

        Pools made beside one another share a lock and scratch, so that `draft_chains` takes texts
        of all of them in one call, and so that one more costs little. They share no text.

        >>> pool = NGramPool()
        >>> other = pool.beside()
        >>> pool.observe([5, 6, 7])
        >>> len(other)
        0
        """
        other = NGramPool.__new__(NGramPool)
        other._capacity, other._max_ngram_size = self._capacity, self._max_ngram_size
        other.tokenizer, other.model = self.tokenizer, self.model
        other._begin(self.seed)
        other._allocate_the_rest(beside=self)
        return other

    def _allocate_the_rest(self, beside: "NGramPool | None" = None) -> None:
        """Allocate the attributes in `_NOT_COPIED`, which every copy has of its own."""
        self._lock: Any = lock_of_pool() if beside is None else beside._lock
        # Weak references, so that a sequence is closed when its handle is gone.
        self._sequences = {0: weakref.ref(self._sequence_0)}
        self._purge_at = _FIRST_PURGE
        self._no_sequence = _Sequence(_NO_TABLE)
        # The name of this pool among all there are, and the process in which it is that.
        self._origin = "", -1
        # Sequences of other pools, by origin and last position there.
        self._continued: OrderedDict[tuple[str, int], _Sequence] = OrderedDict()
        self._known_row: _Row | None = None  # as of the last call of `_row`
        # Free scratch, by number of layers.
        rooms = {0: [self._room(_LEAST_ROOM, 0)]} if beside is None else beside._rooms
        self._rooms: dict[int, list[_Room]] = rooms

    # --- what is held -----------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of tokens held, and of empty places; at most `capacity_tokens`."""
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
        rooms = [room for free in list(self._rooms.values()) for room in list(free)]
        arrays = [array for group in (self._held, self._unigrams, *rooms) for array in group]
        arrays += [self._weights, self._counts]
        return sum(array.nbytes for array in arrays) + self._harvested.nbytes

    @property
    def seed(self) -> int:
        """The seed of the hashes; a secret, where the text comes from strangers."""
        state, multiplier = self._counts.item(SEED), self._counts.item(MULTIPLIER)
        return state | ((multiplier ^ HASH_MULTIPLIER) >> 1) << 31

    @property
    def is_read_only(self) -> bool:
        """Whether the pool never learns or forgets anything, so that it can be a layer."""
        return self._is_read_only

    @property
    def num_open_sequences(self) -> int:
        """Number of open sequences besides sequence 0; linear in that number."""
        return sum(opened() is not None for opened in list(self._sequences.values())) - 1

    # --- writing ----------------------------------------------------------------------------

    def open_sequence(
        self,
        prewarmed: SuccessorTable | None = None,
        layers: Sequence["NGramPool"] = (),
    ) -> int:
        """Open one more sequence and return its handle for `observe`; amortised O(1).

        Sequence 0 is always open. No n-gram runs across two sequences, however their tokens are
        interleaved, but a draft for one uses the text of all.

        The handle is a number that no other sequence gets, and an object: when its last reference
        is gone, for example because an exception ended the function that was to close it, the
        sequence is closed. While it lives, any equal number names the sequence as well.

        Args:
            prewarmed: table of what the sequence's target finds likely after single tokens and
                pairs; read, never written.
            layers: pools that are only read, of any sizes. Drafts for the sequence come from their
                text as well, and where this pool has harvested nothing after a context, from what
                they have. The weights of the first four are learned each on its own; further ones
                share those of the fourth.

        Raises:
            TypeError: `prewarmed` is not a `SuccessorTable`, or a layer not an `NGramPool`.
            ValueError: a layer is not read-only.

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
        held = _checked_layers(layers)
        rows = np.array([layer._as_layer() for layer in held], np.int64) if held else _NO_LAYERS
        table = _NO_TABLE if prewarmed is None else prewarmed
        return self._open_sequence(_Sequence(table, held, rows))

    @writing
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

    @writing
    def harvest(self, contexts: ArrayLike, token_ids: ArrayLike, probs: ArrayLike) -> None:
        """Learn what a target finds likely after contexts of one and two tokens; O(1) each.

        The arguments and errors are those of `SuccessorTable.put`. There is room for a sixteenth as
        many contexts as `capacity_tokens`, rounded up as in `SuccessorTable`.
        """
        self._harvested.put(contexts, token_ids, probs)
        self._count_unigrams(token_ids, probs)

    @writing
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

    # --- text as a whole --------------------------------------------------------------------

    def texts(self) -> Iterator[Int32Array]:
        """Return what is held, sequence by sequence, those that began first before others.

        A sequence that is held in part, or that something was forgotten of, comes in the parts
        that are held. Linear in the tokens held, at the call; what is observed later is not in it.

        >>> pool = NGramPool()
        >>> pool.observe([5, 6, 7])
        >>> [text.tolist() for text in pool.texts()]
        [[5, 6, 7]]
        """
        return self._texts_since(0)

    def merge(self, other: "NGramPool | PoolDelta") -> bool:
        """Observe all text of another pool, or of a delta, and take its harvested successors.

        Each of its sequences is observed as one of its own; one that goes on in the next delta of
        the same pool goes on here. Where both know the successors of a context, those of the other
        are taken. Of a token's expected counts, the greater is taken from a pool; to them is added
        what a delta expects of it. The weights of the sources stay as they are, and `other` is
        unchanged.

        A delta that was merged before is left out, and so is one of this pool itself. A pool
        remembers that of the last 4,096 pools which deltas came from, not in its file.

        Returns:
            Whether it was taken: False for a delta that is left out.

        Raises:
            ReadOnlyPoolError: the pool is read-only.
            TypeError: `other` is neither a pool nor a delta.
            ValueError: it is this pool itself, or holds text of another tokenizer; or a delta has
                a part of what was merged before, and more. The pool is unchanged after such an
                error; after an interrupt, it has taken a first part.

        Warns:
            UserWarning: `other` has successors of another model, which are left out.

        >>> pool, other = NGramPool(), NGramPool()
        >>> other.observe([5, 6, 7])
        >>> pool.merge(other)
        True
        >>> pool.draft([5], max_draft_tokens=2).candidates()
        [[6, 7]]
        """
        if not isinstance(other, NGramPool | PoolDelta):
            raise TypeError(f"expected an NGramPool or a PoolDelta, got {other!r}")
        if other is self:
            raise ValueError("expected another pool, got this one itself")
        if self._is_read_only:
            raise ReadOnlyPoolError(f"expected a pool that learns for merge, got {self!r}")
        if self.tokenizer and other.tokenizer and self.tokenizer != other.tokenizer:
            kind = "pool" if isinstance(other, NGramPool) else "delta"
            raise ValueError(
                f"expected text of the tokenizer {self.tokenizer}, got a {kind} of "
                f"{other.tokenizer}"
            )
        if isinstance(other, PoolDelta):
            return self._take_delta(other)
        self._take_from(other, 0)
        return True

    @writing
    def stamp(self) -> PoolStamp:
        """Mark this moment: `delta` of the stamp has what is learned later; O(1).

        A stamp is of this pool in memory. It is none of a copy, nor of what is loaded from its
        file: they take their own.
        """
        return self._stamp()

    def delta(
        self,
        since: PoolStamp | None = None,
        *,
        with_harvest: bool = True,
        max_bytes: int | None = None,
    ) -> PoolDelta:
        """Return what the pool itself learned since a stamp, to be merged into other pools.

        What it took from other pools (`merge`) is not in it, so that pools can exchange deltas back
        and forth. What has been overwritten or forgotten is not, either; what was sent before
        something was forgotten has to be forgotten wherever it went. Linear in what came since.

        A delta is text. What is private to a user, a call or a tenant must not leave them in one:
        keep a pool for each, or send the deltas of shared pools only.

        Args:
            since: `stamp()` of this pool, or `until` of its last delta; None for all that is held,
                what was in the file that it was loaded from too.
            with_harvest: whether harvested successors are in it; they take far more room than text.
            max_bytes: of its arrays in memory (`PoolDelta.nbytes`): the newest text that fits, and
                then the newest contexts; None for all. What is left out is in no later delta.

        Raises:
            ReadOnlyPoolError: the pool is read-only.
            TypeError, ValueError: the stamp is not one, or of another pool; `max_bytes` is not a
                positive integer.

        >>> pool, other = NGramPool(), NGramPool()
        >>> pool.observe([5, 6, 7])
        >>> delta = pool.delta()
        >>> other.merge(PoolDelta.from_bytes(delta.to_bytes()))
        True
        >>> pool.observe([8])
        >>> pool.delta(delta.until).num_tokens, other.delta().num_tokens
        (1, 0)
        """
        if not isinstance(since, PoolStamp | None):
            raise TypeError(f"expected since to be a PoolStamp or None, got {since!r}")
        if max_bytes is not None:
            max_bytes = positive("max_bytes", max_bytes)
        delta = self._delta(since, with_harvest)
        return delta if max_bytes is None else delta.newest(max_bytes)

    def forget(self, token_ids: Sequence[int] | NDArray[np.integer[Any]]) -> int:
        """Remove every occurrence of some tokens in a row, for good; linear in what is held.

        No sequence holds them afterwards; what stood before and behind each occurrence are two
        sequences. Where a sequence begins with their last ones, or ends with their first, those go
        too: the rest may be too old to be held. The places stay empty until new text takes them, so
        the length of what was forgotten can still be told, and nothing else of it.

        Of what was harvested, the contexts that occurrences were part of are dropped: each of these
        tokens, each two neighbours among them, and the two across either end of an occurrence. A
        token that no other text held has is dropped wherever it stands: in contexts, successors and
        expected counts.

        What is left: of tokens that other text has too, how likely they are in other contexts and
        at all; and the weights of the sources, which hold no tokens. Read-only layers, copies and
        files made before are not touched, but a pool of a `PoolStore` is forgotten of in its file
        as well. Text observed later is learned anew.

        Args:
            token_ids: integers [num_tokens], at least one.

        Returns:
            How many occurrences there were, overlapping ones counted each.

        Raises:
            TypeError, ValueError: as for `observe`; there must be a token. The pool is unchanged
                after such an error.

        >>> pool = NGramPool()
        >>> pool.observe([1, 2, 7, 8, 3, 7, 8])
        >>> pool.forget([7, 8])
        2
        >>> [text.tolist() for text in pool.texts()]
        [[1, 2], [3]]
        """
        ids = token_ids_of("token_ids", token_ids)
        if not len(ids):
            raise ValueError("expected token_ids to forget, got none")
        return self._forget(ids) if self._keeper is None else self._keeper(ids)

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

    def draft_chains(
        self,
        texts: ArrayLike,
        lengths: ArrayLike,
        max_draft_tokens: ArrayLike,
        sequences: Sequence[int] | None = None,
        num_new: ArrayLike | None = None,
        min_probability: float = 0.0,
        pools: Sequence["NGramPool"] | None = None,
        max_learned: int | None = None,
    ) -> DraftChains:
        """Propose the likeliest path on from each of many texts, in one compiled call.

        As `draft` with `max_candidates=1` for each text in turn, but as far as the path is likely
        enough. With `num_new`, the newest tokens of all texts are first observed as answers, text
        by text, so that each draft knows what came last in any of them: a whole step of an engine.

        Args:
            texts: integers [num_rows, width], a text at the start of each row, oldest token first.
                An int32 array is read in place.
            lengths: integers [num_rows], how long each text is.
            max_draft_tokens: maximum length of all paths, or integers [num_rows] of each, from 0.
            sequences: the open sequence of each text, with its own layers and table; None for none.
            num_new: integers [num_rows], how many of each text's last tokens to observe; 0 for a
                text whose tokens are observed elsewhere. None to observe none, which other threads
                may do at the same time.
            min_probability: from 0 to 1; a path ends where it is less likely than this as a whole.
            pools: the pool of each text: this one, or one made `beside` it; None for this one.
            max_learned: from how many of the tokens observed the pools learn how far to trust their
                sources, evenly spread; None for all. Each takes about as long as a drafted token.

        Returns:
            A path for each row; empty where no successor is known.

        Raises:
            TypeError: what should be integers is not.
            ValueError: shapes do not match, a size or a token is out of range, a sequence is not
                open, a pool was not made beside this one, or tokens are to be observed without
                sequences. The pools are unchanged after such an error.
            ReadOnlyPoolError: tokens are to be observed, and the pool is read-only.

        >>> pool = NGramPool()
        >>> rows = [pool.open_sequence(), pool.open_sequence()]
        >>> texts = np.array([[5, 6, 7, 5, 6], [6, 7, 0, 0, 0]])
        >>> pool.draft_chains(texts, [5, 2], 2, rows, num_new=[5, 2]).tolist()
        [[7, 5], [5, 6]]
        """
        rows = _checked_rows(texts, lengths, max_draft_tokens, num_new)
        if not 0.0 <= min_probability <= 1.0:
            raise ValueError(f"expected min_probability from 0 to 1, got {min_probability!r}")
        num_read = np.maximum(rows.num_new, self.max_match)
        negative = _kernels.find_negative(rows.texts, rows.lengths, num_read)
        if negative != NONE:
            raise ValueError(
                f"expected token ids from 0 to {MAX_TOKEN_ID}, got less in row {negative}"
            )
        num_rows = len(rows.texts)
        for name, values in (("sequences", sequences), ("pools", pools)):
            if values is not None and len(values) != num_rows:
                raise ValueError(f"expected {num_rows} {name}, got {len(values)}")
        if sequences is None and num_new is not None:
            raise ValueError("expected sequences to observe tokens in, got None")
        if max_learned is None:
            stride = 1
        else:
            stride = max(1, -(-int(rows.num_new.sum()) // positive("max_learned", max_learned)))
        held_by = [self] * num_rows if pools is None else pools
        floor = float(min_probability)
        if num_new is None:
            return self._draft_chains(held_by, rows, sequences, floor)
        assert sequences is not None
        return self._observe_and_draft_chains(held_by, rows, sequences, floor, stride)

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

    def as_read_only(self) -> "NGramPool":
        """Return an independent copy that never changes; the pool itself if it is read-only.

        >>> docs = NGramPool()
        >>> docs.observe([1, 2, 3, 4])
        >>> mine = NGramPool()
        >>> sequence = mine.open_sequence(layers=[docs.as_read_only()])
        >>> mine.draft([1, 2], max_draft_tokens=2, sequence=sequence).candidates()
        [[3, 4]]
        """
        if self._is_read_only:
            return self
        frozen = copy.copy(self)
        frozen._is_read_only = True
        return frozen

    # --- files ------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all that the pool holds to a file; linear in `nbytes`.

        The file is for its owner's eyes only. It is replaced as a whole: whenever this is
        interrupted, even by a power cut, it is the old one or the new one. Pools that were loaded
        from the old one go on with what they have. Other threads may use the pool meanwhile; those
        that write to it wait while it is copied, which takes as much memory again, but not for the
        disk.

        Args:
            path: of the file; its folder is made if there is none.

        Raises:
            OSError: the file cannot be written; the old one is as it was.
            TypeError, ValueError: `tokenizer` or `model` is no string, or has more than 1000
                characters.
        """
        write_pool(Path(path), self._stored())

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        tokenizer: str = "",
        model: str = "",
        read_only: bool = False,
    ) -> "NGramPool":
        """Return the pool that `save` wrote, as if it had been copied.

        All of the file is read into memory of this process and checked, in 0.1 to 0.3 s per 100 MB.
        What the pool learns is in no file until it is saved, and whatever is done to the file
        later, the pool goes on with what it has.

        Args:
            path: of the file.
            tokenizer: fingerprint of the tokenizer that the pool is to be used with; "" for any.
            model: fingerprint of the model that the pool is to be used with; "" for any. If it is
                not the file's, the text is used, but not what another model found likely after it:
                harvested successors, unigrams and learned weights are left out, with a warning.
            read_only: whether the pool is only read (`is_read_only`).

        Raises:
            OSError: the file cannot be read.
            PoolFileError: the file is not a pool's, is damaged or of a newer format, or its text is
                of another tokenizer.

        >>> import tempfile
        >>> pool = NGramPool()
        >>> pool.observe([5, 6, 7, 8, 9, 5, 6])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pool.save(f"{folder}/my.pool")
        ...     loaded = NGramPool.load(f"{folder}/my.pool")
        >>> loaded.draft([5, 6], max_draft_tokens=2).candidates()
        [[7, 8]]
        """
        stored = read_pool(Path(path))
        if tokenizer and stored.tokenizer and tokenizer != stored.tokenizer:
            raise PoolFileError(
                f"{os.fspath(path)}: expected text of the tokenizer {tokenizer!r}, got text of "
                f"{stored.tokenizer!r}"
            )
        pool = cls(1, 1)
        is_of_model = not (model and stored.model and model != stored.model)
        pool._take(stored, os.fspath(path), is_of_model)
        pool.tokenizer = stored.tokenizer or tokenizer
        pool.model = model or stored.model
        pool._is_read_only = bool(read_only)
        if not is_of_model:
            warnings.warn(
                f"{os.fspath(path)}: successors, unigrams and weights are left out, because they "
                f"are of the model {stored.model!r}, not {model!r}; the text is used",
                stacklevel=2,
            )
        return pool

    @reading
    def _stored(self) -> StoredPool:
        """Return a copy of all that a file holds."""
        while True:
            held, table = self._held, self._harvested.held
            arrays = {
                **held._asdict(),
                **{f"unigrams.{name}": array for name, array in self._unigrams._asdict().items()},
                **{f"harvested.{name}": array for name, array in table._asdict().items()},
                "weights": self._weights,
                "sequence": self._sequence_0.state,
                "counts": self._counts,
            }
            # In one go: a signal handler of this thread may write before and after, not meanwhile.
            copies = dict(zip(arrays, map(np.ndarray.copy, arrays.values()), strict=True))
            if self._held is held and self._harvested.held is table:
                break
        _kernels.lower(copies["sequence"], copies["counts"])
        copies["sequence"] = copies["sequence"][:LOWERED_THEN]
        return StoredPool(
            self._max_ngram_size,
            self._capacity,
            copies["counts"].item(NEXT_POSITION),
            self.seed,
            self.tokenizer,
            self.model,
            copies,
        )

    def _take(self, stored: StoredPool, path: str, is_of_model: bool) -> None:
        """Become what a file holds, with or without what is of its model."""
        arrays = stored.arrays
        num_contexts = max(1, int(stored.capacity_tokens * _CONTEXTS_PER_TOKEN))
        self._harvested = SuccessorTable(num_contexts, averages=False)
        if stored.capacity_tokens > MAX_CAPACITY_TOKENS:
            raise PoolFileError(
                f"{path}: expected a capacity of at most {MAX_CAPACITY_TOKENS} tokens, "
                f"got {stored.capacity_tokens}"
            )
        if len(arrays["harvested.keys"]) > self._harvested.capacity:
            raise PoolFileError(
                f"{path}: part 'harvested.keys': expected at most {self._harvested.capacity} rows, "
                f"got {len(arrays['harvested.keys'])}"
            )
        self._capacity, self._max_ngram_size = stored.capacity_tokens, stored.max_ngram_size
        self._held = _Held(arrays["text"], arrays["links"], arrays["heads"])
        self._counts = _first_counts(stored.hash_seed)
        self._counts[NEXT_POSITION] = stored.num_observed
        self._sequence_0.state[:LOWERED_THEN] = arrays["sequence"]
        if is_of_model:
            names = ("keys", "token_ids", "costs", "counts")
            self._harvested.take(*(arrays[f"harvested.{name}"] for name in names))
            self._unigrams = _Unigrams(arrays["unigrams.token_ids"], arrays["unigrams.counts"])
            self._weights = arrays["weights"]
        self._allocate_the_rest()

    # --- checking ---------------------------------------------------------------------------

    @reading
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
        assert len(self._harvested) == len(self._harvested.contexts())
        assert np.isfinite(self._unigrams.counts).all()
        assert (self._unigrams.counts[self._unigrams.token_ids == NONE] == 0).all()
        assert all(begin < end for begin, end in self._taken)
        assert all(one[1] < two[0] for one, two in pairwise(self._taken))
        assert len(self._taken) <= _MAX_STRETCHES
        for opened in [ref() for ref in self._sequences.values()] + [*self._continued.values()]:
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
            if row[TOKEN] == NONE:
                assert row.tolist() == [NONE] * 3
                assert (links[position % num_rows] == NONE).all()
                continue
            assert 0 <= row[TOKEN] <= MAX_TOKEN_ID
            assert NONE <= row[PREVIOUS] < position
            assert row[NEXT] == NONE or position < row[NEXT] < num_observed
            if row[PREVIOUS] >= first:
                assert text[row[PREVIOUS] % num_rows, NEXT] == position
            if row[NEXT] != NONE:
                assert text[row[NEXT] % num_rows, PREVIOUS] == position
            hashed, reached = self._counts.item(SEED), position
            for order in range(num_orders):
                if reached < first:
                    break
                reached_row = text[reached % num_rows]
                hashed = _kernels.hash_with(
                    hashed, int(reached_row[TOKEN]), self._counts.item(MULTIPLIER)
                )
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

    @writing
    def _open_sequence(self, opened: _Sequence) -> int:
        if len(self._sequences) >= self._purge_at:
            living = {k: ref for k, ref in self._sequences.items() if ref() is not None}
            self._sequences, self._purge_at = living, 2 * len(living) + _FIRST_PURGE
        number = self._num_opened
        handle = _Handle(number)
        handle.sequence = opened
        self._num_opened = number + 1
        self._sequences[number] = weakref.ref(handle.sequence)  # the handle itself would live on
        return handle

    @writing
    def _observe(self, ids: Int64Array, sequence: int, is_answer: bool) -> None:
        self._append_all(ids, self._sequence(sequence), is_answer)

    def _append_all(self, ids: Int64Array, opened: _Sequence, is_answer: bool) -> None:
        self._grow_for(len(ids))
        # In pieces that fit the capacity, so that positions can count them.
        piece = min(self._capacity, _PIECE)
        for start in range(0, len(ids), piece):
            self._append(ids[start : start + piece], opened, is_answer)

    @reading
    def _draft(
        self, ids: Int64Array, max_draft_tokens: int, max_leaves: int, sequence: int | None
    ) -> Draft:
        opened = self._no_sequence if sequence is None else self._sequence(sequence)
        if not len(ids):
            return Draft.empty()
        room = self._take_room(max_draft_tokens, opened)
        num_nodes = self._grow_tree(ids[::-1].copy(), max_draft_tokens, max_leaves, opened, room)
        token_ids, parents, depths = room.nodes[:3, :num_nodes].astype(np.int32)
        draft = Draft(token_ids, parents, depths, room.node_probs[:num_nodes].copy())
        self._give_room_back(room, opened)
        return draft

    @reading
    def _draft_chains(
        self,
        pools: Sequence["NGramPool"],
        rows: "_TextRows",
        sequences: Sequence[int] | None,
        min_probability: float,
    ) -> DraftChains:
        return self._run_chains(pools, self._sequences_of(pools, sequences), rows, min_probability)

    @writing
    def _observe_and_draft_chains(
        self,
        pools: Sequence["NGramPool"],
        rows: "_TextRows",
        sequences: Sequence[int],
        min_probability: float,
        learning_stride: int,
    ) -> DraftChains:
        opened = self._sequences_of(pools, sequences)
        num_more: dict[NGramPool, int] = {}
        for pool, more in zip(pools, rows.num_new.tolist(), strict=True):
            num_more[pool] = num_more.get(pool, 0) + more
        for pool, more in num_more.items():
            pool._grow_for(more)
            pool._rebase_for(more)
        return self._run_chains(pools, opened, rows, min_probability, learning_stride)

    def _sequences_of(
        self, pools: Sequence["NGramPool"], sequences: Sequence[int] | None
    ) -> list[_Sequence]:
        """Return the sequences of some pools, or raise before anything is changed."""
        for pool in pools:
            if pool is not self and getattr(pool, "_lock", None) is not self._lock:
                raise ValueError(f"expected pools made beside {self!r}, got {pool!r}")
        if sequences is None:
            return [self._no_sequence] * len(pools)
        return [pool._sequence(handle) for pool, handle in zip(pools, sequences, strict=True)]

    def _grow_for(self, num_tokens: int) -> None:
        """Have room for more tokens, up to the capacity."""
        end = self._counts.item(NEXT_POSITION) + num_tokens
        if len(self._held.text) < min(end, self._capacity):
            self._grow(end)

    def _rebase_for(self, num_tokens: int) -> None:
        """Lower positions if those of more tokens would overflow."""
        if self._counts.item(NEXT_POSITION) + num_tokens > _POSITION_LIMIT:
            _kernels.rebase(*self._held, self._counts)

    @reading
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
        room = self._take_room(max_draft_tokens, opened)
        num_nodes = self._sample_tree(
            ids[::-1].copy(), max_draft_tokens, max_leaves, uniforms, opened, room
        )
        token_ids, parents, depths = room.nodes[:3, :num_nodes].astype(np.int32)
        draft = SampledDraft(
            token_ids,
            parents,
            depths,
            room.node_probs[:num_nodes].copy(),
            room.left_ids[parents + 1].astype(np.int32),
            room.support_probs[:num_nodes].copy(),
        )
        self._give_room_back(room, opened)
        return draft

    @property
    def _num_observed(self) -> int:
        """How many tokens were ever observed, here and in the pools this one was loaded from."""
        return self._counts.item(NEXT_POSITION) + self._counts.item(LOWERED)

    @reading
    def _texts_since(self, num_observed: int) -> Iterator[Int32Array]:
        """Return what is held of the text observed after so many tokens."""
        token_ids, bounds, _ = self._write_texts(num_observed)
        return (token_ids[begin:end] for begin, end in pairwise(bounds.tolist()))

    def _write_texts(self, num_observed: int) -> tuple[Int32Array, Int32Array, Int64Array]:
        """Return the same as one array, bounds of texts in it, and the kernel's `places`.

        These count as `_num_observed` does.
        """
        lowered = self._counts.item(LOWERED)
        since = num_observed - lowered
        num_tokens = min(len(self), max(0, self._counts.item(NEXT_POSITION) - since))
        token_ids, bounds = np.empty(num_tokens, np.int32), np.empty(num_tokens + 1, np.int32)
        places = np.empty((num_tokens, 3), np.int32)
        num = _kernels.write_texts(self._held.text, self._counts, since, token_ids, bounds, places)
        positions = places[:num].astype(np.int64)
        positions[positions != NONE] += lowered
        return token_ids[: bounds[num]], bounds[: num + 1], positions

    # --- exchange with other pools ----------------------------------------------------------

    def _stamp(self) -> PoolStamp:
        if self._origin[1] != os.getpid():  # a forked child learns on its own
            self._origin = secrets.token_hex(8), os.getpid()
        return PoolStamp(self._origin[0], self._num_observed, self._harvested.end_epoch())

    @writing
    def _delta(self, since: PoolStamp | None, with_harvest: bool) -> PoolDelta:
        until = self._stamp()
        since = PoolStamp(until.origin, 0, 0) if since is None else since
        if since.origin != until.origin:
            raise ValueError(f"expected a stamp of the pool {until.origin}, got {since}")
        if not (0 <= since.num_observed <= until.num_observed and 0 <= since.epoch < until.epoch):
            raise ValueError(f"expected a stamp before {until}, got {since}")
        token_ids, bounds, places = self._write_texts(since.num_observed)
        is_own = ~self._is_taken(places[:, 1])
        sizes = np.diff(bounds)
        token_ids = token_ids[np.repeat(is_own, sizes)]
        bounds = np.concatenate([[0], sizes[is_own].cumsum()]).astype(np.int32)
        changed = self._harvested.arrays(since.epoch if with_harvest else until.epoch)
        return PoolDelta(
            since,
            until,
            self.tokenizer,
            self.model,
            token_ids,
            bounds,
            places[is_own][:, ::2].copy(),
            keys=changed["keys"][::-1].copy(),
            successor_ids=changed["token_ids"][::-1].copy(),
            costs=changed["costs"][::-1].copy(),
        )

    def _is_taken(self, positions: Int64Array) -> NDArray[np.bool_]:
        """Return whether text came from other pools, by positions counted as `_num_observed`."""
        begins, ends = np.array(self._taken, np.int64).reshape(-1, 2).T
        stretch = np.searchsorted(begins, positions, "right") - 1
        is_taken: NDArray[np.bool_] = (stretch >= 0) & (positions < np.append(ends, 0)[stretch])
        return is_taken

    def _take_delta(self, delta: PoolDelta) -> bool:
        if not self._begin_delta(delta):
            return False
        origin = delta.since.origin
        ids = delta.token_ids.astype(np.int64)
        places = delta.places.tolist()
        for (begin, end), place in zip(pairwise(delta.bounds.tolist()), places, strict=True):
            self._take_text(ids[begin:end], origin, *place)
        if self._is_of_model(delta.model):
            self._take_successors(delta)
        self._take_fingerprints(delta)
        return True

    @writing
    def _begin_delta(self, delta: PoolDelta) -> bool:
        """Return whether a delta is to be taken, and count it as taken: at most once, then."""
        origin, until = delta.since.origin, self._taken_until
        if (origin, os.getpid()) == self._origin or delta.until.epoch <= until.get(origin, 0):
            return False
        if delta.since.epoch < until.get(origin, 0):
            raise ValueError(
                f"expected a delta of the pool {origin} since epoch {until[origin]}, which was "
                f"merged last, or later, got {delta!r}"
            )
        until[origin] = delta.until.epoch
        until.move_to_end(origin)
        while len(until) > _MAX_ORIGINS:
            until.popitem(last=False)
        return True

    @writing
    def _take_text(
        self, ids: Int64Array, origin: str = "", previous: int = NONE, last: int = NONE
    ) -> None:
        """Observe a text of another pool, in the sequence that it goes on with there.

        Args:
            origin: of that pool; "" where nothing will go on with the text.
            previous, last: positions there, as `PoolDelta.places`.
        """
        opened = self._continued.pop((origin, previous), None) or _Sequence(_NO_TABLE)
        try:
            # Before it is there: wherever this is interrupted, it is sent back to nobody.
            self._note_taken(len(ids))
            self._append_all(ids, opened, is_answer=False)
        finally:
            self._note_taken(0)
        if origin:
            self._continued[origin, last] = opened
            while len(self._continued) > _MAX_CONTINUED:
                self._continued.popitem(last=False)

    def _note_taken(self, num_tokens: int) -> None:
        """Note that the next tokens to be observed are another pool's, and none after them."""
        now = self._num_observed
        oldest = now - len(self)
        taken = [(begin, min(end, now)) for begin, end in self._taken if oldest < end]
        taken = [(begin, end) for begin, end in taken if begin < end]
        if num_tokens:
            begin = taken.pop()[0] if taken and taken[-1][1] == now else now
            taken.append((begin, now + num_tokens))
        if len(taken) > _MAX_STRETCHES:
            taken[:2] = [(taken[0][0], taken[1][1])]
        self._taken = tuple(taken)

    def _take_from(self, other: "NGramPool", num_observed: int) -> None:
        """Take another pool's text observed after so many tokens, and its harvest."""
        for text in other._texts_since(num_observed):
            self._take_text(text.astype(np.int64))
        if self._is_of_model(other.model):
            self._take_harvest(*other._harvest())
        self._take_fingerprints(other)

    def _is_of_model(self, model: str) -> bool:
        return not (self.model and model and self.model != model)

    def _take_fingerprints(self, other: "NGramPool | PoolDelta") -> None:
        self.tokenizer = self.tokenizer or other.tokenizer
        self.model = self.model or other.model
        if self.model != other.model and other.model:
            warnings.warn(
                f"successors of the model {other.model} are left out of a pool of {self.model}",
                stacklevel=4,
            )

    @writing
    def _take_successors(self, delta: PoolDelta) -> None:
        self._harvested.take_successors(delta.keys, delta.successor_ids, delta.costs)
        self._count_unigrams(delta.successor_ids, probs_of(delta.costs))

    @reading
    def _harvest(self) -> tuple[SuccessorTable, _Unigrams]:
        return copy.copy(self._harvested), self._unigrams.copy()

    @writing
    def _take_harvest(self, table: SuccessorTable, unigrams: _Unigrams) -> None:
        self._harvested.update(table)
        # The greater count, so that a pool that comes back with what it took is not counted twice.
        own = self._unigrams.as_dict()
        more = {
            token_id: count - own.get(token_id, 0.0)
            for token_id, count in unigrams.as_dict().items()
            if count > own.get(token_id, 0.0)
        }
        for token_id in sorted(more, key=more.__getitem__):  # where there is no room, the rarest go
            self._count_unigrams([[token_id]], [[more[token_id]]])

    @writing
    def _forget(self, ids: Int64Array) -> int:
        text, table = self._held.text, self._harvested._held
        left = np.zeros(len(text), np.int32)
        num_found = _kernels.find_occurrences(
            text, self._counts, ids, ids[::-1].copy(), np.empty((2, len(ids)), np.int32), left
        )
        distinct = np.unique(ids)
        is_elsewhere = np.zeros(len(distinct), np.bool_)
        _kernels.find_tokens(text, left, distinct, is_elsewhere)
        _kernels.forget(
            *self._held,
            self._counts,
            left,
            table.keys,
            table.counts,
            table.token_ids,
            table.costs,
            table.epochs,
            table.num_contexts,
            *self._unigrams,
            self._contexts_of(ids, np.flatnonzero(left)),
            distinct[~is_elsewhere],
            bool(left.any()),
        )
        for room in [room for rooms in self._rooms.values() for room in rooms]:
            for array in room:  # of the last drafts
                array.fill(0)
        return num_found

    def _contexts_of(self, ids: Int64Array, rows: NDArray[np.intp]) -> Int64Array:
        """Return the keys, sorted, of the contexts that tokens and rows of the text are part of."""
        text = self._held.text
        pairs = [np.stack([np.full_like(ids, NONE), ids], 1), np.stack([ids[:-1], ids[1:]], 1)]
        for column in (PREVIOUS, NEXT):
            others = text[rows, column]
            is_held = others >= self._first
            there = text[rows[is_held], TOKEN]
            beside = text[others[is_held] % len(text), TOKEN]
            pair = (beside, there) if column == PREVIOUS else (there, beside)
            pairs.append(np.stack(pair, 1).astype(np.int64))
        return np.unique(keys_of(np.concatenate(pairs)))

    def _count_unigrams(self, token_ids: ArrayLike, probs: ArrayLike) -> None:
        ids, floats = np.ascontiguousarray(token_ids, np.int32), np.ascontiguousarray(probs, "f4")
        _kernels.count_unigrams(*self._unigrams, ids, floats)

    @reading
    def _explore(
        self, max_tokens: int, excluded: Int64Array, sequence: int | None
    ) -> tuple[Int32Array, Float64Array]:
        opened = self._no_sequence if sequence is None else self._sequence(sequence)
        token_ids, worths = np.empty(max_tokens, np.int32), np.empty(max_tokens)
        num = _kernels.find_worthwhile(
            *self._unigrams,
            opened.layer_rows,
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

    def _take_room(self, max_draft_tokens: int, sequence: _Sequence) -> _Room:
        """Return scratch for this thread alone, to be given back; else only the room is lost."""
        num_layers = len(sequence.layers)
        try:
            room = self._rooms[num_layers].pop()
        except LookupError:
            return self._room(max(max_draft_tokens, _LEAST_ROOM), num_layers)
        if max_draft_tokens > room.nodes.shape[1]:
            return self._room(max_draft_tokens, num_layers)
        return room

    def _give_room_back(self, room: _Room, sequence: _Sequence) -> None:
        free = self._rooms.setdefault(len(sequence.layers), [])
        if len(free) < _MAX_ROOMS:
            free.append(room)

    def _room(self, max_draft_tokens: int, num_layers: int) -> _Room:
        width = _kernels.MAX_FOUND + _kernels.MAX_OCCURRENCES * num_layers
        return _Room(
            context=np.empty(self.max_match, np.int64),
            found=np.empty((8 + num_layers, max(width, self._max_ngram_size + 1)), np.int64),
            features=np.empty((width, _kernels.NUM_FEATURES), np.float64),
            summed=np.empty(_kernels.NUM_WEIGHTS, np.float64),
            found_probs=np.empty(width, np.float64),
            candidates=np.empty((3, max_draft_tokens * width), np.int64),
            candidate_probs=np.empty(max_draft_tokens * width, np.float64),
            left_ids=np.empty((max_draft_tokens + 1, width), np.int64),
            left_probs=np.empty((max_draft_tokens + 1, width), np.float64),
            nodes=np.empty((5, max_draft_tokens), np.int64),
            node_probs=np.empty(max_draft_tokens, np.float64),
            support_probs=np.empty((max_draft_tokens, width), np.float64),
        )

    def _as_layer(self) -> list[int]:
        """Return the kernels' row for this pool, which never changes; valid while it lives."""
        (text, links, heads), (keys, token_ids, costs) = self._held, self._harvested.rows
        places = [array.ctypes.data for array in (text, links, heads, keys, token_ids, costs)]
        return [
            *(*places[:3], len(text), *heads.shape),
            *self._counts[[NEXT_POSITION, SEED, MULTIPLIER]].tolist(),
            *(*places[3:], len(keys), token_ids.shape[1]),
        ]

    def _state_of(self, sequence: _Sequence) -> Int64Array:
        """Return a sequence's state with its positions as low as the text's; writes nothing."""
        if sequence.state.item(LOWERED_THEN) == self._counts.item(LOWERED):
            return sequence.state
        state = sequence.state.copy()
        _kernels.lower(state, self._counts)
        return state

    # --- kernels ----------------------------------------------------------------------------

    def _append(self, ids: Int64Array, sequence: _Sequence, is_answer: bool) -> None:
        self._rebase_for(len(ids))
        room = self._take_room(1, sequence)
        _kernels.append(
            *self._held,
            self._counts,
            sequence.state,
            sequence.layer_rows,
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
        self._give_room_back(room, sequence)

    def _grow_tree(
        self,
        reversed_context: Int64Array,
        max_draft_tokens: int,
        max_leaves: int,
        sequence: _Sequence,
        room: _Room,
    ) -> int:
        return _kernels.grow_tree(
            *self._held,
            self._counts,
            self._state_of(sequence),
            sequence.layer_rows,
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
            room.candidates,
            room.candidate_probs,
            room.nodes,
            room.node_probs,
        )

    def _row(self) -> _Row:
        """Return the kernels' row, which they may read by for as long as the lock is held."""
        arrays = (self._held.text, self._harvested.rows[0], self._weights, self._counts)
        if self._known_row is None or not self._known_row.is_of(arrays):
            places = [self._counts.ctypes.data, self._weights.ctypes.data]
            self._known_row = _Row([*self._as_layer(), *places], arrays)
        return self._known_row

    def _run_chains(
        self,
        pools: Sequence["NGramPool"],
        opened: list[_Sequence],
        rows: "_TextRows",
        min_probability: float,
        learning_stride: int = 1,
    ) -> DraftChains:
        num_rows, width = len(rows.texts), int(rows.max_draft_tokens.max(initial=0))
        chains = DraftChains(
            np.full((num_rows, width), NONE, np.int32),
            np.zeros((num_rows, width)),
            np.empty(num_rows, np.int64),
        )
        of_pools = [self._row()] * num_rows
        if any(pool is not self for pool in pools):
            of_pools = [pool._row() for pool in pools]
        of_sequences = [sequence.row() for sequence in opened]  # with what they hold
        most_layers = max(opened, key=lambda one: len(one.layers), default=self._no_sequence)
        room = self._take_room(1, most_layers)
        _kernels.draft_chains(
            np.array([row.address for row in of_pools], np.int64),
            np.array([row.address for row, _ in of_sequences], np.int64),
            rows.texts,
            rows.lengths,
            rows.num_new,
            rows.max_draft_tokens,
            self._learning_rate,
            learning_stride,
            min_probability,
            np.empty(_kernels.NUM_STATES, np.int64),
            room.context,
            np.empty(self.max_match + width, np.int64),
            room.found,
            room.features,
            room.summed,
            room.found_probs,
            *chains,
        )
        self._give_room_back(room, most_layers)
        return chains

    def _sample_tree(
        self,
        reversed_context: Int64Array,
        max_draft_tokens: int,
        max_leaves: int,
        uniforms: Float64Array,
        sequence: _Sequence,
        room: _Room,
    ) -> int:
        return _kernels.sample_tree(
            *self._held,
            self._counts,
            self._state_of(sequence),
            sequence.layer_rows,
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
            room.candidates,
            room.candidate_probs,
            room.left_ids,
            room.left_probs,
            room.nodes,
            room.node_probs,
            room.support_probs,
        )

    def _run_kernels(self) -> None:
        """Run every kernel once, so that the first token does not wait for a compiler."""
        self._append(np.empty(0, np.int64), self._no_sequence, False)
        _kernels.reindex(*self._held, self._counts)
        _kernels.rebase(*self._held, self._counts)
        _kernels.lower(self._no_sequence.state, self._counts)
        nothing, (room,) = np.zeros(1, np.int64), self._rooms[0]
        self._grow_tree(nothing, 1, 1, self._no_sequence, room)
        self._sample_tree(nothing, 1, 1, np.zeros(1), self._no_sequence, room)
        self._run_chains([self], [self._no_sequence], _checked_rows([[0]], [1], 1, [0]), 0.0)
        _kernels.find_negative(np.zeros((1, 1), np.int32), nothing, nothing)
        self._count_unigrams(np.empty((0, 1)), np.empty((0, 1)))
        self._explore(1, nothing, None)
        _kernels.find_unsound(*self._held, 0)
        table = SuccessorTable(1)
        table.put(np.zeros((1, 2), np.int64), np.zeros((1, 1), np.int32), np.ones((1, 1)))
        table.put_tree(NONE, [0], [NONE], [[0]], [[1.0]])
        SuccessorTable.from_arrays(table.arrays())
        self._texts_since(0)
        self._forget(nothing)


class _TextRows(NamedTuple):
    """The texts of `draft_chains`, checked."""

    texts: Int32Array  # [num_rows, width]
    lengths: Int64Array  # [num_rows], like the others
    num_new: Int64Array
    max_draft_tokens: Int64Array


def _checked_rows(
    texts: ArrayLike, lengths: ArrayLike, max_draft_tokens: ArrayLike, num_new: ArrayLike | None
) -> _TextRows:
    """Return the texts of `draft_chains`, or raise."""
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
        "max_draft_tokens": (max_draft_tokens, _MAX_CHAIN_TOKENS),
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
        checked[name] = np.ascontiguousarray(np.broadcast_to(array, num_rows), np.int64)
    if (checked["num_new"] > checked["lengths"]).any():
        raise ValueError("expected num_new of at most lengths, got more")
    return _TextRows(np.ascontiguousarray(ids, np.int32), **checked)


def _secret_seed() -> int:
    return secrets.randbits(_SEED_BITS)


def _first_counts(seed: int | None) -> Int64Array:
    """Return the kernels' `counts` of an empty pool."""
    if seed is None:
        seed = _secret_seed()
    elif isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise TypeError(f"expected seed to be an integer or None, got {seed!r}")
    elif not 0 <= seed < 2**_SEED_BITS:
        raise ValueError(f"expected seed from 0 to 2**{_SEED_BITS} - 1, got {seed}")
    multiplier = HASH_MULTIPLIER ^ (int(seed) >> 31) << 1
    return np.array([0, 0, int(seed) & HASH_MASK, multiplier], np.int64)


def _checked_layers(layers: Sequence[NGramPool]) -> tuple[NGramPool, ...]:
    """Return the layers of a sequence, or raise."""
    held = tuple(layers)
    for layer in held:
        if not isinstance(layer, NGramPool):
            raise TypeError(f"expected layers to be NGramPools, got {layer!r}")
        if not layer.is_read_only:
            raise ValueError(
                "expected layers that are only read, from NGramPool.load(..., read_only=True) or "
                f"as_read_only(), got {layer!r}"
            )
    return held
