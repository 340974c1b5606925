"""What lade says once about calls of a model that it decodes otherwise than was to be expected."""

import torch

from lade.errors import PlainDecodingWarning, VerificationWarning
from lade.forward.job import FusedForwards
from lade.hf.call import Call
from lade.hf.planning import Standard
from lade.probing.profile import Profiles
from lade.probing.proof import VerificationError
from lade.targets.base import Target


def say_why_plain(call: Call, standard: Standard) -> None:
    """Warn once that lade falls back to standard decoding, and why."""
    reasons = standard.reasons
    if not reasons:  # the config asks for standard decoding
        return
    methods = {
        why: ", ".join(name for name, each in reasons.items() if each == why)
        for why in reasons.values()
    }
    (reason, *others) = methods
    if others:
        reason = "; ".join(f"{names}: {why}" for why, names in methods.items())
    name = type(call.model).__name__
    text = f"lade falls back to standard decoding for {name}, one token per forward pass. {reason}"
    call.warn_once(text, PlainDecodingWarning)


def say_why_eager(call: Call, target: Target) -> None:
    """Warn once if steps were not compiled though they should be; the text is the same."""
    if target.why_eager is not None:
        name = type(call.model).__name__
        text = f"lade runs steps of {name} eagerly, not compiled on a static cache: "
        call.warn_once(text + target.why_eager, RuntimeWarning)


def say_why_by_torch(call: Call) -> None:
    """Warn once if forwards were compiled in an earlier state of the model, and are no longer."""
    model, present = call.model, call.profile
    were = [each.found.get("fast_views") for each in Profiles.of(model) if each is not present]
    is_lost = any(isinstance(each, FusedForwards) for each in were)
    if not is_lost or (reason := present.why_by_torch(model)) is None:
        return
    text = (
        f"lade's compiled forward no longer runs {type(model).__name__}, and torch takes about "
        f"twice as long: {reason}. Undo that, and the next call is compiled again"
    )
    call.warn_once(text, RuntimeWarning)


def give_up(call: Call, target: Target, failure: VerificationError) -> None:
    """Warn that the rest of a call falls back, and let the next call read the model again."""
    # Next time there may be enough memory.
    if not isinstance(failure.__cause__, torch.OutOfMemoryError):
        Profiles.of(call.model).end(call.profile, target.verification, str(failure))
    text = (
        f"lade falls back to standard decoding for the rest of a call of "
        f"{type(call.model).__name__}: {failure}"
    )
    if failure.is_flaw:
        text += "; the next call checks the model again"
    call.warn_once(text, VerificationWarning)
