"""Fixtures that the tests of steps of fixed shape share."""

import pytest

from lade.hf.generation import Generation
from tests.lade.recorder import CpuRecorder, RecordingPolicy


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CpuRecorder:
    """Record on the CPU, with operators that do in plain torch what models do."""
    made = CpuRecorder()
    monkeypatch.setattr(Generation, "policy", RecordingPolicy(made))
    return made
