"""The only file of these tables that knows lade from inside."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from benchmarks.environment import environment
from benchmarks.report import write_json
from lade.compat import CACHE
from lade.config import SPECULATING, Verification
from lade.forward.job import FusedForwards, why_by_torch
from lade.probing.plan import NO_ROWS
from lade.probing.profile import profile_of
from lade.probing.rules import Lengths, why_not_speculate

__all__ = [
    "CACHE",
    "NO_ROWS",
    "SPECULATING",
    "Lengths",
    "Verification",
    "environment",
    "jobs_alone",
    "why_by_torch",
    "why_not_speculate",
    "why_wrong",
    "write_json",
]


@contextmanager
def jobs_alone() -> Iterator[None]:
    """Let forwards run by jobs even where torch is faster."""
    with patch.object(FusedForwards, "_are_slow", lambda *_: False):
        yield


def why_wrong(model: object) -> str | None:
    """Return why jobs of a model that was used are no longer used, or None."""
    views = profile_of(model).fast_views_for(model)
    return None if views is None else views.why_not
