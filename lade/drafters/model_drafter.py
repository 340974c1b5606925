"""What all drafters that are models share: the sequences of one call and their drafts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch

from lade.budget.asking import FEW_BEHIND, Level, Rule
from lade.drafters.growing import GrowingTree, Growth, RankedTokens
from lade.drafters.runner import ModelRunner
from lade.drafting.drafter import Drafter, DraftingCall
from lade.drafting.drafts import matched_depth
from lade.sampling.processors import HypotheticalProcessors
from lade.transfer import HostCopy
from ngram_pool import Draft


@dataclass(slots=True)
class _DraftedText:
    """The state of one sequence."""

    row: int
    rule: Rule
    runner: ModelRunner | None = None
    num_followed: int = 0  # tokens of the text that the runner has seen
    # The last draft, and its levels until it is known what became of them.
    draft: Draft = field(default_factory=Draft.empty)
    levels: list[Level] = field(default_factory=list)


class ModelDrafter(Drafter):
    """A drafter of one call that asks a model.

    Args:
        open_runner: returns the model for a sequence; asked at its first draft.
        growth: how far drafts go, and which tree they are.
        max_length: tokens, text and draft together, that the model has positions for.
    """

    def __init__(
        self,
        call: DraftingCall,
        open_runner: Callable[[], ModelRunner],
        growth: Growth,
        max_length: int | None = None,
    ) -> None:
        self.is_measured = growth.is_measured
        self._call = call
        self._open_runner = open_runner
        self._growth = growth
        self._max_length = min(call.max_length - 1, max_length or call.max_length)
        self._texts: dict[int, _DraftedText] = {}
        self._num_opened = 0
        self._processors = HypotheticalProcessors(call.processors, call.num_rows)
        self._ends = end_tokens_of(call.model)

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a sequence."""
        handle = self._num_opened
        self._num_opened += 1
        self._texts[handle] = _DraftedText(handle, self._growth.rule(self._call.step_sec))
        return handle

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Grow a draft after the text."""
        state, growth, call = self._texts[sequence], self._growth, self._call
        state.levels = []
        num_nodes = min(max_draft_tokens, growth.max_draft_tokens or max_draft_tokens)
        num_levels = min(num_nodes, self._max_length - len(committed), state.rule.num_levels)
        # The newest token of a text is no part of what a model has run.
        if num_levels < 1 or len(committed) < 2:
            return Draft.empty()
        if state.runner is None:
            state.runner = self._open_runner()
        # Of a drawn tree, no path can be left out afterwards.
        few = call.max_candidates is not None and (call.rngs is not None or call.max_candidates < 2)
        is_chain = state.runner.is_chain or growth.is_chain or few
        rng = None if call.rngs is None else call.rngs[state.row]
        tree = GrowingTree(num_nodes, is_chain, rng, state.rule.mean_right)
        secs: list[float] = []
        say = self._speaker(state, state.runner, tree, committed, secs)
        state.levels = tree.grow(say, num_levels, state.rule.goes_on, self._ends)
        is_behind = len(committed) - state.num_followed > FEW_BEHIND
        state.num_followed = len(committed)
        for sec in secs[is_behind:]:
            growth.forward_sec.add_sec(sec)
        state.draft = tree.draft()
        return state.draft

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """See what became of the last draft."""
        state = self._texts[sequence]
        if state.levels:
            num_right = matched_depth(state.draft, token_ids)
            is_ended = num_right < len(token_ids)
            state.rule.learn(state.levels, min(num_right, len(state.levels)), is_ended)
            state.levels = []

    def close(self, sequence: int) -> None:
        """End a sequence; free what the model holds for it."""
        state = self._texts.pop(sequence)
        if state.runner is not None:
            state.runner.close()

    def _speaker(
        self,
        state: _DraftedText,
        runner: ModelRunner,
        tree: GrowingTree,
        committed: Sequence[int],
        secs: list[float],
    ) -> Callable[[Sequence[int]], RankedTokens]:
        """Return what runs nodes of a growing draft, and tells the likeliest tokens after each.

        The logits processors of the call apply to them, each with the path of its node.

        Args:
            secs: the seconds of each forward are added, until its result was on the host.
        """
        places = {-1: 0}  # node of the draft -> node in order of growth
        paths: dict[int, list[int]] = {-1: [*committed] if self._processors else []}

        @torch.no_grad()
        def say(nodes: Sequence[int]) -> RankedTokens:
            start = perf_counter()
            if nodes == [-1]:
                logits = runner.follow(committed)[None]
            else:
                token_ids = [tree.token_ids[node] for node in nodes]
                parents = [tree.parents[node] for node in nodes]
                logits = runner.grow(token_ids, [places[parent] for parent in parents])
                for node, token_id, parent in zip(nodes, token_ids, parents, strict=True):
                    places[node] = len(places)
                    if self._processors:
                        paths[node] = [*paths[parent], token_id]
            scores = logits[:, : self._call.vocab_size].float()
            if self._processors:
                # Where the call has them, as some processors hold tensors there. Some write into
                # the scores, and these may be the model's own.
                scores = scores.to(self._call.device or scores.device, copy=True)
                prefixes = [paths[node] for node in nodes]
                scores = self._processors(state.row, prefixes, scores)
            best = scores.topk(min(tree.num_ranked, scores.shape[1]), dim=-1)
            probs = (best.values - scores.logsumexp(dim=-1, keepdim=True)).exp()
            ids, on_host = HostCopy(best.indices, probs).get()
            secs.append(perf_counter() - start)
            return RankedTokens(ids.numpy(), on_host.numpy().astype(np.float64))

        return say


def end_tokens_of(model: Any) -> frozenset[int]:
    """Return the tokens that end a text."""
    config = getattr(model, "generation_config", None)
    ids = getattr(config, "eos_token_id", None)
    return frozenset([ids] if isinstance(ids, int) else ids or [])
