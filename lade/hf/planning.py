"""How a call is decoded: by a target that verifies its drafts, or by standard decoding."""

from contextlib import suppress
from functools import partial

import torch

from lade.compat import has_custom_generate, mesh_of
from lade.compat.attempts import Attempt
from lade.engine.engine import EngineCall, current_call, is_in_event_loop
from lade.errors import LadeError, MisfitError, UnsupportedModelError
from lade.hf.call import Call
from lade.machine.garbage import without_collection
from lade.probing.factory import VerificationPlan, make_target
from lade.probing.plan import choose_verification, ready
from lade.probing.proof import DISTANCE, Distances, ProvedTarget
from lade.probing.rules import cache_kind_of, excluded_by, why_not_static
from lade.probing.user_code import AROUND
from lade.targets.base import Target
from lade.targets.inputs import is_text_alone
from lade.targets.parts import TREE_SDPA


@without_collection()  # the first call checks the model, and loads or compiles kernels
def plan(call: Call) -> Target | VerificationPlan:
    """Choose how to decode a call, and set up its target.

    Returns:
        The plan itself for standard decoding, with no reason if that is asked for.

    Raises:
        LadeError: the config forbids what the call needs.
    """
    if (reason := call.why_plain) is not None:
        return VerificationPlan("plain", None, {"tree": reason})
    with Attempt(LadeError, MisfitError, even_memory=True) as attempt:
        verification, engine_call = _verification(call)
        if verification.verification == "plain":
            return verification
        target = make_target(
            *(call.model, call.input_ids, call.model_kwargs, verification),
            *(call.lengths.num_new, call.options, call.profile),
        )
        if engine_call is not None:
            target.join(engine_call)
        return target
    # Standard decoding hits the same error, or works.
    return VerificationPlan("plain", None, {"tree": str(attempt.failure)})


def _verification(call: Call) -> tuple[VerificationPlan, EngineCall | None]:
    """Return how to verify drafts, and the engine's call whose forward passes others share."""
    model, config, profile, lengths = call.model, call.config, call.profile, call.lengths
    execution = call.execution
    why_eager: str | None = None
    if execution == "static":
        why_eager = profile.static_steps.why_not or why_not_static(
            model, call.num_rows, lengths.num_slots, call.user_code
        )
        execution = "static" if why_eager is None else "eager"
    choose = partial(
        choose_verification,
        model,
        config=config,
        num_rows=call.num_rows,
        cache=cache_kind_of(call.model_kwargs),
        excluded=excluded_by(model, call.input_ids, call.model_kwargs, lengths, call.user_code),
        execution=execution,
        profile=profile,
    )
    found: VerificationPlan | None = None
    if (engine_call := _engine_call(call)) is not None and execution == "eager":
        # Calls that share a forward are like rows of different lengths.
        with suppress(UnsupportedModelError):
            found = choose(is_padded=True)
    if found is None or found.attention != TREE_SDPA:
        found, engine_call = None, None
    verification = found or choose(is_padded=lengths.is_padded)
    verification = verification._replace(why_eager=why_eager or verification.why_eager)
    if call.around is None:
        verification = ready(verification, model, profile, uses_kernels=config.uses_kernels)
    return verification, engine_call


def _engine_call(call: Call) -> EngineCall | None:
    """Return the engine's call that this one is, unless it runs alone.

    It does if it depends on its thread or its model's state: user code in forward passes must see
    only this call's; autocast and asyncio loops belong to the thread; and a custom `generate` may
    set attributes of the model until its end.
    """
    is_apart = (
        call.user_code is not None
        or is_in_event_loop()
        or torch.is_autocast_enabled(call.input_ids.device.type)
        or has_custom_generate(call.model)
    )
    return None if is_apart else current_call()


def proved(call: Call, target: Target) -> ProvedTarget:
    """Return a call's target, proved where that is due."""
    # In a batch, code around forwards sees rows where `generate` has a batch.
    is_around = call.user_code == AROUND and call.num_rows == 1
    distances: Distances | None = None
    if mesh_of(call.model) is None and call.user_code is not None:
        distances = Distances()
    elif mesh_of(call.model) is None:  # shared by calls, and begins with the check
        known = call.profile.proofs
        distances = known.setdefault(target.verification, Distances(DISTANCE))
    mask = call.model_kwargs.get("attention_mask")
    sees_ends = mask is None or mask.dim() != 2 or bool(mask[:, -1].all())
    return ProvedTarget(
        call.model,
        target,
        distances,
        may_repeat_prompts=is_text_alone(call.model_kwargs) and sees_ends,
        is_plain=call.user_code is not None and not is_around,
        is_around=is_around,
    )
