"""Preallocated keys and values that keep the accepted paths in place.

transformers' own dynamic cache concatenates, and so copies, all keys and values at every step; here
a step writes its nodes behind the committed ones, and a commit moves the few accepted rows up. Each
row of a batch has a length of its own. A layer with a window forgets what has left it.

Where shapes must not change from step to step, steps write at slots that a tensor tells
(`TreeCache.fix`), and all layers show a number of slots that the caller chooses.

What a model's own cache is made of, and how it goes back to an earlier state, is in `rollback.py`.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from lade.transfer import integers_on

_FIRST_NUM_SLOTS = 256  # slots beyond the prompt at the first allocation
_GROWTH = 4  # then a quarter more, up to the longest the generation can get
_MAX_SLACK = 256  # slots that a windowed layer keeps beyond its window before it moves the rest up

Kind = Literal["full", "windowed", "indexed", "empty"]


class LayerKind(NamedTuple):
    """What one layer of a cache keeps."""

    kind: Kind
    window: int | None = None  # a windowed layer keeps one slot less, as transformers' own does


# By exact type: an unknown subclass may keep more than its parents.
_KINDS: dict[type, Kind] = {
    cache_utils.DynamicLayer: "full",
    cache_utils.DynamicSlidingWindowLayer: "windowed",
    cache_utils.DynamicIndexedLayer: "indexed",
}
if hasattr(cache_utils, "DummyLayer"):  # not in the oldest supported version
    _KINDS[cache_utils.DummyLayer] = "empty"


def kind_of(layer: Any) -> LayerKind | None:
    """Return what a layer of a transformers cache keeps, or None if a `TreeCache` cannot."""
    kind = _KINDS.get(type(layer))
    if kind is None:
        return None
    return LayerKind(kind, layer.sliding_window if kind == "windowed" else None)


class FixedSlots(NamedTuple):
    """Where the layers with one window write in a forward of fixed shape, and what they show."""

    of_new: Tensor  # int64 [rows, num_new], counted from the first slot that they hold
    num_shown: int  # slots, from that one on; more than any row has


class _Store:
    """One tensor for the keys (or the values) of all layers of one shape: one copy moves them all.

    Both `whole`, with all rows of the batch, and `buffer`, with those in use, are
    [num_layers, rows, heads, num_slots, head_dim].
    """

    def __init__(
        self, num_layers: int, states: Tensor, num_slots: int, max_slots: int, is_fixed: bool
    ) -> None:
        rows, heads, num_new, head_dim = states.shape
        self._max_slots = max_slots
        self._is_fixed = is_fixed
        like = states[None].expand(num_layers, rows, heads, num_new, head_dim)
        self.whole = self._allocated(like, min(num_new, num_slots), num_slots)
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

    def write(self, layer: int, states: Tensor, slots: "_Slots", offset: int) -> Tensor:
        """Put new states behind each row's own; return a view of all states of the layer."""
        stop = slots.stop - offset
        self.reserve(stop)
        mine = self.buffer[layer]
        if slots.index is None:
            mine[:, :, stop - states.shape[2] : stop] = states
        else:
            rows = torch.arange(mine.shape[0], device=mine.device)[:, None]
            mine[rows, :, slots.index.to(mine.device) - offset] = states.transpose(1, 2)
        return mine[:, :, :stop]

    def put(self, layer: int, states: Tensor, slots: FixedSlots) -> Tensor:
        """Put new states at slots that the device alone knows; return a view of those shown."""
        mine = self.buffer[layer]
        if mine.shape[0] == 1:
            mine.index_copy_(2, slots.of_new[0], states)
        else:
            rows = torch.arange(mine.shape[0], device=mine.device)[:, None]
            mine[rows, :, slots.of_new] = states.transpose(1, 2)
        return mine[:, :, : slots.num_shown]

    def roll(self, layer: int, states: Tensor, num_held: int, num_kept: int) -> Tensor:
        """Return the states held and new ones behind them; keep the last of both alone."""
        held = self.buffer[layer][:, :, :num_held]
        all_states = torch.cat([held, states], dim=2) if num_held else states
        self.reserve(num_kept)
        self.buffer[layer][:, :, :num_kept] = all_states[:, :, all_states.shape[2] - num_kept :]
        return all_states

    def drop(self, num_slots: int, stop: int) -> None:
        """Forget the first slots of every layer; those before `stop` move up."""
        self.whole[:, :, :, : stop - num_slots] = self.whole[:, :, :, num_slots:stop].clone()

    def reserve(self, stop: int) -> None:
        """Have room for so many slots; those held move to other memory where there is too little.

        Raises:
            torch.OutOfMemoryError: there is not even memory for those; nothing was changed.
        """
        num_slots = self.whole.shape[3]
        if stop <= num_slots:
            return
        roomy = num_slots + max(_FIRST_NUM_SLOTS, num_slots // _GROWTH)
        if stop <= self._max_slots:  # else more came than was planned, and more may come
            roomy = min(roomy, self._max_slots)
        larger = self._allocated(self.whole, stop, max(stop, roomy))
        larger[:, :, :, :num_slots] = self.whole
        self.whole = larger
        self.use(self.buffer.shape[1])

    def _allocated(self, like: Tensor, least: int, num_slots: int) -> Tensor:
        """Return memory for so many slots, or for the least number where there is not so much."""
        shape = list(like.shape)
        for wanted in (num_slots, least):
            shape[3] = wanted
            try:
                # Not an inference tensor, which nothing outside of that mode may write to: the
                # memory may outlive the call.
                with torch.inference_mode(False):
                    # What is hidden by a mask is still multiplied by 0, and memory never written to
                    # may hold NaN. One row alone has hidden slots only where shapes are fixed.
                    is_hidden = self._is_fixed or shape[1] > 1
                    return like.new_zeros(shape) if is_hidden else like.new_empty(shape)
            except torch.OutOfMemoryError as error:
                if wanted == least:
                    num_bytes = math.prod(shape) * like.element_size()
                    raise torch.OutOfMemoryError(
                        f"no memory is left for the keys or values of {least} tokens in "
                        f"{shape[0]} layers and {shape[1]} rows ({num_bytes / 2**20:.0f} MiB); "
                        "shorten the text or the batch"
                    ) from error
        raise AssertionError("expected memory or an error")


class _Slots:
    """Where a forward writes: behind the cached tokens of each row."""

    def __init__(self, starts: Sequence[int], num_new: int) -> None:
        self.stop = max(starts) + num_new
        self.index: Tensor | None = None  # int64 [rows, num_new], or None where all rows are alike
        if min(starts) < max(starts):
            self.index = torch.tensor(starts)[:, None] + torch.arange(num_new)


class _Group:
    """The stores of all layers with one window (or with none), and the first slot they hold."""

    def __init__(
        self, window: int | None, num_layers: int, num_slots: int, max_slots: int, is_fixed: bool
    ) -> None:
        self.window = window
        self.offset = 0
        self.fixed: FixedSlots | None = None  # of the forwards from now on
        self._is_fixed = is_fixed
        self._num_layers = num_layers
        self._slack = min(_MAX_SLACK, window) if window is not None else 0
        self.clears = False  # whether what leaves a window may be no number
        if window is not None:
            max_slots = min(max_slots, window + self._slack + _FIRST_NUM_SLOTS)
            num_slots = max_slots if is_fixed else min(num_slots, window + self._slack)
        self._num_slots, self._max_slots = num_slots, max_slots
        self._stores: dict[str, list[_Store]] = {"keys": [], "values": [], "indexer": []}

    def __iter__(self) -> Iterator[_Store]:
        for stores in self._stores.values():
            yield from stores

    def place(self, what: str, layer: int, states: Tensor) -> tuple[_Store, int]:
        """Return the store for a layer's keys, values or indexer keys, and the layer's row in it.

        `layer` counts the layers of this group.
        """
        stores = self._stores[what]
        if not stores and self._num_layers > 1:
            # The first layer speaks for the others: most models' layers are alike.
            stores.append(self._new_store(self._num_layers, states))
        if self._num_layers > 1 and stores[0].fits(states):
            return stores[0], layer
        stores.append(self._new_store(1, states))
        return stores[-1], 0

    def _new_store(self, num_layers: int, states: Tensor) -> _Store:
        return _Store(num_layers, states, self._num_slots, self._max_slots, self._is_fixed)

    def first_slot(self, length: int) -> int:
        """Return the first slot that a token behind `length` others can see."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def clear(self, lengths: Sequence[int]) -> None:
        """Clear what has left the windows of the rows in use: NaN is NaN, hidden or not."""
        if not self.clears:
            return
        for store in self:
            for row, length in enumerate(lengths):
                store.buffer[:, row, :, : max(0, self.first_slot(length) - self.offset)] = 0
        stop = max(lengths) - self.offset
        self.clears = any(bool(store.buffer[:, :, :, :stop].isnan().any()) for store in self)

    def trim(self, lengths: Sequence[int]) -> None:
        """Forget what has left the window of every row, now and then."""
        num_slots = self.first_slot(min(lengths)) - self.offset
        if self.window is None or num_slots < self._slack:
            return
        for store in self:
            store.drop(num_slots, max(lengths) - self.offset)
        self.offset += num_slots


class _Storage:
    """All stores of a cache. Layers hold this, not the cache: a cycle would keep memory alive."""

    def __init__(self, groups: Sequence[_Group]) -> None:
        self._groups = groups
        self.is_prefilling = True  # every token run now stays
        self.lengths: list[int] = []  # committed slots of each row in use
        self._rows: list[int] = []  # which row lies where, those in use first
        self._parked: dict[int, int] = {}  # committed slots of the rows not in use
        self._slots: dict[tuple[int, int], _Slots] = {}  # of the forward now running
        self.length: Tensor | None = None  # of the longest row, where the device has to look

    def __iter__(self) -> Iterator[_Store]:
        for group in self._groups:
            yield from group

    def stores(self) -> list[tuple[_Store, int]]:
        """Return all stores, each with the first slot that it holds."""
        return [(store, group.offset) for group in self._groups for store in group]

    def reset(self) -> None:
        """Forget all but the memory."""
        self.is_prefilling, self.length = True, None
        self.lengths, self._rows, self._parked, self._slots = [], [], {}, {}
        for group in self._groups:
            group.offset, group.fixed, group.clears = 0, None, False
        for store in self:
            store.whole.zero_()
            store.use(store.whole.shape[1])

    def begin(self, num_rows: int) -> None:
        """Take the number of rows from the first states that come."""
        self.lengths = self.lengths or [0] * num_rows

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
        if not self.is_prefilling:
            for group in self._groups:
                group.trim([*lengths, *self._parked.values()])
                group.clear(lengths)

    def end_prefill(self) -> None:
        """From now on tokens are run that may be rejected."""
        self.is_prefilling = False
        for group in self._groups:
            group.offset = group.first_slot(max(self.lengths, default=0))

    def move(self, row: int, source: list[int], start: int) -> None:
        """Copy slots `source` of a row, in every layer, to those from `start` on."""
        indices: dict[tuple[torch.device, int], Tensor] = {}
        for group in self._groups:
            first = start - group.offset
            for store in group:
                place = store.buffer.device, group.offset
                if place not in indices:
                    indices[place] = integers_on(place[0], [slot - place[1] for slot in source])
                index = indices[place]
                mine = store.buffer[:, row]
                mine[:, :, first : first + len(source)] = mine.index_select(2, index)

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
        lengths = [length for _, length in sorted((in_use | self._parked).items())]
        self._parked = {}
        self.commit(lengths)
        for place in range(len(self._rows)):
            while self._rows[place] != place:
                self._swap(place, self._rows[place])
        self._use(len(self._rows))

    def _swap(self, one: int, other: int) -> None:
        if one != other:
            self._rows[one], self._rows[other] = self._rows[other], self._rows[one]
            for store in self:
                store.swap(one, other)

    def _use(self, num_rows: int) -> None:
        for store in self:
            store.use(num_rows)


class TreeCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """The part of a `TreeCache` that one attention layer writes to and reads from."""

    def __init__(self, storage: _Storage, group: _Group, index: int) -> None:
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
        self._indexer_place: tuple[_Store, int] | None = None

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

    def _held(self, store: _Store, index: int) -> Tensor:
        return store.buffer[index][:, :, : self.get_seq_length() - self.offset]

    def _put(self, store: _Store, index: int, states: Tensor, num_pending: int) -> Tensor:
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
        first = min(num_slots + _FIRST_NUM_SLOTS, max(max_slots, num_slots))
        if is_fixed:
            first = num_slots
        held: list[LayerKind] = [kind for kind in kinds if kind.kind != "empty"]
        windows = [kind.window for kind in held]
        groups = {
            window: _Group(
                window, windows.count(window) if share else 1, first, max_slots, is_fixed
            )
            for window in windows
        }
        self._groups = groups
        self._storage = _Storage([*groups.values()])
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
