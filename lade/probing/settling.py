"""Whether the forward passes of a plan run by lade's kernels, compared and timed before a text."""

from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch
from torch import Tensor
from transformers import GenerationConfig

from lade.budget.seconds import Seconds
from lade.compat import Model, device_of_inputs, mesh_of
from lade.compat.attempts import Attempt
from lade.compat.view import apart
from lade.drafting.drafts import chain
from lade.forward.job import FusedForwards
from lade.forward.packed import made_whole
from lade.probing.factory import VerificationPlan
from lade.probing.profile import Profile
from lade.probing.selfcheck import unchanged_random_state
from lade.probing.state import check_tokens
from lade.targets.trees import TreeTarget
from lade.tree import Tree

# Tokens of the forward passes that are timed at first, and seconds after which they are not timed
# a second time: a busy machine disturbs short ones.
_TIMED = (1, 8, 24)
_ENOUGH_SEC = 1.0


def ready(
    chosen: VerificationPlan, model: Model, profile: Profile, *, uses_kernels: bool = True
) -> VerificationPlan:
    """Return a plan whose forward passes run by lade's kernels, if they can, and time them.

    Models verified by paths may keep a state in their modules, which views would duplicate.
    """
    is_usual = (chosen.verification, chosen.execution) == ("tree", "eager")
    if not is_usual or device_of_inputs(model).type != "cpu" or mesh_of(model) is not None:
        return chosen
    views = profile.fast_views_for(model) if uses_kernels else None
    chosen = chosen._replace(is_fast=views is not None)
    if views is not None or profile.user_code is None:
        profile.once(("ready", chosen.is_fast), partial(_try_out, views, model, chosen, profile))
    return chosen


def _try_out(
    views: FusedForwards | None, model: Model, chosen: VerificationPlan, profile: Profile
) -> None:
    """Compare and time forward passes on a made-up text, before a real one comes.

    The first steps begin with these times; the rest of a step's time is learned from steps.
    """
    model = apart(model)  # forwards may change attributes and buffers
    token_ids, settings = check_tokens(model), (GenerationConfig(), chosen.attention)
    ids, nodes = torch.tensor([token_ids], dtype=torch.int64, device="cpu"), token_ids[::-1] * 8

    def prefilled(fast_views: FusedForwards | None) -> Callable[[int], Tensor]:
        layout = profile.layout_of(model)
        target = TreeTarget(model, ids, {}, layout, len(nodes), *settings, fast_views)
        target.prefill(is_plain=True)

        def run(num_tokens: int) -> Tensor:
            tree = Tree.build(nodes[0], chain(nodes[1:num_tokens]))
            logits = target.forward(target.inputs([tree]))
            target.discard()
            return logits

        return run

    seeds = unchanged_random_state(model, profile)
    with Attempt() as attempt, torch.no_grad(), seeds:
        run = prefilled(views)
        if views is not None:
            by_torch = prefilled(None)
            with made_whole():  # packed weights: else a job would be held against itself
                views.settle(by_torch, run)
        costs = profile.step_costs(chosen.verification, chosen.execution, chosen.is_fast)
        of_one_row = costs.setdefault(1, Seconds())
        since = perf_counter()
        for num_tokens in 2 * _TIMED:
            begin = perf_counter()
            if begin - since > _ENOUGH_SEC and num_tokens == _TIMED[0]:
                break
            run(num_tokens)
            of_one_row.record(num_tokens, perf_counter() - begin)
    if views is not None:
        views.why_not = views.why_not or attempt.failure
