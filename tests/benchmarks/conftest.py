"""Tests of benchmarks begin with what those of lade do."""

from tests.lade.conftest import (
    folder,
    pytest_runtest_protocol,
    pytest_runtest_setup,
    shared_models_stay_whole,
    single_thread,
    steady_random_state,
    trusted,
    waits,
)

__all__ = [
    "folder",
    "pytest_runtest_protocol",
    "pytest_runtest_setup",
    "shared_models_stay_whole",
    "single_thread",
    "steady_random_state",
    "trusted",
    "waits",
]
