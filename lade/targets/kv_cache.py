"""That memory as a cache of transformers."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from lade.targets.kv_memory import FIRST_NUM_SLOTS, FixedSlots, Group, LayerKind, Storage, Store


class TreeCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """The part of a `TreeCache` that one attention layer writes to and reads from."""

    def __init__(self, storage: Storage, group: Group, index: int) -> None:
        # Not the base class's __init__: it would assign `keys` and `values`, properties here.
        self.is_initialized = False
        self.is_indexer_initialized = False
        self._has_place = False
        self.is_sliding = group.window is not None
        self._storage = storage
        self._group = group
        self._index = index  # in the group
        self.num_pending = 0  # slots written behind the committed ones
        self._num_indexed = 0  # the same of the indexer's keys
        self._indexer_place: tuple[Store, int] | None = None

    @property
    def offset(self) -> int:
        """The first slot held."""
        if self._storage.is_prefilling:
            return self._group.first_slot(self.get_seq_length())
        return self._group.offset

    @property
    def keys(self) -> Tensor | None:
        """[rows, heads, length, head_dim], or None before the first forward."""
        return self._held(*self._key_place) if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:
        """[rows, heads, length, head_dim], or None before the first forward."""
        return self._held(*self._value_place) if self.is_initialized else None

    @property
    def indexer_keys(self) -> Tensor | None:
        """[rows, length, index_head_dim] of a layer that indexes its keys."""
        if not self.is_indexer_initialized:
            return None
        assert self._indexer_place is not None
        states: Tensor = self._held(*self._indexer_place)
        return states[:, 0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Find a place in the stores; called with the first keys and values."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._storage.begin(key_states.shape[0])
        if not self._has_place:
            self._key_place = self._group.place("keys", self._index, key_states)
            self._value_place = self._group.place("values", self._index, value_states)
            self._has_place = True
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values behind those of each row; return views of the whole layer."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys = self._put(*self._key_place, key_states, self.num_pending)
        values = self._put(*self._value_place, value_states, self.num_pending)
        self.num_pending += key_states.shape[2]
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write new indexer keys [rows, num_new, index_head_dim]; return those of the layer."""
        states = indexer_key_states[:, None]
        if not self.is_indexer_initialized:
            self._storage.begin(states.shape[0])
            if self._indexer_place is None:
                self._indexer_place = self._group.place("indexer", self._index, states)
            self.is_indexer_initialized = True
        assert self._indexer_place is not None
        indexer_keys = self._put(*self._indexer_place, states, self._num_indexed)[:, 0]
        self._num_indexed += states.shape[2]
        return indexer_keys

    def take_over(self, layer: Any) -> None:
        """Copy what a filled layer of a transformers cache holds."""
        if not getattr(layer, "is_initialized", False) or layer.keys is None:
            return
        self.lazy_initialization(layer.keys, layer.values)
        length, num_held = layer.get_seq_length(), layer.keys.shape[2]
        num_kept = min(num_held, length - self._group.first_slot(length))
        for (store, index), states in (
            (self._key_place, layer.keys),
            (self._value_place, layer.values),
        ):
            store.roll(index, states, 0, num_kept)
        self.num_pending = length
        if getattr(layer, "is_indexer_initialized", False):
            self.update_indexer(layer.indexer_keys)

    def hand_over(self, layer: Any, copies: bool) -> None:
        """Let a layer of a transformers cache hold what this one holds, or a copy of it."""
        if not self.is_initialized:
            return
        length = self.get_seq_length()
        first = self._group.first_slot(length) - self.offset
        assert self.keys is not None
        assert self.values is not None
        if not layer.is_initialized:
            layer.lazy_initialization(self.keys, self.values)
        layer.keys, layer.values = self.keys[:, :, first:], self.values[:, :, first:]
        indexer_keys = self.indexer_keys
        if copies:
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
            indexer_keys = None if indexer_keys is None else indexer_keys.clone()
        if self._group.window is not None:
            layer.cumulative_length = length
        if indexer_keys is not None:
            layer.indexer_keys, layer.is_indexer_initialized = indexer_keys, True

    def commit(self) -> None:
        """Begin to count pending slots anew."""
        self.num_pending = self._num_indexed = 0

    def forget(self) -> None:
        """Be as new, with memory that is there already."""
        self.is_initialized = self.is_indexer_initialized = False
        self.commit()

    def get_seq_length(self) -> Any:
        """Return the number of slots of the longest row, also those no longer held.

        An int; an int64 tensor [] while a forward is recorded that will be run at other lengths, so
        that what depends on it is recorded, too, or cannot be.
        """
        if not self.is_initialized:  # a layer that no token has come to, as for images
            return 0
        if self._storage.length is not None:
            return self._storage.length
        return max(self._storage.lengths, default=0) + self.num_pending

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that `update` will return, and the first one's slot."""
        offset = self.offset
        if self._group.fixed is not None:
            return self._group.fixed.num_shown, offset
        return self.get_seq_length() + query_length - offset, offset

    def get_max_length(self) -> int:
        """Return -1: the cache grows without a fixed end."""
        return -1

    def _held(self, store: Store, index: int) -> Tensor:
        return store.buffer[index][:, :, : self.get_seq_length() - self.offset]

    def _put(self, store: Store, index: int, states: Tensor, num_pending: int) -> Tensor:
        storage, group, num_new = self._storage, self._group, states.shape[2]
        if group.fixed is not None:
            return store.put(index, states, group.fixed)
        if group.window is None or not storage.is_prefilling:
            slots = storage.slots(num_pending, num_new)
            return store.write(index, states, slots, group.offset)
        # A long prompt need not be held whole to keep the last of it.
        length = max(storage.lengths) + num_pending
        num_held = length - group.first_slot(length)
        num_kept = length + num_new - group.first_slot(length + num_new)
        return store.roll(index, states, num_held, num_kept)


class TreeCache(Cache):  # type: ignore[misc]
    """A `transformers.Cache` of preallocated layers for attention of every kind.

    Args:
        kinds: of the layers, as `kind_of` tells them.
        num_slots: tokens of the prompt.
        max_slots: tokens that can be needed at all; memory grows in steps, and not beyond this
            unless more tokens come.
        share: whether all layers are on one device, so that one tensor can hold them.
        is_fixed: whether steps will be of fixed shape; `num_slots` then is what to begin with, room
            for new tokens included, for memory that moves has to be recorded anew.
    """

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        num_slots: int,
        max_slots: int,
        *,
        share: bool = True,
        is_fixed: bool = False,
    ) -> None:
        first = min(num_slots + FIRST_NUM_SLOTS, max(max_slots, num_slots))
        if is_fixed:
            first = num_slots
        held: list[LayerKind] = [kind for kind in kinds if kind.kind != "empty"]
        windows = [kind.window for kind in held]
        groups = {
            window: Group(window, windows.count(window) if share else 1, first, max_slots, is_fixed)
            for window in windows
        }
        self._groups = groups
        self._storage = Storage([*groups.values()])
        self._held: list[TreeCacheLayer] = []
        layers: list[Any] = []
        for kind in kinds:
            if kind.kind == "empty":
                layers.append(cache_utils.DummyLayer())
                continue
            index = sum(layer.window == kind.window for layer in held[: len(self._held)])
            self._held.append(TreeCacheLayer(self._storage, groups[kind.window], index))
            layers.append(self._held[-1])
        super().__init__(layers=layers)

    @property
    def lengths(self) -> list[int]:
        """Committed slots of each row in use; empty before the first forward."""
        return self._storage.lengths

    @property
    def windows(self) -> list[int | None]:
        """The windows of the layers, each once; None for layers that keep all."""
        return [*self._groups]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the memory lies; what recorded them must not be run when they have changed."""
        return tuple(store.whole.data_ptr() for store in self._storage)

    @property
    def device(self) -> torch.device | None:
        """Where the memory lies; None before the first forward."""
        return next((store.whole.device for store in self._storage), None)

    @property
    def room(self) -> int:
        """Slots that all layers without a window have memory for; others need no more."""
        stores = self._groups.get(None, ())
        return min((store.whole.shape[3] for store in stores), default=sys.maxsize)

    @property
    def is_clearing(self) -> bool:
        """Whether layers with windows hold what is no number, and will have let it go by and by."""
        return any(group.clears for group in self._groups.values())

    @property
    def num_bytes(self) -> int:
        """Size of the memory."""
        return sum(store.whole.nbytes for store in self._storage)

    def first_slot(self, window: int | None) -> int:
        """Return the first slot that layers with this window hold."""
        for layer in self._held:
            if layer._group.window == window:
                return layer.offset
        return 0

    def reserve(self, num_new: int) -> dict[int | None, int]:
        """Have room for so many slots behind those of the longest row.

        Returns:
            By window how many slots its layers have room for.

        Raises:
            torch.OutOfMemoryError: there is no memory for them.
        """
        stop = max(self.lengths) + num_new
        rooms = {}
        for window, group in self._groups.items():
            for store in group:
                store.reserve(stop - group.offset)
            rooms[window] = min((store.whole.shape[3] for store in group), default=0)
        return rooms

    def fix(self, slots: Mapping[int | None, FixedSlots], length: Tensor | None = None) -> None:
        """Let forwards write at these slots, given by window, until they are fixed anew.

        Args:
            slots: of every window.
            length: of the longest row, int64 []: what layers are to tell a forward that is recorded
                to be run at other lengths, too.
        """
        for window, group in self._groups.items():
            group.fixed = slots[window]
        self._storage.length = length
        for layer in self._held:
            layer.commit()  # what was written before, and not committed, is written anew

    def reset(self) -> None:
        """Forget all but the memory, for another prompt with as many rows."""
        self._storage.reset()
        for layer in self._held:
            layer.forget()

    def keep_all(self, may_be_nan: bool = False) -> None:
        """Commit every slot of the prompt, those of padding too; what comes now may be rejected.

        Args:
            may_be_nan: whether to look for slots that are no number, as padding is to some models.
        """
        num_pending = max(layer.num_pending for layer in self._held)
        self._commit([length + num_pending for length in self.lengths])
        self._storage.end_prefill()
        for group in self._groups.values():
            group.clears = may_be_nan and group.window is not None
            group.clear(self.lengths)

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

    def pending(self, nodes: Sequence[int]) -> list[Tensor]:
        """Return copies of what was written for one node of each row since the last commit."""
        return [
            torch.stack(
                [
                    store.buffer[:, row, :, length + node - offset]
                    for row, (node, length) in enumerate(zip(nodes, self.lengths, strict=True))
                ]
            )
            for store, offset in self._storage.stores()
        ]

    def put_pending(self, states: Sequence[Tensor]) -> None:
        """Write such copies over what was written first since the last commit."""
        for (store, offset), of_rows in zip(self._storage.stores(), states, strict=True):
            for row, (state, length) in enumerate(zip(of_rows, self.lengths, strict=True)):
                store.buffer[:, row, :, length - offset] = state

    def select(self, places: Sequence[int]) -> None:
        """Go on with these of the rows in use, ascending; between steps only."""
        self._storage.select(places)

    def rejoin(self) -> None:
        """Take all rows back into use; between steps only."""
        self._storage.rejoin()

    def take_over(self, cache: DynamicCache) -> None:
        """Copy what a filled cache holds; that cache stays as it is. Before the prompt only."""
        for mine, theirs in zip(self.layers, cache.layers, strict=False):
            if isinstance(mine, TreeCacheLayer):
                mine.take_over(theirs)
        num_pending = max(layer.num_pending for layer in self._held)
        self._commit([length + num_pending for length in self.lengths])

    def hand_over(self, cache: DynamicCache, *, copies: bool = False) -> None:
        """Let a dynamic cache hold what this one holds; rows are of one length.

        Unless it gets copies, its keys and values then are views of memory that all layers share.
        """
        assert len(set(self.lengths)) == 1
        for index, mine in enumerate(self.layers):
            if not isinstance(mine, TreeCacheLayer):
                continue
            keys, values = mine.keys, mine.values
            if index >= len(cache.layers) and keys is not None and values is not None:
                cache.update(
                    keys[:, :, :0], values[:, :, :0], index
                )  # it makes layers as they come
            if index < len(cache.layers):
                mine.hand_over(cache.layers[index], copies)

    def _commit(self, lengths: list[int]) -> None:
        self._storage.commit(lengths)
        for layer in self._held:
            layer.commit()
