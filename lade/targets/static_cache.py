"""`StaticTreeCache`: transformers' own static layers, holding a text and a tree behind it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache

from lade.errors import UnsupportedModelError
from lade.machine.transfer import integers_on
from lade.targets.kv_cache import LayerKind

_CLASSES = {"indexed": "StaticIndexedLayer", "empty": "DummyLayer"}  # of transformers


class StaticTreeCache(Cache):  # type: ignore[misc]
    """A `Cache` of transformers' static layers, each as long as the text, with a window or not."""

    def __init__(self, kinds: Sequence[LayerKind], num_slots: int) -> None:
        if {kind.kind for kind in kinds} & {"convolved", "recurrent"}:
            raise UnsupportedModelError("its convolutions see a text as long as it is")
        classes = (getattr(cache_utils, _CLASSES.get(kind.kind, "StaticLayer")) for kind in kinds)
        super().__init__(layers=[of_kind(max_cache_len=num_slots) for of_kind in classes])
        self.num_slots, self.length = num_slots, 0
        self._least = 0  # the shortest text whose windows are held whole

    def take_over(self, cache: Any) -> bool:
        """Copy the text of a cache of lade; return False if it does not suit the memory."""
        self.length, self._least = cache.length, getattr(cache, "_least", 0)
        for mine, theirs in zip(self.layers, cache.layers, strict=True):
            if theirs.keys is None:
                continue
            first = getattr(theirs, "offset", 0)
            self._least = max(self._least, cache.length if first else 0)
            indexed = getattr(theirs, "indexer_keys", None)
            with torch.inference_mode(False):  # the memory may outlive the call
                if not mine.is_initialized:
                    mine.lazy_initialization(theirs.keys, theirs.values)
                if indexed is not None and not mine.is_indexer_initialized:
                    mine.lazy_initialization_indexer(indexed)
            pairs = [(mine.keys, theirs.keys), (mine.values, theirs.values)]
            pairs += [(mine.indexer_keys, indexed)] if indexed is not None else []
            for slots, held in pairs:
                if (held.dtype, held.device) != (slots.dtype, slots.device):
                    return False
                slots.zero_()  # attention multiplies what no node sees by 0
                slots[..., first : self.length, :] = held[..., : self.length - first, :]
        return True

    def _all(self, *names: str) -> list[Tensor]:
        found = (getattr(layer, name, None) for layer in self.layers for name in names)
        return [each for each in found if each is not None]

    def rewind(self) -> None:
        """Make the next forward write behind the text."""
        lengths = self._all("cumulative_length", "indexer_cumulative_length")
        torch._foreach_zero_(lengths)
        torch._foreach_add_(lengths, self.length)

    def first_slot(self, window: int | None) -> int:
        """Return 0: layers show all slots, whatever their window."""
        return 0

    def keep(self, path: Sequence[int]) -> None:
        """Keep the slots of a path: ascending nodes, counted from the end of the text."""
        first, self.length = self.length, self.length + len(path)
        if [*path] != [*range(len(path))]:
            tensors = self._all("keys", "values", "indexer_keys")
            slots = integers_on(tensors[0].device, [first + node for node in path])
            for each in tensors:
                each[..., first : self.length, :] = each.index_select(-2, slots)

    def can_go_back(self, num_tokens: int) -> bool:
        """Return whether all slots are held that tokens see after going back."""
        return self.length - num_tokens >= self._least

    def go_back(self, num_tokens: int) -> None:
        """Forget the last tokens."""
        self.length -= num_tokens
