"""The only file of these tables that knows lade from inside."""

from benchmarks.environment import environment
from benchmarks.report import write_json
from lade.compat import CACHE
from lade.config import SPECULATING, Verification
from lade.forward.job import why_by_torch
from lade.probing.plan import NO_ROWS
from lade.probing.rules import Lengths, why_not_speculate

__all__ = [
    "CACHE",
    "NO_ROWS",
    "SPECULATING",
    "Lengths",
    "Verification",
    "environment",
    "why_by_torch",
    "why_not_speculate",
    "write_json",
]
