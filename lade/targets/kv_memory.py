"""Memory for keys and values, in slots that are written once and moved when a path is kept."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import cache_utils

# Slots after the prompt at the first allocation, and those that a windowed layer keeps beyond its
# window before the rest moves up.
FIRST_NUM_SLOTS = 256
_GROWTH = 4  # each growth adds a quarter, up to the maximum length of the generation

Kind = Literal["full", "windowed", "indexed", "empty"]


class LayerKind(NamedTuple):
    """What a cache layer keeps."""

    kind: Kind
    window: int | None = None  # a windowed layer keeps one slot fewer, as transformers' own does


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


class FixedSlots(NamedTuple):
    """Slots that layers with one window write and return in a forward of fixed shape."""

    of_new: Tensor  # int64 [num_new], slots to write, counted from the first slot held
    num_shown: int  # slots returned, from the first slot held on; more than there are tokens


class Store:
    """One tensor for the keys (or values) of all layers of one shape: one copy moves them all.

    `buffer` is [num_layers, 1, heads, num_slots, head_dim].
    """

    def __init__(
        self, num_layers: int, states: Tensor, num_slots: int, max_slots: int, is_fixed: bool
    ) -> None:
        self._max_slots, self._is_fixed = max_slots, is_fixed
        like = states[None].expand(num_layers, *states.shape)
        self.buffer = self._allocated(like, min(states.shape[2], num_slots), num_slots)

    def fits(self, states: Tensor) -> bool:
        """Return whether this store can hold a layer with such keys or values."""
        mine, other = (
            (each.shape[-3], each.shape[-1], each.dtype, each.device)
            for each in (self.buffer, states)
        )
        return mine == other

    def address(self, layer: int, states: Tensor) -> tuple[int, int] | None:
        """Return the address of a layer's slots, and bytes from one head to the next.

        None if the memory is another device's than that of these states, or has no such ones.
        """
        if not self.fits(states):
            return None
        width, (layer_step, _, head_step, *_) = self.buffer.element_size(), self.buffer.stride()
        return self.buffer.data_ptr() + width * layer * layer_step, width * head_step

    def roll(self, layer: int, states: Tensor, num_held: int, num_kept: int) -> Tensor:
        """Return the held states followed by the new ones; keep only the last `num_kept`."""
        held = self.buffer[layer][:, :, :num_held]
        all_states = torch.cat([held, states], dim=2) if num_held else states
        self.reserve(num_kept)
        self.buffer[layer][:, :, :num_kept] = all_states[:, :, all_states.shape[2] - num_kept :]
        return all_states

    def reserve(self, stop: int) -> None:
        """Ensure room for `stop` slots, moving the contents to new memory if needed.

        Raises:
            torch.OutOfMemoryError: there is not enough memory; nothing was changed.
        """
        num_slots = self.buffer.shape[3]
        if stop <= num_slots:
            return
        roomy = num_slots + max(FIRST_NUM_SLOTS, num_slots // _GROWTH)
        if stop <= self._max_slots:  # else more came than planned, and yet more may come
            roomy = min(roomy, self._max_slots)
        larger = self._allocated(self.buffer, stop, max(stop, roomy))
        larger[:, :, :, :num_slots] = self.buffer
        self.buffer = larger

    def _allocated(self, like: Tensor, least: int, num_slots: int) -> Tensor:
        """Return memory for `num_slots` slots, or for `least` if there is not enough."""
        shape = list(like.shape)
        for wanted in (num_slots, least):
            shape[3] = wanted
            # Not an inference tensor, which cannot be written to outside of inference mode: the
            # memory may outlive the call.
            with suppress(torch.OutOfMemoryError), torch.inference_mode(False):
                # Masked slots are still multiplied by 0, and memory never written to may hold NaN.
                # There are masked slots only if shapes are fixed.
                return like.new_zeros(shape) if self._is_fixed else like.new_empty(shape)
        num_bytes = math.prod(shape) * like.element_size()
        raise torch.OutOfMemoryError(
            f"no memory is left for the keys or values of {least} tokens in {shape[0]} layers "
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
        is_fixed: bool,
        spare_bytes: int = 0,
    ) -> None:
        self.window = window
        self._spare_bytes = spare_bytes if window is None else 0
        self.offset = 0
        self.fixed: FixedSlots | None = None  # for the next forwards
        self._is_fixed = is_fixed
        self._num_layers = num_layers
        self._slack = min(FIRST_NUM_SLOTS, window) if window is not None else 0
        if window is not None:
            max_slots = min(max_slots, window + self._slack + FIRST_NUM_SLOTS)
            num_slots = max_slots if is_fixed else min(num_slots, window + self._slack)
        self._num_slots, self._max_slots = num_slots, max_slots
        self._stores: dict[str, list[Store]] = {"keys": [], "values": [], "indexer": []}

    def __iter__(self) -> Iterator[Store]:
        for stores in self._stores.values():
            yield from stores

    def place(self, what: str, layer: int, states: Tensor) -> tuple[Store, int]:
        """Return the store for a layer's keys, values or indexer keys, and its index there.

        `layer` is the layer's index in this group.
        """
        stores = self._stores[what]
        if stores and self._num_layers > 1 and stores[0].fits(states):
            return stores[0], layer
        # Shaped by the first layer: in most models all layers are alike.
        num_layers = 1 if stores else self._num_layers
        fitting = self._spare_bytes // max(1, states[:, :, :1].nbytes)
        num_slots = max(self._num_slots, min(self._max_slots, fitting))
        made = Store(num_layers, states, num_slots, self._max_slots, self._is_fixed)
        stores.append(made)
        return made, layer if num_layers > 1 else 0

    def first_slot(self, length: int) -> int:
        """Return the first slot visible to a token after `length` others."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def trim(self, length: int) -> None:
        """Drop slots that have left the window, once there are enough of them."""
        num_slots, stop = self.first_slot(length) - self.offset, length - self.offset
        if num_slots < self._slack:
            return
        for store in self:  # the other slots of every layer move up
            left = store.buffer[:, :, :, num_slots:stop].clone()
            store.buffer[:, :, :, : stop - num_slots] = left
        self.offset += num_slots


@dataclass
class Extent:
    """How far a cache is filled.

    Layers refer to this, not to the cache: a reference cycle would keep memory alive.
    """

    length: int = 0  # committed slots
    is_prefilling: bool = True  # while all tokens run are kept
    reported: Tensor | None = None  # the length, if reported as a tensor
