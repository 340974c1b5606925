"""Keys and values that outlive a call, for prompts that begin as an earlier text did.

What is kept is never changed: a call goes on from a copy that shares its memory. So any number of
calls may go on from the same text at once, and none that fails can damage it. Next file:
`lade/hf/prefixes.py`, which calls may.
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

# A text is dropped for one that has all of it but a part so small: it would have to be run again,
# and the rest is not kept twice. Answers that are written anew are mostly shorter than that.
_MOST_LOST = 1 / 8
# Memory that grew ahead of its text is copied to fit if it is larger than the text by this factor.
_MOST_ROOM = 1.5


class Origin(NamedTuple):
    """The model that keys and values belong to, and the calls that may find them."""

    model: Hashable  # in one state; what is kept of any other is of no more use
    owner: object  # of those who may know of each other's text, as of `owner_of`, or a name


class KeptText:
    """A text, and the keys and values of all of its tokens.

    Args:
        cache: of one row and of exactly these tokens; nobody else may change it, or its tensors.
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
        """Return how many of this text's last tokens another lacks."""
        return len(self.token_ids) - self.num_shared(later.token_ids)

    def first(self, num_tokens: int) -> DynamicCache:
        """Return a cache of the first tokens, to be written to; it shares memory with this one."""
        cache: DynamicCache = saved(self._cache)
        if num_tokens < len(self.token_ids):
            crop(cache, len(self.token_ids) - num_tokens)
        return cache


class PrefixStore:
    """The texts that are kept of a model, within a budget of memory.

    A copy of the model starts with none.
    """

    def __init__(self) -> None:
        # The last used at the end. Threads share it without a lock, which an interrupt might leave
        # held: every change is one operation of the list.
        self._kept: list[KeptText] = []
        #: How often all was dropped, as when a model was changed.
        self.num_cleared = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle nothing."""
        return PrefixStore, ()

    def find(self, origin: Origin, prompt_ids: Sequence[int]) -> tuple[KeptText, int] | None:
        """Return the text with the longest reusable beginning of a prompt, and its length.

        Drops what is kept of the model in other states.
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
        """Keep a text, in place of those that it supersedes and of those not used for longest."""
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
        """Return the texts that are of (nearly) no more use once another is kept."""
        others = [kept for kept in [*self._kept] if kept.origin == text.origin]
        if text.is_cuttable:
            most = _MOST_LOST
            return [k for k in others if k.num_lost_to(text) <= most * len(k.token_ids)]
        # Its beginnings are found only as long as they are kept themselves. The longest stays: who
        # has an answer written anew goes on from there.
        begun = [kept for kept in others if not kept.num_lost_to(text)]
        return sorted(begun, key=lambda kept: len(kept.token_ids))[:-1]

    def owner_of(self, owner: object) -> object:
        """Return what texts of an object are kept by, and with it: they are dropped as it goes."""
        known, place = weakref.ref(self), id(owner)

        # As the interpreter ends, modules lose what they hold before their objects are gone.
        def drop(gone: object, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
            store = known()
            if store is not None and not is_ending():
                for kept in [*store._kept]:
                    if kept.origin.owner == (place, gone):
                        store._has_removed(kept)

        return place, weakref.ref(owner, drop)

    def clear(self) -> None:
        """Drop all texts."""
        self.num_cleared += 1
        self._kept.clear()

    @property
    def num_bytes(self) -> int:
        """Size of all that is kept."""
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
    """Return whether a cache still holds every token apart, so that any number can be dropped."""
    for layer in cache.layers:
        kind = kind_of(layer)
        if kind is None:  # a recurrent state, or a layer that only its model knows
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
    """Copy keys and values to memory that nobody else has, and that has room for no more."""
    with torch.no_grad():
        for layer in cache.layers:
            vars(layer).update(tree_map_only(Tensor, Tensor.clone, vars(layer)))
