"""The target's own first layers as a drafter."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lade.attempts import Attempt
from lade.budget.sources import SourceCosts
from lade.closeness import distance, limit_of
from lade.compat import Model, device_of_inputs, placeholders_of
from lade.drafters.exits import Cut, Layers, layers_of, refusal, why_not_cut
from lade.drafters.growth import ExpansionName, Growth, LengthName
from lade.drafters.merging import alone
from lade.drafters.model_drafter import ModelDrafter
from lade.drafters.runner import ModelRunner, plan_for, prepared
from lade.drafting.drafter import Drafter, DraftingCall
from lade.drafting.drafts import draft_of
from lade.errors import UnsupportedModelError, UnsupportedOptionError
from lade.probing.factory import VerificationPlan, make_target
from lade.probing.profile import Profile, profile_of
from lade.probing.rules import refuse_encoder_decoder
from lade.probing.selfcheck import check_tokens, unchanged_random_state
from lade.targets.trees import TreeTarget
from lade.tree import Tree


class FirstLayers(Drafter):
    """The target's own first layers, followed by its last norm and head, as a drafter.

    No second model is needed, and none of its memory. The decoder layers are found by structure, in
    any causal LM; before it drafts, the first layers followed by the others are held against the
    whole model. The model is never changed.

    Where one row is verified as a tree, eagerly and without padding, the drafts are run in the
    target's own cache, and the verification runs only the remaining layers for what was drafted.
    Elsewhere (batches, other ways of verification, fixed shapes, where hidden states or attentions
    are asked for, or if going on so is not exact for the model) the first layers have a cache of
    their own and run the prompt once more.

    Args:
        num_layers: how many layers; a third of them is a first try.
        length, expansion, max_draft_tokens, confidence: as for `AssistantModel`.
        name: of this source in `DecodeStats.sources`.

    Raises:
        TypeError, ValueError: an argument is none of those.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        length: LengthName | int = "measured",
        expansion: ExpansionName = "tree",
        max_draft_tokens: int | None = None,
        confidence: float = 0.4,
        name: str = "first_layers",
    ) -> None:
        if isinstance(num_layers, bool) or not isinstance(num_layers, int):
            raise TypeError(f"expected num_layers to be an int, got {num_layers!r}")
        if num_layers < 1:
            raise ValueError(f"expected num_layers of at least 1, got {num_layers}")
        self.num_layers = num_layers
        self.name = name
        self._growth = Growth(length, expansion, max_draft_tokens, confidence)
        self._costs = SourceCosts()

    def for_call(self, call: DraftingCall) -> Drafter:
        """Return a drafter for one call.

        Raises:
            UnsupportedModelError: the target's layers cannot be found, or cannot be run by
                themselves, with the reason.
            UnsupportedOptionError: it has too few layers; also a `ValueError`.
        """
        exits = Exits(call.model)
        num_layers = self.num_layers
        exits.check(num_layers)
        target = call.target
        if isinstance(target, TreeTarget) and exits.why_not_early(target, num_layers) is None:
            halve = partial(Cut, layers=exits.layers, num_layers=num_layers)
            runner = EarlyRunner(target, halve, placeholders_of(call.model))
            return self._alone(_EarlyDrafter(call, runner, self._growth), call)
        view, plan = exits.view(num_layers)

        def open_scorer(committed: Sequence[int]) -> ModelRunner:
            return ModelRunner(view, plan, call.max_length)

        return self._alone(ModelDrafter(call, open_scorer, self._growth), call)

    def _alone(self, made: Drafter, call: DraftingCall) -> Drafter:
        return alone(self.name, made, self._costs, call, asks_all=not self._growth.is_measured)


class _EarlyDrafter(ModelDrafter):
    """A drafter of the one row of a call whose target runs the drafts, too."""

    def __init__(self, call: DraftingCall, runner: "EarlyRunner", growth: Growth) -> None:
        super().__init__(call, lambda committed: runner, growth)
        self._runner = runner

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin the sequence, whose prompt the target has run."""
        self._runner.begin(len(prompt_ids))
        return super().open(prompt_ids)


class EarlyRunner:
    """A `Scorer` that is the first layers of a target, in the target's own cache; for one row.

    Args:
        placeholders: tokens never to draft, because a forward over them fails.
    """

    is_chain = False

    def __init__(
        self,
        target: TreeTarget,
        halve: Callable[[Model], Cut],
        placeholders: Sequence[int] = (),
    ) -> None:
        self._target = target
        self._halve = halve
        self._placeholders = [*placeholders]
        self._num_without_slot = 0  # tokens of the text, less slots without a token, as of images
        self._root = 0  # the node that drafts are grown from, among those that were run

    def begin(self, num_tokens: int) -> None:
        """Begin with a prompt of so many tokens, when the target has run it."""
        self._num_without_slot = num_tokens - self._target.num_cached[0]

    @torch.no_grad()
    def follow(self, committed: Sequence[int]) -> Tensor:
        """Run what of the text is not in the cache; return the logits after it [vocab_size]."""
        self._target.drop_early()
        num_cached = self._target.num_cached[0] + self._num_without_slot
        token_ids = committed[num_cached:]  # several where a grammar forces the next ones
        if not token_ids:
            raise ValueError(f"expected more than {num_cached} tokens, got {len(committed)}")
        self._root = len(token_ids) - 1
        return self._run(token_ids, range(-1, self._root))[-1]

    @torch.no_grad()
    def grow(self, token_ids: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Run nodes and return the logits after each [num_new, vocab_size]."""
        return self._run(token_ids, [self._root + parent for parent in parents])

    def close(self) -> None:
        """Do nothing: the cache is the target's."""

    def _run(self, token_ids: Sequence[int], parents: Sequence[int]) -> Tensor:
        logits = self._target.run_early([*token_ids], [*parents], self._halve)
        logits = logits[:, : self._target.vocab_size]
        if self._placeholders:
            logits = logits.clone()
            logits[:, self._placeholders] = float("-inf")
        return logits


class Exits:
    """The ways to use the first layers of a model, each checked once; kept with its profile.

    Raises:
        UnsupportedModelError: its layers cannot be found.
    """

    def __init__(self, model: Model) -> None:
        refuse_encoder_decoder(model)
        self._model = model
        self._profile = profile_of(model)
        self.layers: Layers = self._known("layers", partial(layers_of, model, self._profile))

    def check(self, num_layers: int) -> None:
        """Raise if so many first layers cannot draft.

        Raises:
            UnsupportedModelError: the model cannot be cut there, with the reason.
            UnsupportedOptionError: it has no more layers than asked for.
        """
        if num_layers >= len(self.layers):
            raise UnsupportedOptionError(
                f"expected num_layers from 1 to {len(self.layers) - 1} for "
                f"{type(self._model).__name__}, got {num_layers}"
            )
        find = partial(why_not_cut, self._model, self._profile, self.layers, num_layers)
        reason: str | None = self._known(("flaw", num_layers), find)
        if self._profile.draws:
            reason = "its forwards draw random numbers"
        if reason is not None:
            raise UnsupportedModelError(refusal(self._model, reason))

    def why_not_early(self, target: TreeTarget, num_layers: int) -> str | None:
        """Return why the verification cannot go on from what the first layers ran, or None."""
        if target.why_not_early is not None:
            return target.why_not_early
        key = num_layers, target.attention
        find = partial(why_not_early, self._model, self._profile, self.layers, *key)
        reason: str | None = self._known(("early", *key), find)
        return reason

    def view(self, num_layers: int) -> tuple[Model, VerificationPlan]:
        """Return a model of the first layers, and how to run it with a cache of its own.

        Raises:
            UnsupportedModelError: no cache of its own can go back.
        """

        def find() -> tuple[Model, VerificationPlan]:
            view = self.layers.exit_view(self._model, num_layers)
            return view, plan_for(view)

        found: tuple[Model, VerificationPlan] = self._known(("view", num_layers), find)
        return found

    def _known(self, key: object, find: Callable[[], Any]) -> Any:
        """Return what is known, after it was found the first time."""
        known = self._profile.of_drafters.setdefault("first_layers", {})
        if key not in known:
            known[key] = find()
        return known[key]


@torch.no_grad()
def why_not_early(
    model: Model, profile: Profile, layers: Layers, num_layers: int, attention: str | None
) -> str | None:
    """Return why verification cannot go on from what the first layers have run, or None.

    Compares the logits of a dozen nodes with those of forwards of all layers: of trees whose nodes
    the first layers have run in another order, one of which they have not, and of a root alone.
    """

    def logits_of(is_early: bool) -> Tensor:
        input_ids = torch.tensor([tokens[:6]], device=device_of_inputs(model))
        config, model_kwargs = prepared(model, input_ids, len(tokens))
        plan = VerificationPlan("tree", attention, {})
        target = make_target(model, input_ids, model_kwargs, plan, len(tokens), config, profile)
        assert isinstance(target, TreeTarget)
        found = []
        try:
            target.prefill()
            for root, grown, (drafted, parents), kept in _SCRIPT:
                num_nodes = 1
                target.run_early([tokens[root]], [-1], halve) if is_early else None
                for level, of_level in grown if is_early else ():
                    target.run_early([tokens[i] for i in level], of_level, halve)
                    num_nodes += len(level)
                tree = Tree.build(tokens[root], draft_of([tokens[i] for i in drafted], parents))
                found.append(target.forward(target.inputs([tree])).logits[0])
                if target.early_failure is not None:
                    raise RuntimeError(target.early_failure)
                target.commit([kept])
        finally:
            target.close()
        return torch.cat(found)

    tokens = check_tokens(model)
    halve = partial(Cut, layers=layers, num_layers=num_layers)
    with Attempt() as attempt, unchanged_random_state(model, profile):
        apart = distance(logits_of(True), logits_of(False))
    if attempt.failure is not None:
        return attempt.failure
    if not apart <= limit_of(model):
        return f"its logits then differ by {apart:.2g} of their standard deviation"
    return None


# Steps: the root; what is grown, level by level, each with its parents among the nodes run (the
# root is 0); the draft that is verified; the nodes that are kept. Numbers are places of tokens.
_SCRIPT: list[
    tuple[int, list[tuple[list[int], list[int]]], tuple[list[int], list[int]], list[int]]
] = [
    (6, [([8, 15, 7], [0, 0, 0]), ([10], [1])], ([7, 8, 9, 10], [-1, -1, 0, 1]), [0, 2, 4]),
    (11, [([14], [0])], ([12], [-1]), [0]),
    (13, [], ([], []), [0]),
    (14, [([6], [0])], ([6, 7], [-1, 0]), [0, 1, 2]),
]
