"""What lade says once about calls of a model that it decodes otherwise than was to be expected."""

import torch

from lade.errors import PlainDecodingWarning, VerificationWarning
from lade.forward.job import FusedForwards
from lade.hf.circumstances import Circumstances
from lade.hf.planning import Planned
from lade.probing.factory import VerificationPlan
from lade.probing.profile import Profiles
from lade.probing.proof import VerificationError
from lade.targets.static import StaticTarget


def say_why_plain(seen: Circumstances, verification: VerificationPlan) -> None:
    """Warn once that lade falls back to standard decoding, and why."""
    reasons = verification.reasons
    if not reasons:  # the config asks for standard decoding
        return
    methods = {
        why: ", ".join(name for name, each in reasons.items() if each == why)
        for why in reasons.values()
    }
    (reason, *others) = methods
    if others:
        reason = "; ".join(f"{names}: {why}" for why, names in methods.items())
    name = type(seen.call.model).__name__
    text = f"lade falls back to standard decoding for {name}, one token per forward pass. {reason}"
    seen.warn_once(text, PlainDecodingWarning)


def say_why_eager(seen: Circumstances, plan: Planned) -> None:
    """Warn once if steps were not compiled though they should be; the text is the same."""
    target, reason = plan.target, plan.verification.why_eager
    if isinstance(target, StaticTarget):
        reason = target.why_not
    if reason is not None:
        name = type(seen.call.model).__name__
        text = f"lade runs steps of {name} eagerly, not compiled on a static cache: {reason}"
        seen.warn_once(text, RuntimeWarning)


def say_why_by_torch(seen: Circumstances) -> None:
    """Warn once if forwards were compiled in an earlier state of the model, and are no longer."""
    model, present = seen.call.model, seen.profile
    were = [each.found.get("fast_views") for each in Profiles.of(model) if each is not present]
    is_lost = any(isinstance(each, FusedForwards) for each in were)
    if not is_lost or (reason := present.why_by_torch(model)) is None:
        return
    text = (
        f"lade's compiled forward no longer runs {type(model).__name__}, and torch takes about "
        f"twice as long: {reason}. Undo that, and the next call is compiled again"
    )
    seen.warn_once(text, RuntimeWarning)


def give_up(
    seen: Circumstances, verification: VerificationPlan, failure: VerificationError
) -> None:
    """Warn that the rest of a call falls back, and let the next call read the model again."""
    # Next time there may be enough memory.
    if not isinstance(failure.__cause__, torch.OutOfMemoryError):
        profiles = Profiles.of(seen.call.model)
        profiles.end(seen.profile, verification.verification, str(failure))
    text = (
        f"lade falls back to standard decoding for the rest of a call of "
        f"{type(seen.call.model).__name__}: {failure}"
    )
    if failure.is_flaw:
        text += "; the next call checks the model again"
    seen.warn_once(text, VerificationWarning)
