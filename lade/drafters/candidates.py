"""`Candidates`: any candidate generator of transformers as a drafter.

A generator proposes one path, most of them with logits. Beside each of its tokens, the draft has
other likely ones; with rejection sampling, tokens drawn from these logits.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from lade.budget.asking import Mean
from lade.drafting.drafter import Drafter, DraftingCall
from lade.drafting.drafts import Floats, chain, draft_of, matched_depth
from lade.errors import UnsupportedOptionError
from lade.machine.generators import put_back, random_states
from lade.sampling.processors import HypotheticalProcessors
from ngram_pool import Draft, SampledDraft

_WIDTH = 4  # tokens after one
# Tokens less likely than this share of their level's best are left out: they are hardly ever right.
_LEAST_SHARE = 0.1
# Tokens that a drawn token is drawn from: the likeliest, with their probabilities scaled to 1. That
# is the distribution that it is verified with, so the text is not affected.
_MAX_SUPPORT = 256

#: Makes the generator of a sequence: of the call, the text [1, num_tokens], and those logits
#: processors of the call that may run after tokens that are never emitted.
Make = Callable[[DraftingCall, Tensor, LogitsProcessorList], Any]


@dataclass(slots=True)
class DraftedText:
    """The state of one sequence."""

    row: int
    generator: Any = None
    committed: Sequence[int] = ()  # the text before the last draft
    token_ids: list[int] = field(default_factory=list)  # of the generator, until they are verified
    draft: Draft = field(default_factory=Draft.empty)
    #: How often a drafted token was right lately, given the one before; at first, a guess.
    right: Mean = field(default_factory=lambda: Mean(0.7, 4.0))


class Candidates(Drafter):
    """Drafts by a candidate generator of `transformers.generation.candidate_generator`.

    It is asked where its tokens are worth their time. Its generator should decode greedily.

    Args:
        make: makes a generator for a sequence.
        name: name of this source in `DecodeStats.sources`.
    """

    is_measured = True  # asked only where it pays

    # Of a call.
    _call: DraftingCall
    _processors: HypotheticalProcessors
    _texts: dict[int, DraftedText]

    def __init__(self, make: Make, *, name: str = "candidates") -> None:
        self.name = name
        self._make = make

    def for_call(self, call: DraftingCall) -> Drafter:
        """Return a drafter for one call."""
        mine = copy.copy(self)
        mine._call = call
        mine._texts = {}
        mine._processors = HypotheticalProcessors(call.processors, call.num_rows)
        return mine

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a sequence."""
        handle = len(self._texts)
        self._texts[handle] = DraftedText(handle)
        return handle

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Return the generator's path after the text, and other likely or drawn tokens beside."""
        state, call = self._texts[sequence], self._call
        state.token_ids, state.draft, state.committed = [], Draft.empty(), [*committed]
        if len(committed) < 2:  # a prompt of embeddings, or one that was never run
            return state.draft
        input_ids = torch.tensor([state.committed], dtype=torch.int64, device="cpu")
        if state.generator is None:
            state.generator = self._made(input_ids, self._processors_of(state.row))
            if getattr(state.generator, "requires_model_outputs", False):
                raise UnsupportedOptionError(
                    f"{type(state.generator).__name__} drafts from hidden states of the target, "
                    "which lade does not keep"
                )
        device = call.device or torch.device("cpu")
        states = random_states(device)
        try:
            found, logits = self._found(state, input_ids, max_draft_tokens)
        finally:
            put_back(device, states)
        new = found[0, len(committed) :].tolist()[:max_draft_tokens]
        state.token_ids = [*takewhile(lambda token_id: 0 <= token_id < call.vocab_size, new)]
        if not state.token_ids or logits is None:
            probs = [state.right.value**depth for depth in range(1, 1 + len(state.token_ids))]
            state.draft = chain(state.token_ids, probs)
        else:
            state.draft = self._tree(state, logits[0, : len(state.token_ids)], max_draft_tokens)
        return state.draft

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Learn from the outcome of the last draft."""
        state = self._texts[sequence]
        if not (drafted := state.token_ids):
            return
        path = chain(drafted) if self._call.rngs is None else state.draft
        num_levels, num_right = int(path.depths.max(initial=0)), matched_depth(path, token_ids)
        for level in range(min(num_levels, num_right + (num_right < len(token_ids)))):
            state.right.add(level < num_right)
        text = [*state.committed, *token_ids]
        text_ids = torch.tensor([text], dtype=torch.int64, device="cpu")
        # Only the number of scores is known here.
        scores = torch.empty((1, len(drafted) + 1, 0), dtype=torch.float32, device="cpu")
        num_matches = matched_depth(chain(drafted), token_ids)
        state.generator.update_candidate_strategy(text_ids, scores, num_matches)
        state.token_ids = []

    def close(self, sequence: int) -> None:
        """End a sequence."""
        self._texts[sequence].generator = None

    def _processors_of(self, row: int) -> LogitsProcessorList:
        """Return the processors of a row, of those that may run on drafts."""

        def process(input_ids: Tensor, scores: Tensor) -> Tensor:
            moved = scores.to(self._call.device or scores.device, copy=True)
            return self._processors(row, input_ids.tolist(), moved).to(scores.device)

        return LogitsProcessorList([process] if self._processors else [])

    def _made(self, input_ids: Tensor, processors: LogitsProcessorList) -> Any:
        """Return the generator of a sequence."""
        return self._make(self._call, input_ids, processors)

    def _found(self, state: DraftedText, input_ids: Tensor, max_draft_tokens: int) -> Any:
        """Return the text with the generator's tokens, and their logits or None."""
        return state.generator.get_candidates(input_ids)

    def _tree(self, state: DraftedText, logits: Tensor, max_draft_tokens: int) -> Draft:
        """Return the draft of a path with logits [num_tokens, vocab_size or more]."""
        call, rngs = self._call, self._call.rngs
        probs = logits[:, : call.vocab_size].float().softmax(-1)
        # No path of a drawn tree may be left out afterwards.
        few = call.max_candidates is not None and (rngs is not None or call.max_candidates < 2)
        width = 1 if few else _WIDTH
        best = probs.topk(min(width if rngs is None else _MAX_SUPPORT, call.vocab_size))
        ids, ranked = best.indices.cpu().numpy(), best.values.cpu().numpy().astype(np.float64)
        nodes, parent, before = list[_GrownNode](), -1, 1.0
        for level, token_id in enumerate(state.token_ids):
            after = ids[level], ranked[level]
            if rngs is None:
                children = _likeliest(token_id, float(probs[level, token_id]), *after)[:width]
            else:
                children = _drawn(*after, width, rngs[state.row], state.right.value)
            first = len(nodes)
            nodes += (_GrownNode(each, parent, before * prob, of) for each, prob, of in children)
            on_path = [
                node for node in range(first, len(nodes)) if nodes[node].token_id == token_id
            ]
            if not on_path:  # another token was drawn
                break
            parent, before = on_path[0], nodes[on_path[0]].prob
        order = [*range(len(nodes))]
        if rngs is None:
            order.sort(key=lambda node: -nodes[node].prob)  # of equals, parents stay first
        return _draft_of([nodes[node] for node in order], order, max_draft_tokens)


class _GrownNode(NamedTuple):
    token_id: int
    parent: int  # -1 for the text
    prob: float  # of the whole path
    support: tuple[NDArray[np.int64], Floats] | None = None  # of a drawn one


def config_for(call: DraftingCall) -> GenerationConfig:
    """Return the config of a generator of a call."""
    config = copy.deepcopy(getattr(call.model, "generation_config", GenerationConfig()))
    config.max_length, config.min_length, config.do_sample = call.max_length, 0, False
    return config


# A token, its probability given those before, and what it was drawn from.
_Child = tuple[int, float, tuple[NDArray[np.int64], Floats] | None]


def _likeliest(token_id: int, prob: float, ids: NDArray[np.int64], probs: Floats) -> list[_Child]:
    """Return a token of the path, and the likeliest others."""
    others = zip(ids.tolist(), probs.tolist(), strict=True)
    likely = [(each, its, None) for each, its in others if its >= _LEAST_SHARE * probs[0]]
    return [(token_id, prob, None), *(each for each in likely if each[0] != token_id)]


def _drawn(
    ids: NDArray[np.int64], probs: Floats, width: int, rng: np.random.Generator, rate: float
) -> list[_Child]:
    """Draw tokens without replacement.

    Their number depends on how often drawn tokens were accepted before, and not on the tokens;
    their probabilities are those expected before the draw.

    Args:
        rate: how often one is accepted, if those before it were not.
    """
    rate = min(max(rate, 0.05), 0.95)  # with 1, second tokens would have probability 0
    left, children, prob = np.where(probs > 0, probs, 0.0), list[_Child](), rate  # NaN is none
    while len(children) < width and prob >= _LEAST_SHARE * rate and left.sum() > 0:
        left = left / left.sum()
        index = int(rng.choice(len(left), p=left))
        children.append((int(ids[index]), prob, (ids, left)))
        left = np.where(np.arange(len(left)) == index, 0.0, left)
        prob *= 1 - rate
    return children


def _draft_of(nodes: Sequence[_GrownNode], order: Sequence[int], max_draft_tokens: int) -> Draft:
    """Return the draft of the first of some nodes; `order` has their numbers as parents."""
    nodes, index = (
        nodes[:max_draft_tokens],
        {node: new for new, node in enumerate(order)} | {-1: -1},
    )
    draft = draft_of(
        [node.token_id for node in nodes],
        [index[node.parent] for node in nodes],
        [min(1.0, node.prob) for node in nodes],
    )
    supports = [node.support for node in nodes if node.support is not None]
    if not supports:
        return draft
    ids, probs = (np.stack(each) for each in zip(*supports, strict=True))
    whole = draft.token_ids, draft.parents, draft.depths, draft.probs
    return SampledDraft(*whole, ids.astype(np.int32), probs)
