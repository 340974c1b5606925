"""How a call is decoded: the method that verifies drafts, and the target that is set up for it."""

from contextlib import suppress
from functools import partial
from typing import NamedTuple

from lade.attention.packed import PACKED_ROWS
from lade.compat import mesh_of
from lade.compat.attempts import Attempt
from lade.config import SPECULATING, Execution
from lade.engine.engine import EngineCall
from lade.errors import LadeError, MisfitError, UnsupportedModelError
from lade.hf.circumstances import Circumstances
from lade.machine.garbage import without_collection
from lade.probing.factory import VerificationPlan, make_target
from lade.probing.plan import choose_verification, why_not_run
from lade.probing.proof import DISTANCE, Distances, ProvedTarget
from lade.probing.rules import Requirements, requirements_of, why_not_static
from lade.probing.settling import ready
from lade.probing.user_code import AROUND
from lade.targets.base import Target
from lade.targets.inputs import is_text_alone, sees_its_ends
from lade.targets.rows import RowsTarget
from lade.targets.trees import TreeTarget


class Planned(NamedTuple):
    """How a call is decoded."""

    verification: VerificationPlan
    target: Target | None = None  # None for standard decoding
    max_length: int = 0  # maximum total length that a draft may reach, prompt included


@without_collection()  # the first call checks the model, and loads or compiles kernels
def plan_of(seen: Circumstances) -> Planned:
    """Choose how to decode a call, and set up its target.

    Raises:
        LadeError: the config forbids what the call needs.
    """
    call, config = seen.call, seen.call.config
    if (reason := seen.why_plain) is not None:
        if why_not_run(seen.profile) is not None:
            excluded = dict.fromkeys(SPECULATING, reason)  # raises if the config forbids it
            choose_verification(call.model, config=config, excluded=excluded, profile=seen.profile)
        return Planned(VerificationPlan("plain", None, {"tree": reason}))
    with Attempt(LadeError, MisfitError, even_memory=True) as attempt:
        needed = requirements_of(
            call.model, call.input_ids, call.options, call.model_kwargs, seen.user_code
        )
        verification, engine_call = _verification(seen, needed)
        if verification.verification == "plain":
            return Planned(verification)
        target: Target = make_target(
            *(call.model, call.input_ids, call.model_kwargs, verification),
            *(needed.num_new, call.options, seen.profile),
        )
        if engine_call is not None and isinstance(target, TreeTarget | RowsTarget):
            target.join(engine_call)
    if attempt.failure is not None:  # standard decoding hits the same error, or works
        return Planned(VerificationPlan("plain", None, {"tree": attempt.failure}))
    return Planned(verification, target, needed.max_length)


def _verification(
    seen: Circumstances, needed: Requirements
) -> tuple[VerificationPlan, EngineCall | None]:
    """Return how to verify drafts, and the engine's call whose forward passes others share."""
    config = seen.call.config
    execution, why_eager = _execution(seen, needed)
    choose = partial(
        choose_verification,
        seen.call.model,
        config=config,
        num_rows=seen.call.num_rows,
        cache=needed.cache,
        excluded=needed.excluded,
        execution=execution,
        profile=seen.profile,
    )
    found: VerificationPlan | None = None
    if (engine_call := seen.engine_call()) is not None and execution == "eager":
        # Calls that share a forward are like rows of different lengths.
        with suppress(UnsupportedModelError):
            found = choose(is_padded=True)
    if found is None or found.attention != PACKED_ROWS:
        found, engine_call = None, None
    verification = found or choose(is_padded=needed.is_padded)
    verification = verification._replace(why_eager=why_eager or verification.why_eager)
    if seen.around is None:
        uses_kernels = config.uses_kernels
        verification = ready(verification, seen.call.model, seen.profile, uses_kernels=uses_kernels)
    return verification, engine_call


def _execution(seen: Circumstances, needed: Requirements) -> tuple[Execution, str | None]:
    """Return how to execute trees, and why not as the call asks for it."""
    if seen.execution == "eager":
        return "eager", None
    why_eager = seen.profile.static_steps.why_not or why_not_static(
        seen.call.model, seen.call.num_rows, needed.num_slots, seen.user_code
    )
    return ("static" if why_eager is None else "eager"), why_eager


def proved(seen: Circumstances, plan: Planned) -> ProvedTarget:
    """Return a plan's target, proved where that is due."""
    call = seen.call
    assert plan.target is not None
    # In a batch, code around forwards sees rows where `generate` has a batch.
    is_around = seen.user_code == AROUND and call.num_rows == 1
    return ProvedTarget(
        call.model,
        plan.target,
        _distances(seen, plan.verification),
        may_repeat_prompts=is_text_alone(call.model_kwargs)
        and sees_its_ends(call.model_kwargs.get("attention_mask")),
        is_plain=seen.user_code is not None and not is_around,
        is_around=is_around,
    )


def _distances(seen: Circumstances, verification: VerificationPlan) -> Distances | None:
    """Return the distance between proofs, shared by calls unless user code takes part."""
    if mesh_of(seen.call.model) is not None:
        return None
    if seen.user_code is not None:
        return Distances()
    first = Distances(DISTANCE)  # after the check
    return seen.profile.proofs.setdefault(verification.verification, first)
