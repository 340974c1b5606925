"""How a call is decoded: the best verification method that is exact for the model."""

from collections.abc import Mapping
from functools import partial

import torch

from lade.compat import Model, device_of_inputs
from lade.config import SPECULATING, Config, Execution, Verification
from lade.errors import UnsupportedModelError, UnsupportedOptionError
from lade.gpu.fixed import widths_on
from lade.gpu.policy import DevicePolicy
from lade.probing.factory import VerificationPlan
from lade.probing.own_code import has_own_inputs, own_loop_of
from lade.probing.profile import (
    CacheKind,
    CheckKey,
    CheckResult,
    Profile,
    Widths,
    profile_of,
)
from lade.probing.rules import why_not_stable
from lade.probing.selfcheck import check
from lade.targets.layout import takes_parts

# Methods that a call without a cache cannot use.
WITHOUT_CACHE: dict[Verification, str] = {"tree": "use_cache=False", "snapshot": "use_cache=False"}
_NO_ROWS = "rows of a batch are verified as trees"


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
        config: of the call: its `verification` is the only method to consider, if it names one,
            and with `stable_text` all forwards have one width.
        num_rows: of the batch; several are verified as trees, and only as parts of one forward.
        is_padded: whether the prompt has padding; several rows are taken to have some.
        excluded: methods that this call cannot use, and why.
        execution: requested execution of trees.
        profile: of the model in its present state; looked up if None.

    Raises:
        UnsupportedModelError: the method asked for is not exact, with the reason.
        UnsupportedOptionError: the text cannot be kept from depending on drafts, with the reason.
    """
    profile = profile or profile_of(model)
    excluded = {**profile.found_wrong, **why_never(model, profile), **(excluded or {})}
    is_batch = num_rows > 1
    if is_batch:
        execution = "eager"
        excluded = {**dict.fromkeys(("chain", "snapshot"), _NO_ROWS), **excluded}
    asked = None if config is None else config.verification
    stable_width = None if config is None else stable_width_of(model, config)
    if asked == "plain" and stable_width is None:
        return VerificationPlan("plain", None, {})

    result_of = partial(_result_of, model, profile, cache, is_padded or is_batch)
    if stable_width is not None:
        reason = excluded.get("tree") or why_not_stable(model)
        if reason is None:
            reason, attention = result_of("tree", (stable_width,))
        if reason is None:
            return VerificationPlan("tree", attention, {}, execution, (stable_width,))
        raise UnsupportedOptionError(
            f"lade does not support Config(stable_text=True) for {type(model).__name__} here: "
            f"{reason}"
        )
    reasons: dict[Verification, str] = {}
    why_eager: str | None = None
    for verification in SPECULATING if asked is None else (asked,):
        reason = excluded.get(verification)
        if reason is None and verification == "tree" and execution != "eager":
            widths = widths_on(device_of_inputs(model))
            why_eager, attention = result_of(verification, widths)
            if why_eager is None:
                return VerificationPlan(verification, attention, reasons, execution, widths)
        if reason is None:
            reason, attention = result_of(verification)
            if reason is None and is_batch:
                reason = _why_no_parts(model, profile, attention)
        if reason is None:
            return VerificationPlan(verification, attention, reasons, why_eager=why_eager)
        reasons[verification] = reason
    if asked is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot verify drafts by {asked!r}: {reasons[asked]}"
        )
    return VerificationPlan("plain", None, reasons)


def _why_no_parts(model: Model, profile: Profile, attention: str | None) -> str | None:
    is_able = takes_parts(model, profile.layout_of(model), attention)
    return None if is_able else "its attention takes no parts"


def why_never(model: Model, profile: Profile) -> dict[Verification, str]:
    """Return the methods that no call of a model can use, whatever it asks for, and why."""
    reason = why_not_run(profile) or own_loop_of(model)
    if reason is not None:
        return dict.fromkeys(SPECULATING, reason)
    if has_own_inputs(model):
        why = "its prepare_inputs_for_generation is code of one's own"
        return {"tree": why}
    return {}


def why_not_run(profile: Profile) -> str | None:
    """Return why lade is to run no forward of a model at all, not even a check, or None."""
    if profile.compiled is None:
        return None
    return (
        f"{profile.compiled} is compiled by torch.compile, and drafts would have it "
        "compiled anew for their numbers of tokens"
    )


def choose_for_drafting(model: Model, profile: Profile | None = None) -> VerificationPlan:
    """Return the best method to run a model that only drafts, "plain" if there is none.

    Where none is exact, as with layers that quantize activations, one that is roughly right will
    do: the model's drafts are verified by another one.
    """
    profile = profile or profile_of(model)
    plan = choose_verification(model, profile=profile)
    if plan.verification != "plain" or why_not_run(profile) is not None:
        return plan
    for verification in SPECULATING:
        reason, attention = _result_of(model, profile, "dynamic", False, verification, None, True)
        if reason is None:
            return VerificationPlan(verification, attention, plan.reasons)
    return plan


def _result_of(
    model: Model,
    profile: Profile,
    cache: CacheKind,
    is_padded: bool,
    verification: Verification,
    widths: Widths = None,
    is_drafting: bool = False,
) -> CheckResult:
    """Return the result of checking a method, from an earlier check if there was one."""
    key = CheckKey(verification, cache, is_padded, widths, is_drafting)
    try:
        return profile.once(key, lambda: check(model, profile, key))
    except torch.OutOfMemoryError:  # another check may find something else
        return CheckResult("no memory was left to check it")


# Width of all steps if the text must not depend on drafts. On a CPU, 16 costs a tenth more than 8;
# the best width on a GPU was not measured, but a few more tokens cost nothing there.
_STABLE_WIDTH = 8
_STABLE_WIDTH_ON_CUDA = 32


def stable_width_of(model: Model, config: Config) -> int | None:
    """Return the width of all steps if the text must not depend on drafts, else None.

    It depends only on settings and device, because it affects the text.
    """
    if not config.stable_text:
        return None
    is_cuda = device_of_inputs(model).type == "cuda"
    width = _STABLE_WIDTH_ON_CUDA if is_cuda else _STABLE_WIDTH
    num_nodes = width - 1 if config.max_draft_tokens is None else config.max_draft_tokens
    num_cells = 0 if config.lookahead is None else config.lookahead.num_cells
    return -(-(1 + num_nodes + num_cells) // width) * width


def execution_of(model: Model, config: Config, policy: DevicePolicy) -> Execution:
    """Return how to execute a call's forwards.

    Raises:
        UnsupportedOptionError: graphs were asked for on a device that has none.
    """
    device = device_of_inputs(model)
    if config.execution == "graphs" and not policy.can_record(device):
        raise UnsupportedOptionError(
            f"lade does not support Config(execution='graphs') on {device.type!r}: CUDA graphs "
            "need a CUDA device; 'fixed' runs the same steps eagerly"
        )
    # Graphs and Triton kernels are to be asked for until a run on a GPU has shown them right.
    return config.execution or ("fixed" if config.stable_text else "eager")
