"""`PoolState`: all that a pool holds, and every kernel that reads or writes it.

Nothing here takes a lock or checks arguments: `pool.py` does, before it calls. `_kernels.py`, next
to read, explains how the arrays are laid out.
"""

import copy
import operator
import secrets
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ngram_pool import _kernels
from ngram_pool._kernels import (
    HASH_MASK,
    HASH_MULTIPLIER,
    HEADER_AT,
    LOWERED,
    LOWERED_THEN,
    MULTIPLIER,
    NEXT,
    NEXT_POSITION,
    NONE,
    PREVIOUS,
    SEED,
    TOKEN,
    Float64Array,
    Int32Array,
    Int64Array,
)
from ngram_pool.arrays import Header, OpenSequence, Room, TextArrays, Unigrams
from ngram_pool.chains import DraftChains, TextRows, checked_rows
from ngram_pool.compiling import compile_by
from ngram_pool.draft import Draft, SampledDraft
from ngram_pool.errors import PoolFileError
from ngram_pool.files import StoredPool
from ngram_pool.table import SuccessorTable, keys_of
from ngram_pool.weights import first_weights

MAX_CAPACITY_TOKENS = 2**29  # so that positions can count three times as many
_FIRST_NUM_ROWS = 2**12  # allocated first; doubled when full, up to the capacity
_POSITION_LIMIT = 2**31 - 1  # positions are int32 and are lowered before they overflow
# Longer input is observed in pieces, so that Python notices an interrupt within a few ms.
_PIECE = 2**16
# Capacity for harvested contexts, per token of the pool's capacity: at most 8 bytes per token.
_CONTEXTS_PER_TOKEN = 1 / 16
# Bits of a seed: 31 of the hash's first state, and 29 of its multiplier, which stays odd and large.
_SEED_BITS = 60
# Scratch for drafts is kept for this many threads at a time; further ones allocate theirs anew.
_MAX_ROOMS = 8
_LEAST_ROOM = 64  # nodes that scratch is for at least
# How far one token of an answer moves the weights of the sources. From the initial weights, fitted
# to the same model, a rate of 0 accepted 0.4 % fewer tokens, 0.01 2 % fewer, and 0.03 9 % fewer.
_LEARNING_RATE = 0.003
_NONE_DRAWN = np.empty(0, np.float64)  # the uniforms of a tree that is not drawn
# Attributes that a copy of a pool allocates anew.
_NOT_COPIED = {"rooms", "no_sequence", "_header"}


class PoolState:
    """What a pool holds; `NGramPool` describes it. A copy shares nothing with it.

    Args:
        beside: whose scratch is used as well.
    """

    def __init__(
        self,
        capacity_tokens: int,
        max_ngram_size: int,
        seed: int | None,
        beside: "PoolState | None" = None,
    ) -> None:
        self.capacity, self.max_ngram_size = capacity_tokens, max_ngram_size
        # Averaging over the last ten times of a context accepted as many tokens.
        num_contexts = max(1, int(capacity_tokens * _CONTEXTS_PER_TOKEN))
        self.harvested = SuccessorTable(num_contexts, averages=False)
        self.unigrams = Unigrams.empty()
        self.weights = first_weights()
        self.learning_rate = _LEARNING_RATE
        self.counts = _first_counts(seed)
        self.held = self._empty(min(_FIRST_NUM_ROWS, capacity_tokens))
        self.sequence_0 = OpenSequence()
        self._begin(None if beside is None else beside.rooms)

    def _begin(self, rooms: dict[int, list[Room]] | None = None) -> None:
        """Allocate what every copy has of its own."""
        self.no_sequence = OpenSequence()
        self._header: Header | None = None  # as of the last call of `header`
        #: Free scratch, by number of layers.
        self.rooms = {0: [self._room(_LEAST_ROOM, 0)]} if rooms is None else rooms

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in _NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Arrays from out-of-band buffers of a pickle can be read-only; copies are not.
        vars(self).update(copy.deepcopy(state))
        self._begin()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PoolState":
        copied = PoolState.__new__(PoolState)
        copied.__setstate__(self.__getstate__())
        return copied

    def __len__(self) -> int:
        return min(self.counts.item(NEXT_POSITION), len(self.held.text))

    @property
    def first(self) -> int:
        """Oldest position held."""
        return self.counts.item(NEXT_POSITION) - len(self)

    @property
    def num_observed(self) -> int:
        """How many tokens were ever observed, here and in the pools this one was loaded from."""
        return self.counts.item(NEXT_POSITION) + self.counts.item(LOWERED)

    @property
    def max_match(self) -> int:
        """How many of a context's last tokens matter."""
        return max(_kernels.MAX_MATCH, self.max_ngram_size)

    @property
    def seed(self) -> int:
        """The seed of the hashes."""
        state, multiplier = self.counts.item(SEED), self.counts.item(MULTIPLIER)
        return state | ((multiplier ^ HASH_MULTIPLIER) >> 1) << 31

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        rooms = [room for free in list(self.rooms.values()) for room in list(free)]
        groups = [room.arrays for room in rooms] + [self.held, self.unigrams]
        arrays = [self.weights, self.counts, *(array for group in groups for array in group)]
        return sum(array.nbytes for array in arrays) + self.harvested.nbytes

    # --- writing ----------------------------------------------------------------------------

    def append_all(self, ids: Int64Array, opened: OpenSequence, is_answer: bool) -> None:
        """Append tokens to a sequence; see `NGramPool.observe`."""
        self.grow_for(len(ids))
        # In pieces that fit the capacity, so that positions can count them.
        piece = min(self.capacity, _PIECE)
        for start in range(0, len(ids), piece):
            self._append(ids[start : start + piece], opened, is_answer)

    def grow_for(self, num_tokens: int) -> None:
        """Have room for more tokens, up to the capacity."""
        end = self.counts.item(NEXT_POSITION) + num_tokens
        if len(self.held.text) < min(end, self.capacity):
            self._grow(end)

    def rebase_for(self, num_tokens: int) -> None:
        """Lower positions if those of more tokens would overflow."""
        if self.counts.item(NEXT_POSITION) + num_tokens > _POSITION_LIMIT:
            _kernels.rebase(self.header().row)
            # Other sequences are lowered as they are used. A copy that is only read has this one,
            # and threads that use it at once.
            _kernels.lower(self.sequence_0.state, self.counts)

    def _append(self, ids: Int64Array, sequence: OpenSequence, is_answer: bool) -> None:
        self.rebase_for(len(ids))
        room, header = self._take_room(1, sequence), sequence.header()
        rate = self.learning_rate if is_answer else 0.0
        new = ids.astype(np.int32)
        _kernels.append(self.header().row, header.row, room.row, new, rate, 1, 0)
        self._give_room_back(room, sequence)

    def count_unigrams(self, token_ids: ArrayLike, probs: ArrayLike) -> None:
        """Add harvested probabilities to the expected counts of tokens."""
        ids, floats = np.ascontiguousarray(token_ids, np.int32), np.ascontiguousarray(probs, "f4")
        _kernels.count_unigrams(self.header().row, ids, floats)

    def take_harvest(self, table: SuccessorTable, unigrams: Unigrams) -> None:
        """Take what another pool harvested; see `NGramPool.merge`."""
        self.harvested.update(table)
        # The greater count, so that a pool that comes back with what it took is not counted twice.
        own = self.unigrams.as_dict()
        more = {
            token_id: count - own.get(token_id, 0.0)
            for token_id, count in unigrams.as_dict().items()
            if count > own.get(token_id, 0.0)
        }
        for token_id in sorted(more, key=more.__getitem__):  # where there is no room, the rarest go
            self.count_unigrams([[token_id]], [[more[token_id]]])

    def forget(self, ids: Int64Array) -> int:
        """Remove every occurrence of some tokens; see `NGramPool.forget`."""
        text, fallbacks = self.held.text, np.empty((2, len(ids)), np.int32)
        left = np.zeros(len(text), np.int32)
        pool = self.header()
        num_found = _kernels.find_occurrences(pool.row, ids, ids[::-1].copy(), fallbacks, left)
        distinct = np.unique(ids)
        is_elsewhere = np.isin(distinct, text[left == 0, TOKEN])
        contexts = self._contexts_of(ids, np.flatnonzero(left))
        _kernels.forget(pool.row, left, contexts, distinct[~is_elsewhere], bool(left.any()))
        for room in [room for rooms in self.rooms.values() for room in rooms]:
            for array in room.arrays:  # of the last drafts
                array.fill(0)
        return num_found

    def _contexts_of(self, ids: Int64Array, rows: NDArray[np.intp]) -> Int64Array:
        """Return the keys, sorted, of the contexts that tokens and rows of the text are part of."""
        text = self.held.text
        pairs = [np.stack([np.full_like(ids, NONE), ids], 1), np.stack([ids[:-1], ids[1:]], 1)]
        for column in (PREVIOUS, NEXT):
            others = text[rows, column]
            is_held = others >= self.first
            there = text[rows[is_held], TOKEN]
            beside = text[others[is_held] % len(text), TOKEN]
            pair = (beside, there) if column == PREVIOUS else (there, beside)
            pairs.append(np.stack(pair, 1).astype(np.int64))
        return np.unique(keys_of(np.concatenate(pairs)))

    # --- reading ----------------------------------------------------------------------------

    def draft(
        self, ids: Int64Array, max_draft_tokens: int, max_leaves: int, opened: OpenSequence
    ) -> Draft:
        """Grow a tree under a context; see `NGramPool.draft`."""
        if not len(ids):
            return Draft.empty()
        room = self._take_room(max_draft_tokens, opened)
        nodes, probs = self._grow_tree(ids, max_draft_tokens, max_leaves, _NONE_DRAWN, opened, room)
        self._give_room_back(room, opened)
        return Draft(*nodes, probs)

    def draw(
        self, ids: Int64Array, max_leaves: int, uniforms: Float64Array, opened: OpenSequence
    ) -> SampledDraft:
        """Draw a tree under a context, of a node for each uniform; see `NGramPool.sample`."""
        max_draft_tokens = len(uniforms)
        if not len(ids):
            return SampledDraft.empty()
        room = self._take_room(max_draft_tokens, opened)
        nodes, probs = self._grow_tree(ids, max_draft_tokens, max_leaves, uniforms, opened, room)
        left_ids = room.left_ids[nodes[1] + 1].astype(np.int32)
        support_probs = room.support_probs[: len(probs)].copy()
        self._give_room_back(room, opened)
        return SampledDraft(*nodes, probs, left_ids, support_probs)

    def _grow_tree(
        self,
        ids: Int64Array,
        max_draft_tokens: int,
        max_leaves: int,
        uniforms: Float64Array,
        sequence: OpenSequence,
        room: Room,
    ) -> tuple[tuple[Int32Array, Int32Array, Int32Array], Float64Array]:
        """Return tokens, parents and depths of nodes, and their probabilities."""
        reversed_ids, header = ids[::-1].copy(), sequence.header()
        num_nodes = _kernels.grow_tree(
            self.header().row,
            header.row,
            room.row,
            reversed_ids,
            max_draft_tokens,
            max_leaves,
            uniforms,
        )
        token_ids, parents, depths = room.nodes[:3, :num_nodes].astype(np.int32)
        return (token_ids, parents, depths), room.node_probs[:num_nodes].copy()

    def draft_chains(
        self,
        pools: Sequence["PoolState"],
        opened: list[OpenSequence],
        rows: TextRows,
        min_probability: float,
        learning_stride: int = 1,
    ) -> DraftChains:
        """Observe and draft for many texts of some pools; see `NGramPool.draft_chains`."""
        num_more: dict[PoolState, int] = {}
        for pool, more in zip(pools, rows.num_new.tolist(), strict=True):
            num_more[pool] = num_more.get(pool, 0) + more
        for pool, more in num_more.items():
            pool.grow_for(more)
            pool.rebase_for(more)
        num_rows, width = len(rows.texts), int(rows.max_draft_tokens.max(initial=0))
        chains = DraftChains(
            np.full((num_rows, width), NONE, np.int32),
            np.zeros((num_rows, width)),
            np.empty(num_rows, np.int64),
        )
        most_layers = max(opened, key=lambda one: len(one.layers), default=self.no_sequence)
        room = self._take_room(1, most_layers)
        of_sequences = [sequence.header() for sequence in opened]
        of_pools = [self.header()] * num_rows
        if any(pool is not self for pool in pools):
            of_pools = [pool.header() for pool in pools]
        which = (
            np.array([header.address for header in of_pools], np.int64),
            np.array([header.address for header in of_sequences], np.int64),
            room.row,
            rows.texts,
            rows.lengths,
        )
        _kernels.observe_rows(*which, rows.num_new, self.learning_rate, learning_stride)
        _kernels.draft_rows(*which, rows.max_draft_tokens, min_probability, *chains)
        self._give_room_back(room, most_layers)
        return chains

    def explore(
        self, max_tokens: int, excluded: Int64Array, opened: OpenSequence
    ) -> tuple[Int32Array, Float64Array]:
        """Name tokens worth running; see `NGramPool.explore`."""
        token_ids, worths = np.empty(max_tokens, np.int32), np.empty(max_tokens)
        header = opened.header()
        num = _kernels.find_worthwhile(self.header().row, header.row, excluded, token_ids, worths)
        return token_ids[:num], worths[:num]

    def write_texts(self, num_observed: int) -> tuple[Int32Array, Int32Array, Int64Array]:
        """Return what is held of the text observed after so many tokens.

        As one array, bounds of texts in it, and the kernel's `places`, counted as `num_observed`.
        """
        lowered = self.counts.item(LOWERED)
        since = num_observed - lowered
        num_tokens = min(len(self), max(0, self.counts.item(NEXT_POSITION) - since))
        token_ids, bounds = np.empty(num_tokens, np.int32), np.empty(num_tokens + 1, np.int32)
        places = np.empty((num_tokens, 3), np.int32)
        num = _kernels.write_texts(self.header().row, since, token_ids, bounds, places)
        positions = places[:num].astype(np.int64)
        positions[positions != NONE] += lowered
        return token_ids[: bounds[num]], bounds[: num + 1], positions

    # --- files ------------------------------------------------------------------------------

    def stored(self, tokenizer: str, model: str) -> StoredPool:
        """Return a copy of all that a file holds."""
        while True:
            held, table = self.held, self.harvested.held
            arrays = {
                **held._asdict(),
                **{f"unigrams.{name}": array for name, array in self.unigrams._asdict().items()},
                **{f"harvested.{name}": array for name, array in table._asdict().items()},
                "weights": self.weights,
                "sequence": self.sequence_0.state,
                "counts": self.counts,
            }
            # In one go: a signal handler of this thread may write before and after, not meanwhile.
            copies = dict(zip(arrays, map(np.ndarray.copy, arrays.values()), strict=True))
            if self.held is held and self.harvested.held is table:
                break
        _kernels.lower(copies["sequence"], copies["counts"])
        copies["sequence"] = copies["sequence"][:LOWERED_THEN]
        return StoredPool(
            self.max_ngram_size,
            self.capacity,
            copies["counts"].item(NEXT_POSITION),
            self.seed,
            tokenizer,
            model,
            copies,
        )

    @classmethod
    def of_file(cls, stored: StoredPool, path: str, is_of_model: bool) -> "PoolState":
        """Return what a file holds, with or without what is of its model.

        Raises:
            PoolFileError: it holds more than a pool can.
        """
        arrays = stored.arrays
        if stored.capacity_tokens > MAX_CAPACITY_TOKENS:
            raise PoolFileError(
                f"{path}: expected a capacity of at most {MAX_CAPACITY_TOKENS} tokens, "
                f"got {stored.capacity_tokens}"
            )
        state = cls(stored.capacity_tokens, stored.max_ngram_size, stored.hash_seed)
        if len(arrays["harvested.keys"]) > state.harvested.capacity:
            raise PoolFileError(
                f"{path}: part 'harvested.keys': expected at most {state.harvested.capacity} rows, "
                f"got {len(arrays['harvested.keys'])}"
            )
        state.held = TextArrays(arrays["text"], arrays["links"], arrays["heads"])
        state.counts[NEXT_POSITION] = stored.num_observed
        state.sequence_0.state[:LOWERED_THEN] = arrays["sequence"]
        if is_of_model:
            names = ("keys", "token_ids", "costs", "counts")
            state.harvested.take(*(arrays[f"harvested.{name}"] for name in names))
            state.unigrams = Unigrams(arrays["unigrams.token_ids"], arrays["unigrams.counts"])
            state.weights = arrays["weights"]
        return state

    # --- arrays -----------------------------------------------------------------------------
    #
    # Each group of arrays is replaced as a whole, in one store: if memory runs out or an interrupt
    # comes, the pool stays as it was.

    def _empty(self, num_rows: int) -> TextArrays:
        # One bucket per row, rounded down to a power of two: a bucket holds 1 to 2 positions.
        num_buckets = 1 << (num_rows.bit_length() - 1)
        return TextArrays(
            np.full((num_rows, 3), NONE, np.int32),
            np.full((num_rows, self.max_ngram_size), NONE, np.int32),
            np.full((self.max_ngram_size, num_buckets), NONE, np.int32),
        )

    def _grow(self, num_tokens: int) -> None:
        old = self.held.text
        num_rows = len(old)
        while num_rows < min(num_tokens, self.capacity):
            num_rows = min(2 * num_rows, self.capacity)
        new = self._empty(num_rows)
        # Arrays grow before the first overwrite, so a position still is its own row.
        new.text[: len(old)] = old
        _kernels.reindex(self._header_with(new).row)
        self.held = new

    def _take_room(self, max_draft_tokens: int, sequence: OpenSequence) -> Room:
        """Return scratch for this thread alone, to be given back; else only the room is lost."""
        num_layers = len(sequence.layers)
        try:
            room = self.rooms[num_layers].pop()
        except LookupError:
            return self._room(max(max_draft_tokens, _LEAST_ROOM), num_layers)
        if max_draft_tokens > room.nodes.shape[1]:
            return self._room(max_draft_tokens, num_layers)
        return room

    def _give_room_back(self, room: Room, sequence: OpenSequence) -> None:
        free = self.rooms.setdefault(len(sequence.layers), [])
        if len(free) < _MAX_ROOMS:
            free.append(room)

    def _room(self, num_nodes: int, num_layers: int) -> Room:
        return Room(num_nodes, num_layers, self.max_match, self.max_ngram_size)

    def header(self) -> Header:
        """Return the kernels' header, with the arrays as they are now."""
        now = self.held, self.harvested.held, self.weights, self.unigrams
        if self._header is None or not all(map(operator.is_, now, self._header.held)):
            self._header = self._header_with(self.held)
        return self._header

    def _header_with(self, held: TextArrays) -> Header:
        """Return a header with another text."""
        table, weights, unigrams, counts = (
            self.harvested.held,
            self.weights,
            self.unigrams,
            self.counts,
        )
        values = [
            *(array.ctypes.data for array in held),
            *(len(held.text), *held.heads.shape),
            *(array.ctypes.data for array in (counts, weights, table.header, *unigrams)),
            *(len(unigrams.token_ids), 0),
        ]
        header = Header(values, (held, table, weights, unigrams, counts))
        header.row[HEADER_AT] = header.address
        return header

    def run_kernels(self) -> None:
        """Run every kernel that drafts need once, so that the first token waits for no compiler."""
        nothing = np.zeros(1, np.int64)
        self._append(nothing[:0], self.no_sequence, False)
        _kernels.reindex(self.header().row)
        _kernels.rebase(self.header().row)
        _kernels.lower(self.no_sequence.state, self.counts)
        self.draft(nothing, 1, 1, self.no_sequence)
        self.count_unigrams(np.empty((0, 1)), np.empty((0, 1)))
        self.explore(1, nothing, self.no_sequence)
        table = SuccessorTable(1)
        table.put(np.zeros((1, 2), np.int64), np.zeros((1, 1), np.int32), np.ones((1, 1)))
        table.put_tree(NONE, [0], [NONE], [[0]], [[1.0]])
        SuccessorTable.from_arrays(table.arrays())

    def run_chains(self) -> None:
        """Run the kernels of `draft_chains` once."""
        self.draft_chains([self], [self.no_sequence], checked_rows([[0]], [1], 1, [0], 1), 0.0)

    def run_texts(self) -> None:
        """Run the kernels that read and write whole texts once."""
        _kernels.find_unsound(*self.held, 0)
        self.write_texts(0)
        self.forget(np.zeros(1, np.int64))


@cache
def compile_chains() -> None:
    """Compile what engines need, and nobody else."""
    compile_by(PoolState(1, 1, 0).run_chains)


@cache
def compile_texts() -> None:
    """Compile what is needed to forget, to exchange texts, and to check those of files."""
    compile_by(PoolState(1, 1, 0).run_texts)


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
