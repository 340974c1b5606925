"""`NGramPool`: the text seen so far, the target's successors, and drafts from both.

Every method that reads or writes takes the pool's lock. Kernels (`_kernels.py`, the next file) are
never interrupted by signals. Nothing here depends on models or torch.
"""

import copy
import logging
import operator
import os
import secrets
import threading
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numba.core.dispatcher import Dispatcher
from numpy.typing import ArrayLike, NDArray

from ngram_pool import _kernels
from ngram_pool._kernels import (
    HASH_MULTIPLIER,
    LOWERED,
    MAX_CAPACITY_TOKENS,
    MAX_TOKEN_ID,
    MULTIPLIER,
    NEVER,
    NEXT_POSITION,
    NONE,
    SEED,
    TOKEN,
    Int32Array,
    Int64Array,
)
from ngram_pool.arrays import (
    NUM_UNIGRAMS,
    Header,
    Scratch,
    TextArrays,
    Unigrams,
    begin_state,
    checked_rows,
    positive,
    token_ids_of,
)
from ngram_pool.draft import Draft, DraftChains, SampledDraft
from ngram_pool.errors import PoolFileError, ReadOnlyPoolError
from ngram_pool.files import ARRAYS, StoredPool, packed, read_pool, write_pool
from ngram_pool.table import Rows, SuccessorTable
from ngram_pool.weights import first_weights

logger = logging.getLogger(__name__)

DEFAULT_CAPACITY_TOKENS = 2**20
# On greedy answers of SmolLM2, 6 accepted no more tokens than 5, and 4 up to 1 % fewer.
DEFAULT_MAX_NGRAM_SIZE = 5
_FIRST_NUM_ROWS = 2**12  # allocated first; doubled when full, up to the capacity
_POSITION_LIMIT = MAX_TOKEN_ID  # positions are int32, and are lowered before they overflow
# Capacity for harvested contexts, per token of the pool's capacity: at most 8 bytes per token.
_CONTEXTS_PER_TOKEN = 1 / 16
# Bits of a seed: 31 of the hash's first state, and 29 of its multiplier, which stays odd and large.
_SEED_BITS = 60
# How far one token of an answer moves the weights of the sources. From the initial weights, fitted
# to the same model, a rate of 0 accepted 0.4 % fewer tokens, 0.01 2 % fewer, and 0.03 9 % fewer.
_LEARNING_RATE = 0.003
_NONE_DRAWN = np.empty(0, np.float64)  # the uniforms of a tree of the likeliest nodes
# Attributes that are made anew in a copy of a pool.
_NOT_COPIED = {"_lock", "_scratch", "_sequences", "_no_sequence", "_known"}


class OpenSequence:
    """A sequence, open as long as it is referenced; its `state` is the kernels' `sequence`."""

    def __init__(self, layers: "Sequence[NGramPool]" = (), state: Int64Array | None = None) -> None:
        self.layers = layers  # kept alive: the kernels read them
        self.state = begin_state() if state is None else state
        texts = [layer._header().row for layer in layers if len(layer)]
        tables = [layer._harvested.held.header.row for layer in layers if layer.num_contexts]
        self.num_texts = len(texts)
        self._header = Header(self.state, _stacked(texts), _stacked(tables))
        self.row = self._header.row


class NGramPool:
    """A pool that learns token sequences as they are written, and drafts continuations.

    Drafts come from several sources: the text, by contexts of 1 to N tokens and more; harvested
    successors (`harvest`). The pool learns from answers how far to trust each source.

    Memory is bounded by `capacity_tokens`: the arrays grow by doubling up to it, then the oldest
    text is forgotten first. Without harvests and answers, a pool behaves like a new one that was
    given the newest `capacity_tokens` tokens. Methods may be called from several threads, and run
    one at a time, without holding the GIL. An interrupt leaves the pool consistent. A pool can be
    copied or pickled at any time; the copy is independent, and only sequence 0 is open in it.

    A read-only pool (`as_read_only`) can be a *layer* of any number of sequences of other pools,
    which do not wait for it: their drafts come from its text and its harvest, too
    (`open_sequence`).

    Args:
        capacity_tokens: maximum number of tokens held; each takes up to 20 + 8 N bytes, 60 with the
            default N, and half as much again while the arrays grow. The largest draft takes another
            7.2 kB per node, for at least 64 nodes, and the target's unigrams 53 kB.
        max_ngram_size: N; contexts of 1 to N tokens are indexed and matched.
        seed: from 0 to 2**60 - 1, for the hashes; None for a secret one, so that nobody can make
            texts that slow the pool down. Only pools of the same seed give exactly the same drafts
            for the same calls; others hardly ever differ.

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
        self._begin(capacity_tokens, max_ngram_size, seed)
        self._make_unshared()
        _compile_kernels()

    def _begin(
        self,
        capacity_tokens: int,
        max_ngram_size: int,
        seed: int | None,
        held: TextArrays | None = None,
    ) -> None:
        """Set the attributes that a copy copies; `held` is text to begin with."""
        self._capacity, self._max_ngram_size = capacity_tokens, max_ngram_size
        self._max_match = max(_kernels.MAX_MATCH, max_ngram_size)
        num_contexts = max(1, int(capacity_tokens * _CONTEXTS_PER_TOKEN))
        self._harvested = SuccessorTable(num_contexts)
        self._unigrams = Unigrams(np.full(NUM_UNIGRAMS, NONE, np.int32), np.zeros(NUM_UNIGRAMS))
        self._often = np.full(_kernels.NUM_OFTEN, NONE, np.int32), np.zeros(_kernels.NUM_OFTEN)
        self._weights = first_weights()
        self._learning_rate = _LEARNING_RATE
        self._counts = _first_counts(seed)
        self._held = held or self._empty(min(_FIRST_NUM_ROWS, capacity_tokens))
        self._state_0 = begin_state()  # of sequence 0
        self._num_opened = 1
        self._is_read_only = False
        #: Fingerprints, opaque here, of the tokenizer of the text and of the model whose harvested
        #: successors these are; "" where unknown.
        self.tokenizer = ""
        self.model = ""
        #: A text of the owner's, kept in the pool's file.
        self.note = ""

    def _make_unshared(self, beside: "NGramPool | None" = None) -> None:
        """Set the attributes that no copy shares; a pool made `beside` shares lock and scratch."""
        # Reentrant, because a signal handler may call during a method.
        self._lock: Any = threading.RLock() if beside is None else beside._lock
        self._scratch: Scratch = (
            Scratch(self.max_match, self._max_ngram_size) if beside is None else beside._scratch
        )
        self._sequences = {0: OpenSequence(state=self._state_0)}
        self._no_sequence = OpenSequence()
        self._known: tuple[Any, Header] | None = None

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return copy.deepcopy({k: v for k, v in vars(self).items() if k not in _NOT_COPIED})

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Arrays from out-of-band buffers of a pickle can be read-only; copies are not.
        vars(self).update(copy.deepcopy(state))
        self._make_unshared()
        NGramPool(1, seed=0)  # so that the first token does not wait for a compiler

    def __copy__(self) -> "NGramPool":
        copied = type(self).__new__(type(self))
        vars(copied).update(self.__getstate__())
        copied._make_unshared()
        return copied

    def beside(self) -> "NGramPool":
        """Return a new, empty pool of the same sizes and seed, written together with this one.

        Pools made beside one another share a lock and scratch memory, so that `draft_chains` takes
        texts of all of them in one call, and another pool costs little. They share no text.

        >>> pool = NGramPool()
        >>> other = pool.beside()
        >>> pool.observe([5, 6, 7])
        >>> len(other)
        0
        """
        other = NGramPool.__new__(NGramPool)
        other._begin(self.capacity_tokens, self.max_ngram_size, self.seed)
        other._make_unshared(beside=self)
        other.tokenizer, other.model = self.tokenizer, self.model
        return other

    # --- what is held -----------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of tokens held; at most `capacity_tokens`."""
        return min(self._counts.item(NEXT_POSITION), len(self._held.text))

    def __repr__(self) -> str:
        return (
            f"NGramPool(capacity_tokens={self.capacity_tokens}, "
            f"max_ngram_size={self.max_ngram_size}, held={len(self)}, nbytes={self.nbytes})"
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
        """How many of a context's last tokens matter: the maximum length of a match."""
        return self._max_match

    @property
    def num_contexts(self) -> int:
        """Number of contexts whose harvested successors are held."""
        return len(self._harvested)

    def contexts(self) -> Int64Array:
        """Return these contexts, int64 [num_contexts, 2], as `harvest` takes them."""
        with self._lock:
            return self._harvested.contexts()

    @property
    def nbytes(self) -> int:
        """Bytes allocated now by all arrays; grows by doubling with the text."""
        arrays = *self._scratch.header.arrays, *self._held, *self._unigrams, self._weights
        num_bytes: int = sum(array.nbytes for array in (*arrays, self._counts))
        return num_bytes + self._harvested.nbytes

    @property
    def seed(self) -> int:
        """The seed of the hashes; keep it secret if the text comes from strangers."""
        state, multiplier = self._counts.item(SEED), self._counts.item(MULTIPLIER)
        return state | ((multiplier ^ HASH_MULTIPLIER) >> 1) << 31

    @property
    def is_read_only(self) -> bool:
        """Whether the pool never changes, so that it can be a layer."""
        return self._is_read_only

    @property
    def num_open_sequences(self) -> int:
        """Number of open sequences besides sequence 0."""
        return len(self._sequences) - 1

    @property
    def _learned(self) -> tuple[int, float]:
        """Numbers of tokens ever observed and harvested; they change whenever the pool learns."""
        num_observed = self._counts.item(NEXT_POSITION) + self._counts.item(LOWERED)
        return num_observed, float(self._unigrams.counts.sum())

    # --- writing ----------------------------------------------------------------------------

    def open_sequence(self, layers: Sequence["NGramPool"] = ()) -> int:
        """Open one more sequence and return its unique number, for `observe`; O(1).

        Sequence 0 is always open. No n-gram runs across two sequences, even if their tokens are
        interleaved, but a draft for one uses the text of all. Close it by `close_sequence`.

        Args:
            layers: read-only pools of any sizes. Drafts for the sequence come from their text, too,
                and from their harvest for contexts that this pool has not harvested. Each of the
                first four layers with text learns its own weights; further ones share those of the
                fourth.

        Raises:
            TypeError: a layer is no `NGramPool`.
            ValueError: a layer is not read-only.

        >>> pool = NGramPool()
        >>> sequence = pool.open_sequence()
        >>> pool.num_open_sequences
        1
        >>> pool.close_sequence(sequence)
        >>> pool.num_open_sequences
        0
        """
        layers = tuple(layers)
        for layer in layers:
            if not isinstance(layer, NGramPool):
                raise TypeError(f"expected layers to be NGramPools, got {layer!r}")
            if not layer.is_read_only:
                raise ValueError(
                    "expected read-only layers, from NGramPool.load(..., read_only=True) or "
                    f"as_read_only(), got {layer!r}"
                )
        opened = OpenSequence(layers)
        with self._lock:
            self._check_learns("open_sequence")
            number = self._num_opened
            self._num_opened = number + 1
            self._sequences[number] = opened
        return number

    def close_sequence(self, sequence: int) -> None:
        """Forget the number but keep the text; O(1). Sequence 0 starts afresh instead.

        Raises:
            ValueError: the sequence is not open.
        """
        with self._lock:
            self._check_learns("close_sequence")
            if self._sequence(sequence) is self._sequences[0]:
                self._state_0[:] = begin_state()
            else:
                del self._sequences[sequence]

    def observe(
        self,
        token_ids: Sequence[int] | NDArray[np.integer[Any]],
        sequence: int | None = 0,
        is_answer: bool = False,
    ) -> None:
        """Append tokens to a sequence; amortised O(N) per token, whatever the pool holds.

        Args:
            token_ids: integers [num_tokens] from 0 to 2**31 - 1; may be empty.
            sequence: 0, or one from `open_sequence`; None for a separate, complete text.
            is_answer: whether the target chose these tokens. The pool learns from them how far to
                trust its sources, and distinguishes them from the sequence's prompt.

        Raises:
            TypeError: ids are not integers.
            ValueError: an id is negative or too large, the shape is not one-dimensional, or the
                sequence is not open. The pool is unchanged after such an error, or if memory runs
                out.
        """
        ids = token_ids_of("token_ids", token_ids)
        with self._lock:
            self._check_learns("observe")
            opened = OpenSequence() if sequence is None else self._sequence(sequence)
            rate = self._learning_rate if is_answer else 0.0
            scratch = self._scratch.row_for(1, opened.num_texts)
            # In parts, so that positions do not overflow.
            for start in range(0, len(ids) or 1, self._capacity):
                new = ids[start : start + self._capacity].astype(np.int32)
                self._reserve(len(new), opened)
                _kernels.append(self._header().row, opened.row, scratch, new, rate, 1, 0)

    def harvest(self, contexts: ArrayLike, token_ids: ArrayLike, probs: ArrayLike) -> None:
        """Learn a target's likely successors of contexts of one and two tokens; O(1) each.

        A context that is harvested again is averaged over about the last ten times, as many texts
        show it. The pool holds a sixteenth as many contexts as `capacity_tokens`, rounded up to a
        power of two, at least 64. A full pool forgets the contexts harvested longest ago.

        Args:
            contexts: integers [n, 2]: the token before the last one, or -1, and the last one.
            token_ids: integers [n, k], distinct within a row, likeliest first; -1 ends a row.
            probs: floats [n, k] from 0 to 1.

        Raises:
            TypeError: contexts or token ids are not integers.
            ValueError: shapes do not match, or a value is out of range. The pool is unchanged after
                such an error. After an interrupt, it has learned a first part.
        """
        with self._lock:
            self._check_learns("harvest")
            self._harvested.put(contexts, token_ids, probs)
            self._count_unigrams(token_ids, probs)

    def harvest_tree(
        self,
        previous: int,
        nodes: ArrayLike,
        parents: ArrayLike,
        token_ids: ArrayLike,
        probs: ArrayLike,
    ) -> None:
        """Learn a target's likely successors of each node of a tree, alone and behind its parent.

        Known successors of a context are replaced: those of the current text tell more. Of equal
        contexts, the first node's is kept.

        Args:
            previous: the token before the root, or -1.
            nodes: integers [n], tokens of the nodes, the root first.
            parents: integers [n], -1 for the root; parents[i] < i.
            token_ids, probs: as for `harvest`, a row for each node.

        Raises:
            TypeError, ValueError: as for `harvest`.
        """
        with self._lock:
            self._check_learns("harvest_tree")
            self._harvested.put_tree(previous, nodes, parents, token_ids, probs)
            self._count_unigrams(token_ids, probs)

    def unigrams(self) -> dict[int, float]:
        """Return how often each token was to be expected in all harvests; at most 4,096 tokens.

        >>> pool = NGramPool()
        >>> pool.harvest([[-1, 5]], [[5, 6]], [[0.75, 0.25]])
        >>> pool.unigrams()
        {5: 0.75, 6: 0.25}
        """
        with self._lock:
            is_held = self._unigrams.token_ids != NONE
            held = [array[is_held].tolist() for array in self._unigrams]
        return dict(zip(*held, strict=True))

    # --- text as a whole --------------------------------------------------------------------

    def texts(self) -> Iterator[Int32Array]:
        """Return the held text of each sequence, in the order in which the sequences began.

        A sequence whose beginning was forgotten comes without it. The call is linear in the tokens
        held; text observed later is not included.

        >>> pool = NGramPool()
        >>> pool.observe([5, 6, 7])
        >>> [text.tolist() for text in pool.texts()]
        [[5, 6, 7]]
        """
        with self._lock:
            rows, bounds = np.empty(len(self), np.int32), np.empty(len(self) + 1, np.int32)
            num = _kernels.find_texts(self._header().row, rows, bounds)
            token_ids = self._held.text[rows[: bounds[num]], TOKEN]
        return (token_ids[begin:end] for begin, end in pairwise(bounds[: num + 1].tolist()))

    # --- reading ----------------------------------------------------------------------------

    def draft(
        self,
        context: Sequence[int] | NDArray[np.integer[Any]],
        max_draft_tokens: int,
        max_candidates: int | None = None,
        sequence: int | None = None,
    ) -> Draft:
        """Propose continuations of `context`, likeliest nodes first; O(N) lookups per node.

        The context of every node, of N tokens down to one, is looked up in the text and in the
        tables, and the successors found become its children. `probs` estimates the acceptance of
        each node, that is, of its whole path. The likeliest path ends only if no successor is known
        or no node is left; side branches less likely than 0.1 % are not drafted.

        Args:
            context: integers [num_tokens], oldest first; only the last `max_match` matter. It need
                not have been observed.
            max_draft_tokens: maximum number of tokens to propose.
            max_candidates: G, the maximum number of root-to-leaf paths; None for no limit.
            sequence: the open sequence of the context, for its layers, and to distinguish its text
                from others; None for neither.

        Returns:
            A draft of at most `max_draft_tokens` tokens; empty if no successor is known.

        Raises:
            TypeError, ValueError: as for `observe`; sizes must be positive integers.

        >>> pool = NGramPool()
        >>> pool.observe([1, 2, 3, 1, 2, 4, 1, 2, 3])
        >>> pool.draft([9, 1, 2], max_draft_tokens=2).candidates()
        [[3], [4]]
        >>> len(pool.draft([8], max_draft_tokens=2))
        0
        """
        return self._grow(context, max_draft_tokens, max_candidates, sequence, None)

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
        """Propose the likeliest continuation of each of many texts, in one compiled call.

        This is `draft` with `max_candidates=1` for each text, but a path ends where it is too
        unlikely. With `num_new`, the newest tokens of all texts are first observed as answers, text
        by text: a whole step of an engine.

        Args:
            texts: integers [num_rows, width], a text at the start of each row, oldest token first.
                An int32 array is read in place.
            lengths: integers [num_rows], the length of each text in tokens.
            max_draft_tokens: maximum length of all paths, or integers [num_rows] of each, from 0.
            sequences: the open sequence of each text, with its layers; None for none.
            num_new: integers [num_rows], how many of each text's last tokens to observe; 0 for a
                text that is observed elsewhere. None to observe none.
            min_probability: from 0 to 1; a path ends where its probability falls below this.
            pools: the pool of each text: this one, or one made `beside` it; None for this one.
            max_learned: maximum number of observed tokens, evenly spread, that teach the pools how
                far to trust their sources; None for all. Each takes about as long as a drafted
                token.

        Returns:
            A path for each row; empty if no successor is known.

        Raises:
            TypeError: an array that must have integers has none.
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
        rows = checked_rows(texts, lengths, max_draft_tokens, num_new)
        if not 0.0 <= min_probability <= 1.0:
            raise ValueError(f"expected min_probability from 0 to 1, got {min_probability!r}")
        num_rows = len(rows.texts)
        for name, values in (("sequences", sequences), ("pools", pools)):
            if values is not None and len(values) != num_rows:
                raise ValueError(f"expected {num_rows} {name}, got {len(values)}")
        if sequences is None and num_new is not None:
            raise ValueError("expected sequences to observe tokens in, got None")
        stride = 1
        if max_learned is not None:
            stride = max(1, -(-int(rows.num_new.sum()) // positive("max_learned", max_learned)))
        of_rows = [self] * num_rows if pools is None else pools
        with self._lock:
            if num_new is not None:
                self._check_learns("draft_chains with num_new")
            for pool in of_rows:
                if pool is not self and getattr(pool, "_lock", None) is not self._lock:
                    raise ValueError(f"expected pools made beside {self!r}, got {pool!r}")
            numbers = [None] * num_rows if sequences is None else sequences
            opened = [pool._sequence(each) for pool, each in zip(of_rows, numbers, strict=True)]
            num_more: dict[NGramPool, int] = {}
            for pool, more in zip(of_rows, rows.num_new.tolist(), strict=True):
                num_more[pool] = num_more.get(pool, 0) + more
            for pool, more in num_more.items():
                pool._reserve(more, pool._no_sequence)
            width = int(rows.max_draft_tokens.max(initial=0))
            chains = DraftChains(
                np.full((num_rows, width), NONE, np.int32),
                np.zeros((num_rows, width)),
                np.empty(num_rows, np.int64),
            )
            if not num_rows:
                return chains
            headers = {pool: pool._header() for pool in num_more}
            negative = _kernels.draft_rows(
                np.array([headers[pool].row for pool in of_rows]),
                np.array([one.row for one in opened]),
                self._scratch.row_for(max(width, 1), max(one.num_texts for one in opened)),
                *rows,
                self._learning_rate,
                stride,
                float(min_probability),
                *chains,
            )
        if negative != NONE:
            raise ValueError(
                f"expected token ids from 0 to {MAX_TOKEN_ID}, got less in row {negative}"
            )
        return chains

    def sample(
        self,
        context: Sequence[int] | NDArray[np.integer[Any]],
        max_draft_tokens: int,
        rng: np.random.Generator,
        max_candidates: int | None = None,
        sequence: int | None = None,
    ) -> SampledDraft:
        """Propose continuations of `context`, drawn at random; O(N) lookups per node.

        Every node's token is drawn from the successors that `draft` would choose among, in
        proportion to their probabilities, children of one parent without replacement. Whether there
        is a node never depends on its token, so rejection sampling by the returned distributions is
        unbiased (`SampledDraft` documents which nodes may be left out).

        Args:
            rng: always gives `max_draft_tokens` uniforms, so that equal generators give equal
                drafts and stay equal.
            context, max_draft_tokens, max_candidates, sequence: as for `draft`.

        Raises:
            TypeError, ValueError: as for `draft`; `rng` must be a numpy Generator.

        >>> pool = NGramPool()
        >>> pool.observe([1, 2, 3, 1, 2, 4, 1, 2])
        >>> draft = pool.sample([1, 2], max_draft_tokens=2, rng=np.random.default_rng(0))
        >>> np.flatnonzero(draft.dense_probs(vocab_size=6)[0]).tolist()
        [3, 4]
        """
        if not isinstance(rng, np.random.Generator):
            raise TypeError(f"expected rng to be a numpy.random.Generator, got {rng!r}")
        draft = self._grow(context, max_draft_tokens, max_candidates, sequence, rng)
        assert isinstance(draft, SampledDraft)
        return draft

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
        """Write the pool to a file that only its owner may read.

        The file is replaced as a whole: after an interruption, even by a power cut, it is the old
        one or the new one. Other threads wait while the pool is copied, not for the disk.

        Args:
            path: the file; its folder is made if there is none.

        Raises:
            OSError: the file cannot be written; the old one is as it was.
            TypeError, ValueError: `tokenizer` or `model` is no string, or is far too long.
        """
        with self._lock:
            data = packed(self._stored())
        write_pool(Path(path), data)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        tokenizer: str = "",
        model: str = "",
        read_only: bool = False,
    ) -> "NGramPool":
        """Return a copy of the pool that `save` wrote.

        The whole file is read into memory and checked, in 0.1 to 0.3 s per 100 MB. Later changes to
        the file do not affect the pool.

        Args:
            path: the file.
            tokenizer: fingerprint of the tokenizer that the pool will be used with; "" for any.
            model: fingerprint of the model that the pool will be used with; "" for any. If the file
                is of another model, its text is used, but harvested successors, unigrams and
                learned weights are left out, with a warning.
            read_only: whether the pool never changes (`is_read_only`).

        Raises:
            OSError: the file cannot be read.
            PoolFileError: the file is no pool, is damaged or of a newer format, or its text has
                another tokenizer.

        >>> import tempfile
        >>> pool = NGramPool()
        >>> pool.observe([5, 6, 7, 8, 9, 5, 6])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pool.save(f"{folder}/my.pool")
        ...     loaded = NGramPool.load(f"{folder}/my.pool")
        >>> loaded.draft([5, 6], max_draft_tokens=2).candidates()
        [[7, 8]]
        """
        stored, name = read_pool(Path(path)), os.fspath(path)
        if tokenizer and stored.tokenizer and tokenizer != stored.tokenizer:
            raise PoolFileError(
                f"{name}: expected text of the tokenizer {tokenizer!r}, got text of "
                f"{stored.tokenizer!r}"
            )
        is_of_model = not (model and stored.model and model != stored.model)
        cls(1, seed=0)  # compiles
        pool = cls.__new__(cls)
        arrays = stored.arrays
        held = TextArrays(arrays["text"], arrays["links"], arrays["heads"])
        pool._begin(stored.capacity_tokens, stored.max_ngram_size, stored.hash_seed, held)
        pool._counts[NEXT_POSITION] = stored.num_observed
        pool._state_0[:] = arrays["sequence"]
        if is_of_model:
            names = ("keys", "token_ids", "costs", "counts")
            pool._harvested.held = Rows.of(*(arrays[f"harvested.{name}"] for name in names))
            pool._unigrams = Unigrams(arrays["unigrams.token_ids"], arrays["unigrams.counts"])
            pool._weights = arrays["weights"]
        pool._make_unshared()
        pool._count_unigrams(np.empty((0, 1)), np.empty((0, 1)))  # ranks them
        pool.tokenizer, pool.model = stored.tokenizer or tokenizer, model or stored.model
        pool.note = stored.note
        pool._is_read_only = bool(read_only)
        if not is_of_model:
            warnings.warn(
                f"{name}: successors, unigrams and weights are left out, because they "
                f"are of the model {stored.model!r}, not {model!r}; the text is used",
                stacklevel=2,
            )
        return pool

    def _stored(self) -> StoredPool:
        """Return the contents for a file; the caller holds the lock."""
        arrays = {
            **self._held._asdict(),
            **{f"unigrams.{name}": array for name, array in self._unigrams._asdict().items()},
            **{
                f"harvested.{name}": array for name, array in self._harvested.held._asdict().items()
            },
            "weights": self._weights,
            "sequence": self._state_0,
        }
        num_observed = self._counts.item(NEXT_POSITION)
        numbers = self.max_ngram_size, self.capacity_tokens, num_observed, self.seed
        labels = self.tokenizer, self.model, self.note
        return StoredPool(*numbers, *labels, {name: arrays[name] for name in ARRAYS})

    # --- arguments --------------------------------------------------------------------------

    def _check_learns(self, what: str) -> None:
        if self._is_read_only:
            raise ReadOnlyPoolError(f"expected a pool that learns for {what}, got {self!r}")

    def _sequence(self, number: int | None) -> OpenSequence:
        """Return an open sequence, or raise; for None, one without text."""
        if number is None:
            return self._no_sequence
        try:
            return self._sequences[number]
        except (KeyError, TypeError):
            raise ValueError(f"expected an open sequence, got {number!r}") from None

    # --- inside, under the lock -------------------------------------------------------------

    def _reserve(self, num_tokens: int, opened: OpenSequence) -> None:
        """Grow for more tokens, up to the capacity.

        Positions that would overflow are lowered, also those of `opened` and all other sequences.
        """
        end, old = self._counts.item(NEXT_POSITION) + num_tokens, self._held.text
        num_rows = len(old)
        while num_rows < min(end, self._capacity):
            num_rows = min(2 * num_rows, self._capacity)
        if num_rows > len(old):  # no row was overwritten yet: each position is its row
            new = self._empty(num_rows)
            new.text[: len(old)] = old
            _kernels.reindex(self._header_with(new).row)
            self._held = new
        if end > _POSITION_LIMIT:
            before = self._counts.item(LOWERED)
            _kernels.rebase(self._header().row)
            shift = self._counts.item(LOWERED) - before
            for state in (each.state for each in {opened, *self._sequences.values()}):
                lowered = np.maximum(state - shift, [NONE, 0, 0])
                state[state != NEVER] = lowered[state != NEVER]

    def _count_unigrams(self, token_ids: ArrayLike, probs: ArrayLike) -> None:
        """Add harvested probabilities to the expected counts of tokens."""
        ids, floats = np.ascontiguousarray(token_ids, np.int32), np.ascontiguousarray(probs, "f4")
        _kernels.count_unigrams(self._header().row, ids, floats)

    def _grow(
        self,
        context: Sequence[int] | NDArray[np.integer[Any]],
        max_draft_tokens: int,
        max_candidates: int | None,
        sequence: int | None,
        rng: np.random.Generator | None,
    ) -> Draft | SampledDraft:
        """Grow a tree under a context, of the likeliest nodes or, with `rng`, of drawn ones."""
        ids = token_ids_of("context", context)[-self._max_match :]
        size = most_leaves = positive("max_draft_tokens", max_draft_tokens)
        if max_candidates is not None:
            most_leaves = positive("max_candidates", max_candidates)
        with self._lock:
            opened = self._sequence(sequence)
            uniforms = _NONE_DRAWN if rng is None else rng.random(size)
            if not len(ids):
                return Draft.empty() if rng is None else SampledDraft.empty()
            row = self._scratch.row_for(size, opened.num_texts)
            root = ids.astype(np.int32)
            tree = opened.row, row, root, size, most_leaves, uniforms, 0.0
            num = _kernels.grow_tree(self._header().row, *tree)
            nodes, probs, _, _, left_ids, _, support_probs = self._scratch.header.arrays[5:]
            token_ids, parents, depths = nodes[:3, :num].astype(np.int32)
            grown = token_ids, parents, depths, probs[:num].copy()
            if rng is None:
                return Draft(*grown)
            support_ids = left_ids[parents + 1].astype(np.int32)
            return SampledDraft(*grown, support_ids, support_probs[:num].copy())

    # --- arrays -----------------------------------------------------------------------------
    #
    # Each group of arrays is replaced as a whole, in one assignment: if memory runs out or an
    # interrupt comes, the pool is unchanged.

    def _empty(self, num_rows: int) -> TextArrays:
        # One bucket per row, rounded down to a power of two: a bucket holds 1 to 2 positions.
        num_buckets = 1 << (num_rows.bit_length() - 1)
        return TextArrays(
            np.full((num_rows, 3), NONE, np.int32),
            np.full((num_rows, self._max_ngram_size), NONE, np.int32),
            np.full((self._max_ngram_size, num_buckets), NONE, np.int32),
        )

    def _header(self) -> Header:
        """Return the kernels' header of the pool, with the current arrays."""
        now = self._held, self._harvested.held, self._weights, self._unigrams, self._often
        if self._known is None or not all(map(operator.is_, now, self._known[0])):
            self._known = now, self._header_with(self._held)
        return self._known[1]

    def _header_with(self, held: TextArrays) -> Header:
        """Return the kernels' header of the pool with another text."""
        harvested = self._harvested.held.header
        arrays = *held, self._counts, self._weights, *self._unigrams, harvested.row, *self._often
        return Header(*arrays)


# --- compiling ------------------------------------------------------------------------------


@cache
def _compile_kernels() -> None:
    """Run every kernel that a new pool's drafts need, so that no token waits for a compiler."""
    if is_first_run():
        logger.warning("The first run compiles kernels, for about a minute")
    pool, nothing = object.__new__(NGramPool), np.zeros(1, np.int64)
    pool._begin(1, DEFAULT_MAX_NGRAM_SIZE, 0)
    pool._make_unshared()
    pool.observe((), None)
    for kernel in (_kernels.reindex, _kernels.rebase):
        kernel(pool._header().row)
    pool.draft(nothing, 1, 1)
    pool._count_unigrams(np.empty((0, 1)), np.empty((0, 1)))
    pool.texts()
    table = SuccessorTable(1)
    table.put(np.zeros((1, 2), np.int64), np.zeros((1, 1), np.int32), np.ones((1, 1)))
    table.put_tree(NONE, [0], [NONE], [[0]], [[1.0]])
    table._resize(len(table.held.keys))


def is_first_run() -> bool:
    """Return whether a kernel that each pool needs is compiled next, and kept."""
    kernels: list[Any] = [k for k in vars(_kernels).values() if isinstance(k, Dispatcher)]
    caches = [kernel._cache for kernel in kernels if kernel is not _kernels.draft_rows]
    return any(each.cache_path is not None and not each.has_code for each in caches)


@cache
def compile_chains() -> None:
    """Compile the kernels that only engines need."""
    scratch, none = Scratch(1, 1), np.empty(0, np.int64)
    rows, ids, probs = (np.empty((0, 0), kind) for kind in (np.int64, np.int32, np.float64))
    of_rows = rows, rows, scratch.row_for(1, 0), ids, none, none, none
    _kernels.draft_rows(*of_rows, 0.0, 1, 0.0, ids, probs, none)


def _stacked(rows: list[Int64Array]) -> Int64Array:
    """Return headers as one array, int64 [num_rows, …]."""
    return np.array(rows) if rows else np.empty((0, 0), np.int64)


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
    return np.array([0, 0, int(seed) & MAX_TOKEN_ID, multiplier])
