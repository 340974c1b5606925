"""What all drafters that are models share: the sequences of one call and their drafts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from lade.budget.levels import Rule
from lade.budget.sources import FEW_BEHIND
from lade.drafters.expansion import Grown, GrowthLimits, RankedTokens, drawn, likeliest
from lade.drafters.growth import Growth
from lade.drafting.drafter import Drafter, DraftingCall
from lade.drafting.drafts import matched_depth
from lade.sampling.processors import HypotheticalProcessors
from lade.transfer import HostCopy
from ngram_pool import Draft


class Scorer(Protocol):
    """A causal LM that gives logits for a growing tree; one for each sequence."""

    is_chain: bool  # whether only one path can be grown

    def follow(self, committed: Sequence[int]) -> Tensor:
        """Commit what was run of a text, run the rest of it; return the logits after it [vocab].

        What is grown next follows it: its last token is node 0.
        """

    def grow(self, token_ids: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Run nodes and return the logits after each [num_new, vocab].

        Args:
            token_ids: of the nodes [num_new].
            parents: their parents, in order of growth; 0 is the root, 1 the first node grown.
        """

    def close(self) -> None:
        """Free what is held."""


#: Returns a scorer for a sequence, given its text.
OpenScorer = Callable[[Sequence[int]], Scorer]


@dataclass(slots=True)
class _DraftedSequence:
    """The state of one sequence."""

    row: int
    rule: Rule
    scorer: Scorer | None = None
    num_followed: int = 0  # tokens of the text that the scorer has seen
    grown: Grown | None = None  # the last draft, until it is known what became of it


class ModelDrafter(Drafter):
    """A drafter of one call that asks a model.

    Args:
        open_scorer: returns the model for a sequence, given its text; asked at its first draft.
        growth: how far drafts go, and which tree they are.
        max_length: tokens, text and draft together, that the model has positions for.
    """

    def __init__(
        self,
        call: DraftingCall,
        open_scorer: OpenScorer,
        growth: Growth,
        max_length: int | None = None,
    ) -> None:
        self._call = call
        self._open_scorer = open_scorer
        self._growth = growth
        self._max_length = min(call.max_length - 1, max_length or call.max_length)
        self._sequences: dict[int, _DraftedSequence] = {}
        self._num_opened = 0
        self._processors = HypotheticalProcessors(call.processors, call.num_rows)
        self._ends = end_tokens_of(call.model)

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a sequence."""
        handle = self._num_opened
        self._num_opened += 1
        self._sequences[handle] = _DraftedSequence(handle, self._growth.rule(self._call.step_sec))
        return handle

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Grow a draft after the text."""
        state = self._sequences[sequence]
        limits = GrowthLimits(
            min(max_draft_tokens, self._growth.max_draft_tokens or max_draft_tokens),
            self._max_length - len(committed),
        )
        state.grown = None
        # The newest token of a text is no part of what a model has run.
        if min(limits) < 1 or len(committed) < 2:
            return Draft.empty()
        num_behind = len(committed) - state.num_followed
        if state.scorer is None:
            state.scorer = self._open_scorer(committed)
        speaker = ModelSpeaker(
            state.scorer,
            committed,
            self._call.vocab_size,
            partial(self._process, state.row) if self._processors else None,
            self._ends,
        )
        limits = limits._replace(num_levels=min(*limits, state.rule.num_levels))
        state.grown = self._grown(speaker, limits, state, state.scorer.is_chain)
        state.num_followed = len(committed)
        for sec in speaker.secs[num_behind > FEW_BEHIND :]:
            self._growth.forward_sec.add_sec(sec)
        return state.grown.draft

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """See what became of the last draft."""
        state = self._sequences[sequence]
        if state.grown is not None:
            draft, levels = state.grown
            num_right = matched_depth(draft, token_ids)
            is_ended = num_right < len(token_ids)
            state.rule.learn(levels, min(num_right, len(levels)), is_ended)
            state.grown = None

    def close(self, sequence: int) -> None:
        """End a sequence; free what the model holds for it."""
        state = self._sequences.pop(sequence)
        if state.scorer is not None:
            state.scorer.close()

    def _process(self, row: int, prefixes: Sequence[Sequence[int]], scores: Tensor) -> Tensor:
        """Process scores where the call does, as some processors hold tensors there."""
        target = self._call.target
        return self._processors(
            row, prefixes, scores if target is None else scores.to(target.device)
        )

    def _grown(
        self, speaker: "ModelSpeaker", limits: GrowthLimits, state: _DraftedSequence, is_chain: bool
    ) -> Grown:
        most, rngs, rule = self._call.max_candidates, self._call.rngs, state.rule
        is_chain = is_chain or self._growth.is_chain
        if rngs is None:
            return likeliest(speaker, limits, rule.goes_on, is_chain=is_chain or most == 1)
        # Of a drawn tree, no path can be left out afterwards.
        is_chain = is_chain or most is not None
        rng = rngs[state.row]
        return drawn(speaker, limits, rule.goes_on, rng, rule.mean_right, is_chain=is_chain)


class ModelSpeaker:
    """What a scorer says after the nodes of one draft, with the processors of the call.

    Args:
        vocab_size: exclusive upper bound of the token ids in a draft.
        processors: of the sequence, called with prefixes and scores; None if there are none.
        ends: tokens that nothing follows.
    """

    def __init__(
        self,
        scorer: Scorer,
        committed: Sequence[int],
        vocab_size: int,
        processors: Callable[[Sequence[Sequence[int]], Tensor], Tensor] | None,
        ends: frozenset[int],
    ) -> None:
        self._scorer = scorer
        self._committed = committed
        self._vocab_size = vocab_size
        self._processors = processors
        self._ends = ends
        self._places = {-1: 0}  # node of the draft -> node in order of growth
        self._paths: dict[int, list[int]] = {-1: [*committed] if processors else []}
        #: Seconds of each forward, until its result was on the host.
        self.secs: list[float] = []

    def first(self, num_ranked: int) -> RankedTokens:
        """Return the likeliest tokens after the text [1, num_ranked]."""
        start = perf_counter()
        logits = self._scorer.follow(self._committed)[None]
        return self._ranked(logits, [self._paths[-1]], num_ranked, start)

    def grow(
        self,
        nodes: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        num_ranked: int,
    ) -> RankedTokens:
        """Run nodes, and return the likeliest tokens after each [len(nodes), num_ranked]."""
        start = perf_counter()
        logits = self._scorer.grow(token_ids, [self._places[parent] for parent in parents])
        for node, token_id, parent in zip(nodes, token_ids, parents, strict=True):
            self._places[node] = len(self._places)
            if self._processors is not None:
                self._paths[node] = [*self._paths[parent], token_id]
        prefixes = [self._paths[node] for node in nodes] if self._processors is not None else []
        return self._ranked(logits, prefixes, num_ranked, start)

    def is_end(self, token_id: int) -> bool:
        """Return whether nothing follows a token."""
        return token_id in self._ends

    def _ranked(
        self, logits: Tensor, prefixes: Sequence[Sequence[int]], num_ranked: int, start: float
    ) -> RankedTokens:
        with torch.no_grad():
            scores = logits[:, : self._vocab_size].float()
            if self._processors is not None:
                # Some write into the scores, and these may be the model's own.
                scores = self._processors(prefixes, scores.clone())
            best = scores.topk(min(num_ranked, scores.shape[1]), dim=-1)
            probs = (best.values - scores.logsumexp(dim=-1, keepdim=True)).exp()
        token_ids, on_host = HostCopy(best.indices, probs).get()
        self.secs.append(perf_counter() - start)
        return RankedTokens(token_ids.numpy(), on_host.double().numpy())


def end_tokens_of(model: Any) -> frozenset[int]:
    """Return the tokens that end a text."""
    config = getattr(model, "generation_config", None)
    ids = getattr(config, "eos_token_id", None)
    return frozenset([ids] if isinstance(ids, int) else ids or [])
