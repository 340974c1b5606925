"""A transformers cache on the memory of `kv_memory`."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from lade.targets.kv_memory import (
    FIRST_NUM_SLOTS,
    FixedSlots,
    Group,
    LayerKind,
    Spare,
    Storage,
    Store,
)


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
        self.num_pending = 0  # slots written after the committed ones
        self._num_indexed = 0  # the same for indexer keys
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
        """[rows, length, index_head_dim] in a layer that indexes its keys, else None."""
        if not self.is_indexer_initialized:
            return None
        assert self._indexer_place is not None
        states: Tensor = self._held(*self._indexer_place)
        return states[:, 0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Claim a place in the stores; called with the first keys and values."""
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
        """Write new keys and values after those of each row; return views of the whole layer."""
        fixed = self._group.fixed
        if not self.is_initialized:
            num_rows = len(key_states)
            if fixed is not None and fixed.num_written is not None:
                num_rows = fixed.num_written[0]
            shape = (num_rows, -1, -1, -1)
            self.lazy_initialization(key_states.expand(shape), value_states.expand(shape))
        if fixed is not None and fixed.write is not None:
            (of_keys, key_index), (of_values, value_index) = self._key_place, self._value_place
            keys, values = of_keys.buffer[key_index], of_values.buffer[value_index]
            if keys.shape[1] == values.shape[1]:
                fixed.write(keys, values, key_states, value_states, fixed.of_new)
                num_new = key_states.shape[2] if fixed.num_written is None else fixed.num_written[1]
                self.num_pending += num_new
                return keys[:, :, : fixed.num_shown], values[:, :, : fixed.num_shown]
        keys = self._put(*self._key_place, key_states, self.num_pending)
        values = self._put(*self._value_place, value_states, self.num_pending)
        self.num_pending += key_states.shape[2]
        return keys, values

    def address(self, key_states: Tensor, value_states: Tensor) -> tuple[int, ...] | None:
        """Return where the first key of the first row is, and bytes from one head to the next.

        Then the same of values, and bytes from one row to the next of keys, and of values. None if
        the memory is not a CPU's, or has no such keys or values as these.
        """
        (of_keys, key_index), (of_values, value_index) = self._key_place, self._value_place
        keys = of_keys.address(key_index, key_states, 0)
        values = of_values.address(value_index, value_states, 0)
        if keys is None or values is None:
            return None
        return (*keys, *values, of_keys.row_step, of_values.row_step)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write indexer keys [rows, num_new, index_head_dim]; return all of the layer."""
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
        """Copy the contents of a filled layer of a transformers cache."""
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
        """Let a layer of a transformers cache hold this layer's contents, or copies of them."""
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
        """Reset the count of pending slots."""
        self.num_pending = self._num_indexed = 0

    def forget(self) -> None:
        """Reset, keeping the allocation."""
        self.is_initialized = self.is_indexer_initialized = False
        self.commit()

    def get_seq_length(self) -> Any:
        """Return the number of slots of the longest row, including those no longer held.

        An int; but an int64 tensor [] while recording a forward that will run at other lengths, so
        that whatever depends on it is recorded, too, or the recording fails.
        """
        if not self.is_initialized:  # a layer that no token has reached, such as one for images
            return 0
        if self._storage.length is not None:
            return self._storage.length
        return max(self._storage.lengths, default=0) + self.num_pending

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that `update` will return, and the slot of the first."""
        offset = self.offset
        if self._group.fixed is not None:
            return self._group.fixed.num_shown, offset
        return self.get_seq_length() + query_length - offset, offset

    def get_max_length(self) -> int:
        """Return -1: the cache has no fixed maximum."""
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
        # Only the end of a long prompt is kept, so memory for all of it is not needed.
        length = max(storage.lengths) + num_pending
        num_held = length - group.first_slot(length)
        num_kept = length + num_new - group.first_slot(length + num_new)
        return store.roll(index, states, num_held, num_kept)


class TreeCache(Cache):  # type: ignore[misc]
    """A `transformers.Cache` of preallocated layers for all kinds of attention.

    Args:
        max_slots: maximum number of tokens expected; memory grows in steps, and beyond this only if
            more tokens come.
        share: whether all layers are on one device, so that one tensor can hold them.
        is_fixed: whether steps will have fixed shapes; `num_slots` is then the initial allocation,
            including room for new tokens, because steps must be recorded anew if memory moves.
        spare: more slots for layers without a window, allocated at once if they fit.
    """

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        num_slots: int,
        max_slots: int,
        *,
        share: bool = True,
        is_fixed: bool = False,
        spare: Spare | None = None,
    ) -> None:
        first = min(num_slots + FIRST_NUM_SLOTS, max(max_slots, num_slots))
        if is_fixed:
            first = num_slots
        held: list[LayerKind] = [kind for kind in kinds if kind.kind != "empty"]
        windows = [kind.window for kind in held]
        if spare is not None and held:
            of_layer = spare.num_bytes // (2 * len(held))  # its keys, and its values
            spare = spare._replace(num_bytes=of_layer)
        groups = {
            window: Group(
                window,
                windows.count(window) if share else 1,
                first,
                max_slots,
                is_fixed,
                spare,
            )
            for window in windows
        }
        self._groups = groups
        self._storage = Storage([*groups.values()])
        self._places: tuple[tuple[int, ...], NDArray[np.int64]] | None = None  # of late
        #: The layers that keep anything.
        self.held: list[TreeCacheLayer] = []
        layers: list[Any] = []
        for kind in kinds:
            if kind.kind == "empty":
                layers.append(cache_utils.DummyLayer())
                continue
            index = sum(layer.window == kind.window for layer in held[: len(self.held)])
            self.held.append(TreeCacheLayer(self._storage, groups[kind.window], index))
            layers.append(self.held[-1])
        super().__init__(layers=layers)

    @property
    def lengths(self) -> list[int]:
        """Committed slots of each row in use; empty before the first forward."""
        return self._storage.lengths

    @property
    def windows(self) -> list[int | None]:
        """The distinct windows of the layers; None for layers that keep all slots."""
        return [*self._groups]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Memory addresses; a recording must not be replayed after they have changed."""
        return tuple(store.whole.data_ptr() for store in self._storage)

    @property
    def device(self) -> torch.device | None:
        """Device of the memory; None before the first forward."""
        return next((store.whole.device for store in self._storage), None)

    @property
    def room(self) -> int:
        """Slots that all layers without a window have room for; windowed layers need no more."""
        stores = self._groups.get(None, ())
        return min((store.whole.shape[3] for store in stores), default=sys.maxsize)

    @property
    def is_clearing(self) -> bool:
        """Whether windowed layers still hold NaN, which will leave their windows eventually."""
        return any(group.clears for group in self._groups.values())

    @property
    def num_bytes(self) -> int:
        """Size of the memory in bytes."""
        return sum(store.whole.nbytes for store in self._storage)

    def first_slot(self, window: int | None) -> int:
        """Return the first slot held by layers with this window."""
        for layer in self.held:
            if layer._group.window == window:
                return layer.offset
        return 0

    def reserve(self, num_new: int) -> dict[int | None, int]:
        """Reserve room for `num_new` slots after those of the longest row.

        Returns:
            For each window, the number of slots that its layers have room for.

        Raises:
            torch.OutOfMemoryError: there is not enough memory.
        """
        stop = max(self.lengths) + num_new
        rooms = {}
        for window, group in self._groups.items():
            for store in group:
                store.reserve(stop - group.offset)
            rooms[window] = min((store.whole.shape[3] for store in group), default=0)
        return rooms

    def places(
        self, nums: Sequence[int], key_states: Tensor, value_states: Tensor
    ) -> NDArray[np.int64] | None:
        """Return where new keys and values of each row go, and those before them are.

        Room is reserved. None where they are not in plain memory, a CPU's, with such heads.

        Args:
            nums: how many come in each row; nothing is counted as pending yet.
            key_states, value_states: of the right heads, numbers and dtype, of one token.

        Returns:
            int64 [num_layers, rows, 5]: address of the keys, bytes from one head to the
            next, both of values, and the number of keys.
        """
        storage, groups, num_rows = self._storage, [*self._groups.values()], len(nums)
        if not all(layer.is_initialized for layer in self.held):
            shape = (num_rows, -1, -1, -1)
            for layer in self.held:
                layer.lazy_initialization(key_states.expand(shape), value_states.expand(shape))
        lengths, num_pending = self.lengths, self.held[0].num_pending
        if len(lengths) != num_rows or any(layer.num_pending != num_pending for layer in self.held):
            return None
        stops = np.add(lengths, nums) + num_pending
        if storage.is_prefilling and any(group.first_slot(int(stops.max())) for group in groups):
            return None  # of a long prompt, layers with windows keep the end alone
        for group in groups:
            for store in group:
                store.reserve(int(stops.max()) - group.offset)
        if self._places is None or self._places[0] != self.addresses:
            found = [layer.address(key_states, value_states) for layer in self.held]
            if None in found:
                return None
            self._places = self.addresses, np.array(found)
        of_layers = self._places[1]  # [num_layers, 6]
        places = np.empty((len(self.held), num_rows, 5), np.int64)
        places[..., :4] = of_layers[:, None, :4]
        places[..., (0, 2)] += of_layers[:, None, 4:] * np.arange(num_rows)[:, None]
        places[..., 4] = stops - np.array([[layer._group.offset] for layer in self.held])
        return places

    def fix(self, slots: Mapping[int | None, FixedSlots], length: Tensor | None = None) -> None:
        """Make forwards write at these slots until the next call.

        Args:
            length: length of the longest row, int64 [], which layers report while recording a
                forward that will also run at other lengths.
        """
        for window, group in self._groups.items():
            group.fixed = slots[window]
        self._storage.length = length
        for layer in self.held:
            layer.commit()  # uncommitted slots are overwritten

    def unfix(self) -> None:
        """Make forwards write after the tokens of each row again."""
        for group in self._groups.values():
            group.fixed = None

    def reset(self) -> None:
        """Reset, keeping the allocation, for another prompt with as many rows."""
        self._storage.reset()
        for layer in self.held:
            layer.forget()

    def keep_all(self, may_be_nan: bool = False) -> None:
        """Commit all slots of the prompt, including padding; later tokens may be rejected.

        Args:
            may_be_nan: whether to look for slots with NaN, as some models give for padding.
        """
        num_pending = max(layer.num_pending for layer in self.held)
        self._commit([length + num_pending for length in self.lengths])
        self._storage.end_prefill()
        for group in self._groups.values():
            group.clears = may_be_nan and group.window is not None
            group.clear(self.lengths)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the slots of each row's path, in order, of those written since the last commit.

        Args:
            paths: for each row, ascending node indices, counted from the row's committed slots.
        """
        for row, (path, length) in enumerate(zip(paths, self.lengths, strict=True)):
            in_place = 0
            while in_place < len(path) and path[in_place] == in_place:
                in_place += 1
            if in_place < len(path):
                source = [length + node for node in path[in_place:]]
                self._storage.move(row, source, length + in_place)
        self._commit([old + len(path) for old, path in zip(self.lengths, paths, strict=True)])

    def go_back(self, num_tokens: int) -> bool:
        """Forget the last tokens of each row; False if those before them are held no more."""
        lengths = [length - num_tokens for length in self.lengths]
        groups = self._groups.values()
        if any(group.first_slot(min(lengths)) < group.offset for group in groups):
            return False
        self._storage.go_back(lengths)
        self.drop_pending()
        return True

    def drop_pending(self) -> None:
        """Forget the slots that were written since the last commit."""
        for layer in self.held:
            layer.commit()

    def select(self, places: Sequence[int]) -> None:
        """Continue with these of the rows in use, ascending; only between steps."""
        self._storage.select(places)

    def rejoin(self) -> None:
        """Take all rows back into use; only between steps."""
        self._storage.rejoin()

    def take_over(self, cache: DynamicCache) -> None:
        """Copy the contents of a filled cache, which is not changed; only before the prompt."""
        for mine, theirs in zip(self.layers, cache.layers, strict=False):
            if isinstance(mine, TreeCacheLayer):
                mine.take_over(theirs)
        num_pending = max(layer.num_pending for layer in self.held)
        self._commit([length + num_pending for length in self.lengths])

    def hand_over(self, cache: DynamicCache, *, copies: bool = False) -> None:
        """Let a dynamic cache hold this cache's contents; rows must be of equal length.

        Without `copies`, its keys and values become views of memory that all layers share.
        """
        assert len(set(self.lengths)) == 1
        for index, mine in enumerate(self.layers):
            if not isinstance(mine, TreeCacheLayer):
                continue
            keys, values = mine.keys, mine.values
            if index >= len(cache.layers) and keys is not None and values is not None:
                cache.update(keys[:, :, :0], values[:, :, :0], index)  # creates the layer
            if index < len(cache.layers):
                mine.hand_over(cache.layers[index], copies)

    def _commit(self, lengths: list[int]) -> None:
        self._storage.commit(lengths)
        for layer in self.held:
            layer.commit()
