"""Preallocated keys and values that keep the accepted path in place.

transformers' own dynamic cache concatenates, and so copies, all keys and values at every step; here
a step writes its nodes behind the committed ones, and a commit moves the few accepted rows up. Only
this file knows how a transformers cache works inside.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_FIRST_NUM_SLOTS = 256  # slots beyond the prompt at the first allocation
_GROWTH = 4  # then a quarter more, up to the longest the generation can get


class _Store:
    """One tensor for the keys (or the values) of all layers of one shape: one copy moves them all.

    `buffer` is [num_layers, rows, heads, num_slots, head_dim].
    """

    def __init__(self, num_layers: int, states: Tensor, num_slots: int, max_slots: int) -> None:
        rows, heads, _, head_dim = states.shape
        self._max_slots = max_slots
        self.buffer = states.new_empty((num_layers, rows, heads, num_slots, head_dim))

    def fits(self, states: Tensor) -> bool:
        """Tell whether a layer with such new keys or values can live here."""
        mine, other = self.buffer[0], states
        return (mine.dtype, mine.device) == (other.dtype, other.device) and (
            mine.shape[0],
            mine.shape[1],
            mine.shape[3],
        ) == (other.shape[0], other.shape[1], other.shape[3])

    def write(self, layer: int, start: int, states: Tensor) -> Tensor:
        """Put new states at slot `start` of a layer; return a view of all its states so far."""
        stop = start + states.shape[2]
        num_slots = self.buffer.shape[3]
        if stop > num_slots:
            roomy = num_slots + max(_FIRST_NUM_SLOTS, num_slots // _GROWTH)
            shape = list(self.buffer.shape)
            shape[3] = max(stop, min(roomy, self._max_slots))
            larger = self.buffer.new_empty(shape)
            larger[:, :, :, :start] = self.buffer[:, :, :, :start]
            self.buffer = larger
        mine = self.buffer[layer]
        mine[:, :, start:stop] = states
        return mine[:, :, :stop]


class _Storage:
    """All stores of a cache. Layers hold this, not the cache: a cycle would keep memory alive."""

    def __init__(self, num_alike: int, num_slots: int, max_slots: int) -> None:
        self._num_alike = num_alike
        self._num_slots = num_slots
        self._max_slots = max_slots
        self._of_keys: list[_Store] = []
        self._of_values: list[_Store] = []

    def place_keys(self, layer: int, states: Tensor) -> tuple[_Store, int]:
        """Return the store for a layer's keys, and the layer's row in it."""
        return self._place(self._of_keys, layer, states)

    def place_values(self, layer: int, states: Tensor) -> tuple[_Store, int]:
        """Return the store for a layer's values, and the layer's row in it."""
        return self._place(self._of_values, layer, states)

    def move(self, source: list[int], start: int) -> None:
        """Copy slots `source` of every layer to those from `start` on."""
        for store in (*self._of_keys, *self._of_values):
            index = torch.tensor(source, device=store.buffer.device)
            moved = store.buffer.index_select(3, index)
            store.buffer[:, :, :, start : start + len(source)] = moved

    def _place(self, stores: list[_Store], layer: int, states: Tensor) -> tuple[_Store, int]:
        if not stores and self._num_alike > 1:
            # The first layer speaks for the others: most models' layers are alike.
            stores.append(_Store(self._num_alike, states, self._num_slots, self._max_slots))
        if self._num_alike > 1 and stores[0].fits(states):
            return stores[0], layer
        stores.append(_Store(1, states, self._num_slots, self._max_slots))
        return stores[-1], 0


class TreeCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """The part of a `TreeCache` that one attention layer writes to and reads from."""

    is_croppable = True
    is_sliding = False

    def __init__(self, storage: _Storage, index: int) -> None:
        # Not the base class's __init__: it would assign `keys` and `values`, properties here.
        self.is_initialized = False
        self._storage = storage
        self._index = index
        self._length = 0

    @property
    def keys(self) -> Tensor | None:
        """[rows, heads, length, head_dim], or None before the first forward."""
        if not self._length:
            return None
        return self._key_store.buffer[self._key_row][:, :, : self._length]

    @property
    def values(self) -> Tensor | None:
        """[rows, heads, length, head_dim], or None before the first forward."""
        if not self._length:
            return None
        return self._value_store.buffer[self._value_row][:, :, : self._length]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Find a place in the stores; called with the first keys and values."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._key_store, self._key_row = self._storage.place_keys(self._index, key_states)
        self._value_store, self._value_row = self._storage.place_values(self._index, value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values behind the held ones; return views of all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys = self._key_store.write(self._key_row, self._length, key_states)
        values = self._value_store.write(self._value_row, self._length, value_states)
        self._length += key_states.shape[2]
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of slots held."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys a query of that length sees, and their offset."""
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the cache grows without a fixed end."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last slots; transformers passes their number negated."""
        if tokens_to_remove > 0:
            raise ValueError(f"expected a number of at most 0, got {tokens_to_remove}")
        self._length = max(0, self._length + tokens_to_remove)

    def reset(self) -> None:
        """Hold nothing, keep the memory."""
        self._length = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows of the batch; part of the layer interface of transformers."""
        if self.is_initialized:
            for states in (
                self._key_store.buffer[self._key_row],
                self._value_store.buffer[self._value_row],
            ):
                states.copy_(states.index_select(0, beam_idx.to(states.device)))


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

    def keep(self, num_committed: int, nodes: list[int]) -> None:
        """Of the slots written after the first `num_committed`, keep `nodes`, in that order.

        Args:
            num_committed: slots that stay as they are.
            nodes: indices, ascending, counted from `num_committed`.
        """
        in_place = 0
        while in_place < len(nodes) and nodes[in_place] == in_place:
            in_place += 1
        if in_place < len(nodes):
            source = [num_committed + node for node in nodes[in_place:]]
            self._storage.move(source, num_committed + in_place)
        for layer in self.layers:
            layer._length = num_committed + len(nodes)
