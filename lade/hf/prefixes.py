"""`Reuse`: the KV cache that a call takes from earlier calls and keeps for later ones."""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

from transformers.cache_utils import DynamicCache

from lade.compat import CACHE, CHUNKS_GO_ON, MARKS_CACHES, Model, mesh_of
from lade.hf.call import Arguments, Call
from lade.hf.pools import pools_of
from lade.probing.profile import Profile, Profiles, profile_of
from lade.probing.rules import why_no_snapshot, why_not_speculate
from lade.probing.selfcheck import why_not_continued
from lade.targets.inputs import is_text_alone
from lade.targets.prefixes import KeptText, Origin, PrefixStore, is_cuttable, move_to_own_memory
from lade.targets.rollback import crop, length_of, saved
from ngram_pool import NamedPool


class Reuse:
    """The KV cache of one call, taken from earlier calls and kept for later ones.

    Attributes:
        num_tokens: first tokens of the prompt that do not run, because the cache holds them.
    """

    def __init__(self, call: Call, store: PrefixStore) -> None:
        self.num_tokens = 0
        self._model, self._store, self._max_bytes = call.model, store, call.config.max_prefix_bytes
        self._origin = Origin(state_of(call.model, call.profile), _owner_of(call.arguments, store))
        self._cache = call.model_kwargs[CACHE]  # the call's cache, filled in place
        self._empty = saved(self._cache)
        self._num_cleared = store.num_cleared
        found = store.find(self._origin, call.input_ids[0].tolist())
        if found is not None:
            text, self.num_tokens = found
            vars(self._cache).update(vars(text.first(self.num_tokens)))

    def undo(self) -> None:
        """Empty the cache, which may be wrong, and drop all kept texts."""
        self.num_tokens = 0
        vars(self._cache).update(vars(self._empty))
        self._store.clear()

    def end(self, token_ids: Sequence[int]) -> None:
        """Keep the call's cache, which holds all of these tokens but the last, for later calls."""
        origin, present = self._origin, state_of(self._model, profile_of(self._model))
        if self._store.num_cleared != self._num_cleared or origin.model != present:
            return  # the model was changed meanwhile
        cache, num_tokens = self._cache, len(token_ids) - 1
        num_more = (length_of(cache) or 0) - num_tokens
        if num_more < 0:
            return  # some models replace the cache
        if num_more and not is_cuttable(cache):
            return  # on a device, `generate` may have run beyond the end
        # An unmarked cache may be the caller's: keep a copy.
        kept = saved(cache)
        if not MARKS_CACHES:
            move_to_own_memory(kept)
        if num_more:
            crop(kept, num_more)
        self._store.keep(KeptText(origin, token_ids[:-1], kept), self._max_bytes)


def reuse_of(call: Call) -> Reuse | None:
    """Fill a call's cache with the kept beginning of its prompt; None if it may not be reused."""
    model, options = call.model, call.options
    cache = call.model_kwargs.get(CACHE)  # `generate` continues from no other
    if not _is_plain_text(call, cache):
        return None
    if options.prefill_chunk_size is not None and not CHUNKS_GO_ON:
        return None
    # Keys of another length may differ, or its forwards.
    reason = why_no_snapshot(model, call.lengths) or why_not_speculate(model, call.lengths)
    find = partial(why_not_continued, model, call.profile)
    if reason is not None or call.profile.once("why_not_continued", find) is not None:
        return None
    return Reuse(call, Profiles.of(model).prefixes)


def state_of(model: Model, profile: Profile) -> Hashable:
    """Return what keys and values depend on besides tokens, as far as lade can see.

    It consists of the model's state, and of the address and the count of writes of each weight.
    After any other change of a model, its user must call `lade.release`.
    """
    weights = [*model.parameters(), *(each for each in model.buffers() if each.dim() > 1)]
    writes = [(each.data_ptr(), -1 if each.is_inference() else each._version) for each in weights]
    return profile.state, tuple(writes)


def _is_plain_text(call: Call, cache: Any) -> bool:
    """Return whether a call's keys and values follow from its tokens alone."""
    num_rows, num_tokens = call.input_ids.shape
    # Returned states must include every token of the prompt.
    if num_rows != 1 or num_tokens < 1 or mesh_of(call.model) is not None or call.returns_states:
        return False
    if type(cache) is not DynamicCache or cache.offloading or length_of(cache):
        return False
    if getattr(cache, "_is_user_defined", False) or not is_text_alone(call.model_kwargs):
        return False
    mask, lengths = call.model_kwargs.get("attention_mask"), call.lengths
    is_usual = lengths.num_slots == lengths.first_position == num_tokens and not lengths.is_padded
    return is_usual and (mask is None or mask.dim() == 2)


def _owner_of(arguments: Arguments, store: PrefixStore) -> object:
    """Return the owner of the call's text: the pool that learns it, or its drafter.

    None for calls that have neither: they share their kept texts.

    Raises:
        TypeError: the drafter's class allows no weak references.
    """
    for pool in pools_of(arguments.pool):
        if isinstance(pool, NamedPool):
            return str(pool.store.folder), pool.name
        if not pool.is_read_only:
            return store.owner_of(pool)
    return None if arguments.drafter is None else store.owner_of(arguments.drafter)
