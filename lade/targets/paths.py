"""Verifying drafts with the model's own causal masks: one path, or several as rows of a batch.

For models that no tree mask can describe: without position_ids, with ALiBi, with convolutions, with
a recurrent state, or without a cache at all.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache, StaticCache

from lade.compat import Model, prefill
from lade.errors import UnsupportedModelError
from lade.targets import ties
from lade.targets.base import Alone, Forward
from lade.targets.inputs import extended, widened
from lade.targets.rollback import (
    crop,
    expand,
    find_cache,
    length_of,
    pick,
    record_past,
    saved,
    why_not_croppable,
    why_not_savable,
)
from lade.targets.ties import TieError, Untied
from lade.tree import ROOT, Tree

MAX_ROWS = 4  # paths of a draft as rows of a batch; each reads the whole cache once more
_MAX_PENDING = 16  # tokens to run again; beyond, a step without a draft brings the state up to date


class _Layout(NamedTuple):
    """Where the nodes of one step's trees are run."""

    width: int  # tokens of a row, those run again not counted
    rows: list[int] | None  # of each node, where one tree takes several rows
    columns: list[int]  # of each node
    is_whole: bool  # whether no row is padded


class _Outputs(NamedTuple):
    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor | None, ...] | None


class ChainTarget:
    """Verifies paths in the cache that the model itself has made, after going back where they end.

    A batch of prompts is verified one path a row, and its rows stay of one length.

    Args:
        model: the target.
        input_ids: int64 [rows, num_tokens], the prompts; no tokens where `inputs_embeds` is given.
        model_kwargs: what `generate` prepared for the prefill; a cache in it is written to.
        max_candidates: paths of a draft to verify at once, as rows of a batch.
        restores: keep the state from before a draft and run the accepted part again, with the next
            draft, where the draft was not accepted whole; instead of dropping tokens.
        generation_config: the prefill follows its `prefill_chunk_size`.
    """

    def __init__(
        self,
        model: Model,
        input_ids: Tensor,
        model_kwargs: dict[str, Any],
        max_candidates: int = 1,
        restores: bool = False,
        generation_config: GenerationConfig | None = None,
    ) -> None:
        self.device: torch.device = input_ids.device
        self.vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
        self.is_lockstep = input_ids.shape[0] > 1
        self.max_candidates: int | None = 1 if self.is_lockstep or restores else max_candidates
        self.num_pending = 0
        self._model = model
        self._stepping = Untied(model) if ties.applies(model) else model
        self._model_kwargs = dict(model_kwargs)
        self._restores = restores
        self._generation_config = generation_config or GenerationConfig()
        self._ids = input_ids  # all tokens before the root
        self._num_prompt = input_ids.shape[1]
        self._cache: tuple[str, Any] | None = None  # under its name
        self._saved: Any = None
        given = find_cache(model_kwargs)
        self._given = None if given is None else given[1]  # written to
        self._as_given = None if self._given is None else saved(self._given)
        self._is_recording = False  # the cache keeps what left its windows
        self._is_plain = False

    @property
    def num_cached(self) -> list[int]:
        """Tokens before the root of each row."""
        num_new = self._ids.shape[1] - self._num_prompt
        return [self._num_slots + num_new] * self._ids.shape[0]

    @property
    def must_catch_up(self) -> bool:
        """Whether the next forward should have no draft."""
        return self._is_plain or self.num_pending >= _MAX_PENDING

    def prefill(self, view: Model | None = None) -> Forward:
        """Run the prompts exactly as `generate` does."""
        model = self._model if view is None else view
        output = prefill(model, self._ids, self._generation_config, self._model_kwargs)
        if self._model_kwargs.get("use_cache", True):
            self._cache = find_cache(output)
        self._num_slots = self._count_slots()
        if self._cache is not None and not self._restores:
            reason = why_not_croppable(self._cache[1])
            if reason is not None:
                raise UnsupportedModelError(reason)
            record_past(self._cache[1], True)
            self._is_recording = True
        forward: Forward = output
        return forward

    @property
    def is_timing_valid(self) -> bool:
        """True: none is prepared for the next."""
        return True

    def width_of(self, num_tokens: int) -> int:
        """Return the same: no forward is larger than it has to be."""
        return num_tokens

    def inputs(self, trees: Sequence[Tree]) -> Any:
        """Return the arguments of the model's forward for a path behind each row's tokens."""
        if self.is_lockstep:
            paths = [[*range(len(tree))] for tree in trees]
            rows = None
        else:
            paths = _paths(trees[0])
            rows = [
                next(row for row, path in enumerate(paths) if node in path)
                for node in range(len(trees[0]))
            ]
        width = max(map(len, paths))
        self._layout = _Layout(
            width,
            rows if len(paths) > 1 else None,
            max((tree.depths for tree in trees), key=len),
            all(len(path) == width for path in paths),
        )
        of_paths = trees if self.is_lockstep else [trees[0]] * len(paths)
        token_ids = torch.zeros((len(paths), width), dtype=torch.int64)
        for row, (tree, path) in enumerate(zip(of_paths, paths, strict=True)):
            token_ids[row, : len(path)] = torch.tensor([tree.token_ids[node] for node in path])
        self._tokens = [tree.token_ids for tree in trees]
        num_rows = len(paths)
        before = self._ids if self.is_lockstep else self._ids.expand(num_rows, -1)
        input_ids = torch.cat([before, token_ids.to(self.device)], dim=1)
        return self._prepared(input_ids, self.num_pending + width, is_wide=num_rows > len(trees))

    def forward(self, inputs: Any) -> Forward:
        """Run the model on such inputs; bring what comes back into the order of the nodes."""
        layout = self._layout
        if self._cache is not None:
            if self._restores and layout.width > 1:  # a root alone is always kept
                self._saved = saved(self._cache[1])
            elif layout.rows is not None:
                expand(self._cache[1], inputs["input_ids"].shape[0], self.device)
        try:
            output = self._stepping(**inputs, return_dict=True)
        except TieError:
            raise  # after the forward, which is taken back
        except BaseException:
            if self._cache is not None and layout.rows is not None:
                pick(self._cache[1], 0, self.device)  # it may be the caller's
            raise
        if self._cache is not None:
            self._cache = find_cache(output) or self._cache
        assert output.logits.shape[1] >= layout.width
        columns = torch.tensor(layout.columns)
        rows = slice(None) if layout.rows is None else torch.tensor(layout.rows)

        def of_nodes(states: Tensor) -> Tensor:
            if layout.rows is None:
                return states[:, states.shape[1] - layout.width :]
            return states[rows, states.shape[1] - layout.width + columns][None]

        def of_queries(weights: Tensor | None) -> Tensor | None:
            return None if weights is None else weights[:, :, self.num_pending :]

        hidden_states, attentions = output.get("hidden_states"), output.get("attentions")
        return _Outputs(
            of_nodes(output.logits),
            hidden_states and tuple(map(of_nodes, hidden_states)),
            attentions and tuple(map(of_queries, attentions)),
        )

    def discard(self) -> None:
        """Forget what was run last, and want no draft any more."""
        self._is_plain = True
        if self._cache is None:
            return
        name, cache = self._cache
        if not self._restores:
            if self._layout.rows is not None:
                pick(cache, 0, self.device)
            crop(cache, self._layout.width)
        elif self._saved is not None:
            if isinstance(cache, Cache):
                vars(cache).update(vars(self._saved))
            else:
                self._cache = name, self._saved
        self._saved = None

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the accepted paths; go back to where they end."""
        num_kept, layout = len(paths[0]), self._layout
        assert all(len(path) == num_kept for path in paths)
        kept = [
            [tokens[node] for node in path]
            for tokens, path in zip(self._tokens, paths, strict=True)
        ]
        self._ids = torch.cat([self._ids, torch.tensor(kept, device=self.device)], dim=1)
        if self._cache is None:
            return
        name, cache = self._cache
        if not self._restores:
            if layout.rows is not None:
                pick(cache, layout.rows[paths[0][-1]], self.device)
            crop(cache, layout.width - num_kept)
        elif layout.is_whole and num_kept == layout.width:
            self.num_pending = 0
        else:
            if isinstance(cache, Cache):  # in place: it may be the caller's
                vars(cache).update(vars(self._saved))
            else:
                self._cache = name, self._saved
            self.num_pending += num_kept
        self._saved = None

    def commit_and_look(self, paths: Sequence[Sequence[int]]) -> Alone | None:
        """Run a token of each path alone, on a copy of the cache, and commit.

        That is the last one; where a state is restored, the first one, right behind that state.
        """
        alone = self._look(paths)
        self.commit(paths)
        return alone

    def _look(self, paths: Sequence[Sequence[int]]) -> Alone | None:
        num_kept = 1 if self._restores else len(paths[0])
        kept = [
            [tokens[node] for node in path[:num_kept]]
            for tokens, path in zip(self._tokens, paths, strict=True)
        ]
        if num_kept == 0 or not all(kept):
            return None
        trial = None
        if self._cache is not None:
            trial = self._cache_before(num_kept, paths[0][-1])
            if trial is None:
                return None
        ids = torch.cat([self._ids, torch.tensor(kept, device=self.device)], dim=1)
        inputs = self._prepared(ids, 1, cache=trial)
        output = self._model(**inputs, return_dict=True)
        return Alone([path[num_kept - 1] for path in paths], output.logits[:, -1])

    def _cache_before(self, num_kept: int, last: int) -> Any:
        """Return a copy of the cache that holds all but the last of so many nodes of a path."""
        assert self._cache is not None
        if self._restores:  # tokens that are run again would be run along with it
            return None if self._saved is None or self.num_pending else saved(self._saved)
        cache, layout = self._cache[1], self._layout
        if why_not_savable(cache) is not None or isinstance(cache, StaticCache):
            return None  # what it holds is not copied, and would be written over
        trial = saved(cache)
        if layout.rows is not None:
            pick(trial, layout.rows[last], self.device)
        crop(trial, layout.width - (num_kept - 1))
        return trial

    def select(self, places: Sequence[int]) -> None:
        """Keep all rows: they stay of one length."""

    def rejoin(self) -> None:
        """Do nothing: no row was left out."""

    def hand_over(self, cache: Any) -> Any:
        """Let the caller's cache hold every token before the root; return what holds it."""
        if self._cache is None:
            return cache
        if self.num_pending:
            output = self._model(**self._prepared(self._ids, self.num_pending), return_dict=True)
            self._cache = find_cache(output) or self._cache
            self.num_pending = 0
        mine = self._cache[1]
        if cache is None or type(cache) is not type(mine):
            return mine
        if cache is not mine:
            vars(cache).update(vars(mine))
        return cache

    def close(self) -> None:
        """Let the cache forget again what it need not keep."""
        if self._cache is not None and self._is_recording:
            record_past(self._cache[1], False)

    def undo(self) -> None:
        """Let the caller's cache hold again what it held before the prompts."""
        if self._given is None:
            return
        if isinstance(self._given, Cache):
            vars(self._given).update(vars(self._as_given))

    def release(self) -> None:
        """Do nothing: all goes with the call."""

    def _count_slots(self) -> int:
        """Return how many keys the prompt has left, where there are keys at all."""
        length = None if self._cache is None else length_of(self._cache[1])
        if length is not None:
            return length
        embeds = self._model_kwargs.get("inputs_embeds")
        return self._num_prompt if embeds is None else embeds.shape[1]

    def _prepared(
        self, input_ids: Tensor, num_tokens: int, *, is_wide: bool = False, cache: Any = None
    ) -> dict[str, Any]:
        """Return the arguments for the last tokens of each row, prepared by the model itself."""
        num_rows = input_ids.shape[0]
        model_kwargs = extended(self._model_kwargs, input_ids.shape[1] - self._num_prompt)
        if is_wide:
            model_kwargs = widened(model_kwargs, num_rows)
        if self._cache is not None:
            model_kwargs[self._cache[0]] = self._cache[1] if cache is None else cache
        inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=None if self._cache is None else num_tokens,
            **model_kwargs,
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = num_tokens
        return inputs


def _paths(tree: Tree) -> list[list[int]]:
    """Return the paths from the root to every leaf, that of the first node first."""
    inner = {parent for parent, _ in tree.children}
    leaves = [node for node in range(len(tree)) if node not in inner]
    parents = [ROOT - 1, *(tree.draft.parents + 1).tolist()]
    paths = []
    for leaf in leaves:
        path = [leaf]
        while path[-1] != ROOT:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    return paths
