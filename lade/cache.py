"""Preallocated keys and values that keep the accepted path in place.

transformers' own dynamic cache concatenates, and so copies, all keys and values at every step; here
a step writes its nodes behind the committed ones, and a commit moves the few accepted rows up. This
is the only file that touches how transformers caches are made.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_FIRST_NUM_SLOTS = 256  # slots beyond the prompt at the first allocation; doubled when full


class _Store:
    """One tensor for the keys (or the values) of all layers of one shape: one copy moves them all.

    `buffer` is [num_layers, rows, heads, num_slots, head_dim].
    """

    def __init__(self, num_layers: int, states: Tensor, num_slots: int) -> None:
        rows, heads, _, head_dim = states.shape
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
            shape = list(self.buffer.shape)
            shape[3] = max(stop, 2 * num_slots)
            larger = self.buffer.new_empty(shape)
            larger[:, :, :, :start] = self.buffer[:, :, :, :start]
            self.buffer = larger
        mine = self.buffer[layer]
        mine[:, :, start:stop] = states
        return mine[:, :, :stop]


class TreeCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """The part of a `TreeCache` that one attention layer writes to and reads from."""

    is_croppable = True
    is_sliding = False

    def __init__(self, cache: "TreeCache", index: int) -> None:
        # Not the base class's __init__: it would assign `keys` and `values`, properties here.
        self.is_initialized = False
        self._cache = cache
        self._index = index
        self._length = 0

    @property
    def keys(self) -> Tensor | None:
        """[rows, heads, length, head_dim], or None before the first forward."""
        return self._key_store.buffer[self._key_row][:, :, : self._length] if self._length else None

    @property
    def values(self) -> Tensor | None:
        """[rows, heads, length, head_dim], or None before the first forward."""
        if not self._length:
            return None
        return self._value_store.buffer[self._value_row][:, :, : self._length]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Find a place in the stores; called with the first keys and values."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._key_store, self._key_row = self._cache.place(0, self._index, key_states)
        self._value_store, self._value_row = self._cache.place(1, self._index, value_states)
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
        num_slots: expected number of tokens; more are taken by doubling.
    """

    def __init__(self, num_layers: int, num_slots: int) -> None:
        super().__init__(layers=[TreeCacheLayer(self, index) for index in range(num_layers)])
        self._num_slots = num_slots + _FIRST_NUM_SLOTS
        self._stores: tuple[list[_Store], list[_Store]] = ([], [])  # of keys, of values

    def place(self, which: int, index: int, states: Tensor) -> tuple[_Store, int]:
        """Return the store for a layer's keys (0) or values (1), and the layer's row in it."""
        stores = self._stores[which]
        if not stores:  # the first layer speaks for the others: most models' layers are alike
            stores.append(_Store(len(self.layers), states, self._num_slots))
        if stores[0].fits(states):
            return stores[0], index
        stores.append(_Store(1, states, self._num_slots))
        return stores[-1], 0

    def keep(self, num_committed: int, nodes: list[int]) -> None:
        """Of the slots written after the first `num_committed`, keep `nodes`, in that order.

        Args:
            num_committed: slots that stay as they are.
            nodes: indices, ascending, counted from `num_committed`.
        """
        in_place = 0
        while in_place < len(nodes) and nodes[in_place] == in_place:
            in_place += 1
        start, stop = num_committed + in_place, num_committed + len(nodes)
        if start < stop:
            for store in (*self._stores[0], *self._stores[1]):
                source = torch.tensor(nodes[in_place:], device=store.buffer.device) + num_committed
                store.buffer[:, :, :, start:stop] = store.buffer.index_select(3, source)
        for layer in self.layers:
            layer._length = stop
