"""KV caches that outlive a call, for prompts that begin as an earlier text did.

A kept cache never changes: a call continues from a copy that shares its memory. So any number of
calls may continue from the same text at once, and a failing call cannot damage it. Next file:
`lade/hf/prefixes.py`, which decides what calls may reuse.
"""

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.cache_utils import DynamicCache

from lade.targets.kv_cache import kind_of
from lade.targets.rollback import crop, saved

# A text is dropped if a new one has all but this share of it: the lost part would have to run
# again, but the rest is not kept twice. A regenerated answer mostly loses less.
_MOST_LOST = 1 / 8
# Memory that grew ahead of its text is copied to fit if it is larger than the text by this factor.
_MOST_ROOM = 1.5


class Origin(NamedTuple):
    """The model that keys and values belong to, and the calls that may find them."""

    model: Hashable  # in one state; texts of any other state are useless
    owner: object  # calls of one owner may find each other's text: from `owner_of`, or a name


class KeptText:
    """A text, and the keys and values of all of its tokens.

    Args:
        cache: of one row and of exactly these tokens; no other code may change it or its tensors.
    """

    def __init__(self, origin: Origin, token_ids: Sequence[int], cache: DynamicCache) -> None:
        if _num_bytes(cache) > _MOST_ROOM * sum(each.nbytes for each in _tensors(cache)):
            move_to_own_memory(cache)
        self.origin = origin
        self.token_ids: NDArray[np.int64] = np.array(token_ids, np.int64)
        self.is_cuttable = is_cuttable(cache)
        self.num_bytes = self.token_ids.nbytes + _num_bytes(cache)
        self._cache = cache

    def num_shared(self, token_ids: NDArray[np.int64]) -> int:
        """Return how many first tokens this text and another have in common."""
        length = min(len(self.token_ids), len(token_ids))
        differs = self.token_ids[:length] != token_ids[:length]
        return int(differs.argmax()) if differs.any() else length

    def num_reusable(self, prompt_ids: NDArray[np.int64]) -> int:
        """Return how many first tokens of a prompt need not be run; its last one always is."""
        num_shared = self.num_shared(prompt_ids[:-1])
        return num_shared if self.is_cuttable or num_shared == len(self.token_ids) else 0

    def num_lost_to(self, later: "KeptText") -> int:
        """Return how many of this text's last tokens a later text lacks."""
        return len(self.token_ids) - self.num_shared(later.token_ids)

    def first(self, num_tokens: int) -> DynamicCache:
        """Return a cache of the first tokens, to be written to; it shares memory with this one."""
        cache: DynamicCache = saved(self._cache)
        if num_tokens < len(self.token_ids):
            crop(cache, len(self.token_ids) - num_tokens)
        return cache


class PrefixStore:
    """The kept texts of a model, within a budget of memory.

    A copy of the model starts with none.
    """

    def __init__(self) -> None:
        # The last used is at the end. Threads share the list without a lock, which an interrupt
        # might leave held: every change is one operation of the list.
        self._kept: list[KeptText] = []
        #: How often all texts were dropped, as when a model was changed.
        self.num_cleared = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as an empty store."""
        return PrefixStore, ()

    def find(self, origin: Origin, prompt_ids: Sequence[int]) -> tuple[KeptText, int] | None:
        """Return the text with the longest reusable beginning of a prompt, and its length.

        Drops the texts of other states of the model.
        """
        ids = np.array(prompt_ids, np.int64)
        best, most = None, 0
        for kept in [*self._kept]:
            if kept.origin.model != origin.model:
                self._has_removed(kept)
            elif kept.origin == origin:
                num_reusable = kept.num_reusable(ids)
                if num_reusable >= most:
                    best, most = kept, num_reusable
        if best is None or not most:
            return None
        if self._has_removed(best):
            self._kept.append(best)  # as the last used
        return best, most

    def keep(self, text: KeptText, max_bytes: int) -> None:
        """Keep a text; drop the texts that it supersedes, then the least recently used."""
        for kept in self._superseded_by(text):
            self._has_removed(kept)
        if text.num_bytes <= max_bytes:
            self._kept.append(text)
        num_bytes = 0
        for kept in reversed([*self._kept]):
            num_bytes += kept.num_bytes
            if num_bytes > max_bytes:
                self._has_removed(kept)

    def _superseded_by(self, text: KeptText) -> list[KeptText]:
        """Return the texts that are (nearly) useless once another is kept."""
        others = [kept for kept in [*self._kept] if kept.origin == text.origin]
        if text.is_cuttable:
            most = _MOST_LOST
            return [k for k in others if k.num_lost_to(text) <= most * len(k.token_ids)]
        # Such a text cannot be cut, so its beginnings must be kept themselves. Only the longest
        # stays: a regenerated answer continues from there.
        begun = [kept for kept in others if not kept.num_lost_to(text)]
        return sorted(begun, key=lambda kept: len(kept.token_ids))[:-1]

    def owner_of(self, owner: object) -> object:
        """Return a key for the texts of an object; they are dropped when the object is freed."""
        known, number = weakref.ref(self), id(owner)

        # As the interpreter ends, modules lose their attributes before their objects are freed.
        def drop(gone: object, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
            store = known()
            if store is not None and not is_ending():
                for kept in [*store._kept]:
                    if kept.origin.owner == (number, gone):
                        store._has_removed(kept)

        return number, weakref.ref(owner, drop)

    def clear(self) -> None:
        """Drop all texts."""
        self.num_cleared += 1
        self._kept.clear()

    @property
    def num_bytes(self) -> int:
        """Size of all kept texts in bytes."""
        return sum(kept.num_bytes for kept in [*self._kept])

    def __iter__(self) -> Iterator[KeptText]:
        """Iterate over the texts, the last used at the end."""
        return iter([*self._kept])

    def _has_removed(self, kept: KeptText) -> bool:
        """Remove a text; return False if another thread has done so already."""
        try:
            self._kept.remove(kept)
        except ValueError:
            return False
        return True


def is_cuttable(cache: DynamicCache) -> bool:
    """Return whether a cache still holds every token separately, so that any number can go."""
    for layer in cache.layers:
        kind = kind_of(layer)
        if kind is None:  # a recurrent state, or a model's own class
            return False
        if kind.window is not None and layer.get_seq_length() >= kind.window:
            return False
    return True


def _tensors(cache: DynamicCache) -> list[Tensor]:
    values = tree_leaves([vars(layer) for layer in cache.layers])
    return [value for value in values if isinstance(value, Tensor)]


def _num_bytes(cache: DynamicCache) -> int:
    """Return the size of all memory that a cache keeps alive."""
    storages = [tensor.untyped_storage() for tensor in _tensors(cache)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def move_to_own_memory(cache: DynamicCache) -> None:
    """Copy keys and values to memory of exactly their size that no other code uses."""
    with torch.no_grad():
        for layer in cache.layers:
            vars(layer).update(tree_map_only(Tensor, Tensor.clone, vars(layer)))
