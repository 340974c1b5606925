"""How a call is decoded: the best exact verification method, and whether lade's kernels run it."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from transformers import GenerationConfig

from lade.budget.seconds import Seconds
from lade.compat import Model, attention_of, device_of_inputs, mesh_of, unwrapped
from lade.compat.attempts import Attempt
from lade.compat.view import apart
from lade.config import SPECULATING, Config, Execution, Verification
from lade.drafting.drafts import chain
from lade.errors import UnsupportedModelError
from lade.forward.job import FusedForwards
from lade.probing.factory import VerificationPlan
from lade.probing.profile import (
    CacheKind,
    CheckKey,
    CheckResult,
    Profile,
    Profiles,
    computing,
    profile_of,
)
from lade.probing.rules import WITHOUT_CACHE, refuse_encoder_decoder
from lade.probing.selfcheck import NoVerdictError, check, unchanged_random_state
from lade.probing.state import check_tokens
from lade.probing.user_code import has_user_experts, has_user_masks, user_loop_of
from lade.targets.layout import takes_parts
from lade.targets.trees import TreeTarget
from lade.tree import Tree

# Tokens of the text before, of the forward passes that are timed at first, and seconds after which
# they are not timed once more: a busy machine disturbs short ones.
_NUM_BEFORE = 6
_TIMED = (1, 8, 24)
_ENOUGH_SEC = 0.5
NO_ROWS = "rows of a batch are verified as trees"


def choose_verification(
    model: Model,
    *,
    config: Config | None = None,
    num_rows: int = 1,
    is_padded: bool = False,
    cache: CacheKind = "dynamic",
    excluded: Mapping[Verification, str] | None = None,
    execution: Execution = "eager",
    profile: Profile | None = None,
) -> VerificationPlan:
    """Return the best verification method that is exact, checking those not checked yet.

    Args:
        config: of the call: its `verification` is the only method to consider, if it names one.
        num_rows: rows of the batch; several are verified as trees, as parts of one forward.
        is_padded: whether the prompt has padding; several rows are taken to have some.
        excluded: methods that this call cannot use, and why.
        execution: requested execution of trees.
        profile: of the model in its present state; looked up if None.

    Raises:
        UnsupportedModelError: the requested method is not exact; gives the reason.
    """
    profile, config = profile or profile_of(model), config or Config()
    excluded = {**profile.found_wrong, **why_never(model, profile), **(excluded or {})}
    if "tree" not in excluded and (why := _why_not_back(model, config, profile)) is not None:
        excluded["tree"] = why
    is_batch, name = num_rows > 1, type(model).__name__
    if is_batch:
        excluded = {**dict.fromkeys(("chain", "snapshot"), NO_ROWS), **excluded}
    asked = config.verification
    methods: tuple[Verification, ...] = SPECULATING if asked is None else (asked,)
    if asked == "plain":
        return VerificationPlan("plain", None, {})

    reasons: dict[Verification, str] = {}
    why_eager: str | None = None
    for verification in methods:
        reason = excluded.get(verification)
        key = CheckKey(verification, cache, is_padded or is_batch)
        if execution != "eager" and verification == "tree" and not (is_batch or reason):
            why_eager, attention = _result_of(model, profile, key._replace(execution=execution))
            if why_eager is None:
                return VerificationPlan(verification, attention, reasons, execution)
        if reason is None:
            reason, attention = _result_of(model, profile, key)
            if reason is None and is_batch:
                is_able = takes_parts(model, profile.layout_of(model), attention)
                reason = None if is_able else "its attention takes no parts"
        if reason is None:
            if execution != "eager" and verification != "tree":
                why_eager = f"it verifies drafts by {verification!r}"
            return VerificationPlan(verification, attention, reasons, why_eager=why_eager)
        reasons[verification] = reason
    if asked is not None:
        raise UnsupportedModelError(f"{name} cannot verify drafts by {asked!r}: {reasons[asked]}")
    return VerificationPlan("plain", None, reasons)


def why_never(model: Model, profile: Profile) -> dict[Verification, str]:
    """Return the methods that no call of a model can use, and why."""
    reason = why_not_run(profile) or user_loop_of(model)
    if reason is not None:
        return dict.fromkeys(SPECULATING, reason)
    if has_user_experts(model):
        # They see all tokens of a forward, and may drop some of many: a proof of few is no proof.
        return dict.fromkeys(SPECULATING, "its experts are computed by your own code")
    # Trees bring lade's masks, but forwards of `generate` have the user's.
    return {"tree": "its masks are made by your own code"} if has_user_masks(model) else {}


def _why_not_back(model: Model, config: Config, profile: Profile) -> str | None:
    """Return why recurrent layers of a model cannot keep a part of a draft by a job, or None."""
    with suppress(UnsupportedModelError):
        if profile.layout_of(model).is_recurrent:
            if device_of_inputs(model).type != "cpu" or not config.uses_kernels:
                return "torch's forwards add all tokens to its recurrent states"
            views = profile.fast_views_for(model)
            if views is None:
                return f"its recurrent layers run by torch ({profile.why_by_torch(model)})"
            if not views.pays(1):
                return "its recurrent layers run by torch, which is faster"
    return None


def why_not_run(profile: Profile) -> str | None:
    """Return why lade must run no forward of a model, not even a check, or None."""
    if (part := profile.state.compiled) is None:
        return None
    return (
        f"{part} is compiled by torch.compile, and drafts would compile it again for each number "
        "of tokens"
    )


def choose_for_drafting(model: Model, profile: Profile) -> VerificationPlan:
    """Return the best method to run a model that only drafts, "plain" if there is none.

    If none is exact, as with layers that quantize activations, a roughly right method suffices: the
    target verifies the model's drafts.
    """
    plan = choose_verification(model, profile=profile)
    if plan.verification == "plain" and why_not_run(profile) is None:
        for method in SPECULATING:
            key = CheckKey(method, is_drafting=True)
            reason, attention = _result_of(model, profile, key)
            if reason is None:
                return VerificationPlan(method, attention, plan.reasons)
    return plan


def _result_of(model: Model, profile: Profile, key: CheckKey) -> CheckResult:
    """Return the result of checking a method, from an earlier check if there was one."""
    try:
        return profile.once(key, lambda: check(model, profile, key))
    except torch.OutOfMemoryError:  # not kept: a later check may succeed
        return CheckResult("no memory was left to check it")
    except NoVerdictError as none:
        return CheckResult(str(none))


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
    nodes = token_ids[::-1] * 2
    ids = torch.tensor([token_ids[:_NUM_BEFORE]], dtype=torch.int64, device="cpu")
    costs = profile.step_costs(chosen.verification, chosen.execution, chosen.is_fast)
    of_one_row = costs.setdefault(1, Seconds())

    def run(num_tokens: int) -> Tensor:
        tree = Tree.build(nodes[0], chain(nodes[1:num_tokens]))
        logits = target.forward(target.inputs([tree]))
        target.discard()
        return logits

    def timed(num_tokens: int) -> Tensor:
        begin = perf_counter()
        logits = run(num_tokens)
        of_one_row.record(num_tokens, perf_counter() - begin)
        return logits

    seeds = unchanged_random_state(model, profile)
    with Attempt() as attempt, torch.no_grad(), seeds:
        layout = profile.layout_of(model)
        target = TreeTarget(model, ids, {}, layout, len(nodes), *settings, views)
        target.prefill(is_plain=True)
        since = perf_counter()
        if views is not None:
            views.settle(run, timed)
        # Jobs of other sizes were timed while they were compared.
        for num_tokens in _TIMED[:2] if views is not None else 2 * _TIMED:
            if perf_counter() - since > _ENOUGH_SEC and num_tokens == _TIMED[0]:
                break
            timed(num_tokens)
    if views is not None:
        views.why_not = views.why_not or attempt.failure


@dataclass(frozen=True, slots=True)
class Probe:
    """What `lade.probe` found.

    Attributes:
        model: Name of the model's class.
        verification: Method by which drafts are verified.
        attention: Attention implementation that verifies drafts.
        reasons: Why each better method was ruled out.
        execution: How forward passes that verify drafts are executed.
        why_by_torch: Why a model on a CPU is run by torch, module by module, and which module is
            the reason; None where the compiled forward pass may run it, and on other devices.
        table: File of the prewarmed table that calls draft from: your own, or else the `lade.pool`
            beside the weights; None if there is none.
    """

    model: str
    verification: Verification
    attention: str | None
    reasons: Mapping[Verification, str]
    execution: Execution = "eager"
    why_by_torch: str | None = None
    table: Path | None = None

    def __str__(self) -> str:
        how = f"attention: {self.attention}, execution: {self.execution}"
        lines = [f"{self.model} verifies drafts by: {self.verification} ({how})"]
        lines += [f"  not {verification}: {why}" for verification, why in self.reasons.items()]
        lines += [f"  run by torch: {self.why_by_torch}"] * (self.why_by_torch is not None)
        lines += [f"  drafts from the table {self.table}"] * (self.table is not None)
        return "\n".join(lines)


@torch.no_grad()
def plan_of_calls(model: Model, num_rows: int = 1) -> tuple[Model, VerificationPlan]:
    """Return the view of a model that calls without options run, and how they verify drafts."""
    config = model.generation_config
    cache: CacheKind = "static" if config.cache_implementation == "static" else "dynamic"
    excluded: dict[Verification, str] = {}
    if config.use_cache is False:
        cache, excluded = "none", dict(WITHOUT_CACHE)
    view = computing(model) if cache == "dynamic" else model
    return view, choose_verification(view, num_rows=num_rows, cache=cache, excluded=excluded)


def probe(model: Model, *, num_rows: int = 1, anew: bool = False) -> Probe:
    """Report how lade verifies drafts of a model, and why better methods are ruled out.

    Runs the self-check of the first generation, unless that has already been run.

    Args:
        model: a transformers causal LM.
        num_rows: of the batch to decode. Several rows are assumed to have padding and different
            lengths.
        anew: whether to forget earlier checks of the model first. A model that was quantized,
            moved, hooked, patched or given adapters is checked again anyway, and calls prove
            changes that cannot be seen. This allows a method again that was ruled out in a state
            that the model has left.

    Raises:
        UnsupportedModelError: the model is an encoder-decoder.
    """
    model = unwrapped(model)
    refuse_encoder_decoder(model)
    if anew:
        Profiles.of(model).forget()
    view, chosen = plan_of_calls(model, num_rows)
    with torch.no_grad():
        is_on_cpu = device_of_inputs(model).type == "cpu"
        why_by_torch = profile_of(model).why_by_torch(model) if is_on_cpu else None
    attention = chosen.attention or attention_of(model)
    name, table = type(model).__name__, profile_of(view).table_of(view)
    found = chosen.verification, attention, chosen.reasons, chosen.execution
    return Probe(name, *found, why_by_torch, table and table.path)
