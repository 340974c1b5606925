"""What a call reuses of the prompts and answers before it, and what it leaves to those after it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache

from lade.compat import CHUNKS_GO_ON, MARKS_CACHES, Model, mesh_of
from lade.config import Config
from lade.hf.arguments import Arguments
from lade.hf.pools import pools_of
from lade.probing.call import lengths_of
from lade.probing.continuing import why_not_continued
from lade.probing.profile import Profile, Profiles
from lade.probing.rules import why_not_reused
from lade.probing.weights import stamp_of, switches_of
from lade.targets.prefixes import (
    KeptText,
    Origin,
    Owner,
    PrefixStore,
    is_cuttable,
    move_to_own_memory,
)
from lade.targets.rollback import crop, length_of, saved
from ngram_pool import NamedPool

# What a call may be given besides its tokens; with anything else, equal tokens may have other keys.
_OF_TEXT = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}


class Reuse:
    """The keys and values of one call, taken from those of earlier calls and left to later ones.

    Attributes:
        num_tokens: first tokens of the prompt that are not run, since the cache holds them.
    """

    def __init__(self, store: PrefixStore, origin: Origin, max_bytes: int, cache: Any) -> None:
        self.num_tokens = 0
        self._store = store
        self._origin = origin
        self._max_bytes = max_bytes
        self._cache = cache  # the call's own, filled in place
        self._empty = saved(cache)

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Fill the cache with what is kept of a prompt's first tokens."""
        found = self._store.find(self._origin, prompt_ids)
        if found is not None:
            text, self.num_tokens = found
            vars(self._cache).update(vars(text.first(self.num_tokens)))

    def undo(self) -> None:
        """Empty the cache, which may hold what is no more true, and drop all that is kept."""
        self.num_tokens = 0
        vars(self._cache).update(vars(self._empty))
        self._store.clear()

    def end(self, token_ids: Sequence[int]) -> None:
        """Keep the call's cache, which holds these tokens but the last, for later calls."""
        cache, num_tokens = self._cache, len(token_ids) - 1
        num_more = (length_of(cache) or 0) - num_tokens
        if num_more < 0:
            return  # some models go on in a cache of their own
        if num_more and not is_cuttable(cache):
            return  # on a device, `generate` itself may have run beyond the end
        # Where nobody can tell whether the cache is the caller's, it is not kept itself.
        kept = saved(cache)
        if not MARKS_CACHES:
            move_to_own_memory(kept)
        if num_more:
            crop(kept, num_more)
        self._store.keep(KeptText(self._origin, token_ids[:-1], kept), self._max_bytes)


def reuse_of(
    model: Model,
    profile: Profile,
    input_ids: Tensor,
    options: GenerationConfig,
    model_kwargs: dict[str, Any],
    arguments: Arguments,
) -> Reuse | None:
    """Return what a call reuses and keeps; None if it does neither.

    Args:
        model: the target.
        profile: of the model in its present state.
        input_ids: int64 [rows, num_tokens].
        options, model_kwargs: as prepared by `generate`.
        arguments: lade's own.
    """
    config = arguments.config or Config()
    cache = model_kwargs.get("past_key_values")  # `generate` goes on from no other
    if not config.reuses_prefix or not _is_plain_text(model, input_ids, model_kwargs, cache):
        return None
    if options.return_dict_in_generate and (
        options.output_hidden_states or options.output_attentions
    ):
        return None  # these are wanted of every token of the prompt
    if options.prefill_chunk_size is not None and not CHUNKS_GO_ON:
        return None
    if why_not_reused(model, lengths_of(input_ids, options, model_kwargs)) is not None:
        return None
    if why_not_continued(model, profile) is not None:
        return None
    store = Profiles.of(model).prefixes
    state = (profile.structure, stamp_of(model))
    origin = Origin(state, switches_of(model), _owner_of(arguments, store))
    reuse = Reuse(store, origin, config.max_prefix_bytes, cache)
    reuse.begin(input_ids[0].tolist())
    return reuse


def _is_plain_text(
    model: Model, input_ids: Tensor, model_kwargs: dict[str, Any], cache: Any
) -> bool:
    """Return whether a call's keys and values follow from its tokens alone."""
    num_rows, num_tokens = input_ids.shape
    if num_rows != 1 or num_tokens < 1 or mesh_of(model) is not None:
        return False
    if type(cache) is not DynamicCache or cache.offloading or length_of(cache):
        return False
    if getattr(cache, "_is_user_defined", False):
        return False
    for name, value in model_kwargs.items():
        is_nothing = value is None or value is False or (isinstance(value, dict) and not value)
        if name not in _OF_TEXT and not is_nothing:
            return False
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is not None and not (mask.shape == input_ids.shape and bool(mask.all())):
        return False
    usual = torch.arange(num_tokens, device=input_ids.device)
    return positions is None or (
        positions.shape[-1] == num_tokens and bool((positions == usual).all())
    )


def _owner_of(arguments: Arguments, store: PrefixStore) -> object:
    """Return whose text the call's is: that of the pool it learns into, or of its drafter.

    None for calls that have neither: they share what is kept of them.

    Raises:
        TypeError: the drafter's class allows no weak references.
    """
    for pool in pools_of(arguments.pool):
        if isinstance(pool, NamedPool):
            return str(pool.store.folder), pool.name
        if not pool.is_read_only:
            return Owner(pool, store)
    return None if arguments.drafter is None else Owner(arguments.drafter, store)
