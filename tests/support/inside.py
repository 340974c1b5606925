"""The only file of these tables that knows lade from inside."""

from benchmarks.environment import environment
from benchmarks.report import write_json
from lade.compat import CACHE
from lade.config import SPECULATING, Execution, Verification
from lade.forward.job import why_by_torch
from lade.gpu.graphs import why_not_recorded
from lade.probing.plan import NO_ROWS, choose_verification
from lade.probing.rules import Lengths, why_not_speculate

__all__ = [
    "CACHE",
    "NO_ROWS",
    "SPECULATING",
    "Execution",
    "Lengths",
    "Verification",
    "choose_verification",
    "environment",
    "why_by_torch",
    "why_not_recorded",
    "why_not_speculate",
    "write_json",
]
