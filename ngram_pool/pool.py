"""`NGramPool`: the text seen so far, the target's successors, and drafts from both.

This file checks arguments, takes the lock and knows the open sequences; `state.py`, next to read,
holds the text and drafts from it. Nothing here depends on models or torch.
"""

import copy
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ngram_pool._kernels import NONE, Float64Array, Int32Array, Int64Array
from ngram_pool.arrays import OpenSequence, Unigrams
from ngram_pool.chains import DraftChains, TextRows, checked_rows
from ngram_pool.checks import positive, token_ids_of
from ngram_pool.compiling import compile_by
from ngram_pool.delta import PoolDelta, PoolStamp
from ngram_pool.draft import Draft, SampledDraft
from ngram_pool.errors import PoolFileError, ReadOnlyPoolError
from ngram_pool.files import StoredPool, read_pool, write_pool
from ngram_pool.locks import lock_of_pool, reading, writing
from ngram_pool.origins import Origins
from ngram_pool.state import MAX_CAPACITY_TOKENS, PoolState, compile_chains, compile_texts
from ngram_pool.table import SuccessorTable, probs_of

DEFAULT_CAPACITY_TOKENS = 2**20
# On the answers of docs/notes/drafting.md, 6 accepted no more tokens than 5, and 4 up to 1 % fewer.
DEFAULT_MAX_NGRAM_SIZE = 5
_FIRST_PURGE = 64  # sequences held before those whose handle is gone are first dropped
# Attributes that a copy of a pool has of its own.
_NOT_COPIED = {"_lock", "_sequences", "_purge_at", "_keeper"}


class _Handle(int):
    """The number of an open sequence, and a reference to it; copies and pickles are plain ints."""

    sequence: OpenSequence

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


class NGramPool:
    """A pool that learns token sequences as they are written, and drafts how one may go on.

    Drafts come from several sources: the text, by contexts of 1 to N tokens and more; harvested
    successors (`harvest`); a prewarmed table of successors (`open_sequence`). How far to trust each
    is learned as answers are observed.

    Memory is bounded by `capacity_tokens`: the arrays grow by doubling up to it, then the oldest
    text is forgotten first. As long as nothing was harvested and no answer observed, the pool
    behaves like a new one that was given the newest `capacity_tokens` tokens. Methods may be called
    from several threads, and run without holding the GIL: one at a time, or beside each other where
    the pool is read-only. Wherever a method is interrupted, the pool is consistent: as before or
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
        capacity_tokens = positive("capacity_tokens", capacity_tokens)
        max_ngram_size = positive("max_ngram_size", max_ngram_size)
        if capacity_tokens > MAX_CAPACITY_TOKENS:
            raise ValueError(
                f"expected capacity_tokens of at most {MAX_CAPACITY_TOKENS}, got {capacity_tokens}"
            )
        self._begin(PoolState(capacity_tokens, max_ngram_size, seed), lock_of_pool())
        compile_by(self._state.run_kernels)

    def _begin(self, state: PoolState, lock: Any, tokenizer: str = "", model: str = "") -> None:
        self._is_read_only = False
        self._num_opened = 1
        self._origins = Origins()
        #: Fingerprints, opaque here, of the tokenizer of the text and of the model whose harvested
        #: successors these are; "" where unknown.
        self.tokenizer = tokenizer
        self.model = model
        self._hold(state, lock)

    def _hold(self, state: PoolState, lock: Any) -> None:
        self._state = state
        self._lock = lock
        # Weak references, so that a sequence is closed when its handle is gone.
        self._sequences = {0: weakref.ref(state.sequence_0)}
        self._purge_at = _FIRST_PURGE

    @reading
    def __getstate__(self) -> dict[str, Any]:
        return copy.deepcopy({k: v for k, v in vars(self).items() if k not in _NOT_COPIED})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._hold(self._state, lock_of_pool())
        NGramPool(1, seed=0)  # so that the first token does not wait for a compiler

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
        state = PoolState(self.capacity_tokens, self.max_ngram_size, self.seed, self._state)
        other = NGramPool.__new__(NGramPool)
        other._begin(state, self._lock, self.tokenizer, self.model)
        return other

    # --- what is held -----------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of tokens held, and of empty places; at most `capacity_tokens`."""
        return len(self._state)

    def __repr__(self) -> str:
        return (
            f"NGramPool(capacity_tokens={self.capacity_tokens}, "
            f"max_ngram_size={self.max_ngram_size}, held={len(self)}, nbytes={self.nbytes})"
        )

    @property
    def capacity_tokens(self) -> int:
        """Maximum number of tokens held."""
        return self._state.capacity

    @property
    def max_ngram_size(self) -> int:
        """N, the number of tokens in the longest indexed context."""
        return self._state.max_ngram_size

    @property
    def max_match(self) -> int:
        """How many of a context's last tokens matter; matches are followed back no further."""
        return self._state.max_match

    @property
    def nbytes(self) -> int:
        """Bytes allocated now, all arrays together; grows by doubling with the text held."""
        return self._state.nbytes

    @property
    def seed(self) -> int:
        """The seed of the hashes; a secret, where the text comes from strangers."""
        return self._state.seed

    @property
    def is_read_only(self) -> bool:
        """Whether the pool never learns or forgets anything, so that it can be a layer."""
        return self._is_read_only

    @property
    def num_open_sequences(self) -> int:
        """Number of open sequences besides sequence 0; linear in that number."""
        return sum(opened() is not None for opened in list(self._sequences.values())) - 1

    # --- writing ----------------------------------------------------------------------------

    @writing
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
        headers = [layer._state.header() for layer in held]
        if len(self._sequences) >= self._purge_at:
            living = {k: ref for k, ref in self._sequences.items() if ref() is not None}
            self._sequences, self._purge_at = living, 2 * len(living) + _FIRST_PURGE
        number = self._num_opened
        handle = _Handle(number)
        handle.sequence = OpenSequence(prewarmed, held, headers)
        self._num_opened = number + 1
        self._sequences[number] = weakref.ref(handle.sequence)  # the handle itself would live on
        return handle

    @writing
    def close_sequence(self, sequence: int) -> None:
        """Forget the handle but keep the text; O(1). Sequence 0 starts afresh instead.

        Raises:
            ValueError: the sequence is not open.
        """
        opened = self._sequence(sequence)
        if sequence == 0:
            opened.begin()
        else:
            del self._sequences[sequence]

    @writing
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
        ids = token_ids_of("token_ids", token_ids)
        self._state.append_all(ids, self._sequence(sequence), is_answer)

    @writing
    def harvest(self, contexts: ArrayLike, token_ids: ArrayLike, probs: ArrayLike) -> None:
        """Learn what a target finds likely after contexts of one and two tokens; O(1) each.

        The arguments and errors are those of `SuccessorTable.put`. There is room for a sixteenth as
        many contexts as `capacity_tokens`, rounded up as in `SuccessorTable`.
        """
        self._state.harvested.put(contexts, token_ids, probs)
        self._state.count_unigrams(token_ids, probs)

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
        self._state.harvested.put_tree(previous, nodes, parents, token_ids, probs)
        self._state.count_unigrams(token_ids, probs)

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
        if isinstance(other, PoolDelta) and not self._begin_delta(other):
            return False
        self._take_from(other)
        return True

    @writing
    def stamp(self) -> PoolStamp:
        """Mark this moment: `delta` of the stamp has what is learned later; O(1).

        A stamp is of this pool in memory. It is none of a copy, nor of what is loaded from its
        file: they take their own.
        """
        num_observed, epoch = self._state.num_observed, self._state.harvested.end_epoch()
        return PoolStamp(self._origins.name(), num_observed, epoch)

    @writing
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
        until = self.stamp()
        since = PoolStamp(until.origin, 0, 0) if since is None else since
        if since.origin != until.origin:
            raise ValueError(f"expected a stamp of the pool {until.origin}, got {since}")
        if not (0 <= since.num_observed <= until.num_observed and 0 <= since.epoch < until.epoch):
            raise ValueError(f"expected a stamp before {until}, got {since}")
        compile_texts()
        token_ids, bounds, places = self._state.write_texts(since.num_observed)
        is_own = ~self._origins.is_taken(places[:, 1])
        sizes = np.diff(bounds)
        token_ids = token_ids[np.repeat(is_own, sizes)]
        bounds = np.concatenate([[0], sizes[is_own].cumsum()]).astype(np.int32)
        changed = self._state.harvested.arrays(since.epoch if with_harvest else until.epoch)
        delta = PoolDelta(
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

    @reading
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
        return self._state.draft(ids, max_draft_tokens, max_leaves, self._sequence(sequence))

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
        compile_chains()
        rows = checked_rows(texts, lengths, max_draft_tokens, num_new, self.max_match)
        if not 0.0 <= min_probability <= 1.0:
            raise ValueError(f"expected min_probability from 0 to 1, got {min_probability!r}")
        num_rows, floor = len(rows.texts), float(min_probability)
        for name, values in (("sequences", sequences), ("pools", pools)):
            if values is not None and len(values) != num_rows:
                raise ValueError(f"expected {num_rows} {name}, got {len(values)}")
        if sequences is None and num_new is not None:
            raise ValueError("expected sequences to observe tokens in, got None")
        if max_learned is None:
            stride = 1
        else:
            stride = max(1, -(-int(rows.num_new.sum()) // positive("max_learned", max_learned)))
        asked = [self] * num_rows if pools is None else pools, rows, sequences, floor, stride
        if num_new is None:
            return self._draft_chains(*asked)
        return self._observe_and_draft_chains(*asked)

    @reading
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
        opened = self._sequence(sequence)
        return self._state.draw(ids, max_leaves, rng.random(max_draft_tokens), opened)

    @reading
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
        max_tokens = positive("max_tokens", max_tokens)
        return self._state.explore(max_tokens, ids, self._sequence(sequence))

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
        compile_texts()
        stored = read_pool(Path(path))
        if tokenizer and stored.tokenizer and tokenizer != stored.tokenizer:
            raise PoolFileError(
                f"{os.fspath(path)}: expected text of the tokenizer {tokenizer!r}, got text of "
                f"{stored.tokenizer!r}"
            )
        is_of_model = not (model and stored.model and model != stored.model)
        state = PoolState.of_file(stored, os.fspath(path), is_of_model)
        pool = cls(1, 1)
        pool._begin(state, lock_of_pool(), stored.tokenizer or tokenizer, model or stored.model)
        pool._is_read_only = bool(read_only)
        if not is_of_model:
            warnings.warn(
                f"{os.fspath(path)}: successors, unigrams and weights are left out, because they "
                f"are of the model {stored.model!r}, not {model!r}; the text is used",
                stacklevel=2,
            )
        return pool

    # --- inside, under the lock -------------------------------------------------------------

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

    def _sequence(self, handle: int | None) -> OpenSequence:
        """Return the sequence of a handle, or raise; for None, one without text."""
        if handle is None:
            return self._state.no_sequence
        try:
            opened = self._sequences[handle]()
        except (KeyError, TypeError):
            opened = None
        if opened is None:
            raise ValueError(f"expected an open sequence, got {handle!r}")
        return opened

    @reading
    def _texts_since(self, num_observed: int) -> Iterator[Int32Array]:
        """Return what is held of the text observed after so many tokens."""
        compile_texts()
        token_ids, bounds, _ = self._state.write_texts(num_observed)
        return (token_ids[begin:end] for begin, end in pairwise(bounds.tolist()))

    @reading
    def _stored(self) -> StoredPool:
        """Return a copy of all that a file holds."""
        return self._state.stored(self.tokenizer, self.model)

    @writing
    def _forget(self, ids: Int64Array) -> int:
        compile_texts()
        return self._state.forget(ids)

    @reading
    def _draft_chains(
        self,
        pools: Sequence["NGramPool"],
        rows: TextRows,
        sequences: Sequence[int] | None,
        min_probability: float,
        learning_stride: int,
    ) -> DraftChains:
        opened = self._sequences_of(pools, sequences)
        states = [pool._state for pool in pools]
        return self._state.draft_chains(states, opened, rows, min_probability, learning_stride)

    @writing
    def _observe_and_draft_chains(self, *args: Any) -> DraftChains:
        return self._draft_chains(*args)

    def _sequences_of(
        self, pools: Sequence["NGramPool"], sequences: Sequence[int] | None
    ) -> list[OpenSequence]:
        """Return the sequences of some pools, or raise before anything is changed."""
        for pool in pools:
            if pool is not self and getattr(pool, "_lock", None) is not self._lock:
                raise ValueError(f"expected pools made beside {self!r}, got {pool!r}")
        if sequences is None:
            return [self._state.no_sequence] * len(pools)
        return [pool._sequence(handle) for pool, handle in zip(pools, sequences, strict=True)]

    # --- exchange with other pools ----------------------------------------------------------

    @writing
    def _begin_delta(self, delta: PoolDelta) -> bool:
        return self._origins.begin_taking(delta)

    @writing
    def _take_text(
        self, ids: Int64Array, origin: str = "", previous: int = NONE, last: int = NONE
    ) -> None:
        """Observe a text of another pool, in the sequence that it goes on with there.

        Args:
            origin: of that pool; "" where nothing will go on with the text.
            previous, last: positions there, as `PoolDelta.places`.
        """
        state, origins = self._state, self._origins
        opened = origins.continued(origin, previous)
        try:
            # Before it is there: wherever this is interrupted, it is sent back to nobody.
            origins.note(state.num_observed, len(state), len(ids))
            state.append_all(ids, opened, is_answer=False)
        finally:
            origins.note(state.num_observed, len(state), 0)
        if origin:
            origins.keep(origin, last, opened)

    def _take_from(self, other: "NGramPool | PoolDelta", num_observed: int = 0) -> None:
        """Take text and harvest of a delta, or of a pool: text observed after so many tokens."""
        if isinstance(other, PoolDelta):
            places = [(other.since.origin, *place) for place in other.places.tolist()]
            for text, place in zip(other.texts(), places, strict=True):
                self._take_text(text.astype(np.int64), *place)
        else:
            for text in other._texts_since(num_observed):
                self._take_text(text.astype(np.int64))
        if not self.model or not other.model or self.model == other.model:
            self._take_harvest(other if isinstance(other, PoolDelta) else other._harvest())
        self.tokenizer = self.tokenizer or other.tokenizer
        self.model = self.model or other.model
        if self.model != other.model and other.model:
            warnings.warn(
                f"successors of the model {other.model} are left out of a pool of {self.model}",
                stacklevel=3,
            )

    @reading
    def _harvest(self) -> tuple[SuccessorTable, Unigrams]:
        return copy.copy(self._state.harvested), self._state.unigrams.copy()

    @writing
    def _take_harvest(self, harvest: tuple[SuccessorTable, Unigrams] | PoolDelta) -> None:
        if isinstance(harvest, PoolDelta):
            keys, ids, costs = harvest.keys, harvest.successor_ids, harvest.costs
            self._state.harvested.take_successors(keys, ids, costs)
            self._state.count_unigrams(ids, probs_of(costs))
        else:
            self._state.take_harvest(*harvest)


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
