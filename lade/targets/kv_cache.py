"""A transformers cache on preallocated memory; slots move only when a path is kept."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
)

from lade.machine.transfer import integers_on

# Slots after the prompt at the first allocation; also the slots that a windowed layer keeps beyond
# its window before the others move up.
FIRST_NUM_SLOTS = 256
_GROWTH = 4  # each growth adds a quarter, up to the maximum length of the generation

# A recurrent layer's state stays this many tokens behind, so that as many can be forgotten.
_NUM_BEHIND = 2
_MOST_CHAINED = 64  # tokens that run at once after a prompt, as a rule

Kind = Literal["full", "windowed", "indexed", "convolved", "recurrent", "empty"]


class LayerKind(NamedTuple):
    """The kind of a cache layer, and its window."""

    kind: Kind
    # A windowed layer keeps one slot fewer, as transformers' own does; then a convolved one keeps
    # as many as its convolution sees, and so does a recurrent one.
    window: int | None = None


# By exact type: an unknown subclass may keep more than its parents.
_KINDS: dict[type, Kind] = {
    cache_utils.DynamicLayer: "full",
    cache_utils.DynamicSlidingWindowLayer: "windowed",
    cache_utils.DynamicIndexedLayer: "indexed",
}
if hasattr(cache_utils, "DummyLayer"):  # not in the oldest supported version
    _KINDS[cache_utils.DummyLayer] = "empty"


def kind_of(layer: Any) -> LayerKind | None:
    """Return the kind of a transformers cache layer, or None if a `TreeCache` has no such kind."""
    kind = _KINDS.get(type(layer))
    if kind is None:
        return None
    return LayerKind(kind, layer.sliding_window if kind == "windowed" else None)


class Store:
    """One tensor for the keys (or values) of all layers of one shape: one copy moves them all.

    `buffer` is [num_layers, 1, heads, num_slots, head_dim].
    """

    def __init__(self, num_layers: int, states: Tensor, num_slots: int, max_slots: int) -> None:
        self._max_slots = max_slots
        like = states[None].expand(num_layers, *states.shape)
        self.buffer = self._allocated(like, min(states.shape[2], num_slots), num_slots)

    def fits(self, states: Tensor) -> bool:
        """Return whether this store can hold a layer with such keys or values."""
        mine, other = (
            (each.shape[-3], each.shape[-1], each.dtype, each.device)
            for each in (self.buffer, states)
        )
        return mine == other

    def roll(self, layer: int, states: Tensor, num_held: int, num_kept: int) -> Tensor:
        """Return the held states followed by the new ones; keep only the last `num_kept`."""
        held = self.buffer[layer][:, :, :num_held]
        all_states = torch.cat([held, states], dim=2) if num_held else states
        self.reserve(num_kept)
        self.buffer[layer][:, :, :num_kept] = all_states[:, :, all_states.shape[2] - num_kept :]
        return all_states

    def keep_end(self, first: int, stop: int) -> None:
        """Move some slots to the front, and free the memory that only a long prompt needed."""
        kept, num = self.buffer[:, :, :, first:stop], stop - first
        num_slots = max(num, min(self.buffer.shape[3], self._max_slots))
        self.buffer = self._allocated(kept, num, num_slots)
        self.buffer[:, :, :, :num] = kept

    def reserve(self, stop: int) -> None:
        """Ensure capacity for `stop` slots, moving the contents to new memory if needed.

        Raises:
            torch.OutOfMemoryError: there is not enough memory; nothing was changed.
        """
        num_slots = self.buffer.shape[3]
        if stop <= num_slots:
            return
        grown = num_slots + max(FIRST_NUM_SLOTS, num_slots // _GROWTH)
        if stop <= self._max_slots:  # else more tokens came than planned, and more may come
            grown = min(grown, self._max_slots)
        larger = self._allocated(self.buffer, stop, max(stop, grown))
        larger[:, :, :, :num_slots] = self.buffer
        self.buffer = larger

    def _allocated(self, like: Tensor, least: int, num_slots: int) -> Tensor:
        """Return memory for `num_slots` slots, or for `least` if there is not enough."""
        shape = list(like.shape)
        for wanted in (num_slots, least):
            shape[3] = wanted
            # The memory may outlive the call, so it must not be an inference tensor, which cannot
            # be written to outside of inference mode.
            with suppress(torch.OutOfMemoryError), torch.inference_mode(False):
                return like.new_empty(shape)
        num_bytes = math.prod(shape) * like.element_size()
        raise torch.OutOfMemoryError(
            f"not enough memory for the keys or values of {least} tokens in {shape[0]} layers "
            f"({num_bytes / 2**20:.0f} MiB); shorten the text"
        )


class Group:
    """The stores of all layers with the same window (or none), and the first slot they hold."""

    def __init__(
        self,
        window: int | None,
        num_layers: int,
        num_slots: int,
        max_slots: int,
        is_convolved: bool = False,
        most_new: int = FIRST_NUM_SLOTS,
    ) -> None:
        self.window = window
        #: Whether a long prompt is held whole until it is committed, so that a forward may run it.
        self.is_convolved = is_convolved
        self.offset = 0
        self._num_layers = num_layers
        slack = 0 if window is None else min(FIRST_NUM_SLOTS, window)
        self._slack = FIRST_NUM_SLOTS if is_convolved else slack
        if window is not None:
            max_slots = min(max_slots, window + self._slack + most_new)
            num_slots = min(num_slots, window + self._slack)
        self._num_slots, self._max_slots = num_slots, max_slots
        self.stores: list[Store] = []
        self._first: dict[str, Store] = {}  # of keys, values or indexer keys

    def store_for(self, what: str, layer: int, states: Tensor) -> tuple[Store, int]:
        """Return the store for a layer's keys, values or indexer keys, and its index there.

        `layer` is the layer's index in this group.
        """
        first = self._first.get(what)
        if first is not None and self._num_layers > 1 and first.fits(states):
            return first, layer
        # The first layer decides the shape: in most models all layers are alike.
        num_layers = self._num_layers if first is None else 1
        made = Store(num_layers, states, self._num_slots, self._max_slots)
        self.stores.append(made)
        self._first.setdefault(what, made)
        return made, layer if num_layers > 1 else 0

    def first_slot(self, length: int) -> int:
        """Return the first slot visible to a token after `length` others."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def trim(self, length: int, oldest: int) -> None:
        """Drop slots that no token from `oldest` on sees, once there are enough of them."""
        num_slots, stop = self.first_slot(oldest) - self.offset, length - self.offset
        if num_slots < self._slack:
            return
        for store in self.stores:
            store.keep_end(num_slots, stop)
        self.offset += num_slots


@dataclass
class CacheState:
    """The state of a cache that its layers share.

    Layers refer to this, not to the cache: a reference cycle would keep memory alive.
    """

    length: int = 0  # committed slots
    is_prefilling: bool = True  # whether no token that runs can be rejected


class TreeCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """The part of a `TreeCache` that one attention layer writes to and reads from."""

    stored: tuple[str, ...] = "keys", "values"  # what each token adds

    def __init__(self, state: CacheState, group: Group, index: int) -> None:
        # Not the base class's __init__: it would assign `keys` and `values`, properties here.
        self.is_initialized = False
        self.is_indexer_initialized = False
        self.is_sliding = group.window is not None
        self._state = state
        self._group = group
        self._index = index  # in the group
        self.num_pending = 0  # slots written after the committed ones
        self.num_indexed = 0  # the same for indexer keys
        # The store of keys, values and indexer keys, and the layer's index in each.
        self._claims: dict[str, tuple[Store, int]] = {}

    @property
    def offset(self) -> int:
        """The first slot held."""
        if self._state.is_prefilling and not self._group.is_convolved:
            return self._group.first_slot(self.get_seq_length())
        return self._group.offset

    @property
    def keys(self) -> Tensor | None:
        """[1, heads, length, head_dim], or None before the first forward."""
        return self._held("keys") if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:
        """[1, heads, length, head_dim], or None before the first forward."""
        return self._held("values") if self.is_initialized else None

    @property
    def indexer_keys(self) -> Tensor | None:
        """[1, length, index_head_dim] in a layer that indexes its keys, else None."""
        return self._held("indexer")[:, 0] if self.is_indexer_initialized else None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Claim a layer of the stores; called with the first keys and values."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._claim("keys", key_states)
        self._claim("values", value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values after those held; return views of the whole layer."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys = self._put("keys", key_states, self.num_pending)
        values = self._put("values", value_states, self.num_pending)
        self.num_pending += key_states.shape[2]
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write indexer keys [1, num_new, index_head_dim]; return all of the layer."""
        states = indexer_key_states[:, None]
        self._claim("indexer", states)
        self.is_indexer_initialized = True
        indexer_keys = self._put("indexer", states, self.num_indexed)[:, 0]
        self.num_indexed += states.shape[2]
        return indexer_keys

    def take_over(self, layer: Any, length: int = 0) -> None:
        """Copy the contents of a filled layer of a transformers cache of so many tokens."""
        if not getattr(layer, "is_initialized", False) or layer.keys is None:
            return
        if not isinstance(layer, cache_utils.StaticLayer):  # which has more slots
            length = layer.get_seq_length()
        self.update(layer.keys[:, :, :length], layer.values[:, :, :length])
        self.num_pending = length  # layers with windows hold only the end
        if getattr(layer, "is_indexer_initialized", False):
            self.update_indexer(layer.indexer_keys[:, :length])

    def hand_over(self, layer: Any) -> None:
        """Fill a layer of a transformers cache with views of this layer's contents."""
        length = self.get_seq_length()
        first = self._group.first_slot(length) - self.offset
        keys, values = (self._held(name)[:, :, first:] for name in ("keys", "values"))
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        if isinstance(layer, cache_utils.StaticLayer):
            self._fill(layer, length)
            return
        layer.keys, layer.values = keys, values
        if self.is_sliding:
            layer.cumulative_length = length
        if self.is_indexer_initialized:
            layer.indexer_keys, layer.is_indexer_initialized = self.indexer_keys, True

    def _fill(self, layer: Any, length: int) -> None:
        """Fill a static layer of a transformers cache with the end of this layer's contents."""
        stop = min(length, layer.max_cache_len)
        for name in ("keys", "values"):
            held = self._held(name)[:, :, -stop:]
            getattr(layer, name)[:, :, stop - held.shape[2] : stop] = held
        layer.cumulative_length.fill_(length)
        if hasattr(layer, "cumulative_length_int"):  # which layers with windows count in
            layer.cumulative_length_int = length

    def get_seq_length(self) -> int:
        """Return the number of slots, including those no longer held."""
        if not self.is_initialized:  # no token has run in this layer, as in layers for images
            return 0
        return self._state.length + self.num_pending

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that `update` will return, and the slot of the first."""
        offset = self.offset
        return self.get_seq_length() + query_length - offset, offset

    def get_max_length(self) -> int:
        """Return -1: the cache has no fixed maximum."""
        return -1

    def _claim(self, name: str, states: Tensor) -> None:
        if name not in self._claims:
            self._claims[name] = self._group.store_for(name, self._index, states)

    def _held(self, name: str) -> Tensor:
        store, index = self._claims[name]
        return store.buffer[index][:, :, : self.get_seq_length() - self.offset]

    def _put(self, name: str, states: Tensor, num_pending: int) -> Tensor:
        (store, index), group, num_new = self._claims[name], self._group, states.shape[2]
        length = self._state.length + num_pending
        if group.window is None or group.is_convolved or not self._state.is_prefilling:
            start = length - group.offset
            stop = start + num_new
            if stop > store.buffer.shape[3]:
                store.reserve(stop)
            held = store.buffer[index][:, :, :stop]
            held[:, :, start:] = states
            return held
        # A windowed layer keeps only the end of a long prompt, so it needs less memory.
        num_held = length - group.first_slot(length)
        num_kept = length + num_new - group.first_slot(length + num_new)
        return store.roll(index, states, num_held, num_kept)


class ConvolvedLayer(TreeCacheLayer, LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """The part of a `TreeCache` that holds the inputs of one short convolution, token by token."""

    stored: tuple[str, ...] = ("keys",)  # [1, 1, length, channels]
    record_past = True  # else models write to a state without saying so

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """Whether any token has run, by number of the state."""
        return {0: bool(self.get_seq_length())}

    @property
    def conv_states(self) -> list[Tensor]:
        """[1, channels, width], the last inputs that the convolution sees, after zeros."""
        held = self._held("keys")[:, 0].transpose(1, 2)
        assert self._group.window is not None
        width = self._group.window - 1
        return [torch.nn.functional.pad(held, (width - held.shape[2], 0))]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Claim a layer of the store; called with the first inputs."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._claim("keys", key_states)
        self.is_initialized = True

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Write new inputs [1, channels, num_new] after those held; return all of them."""
        inputs = conv_states.transpose(1, 2)[:, None]
        if not self.is_initialized:
            self.lazy_initialization(inputs)
        held = self._put("keys", inputs, self.num_pending)
        self.num_pending += inputs.shape[2]
        return held[:, 0].transpose(1, 2)

    def take_over(self, layer: Any, length: int = 0) -> None:
        """Copy the last of so many tokens' inputs from a filled layer of a transformers cache."""
        if not length or not layer.has_previous_state[0]:
            return
        states = layer.conv_states[0].transpose(1, 2)[:, None]
        first = self._group.first_slot(length)
        self._group.offset = first
        self.lazy_initialization(states)
        store, index = self._claims["keys"]
        store.reserve(length - first)
        store.buffer[index][:, :, : length - first] = states[:, :, first - length :]
        self.num_pending = length

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refuse: models of such layers keep no other state."""
        raise NotImplementedError("a convolution keeps no recurrent state")

    def hand_over(self, layer: Any) -> None:
        """Fill a layer of a transformers cache with a copy of the last inputs."""
        (states,) = self.conv_states
        layer.lazy_initialization(conv_states=states)
        layer.conv_states[0], layer.has_previous_state[0] = states.contiguous(), True


class _State(NamedTuple):
    """A recurrent state, of torch's shape."""

    length: int  # tokens that it holds
    state: Tensor
    until: float = math.inf  # tokens up to which later ones can be added, see `RecurrentLayer`


class RecurrentLayer(ConvolvedLayer):
    """The part of a `TreeCache` that holds one recurrence: inputs of its convolution, a state.

    A state cannot forget a token. So the state stays behind the text. The keys, values and gates of
    later tokens are kept in "values", float32 [1, 1, length, keys + values + gates], until the next
    compiled forward, or this class, adds them to the state. Torch's forwards add tokens at once, so
    the states before and after them are kept.
    """

    stored = "keys", "values"

    def __init__(self, state: CacheState, group: Group, index: int) -> None:
        super().__init__(state, group, index)
        self._states: list[_State] = []  # the last is the present one
        self._after: Tensor | None = None  # state after all pending tokens, if torch ran them
        self._lent: Tensor | None = None  # a state that the model may write its next one to
        self._spare: Tensor | None = None  # where the next state goes, in a job's memory
        self._advance: Callable[[Tensor, Tensor], Tensor] | None = None  # adds a token to a state

    @property
    def recurrent_states(self) -> list[Tensor]:
        """A copy of the state after all tokens, as some models write to what they got."""
        self._lent = self._present().clone()
        return [self._lent]

    @property
    def oldest(self) -> int:
        """The first token that a kept state lacks."""
        return self._states[0].length if self._states else 0

    def lazy_initialization(
        self,
        key_states: Tensor,
        value_states: Tensor | None = None,
        recurrent_state: Tensor | None = None,
        advance: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        """Claim layers of the stores; a job adds what torch's forwards do without."""
        super().lazy_initialization(key_states)
        if value_states is not None and recurrent_state is not None:
            self._claim("values", value_states)
            self._advance = advance
            self._spare = torch.zeros_like(recurrent_state)
            if not self._states:
                self._states = [_State(0, torch.zeros_like(recurrent_state))]

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Write new inputs; the next state is where the last was, if the model gives no other."""
        self._after, self._lent = self._lent, None
        return super().update_conv_state(conv_states)

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Note the state after all pending tokens."""
        self._after = recurrent_states.contiguous()
        return self._after

    def take_over(self, layer: Any, length: int = 0) -> None:
        """Copy the state and the last inputs of a filled layer of a transformers cache."""
        super().take_over(layer, length)
        if self.num_pending:
            self._after = layer.recurrent_states[0].clone()

    def hand_over(self, layer: Any) -> None:
        """Fill a layer of a transformers cache with copies of the state and the last inputs."""
        super().hand_over(layer)
        state = self._present().clone(memory_format=torch.contiguous_format)
        layer.lazy_initialization(recurrent_states=state)
        layer.recurrent_states[0] = state

    def addresses(self, stop: int) -> tuple[int, int, int, int] | None:
        """Return the last four of `TreeCache.slot_addresses`; None if torch ran pending tokens."""
        if self._after is not None or self._spare is None:
            return None
        length, state, _ = self._states[-1]
        if state.stride() != self._spare.stride():  # torch has left it
            state = torch.empty_like(self._spare).copy_(state)
            self._states[-1] = self._states[-1]._replace(state=state)
        until = self._until(stop)
        slots = length - self.offset, until - self.offset
        return state.data_ptr(), *slots, self._spare.data_ptr()

    def count(self, stop: int) -> None:
        """Take over the state that a job has left."""
        present, until = self._states[-1], self._until(stop)
        if until > present.length:
            assert self._spare is not None
            self._states, self._spare = [_State(until, self._spare)], present.state

    def settle(self, length: int) -> None:
        """Keep `length` tokens: either all tokens since the last commit, or none of them."""
        before = self._state.length
        if self._after is not None and length > before:
            kept = [
                *self._states[:-1],
                *(each._replace(until=before) for each in self._states[-1:]),
            ]
            self._states = [*kept[-_NUM_BEHIND:], _State(length, self._after)]
        while self._states and self._states[-1].length > length:
            self._states.pop()
        self._after = None

    def can_go_back(self, length: int) -> bool:
        """Return whether a kept state can be brought to `length` tokens."""
        known = [each for each in self._states if each.length <= length]
        return bool(known) and length <= known[-1].until

    def _present(self) -> Tensor:
        """Return the state after all tokens."""
        if self._after is not None:
            return self._after
        length, state, _ = self._states[-1]
        if length < self.get_seq_length():
            assert self._advance is not None
            for row in self._held("values")[0, 0, length - self.offset :]:
                state = self._advance(state[0], row)[None]
        return state

    def _until(self, stop: int) -> int:
        until = stop if self._state.is_prefilling else self._state.length - _NUM_BEHIND
        return max(until, self._states[-1].length)


_MADE = {"convolved": ConvolvedLayer, "recurrent": RecurrentLayer}


class TreeCache(Cache):  # type: ignore[misc]
    """A `transformers.Cache` of preallocated layers for all kinds of attention.

    Args:
        max_slots: maximum number of expected tokens; memory grows in steps, and beyond this only if
            more tokens come.
        share: whether all layers are on one device, so that one tensor can hold them.
    """

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        num_slots: int,
        max_slots: int,
        *,
        share: bool = True,
    ) -> None:
        first = min(num_slots + FIRST_NUM_SLOTS, max_slots)
        windows = [kind.window for kind in kinds if kind.kind != "empty"]
        convolved = {kind.window for kind in kinds if kind.kind == "convolved"}
        recurrent = {kind.window for kind in kinds if kind.kind == "recurrent"}
        self._groups = {
            window: Group(
                *(window, windows.count(window) if share else 1, first, max_slots),
                window in convolved,
                _MOST_CHAINED if window in recurrent else FIRST_NUM_SLOTS,
            )
            for window in windows
        }
        self._state = CacheState()
        # The memory addresses, and what `slot_addresses` found there last.
        self._found: tuple[list[int], NDArray[np.int64]] | None = None
        #: The layers that keep tokens.
        self.held: list[TreeCacheLayer] = []
        layers: list[Any] = []
        for kind in kinds:
            if kind.kind == "empty":
                layers.append(cache_utils.DummyLayer())
                continue
            index = windows[: len(self.held)].count(kind.window)
            made = _MADE.get(kind.kind, TreeCacheLayer)
            self.held.append(made(self._state, self._groups[kind.window], index))
            layers.append(self.held[-1])
        groups = [*self._groups.values()]
        self._group_of = [groups.index(layer._group) for layer in self.held]  # its number
        self._recurrent = [layer for layer in self.held if isinstance(layer, RecurrentLayer)]
        super().__init__(layers=layers)

    @property
    def length(self) -> int:
        """Committed slots."""
        return self._state.length

    def first_slot(self, window: int | None) -> int:
        """Return the first slot held by layers with this window."""
        if window is None:
            return 0
        return next((layer.offset for layer in self.held if layer._group.window == window), 0)

    def slot_addresses(
        self, num_new: int, states: Sequence[tuple[Any, ...]]
    ) -> NDArray[np.int64] | None:
        """Reserve slots for new tokens, and return where keys and values lie in memory.

        Args:
            num_new: number of new tokens; they are not counted as pending yet.
            states: for each layer, the keys of one token, and its values if the layer has some;
                they show heads, head size and dtype. A recurrent state comes third, and then a
                function from a state [heads, …] and a token's values to the next state.

        Returns:
            int64 [num_layers, 9]: address of the keys, bytes from one head to the next, both for
            values, and the number of keys, for which the inputs of a convolution stand; then the
            address of a recurrent state, the first slot that it lacks, the slot up to which a job
            must bring it, and the address for the new state. None if keys and values do not lie in
            one store of such heads. Tokens written there count once `count` has been called.

        Raises:
            torch.OutOfMemoryError: there is not enough memory.
        """
        if self._found is None:
            for layer, of_token in zip(self.held, states, strict=True):
                if not layer._claims.keys() >= {*layer.stored}:
                    layer.lazy_initialization(*of_token)
        num_pending = self.held[0].num_pending
        if {layer.num_pending for layer in self.held} != {num_pending}:
            return None
        stop = self._state.length + num_new + num_pending
        num_keys, held_at = list[int](), list[int]()
        for group in self._groups.values():
            num_keys.append(stop - group.offset)
            for store in group.stores:
                store.reserve(num_keys[-1])
                held_at.append(store.buffer.data_ptr())
        if self._found is None or self._found[0] != held_at:
            found = np.zeros((len(self.held), 4), np.int64)
            for row, layer, of_token in zip(found, self.held, states, strict=True):
                for column, (name, adds) in enumerate(zip(layer.stored, of_token, strict=False)):
                    store, index = layer._claims[name]
                    if not store.fits(adds):
                        return None
                    step = store.buffer.stride(2) * adds.element_size()
                    row[2 * column : 2 * column + 2] = store.buffer[index].data_ptr(), step
            self._found = held_at, found
        addresses = np.zeros((len(self.held), 9), np.int64)
        addresses[:, :4] = self._found[1]
        addresses[:, 4] = np.array(num_keys)[self._group_of]
        for recurrent in self._recurrent:
            if (of_state := recurrent.addresses(stop)) is None:
                return None
            addresses[self.held.index(recurrent), 5:] = of_state
        return addresses

    def count(self, num_new: int) -> None:
        """Count tokens as pending whose keys and values were written at `slot_addresses`."""
        length = self._state.length + self.held[0].num_pending
        for layer in self.held:
            layer.num_pending += num_new
        for recurrent in self._recurrent:
            recurrent.count(length + num_new)
        for group in self._groups.values() if self._state.is_prefilling else ():
            offset, first = group.first_slot(length), group.first_slot(length + num_new)
            if first > offset and not group.is_convolved:
                for store in group.stores:  # windows keep only the end of a long prompt
                    store.keep_end(first - offset, length + num_new - offset)

    @property
    def has_nan_in_windows(self) -> bool:
        """Whether layers with windows hold NaN, as some models compute for padding."""
        layers = [layer for layer in self.held if layer.is_sliding and layer.is_initialized]
        layers = [layer for layer in layers if not isinstance(layer, RecurrentLayer)]
        held = (layer._held(name) for layer in layers for name in layer.stored)
        return any(bool(each.isnan().any()) for each in held)

    def keep_all(self) -> None:
        """Commit all slots of the prompt, including padding; later tokens may be rejected."""
        self._commit(self.length + max(layer.num_pending for layer in self.held))
        self._state.is_prefilling = False
        for group in self._groups.values():
            if not group.is_convolved:
                group.offset = group.first_slot(self.length)

    def keep(self, path: Sequence[int]) -> None:
        """Keep the slots of a path, in order; drop the other slots since the last commit.

        Args:
            path: ascending node indices, counted from the committed slots; see `can_keep`.
        """
        length, in_place = self._state.length, 0
        while in_place < len(path) and path[in_place] == in_place:
            in_place += 1
        if in_place < len(path):
            source = [length + node for node in path[in_place:]]
            self._move(source, length + in_place)
        self._commit(length + len(path))

    def can_keep(self, num_tokens: int) -> bool:
        """Return whether the first of the tokens since the last commit can be kept without others.

        They cannot where torch has added all of them to a state.
        """
        for layer in self._recurrent:
            if layer._after is not None and num_tokens not in (0, layer.num_pending):
                return False
        return True

    def can_go_back(self, num_tokens: int) -> bool:
        """Return whether the cache holds all slots that tokens see after going back."""
        groups, length = self._groups.values(), self.length - num_tokens
        has_states = all(layer.can_go_back(length) for layer in self._recurrent)
        return has_states and all(group.first_slot(length) >= group.offset for group in groups)

    def go_back(self, num_tokens: int) -> None:
        """Forget the last tokens."""
        self._commit(self.length - num_tokens)

    def take_over(self, cache: Cache) -> None:
        """Copy the contents of a filled cache, which is not changed; only before the prompt."""
        self._state.length = 0  # some models replace the cache that they were given
        length: int = getattr(cache, "length", None) or int(cache.get_seq_length())
        for mine, theirs in zip(self.layers, cache.layers, strict=False):
            if isinstance(mine, TreeCacheLayer):
                mine.take_over(theirs, length)
        self._commit(max(layer.num_pending for layer in self.held))

    def hand_over(self, cache: DynamicCache) -> None:
        """Fill a dynamic cache with views of this cache's memory."""
        for index, mine in enumerate(self.layers):
            if isinstance(mine, TreeCacheLayer) and mine.is_initialized:
                if index >= len(cache.layers):
                    nothing = (mine._held(name)[:, :, :0] for name in ("keys", "values"))
                    cache.update(*nothing, index)  # creates the layer
                mine.hand_over(cache.layers[index])

    def _commit(self, length: int) -> None:
        oldest = length
        for recurrent in self._recurrent:
            recurrent.settle(length)
            oldest = min(oldest, recurrent.oldest)
        self._state.length = length
        for group in self._groups.values():
            if group.window is not None and (group.is_convolved or not self._state.is_prefilling):
                group.trim(length, oldest)
        for layer in self.held:
            layer.num_pending = layer.num_indexed = 0

    def _move(self, source: Sequence[int], start: int) -> None:
        """Copy the slots `source` to the slots from `start` on, in every layer."""
        indices: dict[tuple[torch.device, int], Tensor] = {}
        for group in self._groups.values():
            first = start - group.offset
            for store in group.stores:
                key = store.buffer.device, group.offset
                if key not in indices:
                    indices[key] = integers_on(key[0], [slot - key[1] for slot in source])
                mine = store.buffer[:, 0]
                moved = mine.index_select(2, indices[key])
                mine[:, :, first : first + len(source)] = moved
