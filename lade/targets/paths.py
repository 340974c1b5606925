"""Verification with the model's causal masks: one path per step.

For models that cannot run trees under a mask: without position_ids, with ALiBi, with convolutions,
with a recurrent state, or without a cache at all.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from lade.compat import Model, prefill
from lade.compat.view import with_decoding_experts
from lade.errors import UnsupportedModelError
from lade.machine.transfer import arrays_on
from lade.targets.base import Target
from lade.targets.inputs import LOGITS_KEPT
from lade.targets.rollback import (
    cache_in,
    crop,
    find_cache,
    record_past,
    saved,
    why_not_croppable,
)
from lade.tree import Tree


class ChainTarget(Target):
    """Target that verifies a path in the model's cache, and rolls it back to the accepted part.

    Args:
        input_ids: int64 [1, num_tokens], the prompt; num_tokens is 0 with `inputs_embeds`.
        model_kwargs: the arguments that `generate` prepared for the prefill; a cache in it is
            written to.
        restores: whether to restore the state from before a partly accepted draft, and run the
            accepted part again with the next draft, instead of dropping tokens.
        generation_config: provides `prefill_chunk_size` for the prefill.
    """

    max_candidates = 1

    def __init__(
        self,
        model: Model,
        input_ids: Tensor,
        model_kwargs: dict[str, Any],
        restores: bool = False,
        generation_config: GenerationConfig | None = None,
    ) -> None:
        self.device: torch.device = input_ids.device
        self.vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
        self._model = model
        self._model_kwargs = dict(model_kwargs)
        self._restores = restores
        self._generation_config = generation_config or GenerationConfig()
        self._ids = input_ids  # all tokens before the root
        self._num_prompt = input_ids.shape[1]
        self._cache: tuple[str, Any] | None = None  # name and cache
        self._saved: Any = None
        # For recent tokens that ran alone: the text and the state before each.
        self._before: list[tuple[Tensor, Any]] = []
        self._given = cache_in(model_kwargs)  # the caller's cache, written to
        self._as_given = None if self._given is None else saved(self._given)
        self._is_recording = False  # whether the cache keeps tokens that have left its windows

    @functools.cached_property
    def _roots_view(self) -> Model:
        # Made after the prefill, which may set attributes.
        return with_decoding_experts(self._model)

    def prefill(self, *, is_plain: bool = False) -> Tensor:
        """Run the prompts as `generate` does."""
        output = prefill(self._model, self._ids, self._generation_config, self._model_kwargs)
        if self._model_kwargs.get("use_cache", True):
            self._cache = find_cache(output)
        if self._cache is not None and not self._restores:
            reason = why_not_croppable(self._cache[1])
            if reason is not None:
                raise UnsupportedModelError(reason)
            record_past(self._cache[1], True)
            self._is_recording = True
        logits: Tensor = output.logits
        return logits[:, -1:]

    def inputs(self, trees: Sequence[Tree]) -> Any:
        """Return the forward's arguments for the path after the committed tokens."""
        return self._inputs(trees[0], 0)

    def extend(self, tree: Tree, num_run: int) -> Tensor:
        """Run a growing chain's nodes from `num_run` on; earlier nodes ran since the last commit.

        `commit` takes a path of the whole chain.
        """
        inputs = self._inputs(tree, num_run)
        if num_run == 0 and self._restores and self._cache is not None:
            self._saved = saved(self._cache[1])
        return self.forward(inputs)

    def _inputs(self, tree: Tree, num_run: int) -> Any:
        # The chain without pending tokens, and how many of its tokens ran since the last commit.
        self._tokens, self._num_run = tree.token_ids, num_run
        assert len(tree) == max(tree.depths) + 1
        input_ids = self._followed(self._ids, self._tokens)
        num_new = len(tree) - num_run if num_run else self.num_pending + len(tree)
        return self._prepared(input_ids, num_new)

    def forward(self, inputs: Any) -> Tensor:
        """Run the model and return its outputs in node order."""
        width, num_run = len(self._tokens), self._num_run
        # A lone root is always accepted; a chain that grows was saved with its first nodes.
        if self._cache is not None and self._restores and width > 1 and not num_run:
            self._saved = saved(self._cache[1])
        is_single = width == 1 and not self.num_pending
        output = (self._roots_view if is_single else self._model)(**inputs, return_dict=True)
        if self._cache is not None:
            self._cache = find_cache(output) or self._cache
        logits: Tensor = output.logits
        return logits[:, logits.shape[1] - (width - num_run) :]

    def forward_roots(self, roots: Sequence[Tree]) -> Tensor:
        """Run roots, keeping the states before them and before the previous token."""
        inputs = self.inputs(roots)
        before = None if self._cache is None else saved(self._cache[1])
        if self._restores:
            self._saved = before
        kept = [(ids, state) for ids, state in self._before if ids.shape[1] < self._ids.shape[1]]
        self._before = [*kept[-1:], (self._ids, before)]
        return self.forward(inputs)

    def go_back(self, num_tokens: int) -> bool:
        """Go back to before a token that ran alone."""
        num_left = self._ids.shape[1] - num_tokens
        for ids, state in self._before:
            if ids.shape[1] == num_left and not self.num_pending:
                self._ids, self._before = ids, []  # the restored state will be written to
                self._restore(state)
                return True
        return False

    def discard(self) -> None:
        """Discard the last forward."""
        self._roll_back(0)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the accepted path; roll the cache back to where it ends."""
        num_kept = len(paths[0])
        self._ids = self._followed(self._ids, [self._tokens[node] for node in paths[0]])
        # The state was saved before any draft that is only partly accepted.
        is_whole = num_kept == len(self._tokens)
        assert not self._restores or self._cache is None or is_whole or self._saved is not None
        self._roll_back(num_kept)

    def _roll_back(self, num_kept: int) -> None:
        """Roll the cache back to after some tokens of the last forward."""
        if self._cache is None:
            return
        width = len(self._tokens)
        if not self._restores:
            crop(self._cache[1], width - num_kept)
        elif num_kept == width:
            self.num_pending = 0
        elif self._saved is not None:  # `discard` may come before anything was run
            self._restore(self._saved)
            self.num_pending += num_kept
        self._saved = None

    def _restore(self, state: Any) -> None:
        if self._cache is None:
            return
        name, cache = self._cache
        if isinstance(cache, Cache):  # in place: it may be the caller's cache
            vars(cache).update(vars(state))
        else:
            self._cache = name, state

    def _followed(self, token_ids: Tensor, more: Sequence[int]) -> Tensor:
        """Return tokens, int64 [1, num_tokens], followed by more."""
        (sent,) = arrays_on(self.device, np.array([more], np.int64))
        return torch.cat([token_ids, sent], dim=1)

    def hand_over(self, cache: Any) -> Any:
        """Fill the caller's cache with every token before the root; return it, or the model's."""
        if self._cache is None:
            return cache
        if self.num_pending:
            inputs = self._prepared(self._ids, self.num_pending)
            output = self._model(**inputs, return_dict=True)
            self._cache, self.num_pending = find_cache(output) or self._cache, 0
        mine = self._cache[1]
        if cache is None or type(cache) is not type(mine):
            return mine
        if cache is not mine:
            vars(cache).update(vars(mine))
        return cache

    def close(self) -> None:
        """Stop the cache from keeping tokens that have left its windows."""
        if self._cache is not None and self._is_recording:
            record_past(self._cache[1], False)

    def undo(self) -> None:
        """Restore the caller's cache to its content before the prompts."""
        if isinstance(self._given, Cache):
            vars(self._given).update(vars(self._as_given))

    def _prepared(self, input_ids: Tensor, num_tokens: int) -> dict[str, Any]:
        """Return the arguments for the last `num_tokens`, prepared by the model."""
        model_kwargs = self.extended(input_ids.shape[1] - self._num_prompt)
        if self._cache is not None:
            model_kwargs[self._cache[0]] = self._cache[1]
        inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=None if self._cache is None else num_tokens,
            **model_kwargs,
        )
        if LOGITS_KEPT in inputs:
            inputs[LOGITS_KEPT] = num_tokens
        return inputs
