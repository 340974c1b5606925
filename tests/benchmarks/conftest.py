"""Tests of benchmarks begin with what those of lade do."""

from tests.lade.conftest import folder, shared_models_stay_whole, steady_random_state

__all__ = ["folder", "shared_models_stay_whole", "steady_random_state"]
