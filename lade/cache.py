"""Preallocated keys and values that keep the accepted paths in place.

transformers' own dynamic cache concatenates, and so copies, all keys and values at every step; here
a step writes its nodes behind the committed ones, and a commit moves the few accepted rows up. Each
row of a batch has a length of its own. Only this file knows how a transformers cache works inside.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

_FIRST_NUM_SLOTS = 256  # slots beyond the prompt at the first allocation
_GROWTH = 4  # then a quarter more, up to the longest the generation can get


class _Store:
    """One tensor for the keys (or the values) of all layers of one shape: one copy moves them all.

    Both `whole`, with all rows of the batch, and `buffer`, with those in use, are
    [num_layers, rows, heads, num_slots, head_dim].
    """

    def __init__(self, num_layers: int, states: Tensor, num_slots: int, max_slots: int) -> None:
        rows, heads, _, head_dim = states.shape
        self._max_slots = max_slots
        self.whole = _allocated(states, (num_layers, rows, heads, num_slots, head_dim))
        self.use(rows)

    def use(self, num_rows: int) -> None:
        """Work on the first rows alone."""
        self.buffer = self.whole[:, :num_rows]

    def swap(self, one: int, other: int) -> None:
        """Swap two rows."""
        held = self.whole[:, one].clone()
        self.whole[:, one] = self.whole[:, other]
        self.whole[:, other] = held

    def fits(self, states: Tensor) -> bool:
        """Tell whether a layer with such new keys or values can live here."""
        mine, other = self.buffer[0], states
        return (mine.dtype, mine.device) == (other.dtype, other.device) and (
            mine.shape[0],
            mine.shape[1],
            mine.shape[3],
        ) == (other.shape[0], other.shape[1], other.shape[3])

    def write(self, layer: int, states: Tensor, slots: "_Slots") -> Tensor:
        """Put new states behind each row's own; return a view of all states of the layer."""
        num_slots = self.buffer.shape[3]
        if slots.stop > num_slots:
            roomy = num_slots + max(_FIRST_NUM_SLOTS, num_slots // _GROWTH)
            shape = list(self.whole.shape)
            shape[3] = max(slots.stop, min(roomy, self._max_slots))
            larger = _allocated(self.whole, tuple(shape))
            larger[:, :, :, :num_slots] = self.whole
            self.whole = larger
            self.use(self.buffer.shape[1])
        mine = self.buffer[layer]
        if slots.index is None:
            mine[:, :, slots.stop - states.shape[2] : slots.stop] = states
        else:
            rows = torch.arange(mine.shape[0], device=mine.device)[:, None]
            mine[rows, :, slots.index.to(mine.device)] = states.transpose(1, 2)
        return mine[:, :, : slots.stop]


def _allocated(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    # What is hidden by a mask is still multiplied by 0, and memory never written to may hold NaN.
    # One row alone never has hidden slots that were not written.
    return like.new_zeros(shape) if shape[1] > 1 else like.new_empty(shape)


class _Slots:
    """Where a forward writes: behind the cached tokens of each row."""

    def __init__(self, starts: Sequence[int], num_new: int) -> None:
        self.stop = max(starts) + num_new
        self.index: Tensor | None = None  # int64 [rows, num_new], or None where all rows are alike
        if min(starts) < max(starts):
            self.index = torch.tensor(starts)[:, None] + torch.arange(num_new)


class _Storage:
    """All stores of a cache. Layers hold this, not the cache: a cycle would keep memory alive."""

    def __init__(self, num_alike: int, num_slots: int, max_slots: int) -> None:
        self._num_alike = num_alike
        self._num_slots = num_slots
        self._max_slots = max_slots
        self._of_keys: list[_Store] = []
        self._of_values: list[_Store] = []
        self.lengths: list[int] = []  # committed slots of each row in use
        self._rows: list[int] = []  # which row lies where, those in use first
        self._parked: dict[int, int] = {}  # committed slots of the rows not in use
        self._slots: dict[tuple[int, int], _Slots] = {}  # of the forward now running

    def place_keys(self, layer: int, states: Tensor) -> tuple[_Store, int]:
        """Return the store for a layer's keys, and the layer's row in it."""
        return self._place(self._of_keys, layer, states)

    def place_values(self, layer: int, states: Tensor) -> tuple[_Store, int]:
        """Return the store for a layer's values, and the layer's row in it."""
        return self._place(self._of_values, layer, states)

    def slots(self, num_pending: int, num_new: int) -> _Slots:
        """Return where to write `num_new` states behind the committed and the pending ones."""
        known = self._slots.get((num_pending, num_new))
        if known is None:  # one forward asks the same of every layer
            known = _Slots([length + num_pending for length in self.lengths], num_new)
            self._slots = {(num_pending, num_new): known}
        return known

    def commit(self, lengths: list[int]) -> None:
        """Set the number of committed slots of each row."""
        self.lengths = lengths
        self._slots = {}

    def move(self, row: int, source: list[int], start: int) -> None:
        """Copy slots `source` of a row, in every layer, to those from `start` on."""
        for store in (*self._of_keys, *self._of_values):
            index = torch.tensor(source, device=store.buffer.device)
            mine = store.buffer[:, row]
            mine[:, :, start : start + len(source)] = mine.index_select(2, index)

    def select(self, places: Sequence[int]) -> None:
        """Go on with these places, ascending, and park the rows of the others behind them."""
        self._rows = self._rows or [*range(len(self.lengths))]
        for place in set(range(len(self.lengths))) - set(places):
            self._parked[self._rows[place]] = self.lengths[place]
        self.commit([self.lengths[place] for place in places])
        for new, old in enumerate(places):
            self._swap(new, old)
        self._use(len(places))

    def rejoin(self) -> None:
        """Take all rows back into use, in their first order."""
        if not self._parked:
            return
        in_use = dict(zip(self._rows, self.lengths, strict=False))
        self.commit([length for _, length in sorted((in_use | self._parked).items())])
        self._parked = {}
        for place in range(len(self._rows)):
            while self._rows[place] != place:
                self._swap(place, self._rows[place])
        self._use(len(self._rows))

    def _swap(self, one: int, other: int) -> None:
        if one != other:
            self._rows[one], self._rows[other] = self._rows[other], self._rows[one]
            for store in (*self._of_keys, *self._of_values):
                store.swap(one, other)

    def _use(self, num_rows: int) -> None:
        for store in (*self._of_keys, *self._of_values):
            store.use(num_rows)

    def _place(self, stores: list[_Store], layer: int, states: Tensor) -> tuple[_Store, int]:
        if not self.lengths:
            self.lengths = [0] * states.shape[0]
        if not stores and self._num_alike > 1:
            # The first layer speaks for the others: most models' layers are alike.
            stores.append(_Store(self._num_alike, states, self._num_slots, self._max_slots))
        if self._num_alike > 1 and stores[0].fits(states):
            return stores[0], layer
        stores.append(_Store(1, states, self._num_slots, self._max_slots))
        return stores[-1], 0


class TreeCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """The part of a `TreeCache` that one attention layer writes to and reads from."""

    is_sliding = False

    def __init__(self, storage: _Storage, index: int) -> None:
        # Not the base class's __init__: it would assign `keys` and `values`, properties here.
        self.is_initialized = False
        self._storage = storage
        self._index = index
        self.num_pending = 0  # slots written behind the committed ones

    @property
    def keys(self) -> Tensor | None:
        """[rows, heads, length, head_dim], or None before the first forward."""
        if not self.is_initialized:
            return None
        return self._key_store.buffer[self._key_row][:, :, : self.get_seq_length()]

    @property
    def values(self) -> Tensor | None:
        """[rows, heads, length, head_dim], or None before the first forward."""
        if not self.is_initialized:
            return None
        return self._value_store.buffer[self._value_row][:, :, : self.get_seq_length()]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Find a place in the stores; called with the first keys and values."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._key_store, self._key_row = self._storage.place_keys(self._index, key_states)
        self._value_store, self._value_row = self._storage.place_values(self._index, value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values behind those of each row; return views of the whole layer."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = self._storage.slots(self.num_pending, key_states.shape[2])
        keys = self._key_store.write(self._key_row, key_states, slots)
        values = self._value_store.write(self._value_row, value_states, slots)
        self.num_pending += key_states.shape[2]
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of slots held by the longest row."""
        return max(self._storage.lengths, default=0) + self.num_pending

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys a query of that length sees, and their offset."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the cache grows without a fixed end."""
        return -1


class TreeCache(Cache):  # type: ignore[misc]
    """A `transformers.Cache` of preallocated layers for full attention.

    Args:
        num_layers: attention layers of the model.
        num_slots: tokens of the prompt.
        max_slots: tokens that can be needed at all; memory grows in steps, and not beyond this
            unless more tokens come.
        share: whether all layers are on one device, so that one tensor can hold them.
    """

    def __init__(
        self, num_layers: int, num_slots: int, max_slots: int, *, share: bool = True
    ) -> None:
        first = min(num_slots + _FIRST_NUM_SLOTS, max(max_slots, num_slots))
        self._storage = _Storage(num_layers if share else 1, first, max_slots)
        super().__init__(layers=[TreeCacheLayer(self._storage, i) for i in range(num_layers)])

    @property
    def lengths(self) -> list[int]:
        """Committed slots of each row in use; empty before the first forward."""
        return self._storage.lengths

    def keep_all(self) -> None:
        """Commit every slot written so far, those of padding too."""
        num_pending = self.layers[0].num_pending
        self._commit([length + num_pending for length in self.lengths])

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Of the slots written since the last commit, keep those of each row's path, in order.

        Args:
            paths: for each row node indices, ascending, counted from the row's committed slots.
        """
        for row, (path, length) in enumerate(zip(paths, self.lengths, strict=True)):
            in_place = 0
            while in_place < len(path) and path[in_place] == in_place:
                in_place += 1
            if in_place < len(path):
                source = [length + node for node in path[in_place:]]
                self._storage.move(row, source, length + in_place)
        self._commit([old + len(path) for old, path in zip(self.lengths, paths, strict=True)])

    def select(self, places: Sequence[int]) -> None:
        """Go on with these of the rows in use, ascending; between steps only."""
        self._storage.select(places)

    def rejoin(self) -> None:
        """Take all rows back into use; between steps only."""
        self._storage.rejoin()

    def take_over(self, cache: DynamicCache) -> None:
        """Copy what a filled cache holds; that cache stays as it is."""
        for index, layer in enumerate(cache.layers):
            self.update(layer.keys, layer.values, index)
        self.keep_all()

    def hand_over(self, cache: DynamicCache) -> None:
        """Let a dynamic cache hold what this one holds, without a copy; rows are of one length.

        Its keys and values then are views of memory that all layers share.
        """
        assert len(set(self.lengths)) == 1
        for index, mine in enumerate(self.layers):
            if index >= len(cache.layers) or not cache.layers[index].is_initialized:
                cache.update(mine.keys[:, :, :0], mine.values[:, :, :0], index)
            layer = cache.layers[index]
            layer.keys, layer.values = mine.keys, mine.values

    def _commit(self, lengths: list[int]) -> None:
        self._storage.commit(lengths)
        for layer in self.layers:
            layer.num_pending = 0
