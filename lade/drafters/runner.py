"""`Assistant`: a model that lade runs, as the candidate generators of transformers call one."""

import copy
from collections.abc import Mapping, Sequence
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from lade.compat import CACHE, Model, end_tokens
from lade.drafting.drafts import chain
from lade.errors import UnsupportedModelError
from lade.probing.factory import VerificationPlan
from lade.probing.plan import choose_for_drafting, ready
from lade.probing.profile import profile_of
from lade.probing.rules import refuse_encoder_decoder
from lade.probing.selfcheck import Plain
from lade.tree import Tree


def plan_for(model: Model) -> VerificationPlan:
    """Return how to run drafts of a model.

    Raises:
        UnsupportedModelError: no method is known to go back in its cache.
    """
    refuse_encoder_decoder(model)
    name, profile = type(model).__name__, profile_of(model)
    plan = choose_for_drafting(model, profile)
    if plan.verification == "plain":
        reasons = "; ".join(f"{method}: {reason}" for method, reason in plan.reasons.items())
        raise UnsupportedModelError(f"{name} cannot draft, for its cache cannot go back. {reasons}")
    return ready(plan, model, profile)


class Assistant:
    """A model with a `generate` that lade runs, with a KV cache of its own, for one sequence.

    Everything else is the model's. Of a text that continues the last one, or its beginning, only
    what is new is run.

    Args:
        model: is not changed.
        max_length: of a text.
        options: of assisted generation, in place of those of the model's generation config.
        num_drafted: exclusive upper bound of the token ids in a draft; None for all of the model.

    Raises:
        UnsupportedModelError: no method is known to go back in the model's cache.
    """

    def __init__(
        self, model: Model, max_length: int, options: Mapping[str, Any], num_drafted: int | None
    ) -> None:
        self.generation_config = copy.deepcopy(model.generation_config)
        self.generation_config.update(**options)
        self._model, self._plan, self._max_length = model, plan_for(model), max_length
        self._num_drafted = num_drafted
        self._num_ids: int = model.config.get_text_config(decoder=True).vocab_size
        self._target: Any = None
        self._held: list[int] = []  # tokens that the cache keeps
        self._run: list[int] = []  # tokens that ran after these, and may be dropped

    def __getattr__(self, name: str) -> Any:
        if name == "_model":  # while it is copied
            raise AttributeError(name)
        return getattr(self._model, name)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        generation_config: Any,
        logits_processor: Any = (),
        **_: Any,
    ) -> Any:
        """Decode greedily, until a token ends the text or is less sure than the threshold."""
        token_ids, scores = input_ids[0].tolist(), list[Tensor]()
        ends = end_tokens(generation_config)
        processors = LogitsProcessorList(logits_processor or ())
        threshold = generation_config.assistant_confidence_threshold or 0.0
        while len(scores) < max_new_tokens:
            logits = self._extend(token_ids[-1:]) if scores else self._after(token_ids)
            scores.append(logits[None, : self._num_drafted].to(torch.float32, copy=True))
            if processors:
                ids = torch.tensor([token_ids], dtype=torch.int64, device=logits.device)
                scores[-1] = processors(ids, scores[-1])
            prob, token_id = scores[-1].softmax(-1).max(-1)
            token_ids.append(token_id.item())
            if token_ids[-1] in ends or prob.item() < threshold:
                break
        sequences = torch.tensor([token_ids], dtype=torch.int64, device=input_ids.device)
        return SimpleNamespace(sequences=sequences, scores=(*scores,), **{CACHE: None})

    def _after(self, token_ids: list[int]) -> Tensor:
        """Run what is new in a text; return the logits after it [vocab_size]."""
        # On a GPU, an index out of range would end the process's use of it.
        if not 0 <= min(token_ids) <= max(token_ids) < self._num_ids:
            raise ValueError(f"expected token ids from 0 to {self._num_ids - 1}, got others")
        before, ran = token_ids[:-1], [*self._held, *self._run]
        pairs = zip(ran, before, strict=False)
        num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if self._run:
            self._commit(max(0, num_same - len(self._held)))
        num_other = len(self._held) - num_same
        if self._target is None or (num_other and not self._target.go_back(num_other)):
            self._prefill(before)
        elif num_other:
            del self._held[num_same:]
        logits = self._extend(token_ids[len(self._held) :])
        if self._plan.verification != "tree":
            self._commit(len(self._run))  # drafts go back to the state after the text
        return logits

    def _commit(self, num_kept: int) -> None:
        """Keep the first of the tokens that may be dropped, and drop the others."""
        self._target.commit([[*range(num_kept)]])
        self._held += self._run[:num_kept]
        self._run = []

    def _extend(self, token_ids: Sequence[int]) -> Tensor:
        """Run tokens after all that was run; return the logits after the last one [vocab_size]."""
        num_run = len(self._run)
        self._run += token_ids
        tree = Tree.build(self._run[0], chain(self._run[1:]))
        logits: Tensor = self._target.extend(tree, num_run)[0, -1]
        return logits

    def _prefill(self, token_ids: list[int]) -> None:
        """Run the beginning of a text, by the arguments that `generate` prepares."""
        self._target, self._held, self._run = None, token_ids, []
        num_new = max(1, self._max_length - len(token_ids))
        self._target = Plain(self._model, token_ids).target(self._model, self._plan, num_new)
        self._target.prefill()
