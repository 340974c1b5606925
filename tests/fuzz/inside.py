"""The only file of the random comparison that knows lade from inside."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from lade.compat import CACHE, CACHE_NAMES, does_nothing, without_compiler
from lade.config import SPECULATING, VERIFICATIONS
from lade.models.gguf import load_gguf
from lade.probing.plan import choose_verification
from lade.probing.profile import profile_of
from lade.probing.proof import Distances

__all__ = [
    "CACHE",
    "CACHE_NAMES",
    "VERIFICATIONS",
    "does_nothing",
    "load_gguf",
    "noting_verification",
    "proofs_after",
    "settle",
    "without_compiler",
]


@contextmanager
def noting_verification(note: Callable[[str, bool], None]) -> Iterator[None]:
    """Tell in which way lade verifies, and whether that way was asked for."""

    def noting(*args: Any, **options: Any) -> Any:
        chosen = choose_verification(*args, **options)
        note(chosen.verification, options["config"].verification is not None)
        return chosen

    with patch("lade.hf.planning.choose_verification", noting):
        yield


def proofs_after(num_left: int) -> dict[str, Distances]:
    """Return what makes a call prove itself after so many steps with a draft."""
    return {verification: Distances(num_left) for verification in SPECULATING}


def settle(model: Any, **values: Any) -> dict[str, Any]:
    """Set fields of what lade knows of a model; return what they were."""
    model = without_compiler(model)
    profile = profile_of(model.get_base_model() if hasattr(model, "get_base_model") else model)
    before = {name: getattr(profile, name) for name in values}
    for name, value in values.items():
        setattr(profile, name, value)
    return before
