"""`Candidates`: any candidate generator of transformers as a drafter.

A generator proposes one path, most of them with logits. Beside each of its tokens, the draft has
other likely ones; with rejection sampling, tokens drawn from these logits.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from lade.budget.asking import Mean
from lade.drafting.drafter import Drafter, DraftingCall
from lade.drafting.drafts import Floats, best_first, chain, draft_of
from lade.machine.generators import put_back, random_states
from lade.sampling.processors import Processors, repeatable
from lade.tree import matched_path
from ngram_pool import Draft, SampledDraft

_WIDTH = 4  # tokens after one
# Tokens less likely than this share of their level's best are left out: they are hardly ever right.
_LEAST_SHARE = 0.1
# Tokens that a drawn token is drawn from: the likeliest, with their probabilities scaled to 1. That
# is the distribution that it is verified with, so the text is not affected.
_MAX_SUPPORT = 256

#: Makes the generator of a row: of the call, a text [1, 0] on the target's device, and those logits
#: processors of the call that may run after tokens that are never emitted.
Make = Callable[[DraftingCall, Tensor, LogitsProcessorList], Any]

_Support = tuple[NDArray[np.int64], Floats]  # tokens, and their probabilities


@dataclass(slots=True)
class DraftedText:
    """The state of one sequence."""

    row: int
    generator: Any
    committed: Sequence[int] = ()  # the text before the last draft
    token_ids: list[int] = field(default_factory=list)  # of the generator, until they are verified
    draft: Draft = field(default_factory=Draft.empty)
    #: How often a drafted token was right lately, given the one before; at first, a guess.
    right: Mean = field(default_factory=lambda: Mean(0.7, 4.0))


class Candidates(Drafter):
    """Drafts by a candidate generator of `transformers.generation.candidate_generator`.

    It is asked where its tokens are worth their time. Its generator should decode greedily. If the
    generator reads hidden states of the target, torch runs its forward passes, which return
    them; such a generator drafts for a single prompt of text that is verified by trees.

    Args:
        make: makes a generator for a row.
        name: name of this source in `DecodeStats.sources`.
    """

    is_measured = True  # asked only where it pays

    # Of a call.
    _call: DraftingCall
    _processors: Processors
    _texts: list[DraftedText]
    _num_opened = 0
    _outputs: Callable[[int], Any] | None  # of the target, since they were last asked for

    def __init__(self, make: Make, *, name: str = "candidates") -> None:
        self.name = name
        self._make = make

    def for_call(self, call: DraftingCall) -> Drafter:
        """Return a drafter for one call.

        Raises:
            LadeError: the generator cannot draft for the call.
        """
        mine = copy.copy(self)
        mine._call, mine._outputs = call, None
        mine._processors = repeatable(call.processors, call.num_rows)
        mine._texts = [DraftedText(row, mine._made(row)) for row in range(call.num_rows)]
        first = mine._texts[0].generator
        if getattr(first, "requires_model_outputs", False):
            mine._outputs = call.record(first.model_kwargs_overrides)
        return mine

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a sequence."""
        self._num_opened += 1
        return self._num_opened - 1

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Return the generator's path after the text, and other likely or drawn tokens beside."""
        state, call = self._texts[sequence], self._call
        state.token_ids, state.draft, state.committed = [], Draft.empty(), [*committed]
        if len(committed) < 2:  # a prompt of embeddings, or one that was never run
            return state.draft
        input_ids = torch.tensor([state.committed], dtype=torch.int64, device="cpu")
        device = call.device or torch.device("cpu")
        states = random_states(device)
        try:
            found, logits = self._found(state.generator, input_ids, max_draft_tokens)
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
        num_levels, num_right = int(path.depths.max(initial=0)), len(matched_path(path, token_ids))
        for level in range(min(num_levels, num_right + (num_right < len(token_ids)))):
            state.right.add(level < num_right)
        text = [*state.committed, *token_ids]
        text_ids = torch.tensor([text], dtype=torch.int64, device="cpu")
        # Only the number of scores is known here.
        scores = torch.empty((1, len(drafted) + 1, 0), dtype=torch.float32, device="cpu")
        num_matches = len(matched_path(chain(drafted), token_ids))
        state.generator.update_candidate_strategy(text_ids, scores, num_matches)
        state.token_ids = []

    def close(self, sequence: int) -> None:
        """End a sequence."""
        self._texts[sequence].generator = None

    def _made(self, row: int) -> Any:
        """Return a generator for a row, with those of its processors that may run on drafts."""
        device = self._call.device or torch.device("cpu")

        def process(input_ids: Tensor, scores: Tensor) -> Tensor:
            moved = input_ids.to(device), scores.to(device, copy=True)
            return self._processors.of_row[row](*moved).to(scores.device)

        processors = LogitsProcessorList([process] if self._processors else [])
        no_text = torch.empty((1, 0), dtype=torch.int64, device=device)
        return self._make(self._call, no_text, processors)

    def _found(self, generator: Any, input_ids: Tensor, max_draft_tokens: int) -> Any:
        """Return the text with at most so many of the generator's tokens, and logits or None."""
        if input_ids.shape[1] + 1 >= getattr(generator, "main_model_max_length", math.inf):
            return input_ids, None
        given: dict[str, Any] = {}
        if self._outputs is not None:
            input_ids = input_ids.to(self._call.device or "cpu")
            outputs = self._outputs(input_ids.shape[1] - 1)
            if outputs is None:  # a grammar forces tokens that the target has not run
                return input_ids, None
            num, device = input_ids.shape[1], input_ids.device
            positions = torch.arange(num, dtype=torch.int64, device=device)[None]
            of_text = {"position_ids": positions, "attention_mask": torch.ones_like(input_ids)}
            given = {"model_kwargs": of_text, "model_outputs": outputs, "is_first_iteration": False}
            given["n_last_matches"] = outputs.num_tokens - 1
        configured = getattr(generator, "num_assistant_tokens", None)
        if configured is None:
            return generator.get_candidates(input_ids, **given)
        try:
            generator.num_assistant_tokens = min(configured, max_draft_tokens)
            return generator.get_candidates(input_ids, **given)
        finally:
            generator.num_assistant_tokens = configured

    def _tree(self, state: DraftedText, logits: Tensor, max_draft_tokens: int) -> Draft:
        """Return the draft of a path with logits [num_tokens, vocab_size or more]."""
        call, rngs = self._call, self._call.rngs
        likely = logits[:, : call.vocab_size].float().softmax(-1)
        # No path of a drawn tree may be left out afterwards.
        few = call.max_candidates is not None and (rngs is not None or call.max_candidates < 2)
        width = 1 if few else _WIDTH
        best = likely.topk(min(width if rngs is None else _MAX_SUPPORT, call.vocab_size))
        ids, ranked = best.indices.cpu().numpy(), best.values.cpu().numpy().astype(np.float64)
        token_ids, parents, probs = list[int](), list[int](), list[float]()
        supports, parent, before = list[_Support](), -1, 1.0
        for level, token_id in enumerate(state.token_ids):
            if rngs is None:
                children = {token_id: float(likely[level, token_id])}
                enough = ranked[level] >= _LEAST_SHARE * ranked[level, 0]
                others = zip(ids[level, enough].tolist(), ranked[level, enough], strict=True)
                children |= {each: prob for each, prob in others if each != token_id}
                children = dict([*children.items()][:width])
            else:
                args = ids[level], ranked[level], width, rngs[state.row], state.right.value
                children, of_level = _drawn(*args)
                supports += of_level
            places = {each: len(token_ids) + i for i, each in enumerate(children)}
            token_ids += children
            parents += [parent] * len(children)
            probs += (min(1.0, before * prob) for prob in children.values())
            if token_id not in children:  # another token was drawn
                break
            parent, before = places[token_id], before * children[token_id]
        if rngs is None:
            return best_first(token_ids, parents, probs, max_draft_tokens)
        draft = draft_of(token_ids, parents, probs)
        support_ids, support_probs = (np.stack(each) for each in zip(*supports, strict=True))
        whole = draft.token_ids, draft.parents, draft.depths, draft.probs
        drawn = SampledDraft(*whole, support_ids.astype(np.int32), support_probs)
        return drawn.first(max_draft_tokens)


def config_for(call: DraftingCall, **options: Any) -> GenerationConfig:
    """Return the config of a generator of a call, for which only options choose another kind."""
    config = copy.deepcopy(getattr(call.model, "generation_config", GenerationConfig()))
    config.max_length, config.min_length, config.do_sample = call.max_length, 0, False
    config.assistant_early_exit = config.prompt_lookup_num_tokens = config.use_mtp = None
    config.update(**options)
    return config


def _drawn(
    ids: NDArray[np.int64], probs: Floats, width: int, rng: np.random.Generator, rate: float
) -> tuple[dict[int, float], list[_Support]]:
    """Draw tokens without replacement.

    Their number depends on how often drawn tokens were accepted before, and not on the tokens;
    their probabilities are those expected before the draw.

    Args:
        rate: how often one is accepted, if those before it were not.

    Returns:
        The tokens with their probabilities, and what each was drawn from.
    """
    rate = min(max(rate, 0.05), 0.95)  # with 1, second tokens would have probability 0
    left, children, supports = np.where(probs > 0, probs, 0.0), dict[int, float](), []  # NaN is 0
    prob = rate
    while len(children) < width and prob >= _LEAST_SHARE * rate and left.sum() > 0:
        left = left / left.sum()
        index = int(rng.choice(len(left), p=left))
        children[int(ids[index])] = prob
        supports.append((ids, left))
        left = np.where(np.arange(len(left)) == index, 0.0, left)
        prob *= 1 - rate
    return children, supports
