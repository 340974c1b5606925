"""`ModelRunner`: a causal LM with its own KV cache, run over a text and a growing tree."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lade.compat import Model
from lade.drafting.drafts import draft_of, path_along
from lade.errors import UnsupportedModelError
from lade.probing.factory import VerificationPlan, make_target
from lade.probing.plan import choose_for_drafting
from lade.probing.profile import profile_of
from lade.probing.rules import refuse_encoder_decoder
from lade.probing.selfcheck import Plain
from lade.probing.settling import ready
from lade.tree import Tree

_training = attrgetter("training")


def plan_for(model: Model) -> VerificationPlan:
    """Return how to run trees of drafts of a model.

    Raises:
        UnsupportedModelError: no method is known to go back in its cache, or its forwards draw
            random numbers, which would change the target's draws.
    """
    refuse_encoder_decoder(model)
    name, profile = type(model).__name__, profile_of(model)
    plan = choose_for_drafting(model, profile)
    if plan.verification == "plain":
        reasons = "; ".join(f"{method}: {reason}" for method, reason in plan.reasons.items())
        raise UnsupportedModelError(f"{name} cannot draft, for its cache cannot go back. {reasons}")
    if profile.draws:  # as its check has found
        raise UnsupportedModelError(f"{name} cannot draft, for its forwards draw random numbers")
    return ready(plan, model, profile)


class ModelRunner:
    """A causal LM with its own cache, for one sequence: logits after a text and a growing tree.

    The prompt is run when the first draft is asked for, and tokens that were drafted and accepted
    are not run again.

    Args:
        model: is not changed.
        plan: how to run trees of its drafts, by `plan_for`.
        max_length: maximum length of the text, to plan memory for.
    """

    def __init__(self, model: Model, plan: VerificationPlan, max_length: int) -> None:
        self.is_chain = plan.verification != "tree"
        self._model = model
        self._plan = plan
        self._max_length = max_length
        # In another mode it may draw from the generator that the text is drawn from.
        self._modules = [*model.modules()]
        self._modes = [*map(_training, self._modules)]
        self._vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
        self._target: Any = None
        self._held: list[int] = []  # committed tokens that the target has run
        # The nodes that ran after these: tokens of the text, then drafted tokens. In the path of a
        # target without trees, all of them are drafted.
        self._tokens: list[int] = []
        self._parents: list[int] = []  # -1 for the first
        self._places = {-1: -1}  # index of each drafted node by its name; -1 is their root
        self._after: Tensor | None = None  # logits after the held tokens, if these are all the text

    @torch.no_grad()
    def follow(self, committed: Sequence[int]) -> Tensor:
        """Commit the tokens of a text that were run, run the rest; return its logits [vocab].

        The next tree grows from the text: its last token is node -1.
        """
        if [*map(_training, self._modules)] != self._modes:
            name = type(self._model).__name__
            raise RuntimeError(f"{name} was put into another mode, of training or evaluation")
        held = self._held
        if self._after is not None and committed == held:  # nothing but drafts is to be dropped
            self._commit(committed)
            return self._after
        if self._target is None or len(committed) <= len(held) or committed[: len(held)] != held:
            new = committed if self.is_chain else committed[:-1]
            self._check(committed)
            logits = self._prefill(new)
            self._held = [*new]
            if self.is_chain:
                self._after = logits
                return logits
        else:
            self._check(committed[len(held) :])
            self._commit(committed)
        return self._run_text([*committed[len(self._held) :]])

    @torch.no_grad()
    def grow(
        self, nodes: Sequence[int], token_ids: Sequence[int], parents: Sequence[int]
    ) -> Tensor:
        """Run nodes, which the caller numbers, and return the logits after each [num_new, vocab].

        Args:
            token_ids: of the nodes [num_new].
            parents: their parents, -1 for the end of the text.
        """
        num_run = len(self._tokens)
        self._parents += [self._places[parent] for parent in parents]
        self._places |= zip(nodes, range(num_run, num_run + len(nodes)), strict=True)
        self._tokens += token_ids
        return self._run(num_run)

    def close(self) -> None:
        """Free the cache."""
        if self._target is not None:
            self._target.close()
        self._target = None
        self._held, self._tokens, self._parents, self._places = [], [], [], {-1: -1}
        self._after = None

    def _check(self, token_ids: Sequence[int]) -> None:
        # On a GPU, an index out of range would end the process's use of it.
        if max(token_ids) >= self._vocab_size or min(token_ids) < 0:
            raise ValueError(
                f"expected token ids from 0 to {self._vocab_size - 1}, got "
                f"{min(token_ids)} to {max(token_ids)}"
            )

    def _prefill(self, token_ids: Sequence[int]) -> Tensor:
        """Run the beginning of a text, by the arguments that `generate` prepares."""
        self.close()
        num_new = max(1, self._max_length - len(token_ids))

        def begin(_: Model, input_ids: Tensor, generation_config: Any, **prepared: Any) -> Tensor:
            for unwanted in ("logits_processor", "stopping_criteria"):
                prepared.pop(unwanted, None)
            self._target = make_target(
                self._model, input_ids, prepared, self._plan, num_new, generation_config
            )
            return input_ids

        Plain(self._model, token_ids).generate(num_new=num_new, custom_generate=begin)
        logits: Tensor = self._target.prefill()[0, -1]
        return logits

    def _commit(self, committed: Sequence[int]) -> None:
        """Keep the longest path of run nodes that the text took, without the text's last token."""
        if not self._tokens:
            return
        path = path_along(self._tokens, self._parents, committed[len(self._held) : -1])
        self._target.commit([path])
        self._held += [self._tokens[node] for node in path]
        self._tokens, self._parents, self._places = [], [], {-1: -1}

    def _run_text(self, token_ids: list[int]) -> Tensor:
        self._tokens, self._parents = token_ids, [*range(-1, len(token_ids) - 1)]
        self._places = {-1: len(token_ids) - 1}
        logits = self._run(0)[-1]
        if self.is_chain:  # drafts go back to the state after the text
            self._target.commit([[*range(len(token_ids))]])
            self._held += token_ids
            self._tokens, self._parents, self._places = [], [], {-1: -1}
            self._after = logits
        return logits

    def _run(self, num_run: int) -> Tensor:
        parents = [parent - 1 for parent in self._parents[1:]]
        tree = Tree.build(self._tokens[0], draft_of(self._tokens[1:], parents))
        logits: Tensor = self._target.extend(tree, num_run)[0]
        return logits
