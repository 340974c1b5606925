"""Whether a model goes on from keys and values as if it had run the whole text at once."""

from typing import Any

import torch

from lade.attempts import Attempt
from lade.closeness import distance, limit_of
from lade.compat import CACHE, Model
from lade.probing.profile import Profile
from lade.probing.selfcheck import (
    Plain,
    check_tokens,
    reason_of_layers,
    unchanged_random_state,
)


def why_not_continued(model: Model, profile: Profile) -> str | None:
    """Return why keys and values of a text's beginning are not those of the whole, or None.

    The model is asked once, by three short forwards and the check of its layers.
    """
    try:
        return profile.once("why_not_continued", lambda: _why_not(model, profile))
    except torch.OutOfMemoryError:  # next time there may be enough
        return "no memory was left to check it"


@torch.no_grad()
def _why_not(model: Model, profile: Profile) -> str | None:
    with Attempt() as attempt, unchanged_random_state(model, profile):
        error = _error(model)
    reason = reason_of_layers(model, profile)
    if reason is not None:
        return reason
    if attempt.failure is not None:
        return f"it cannot go on from a cache ({attempt.failure})"
    if profile.draws:
        return "its forwards draw random numbers"
    if error <= limit_of(model):
        return None
    return (
        f"its logits after a cached text differ from those of the whole text by {error:.2g} of "
        f"their standard deviation (expected at most {limit_of(model):.2g})"
    )


def _error(model: Model) -> float:
    """Return how far logits are off that follow a cached beginning, of several lengths."""
    tokens = check_tokens(model)
    wanted: dict[str, Any] = {"num_new": 1, "output_logits": True, "return_dict_in_generate": True}
    whole = Plain(model, tokens)
    expected = whole.generate(**wanted).logits[0]
    errors = []
    for num_cached in (3, len(tokens) - 1):
        cache = getattr(Plain(model, tokens[:num_cached]).generate(**wanted), CACHE)
        if cache is None:
            return float("inf")
        rest = whole.generate(**wanted, **{CACHE: cache})
        errors.append(distance(rest.logits[0], expected))
    return max(errors)
