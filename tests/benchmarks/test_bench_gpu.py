"""`python -m benchmarks gpu` on a CPU: right texts, accepted drafts, timed steps."""

import pytest

from benchmarks.gpu import measured, run


def test_calls_and_steps_are_measured_by_models_whose_text_is_known() -> None:
    found = measured("eager", "tiny", "cpu")
    assert found["right"] == 1
    assert found["mean_accepted_tokens"] > 1.5
    steps = measured("steps_eager", "tiny", "cpu")
    assert len(steps["msec"]) == len(steps["of_copy"]) == 3
    assert all(0 < share < 1 for share in steps["of_copy"].values())


def test_what_cannot_be_measured_is_said() -> None:
    with pytest.raises(ValueError, match="expected different ones of plain, eager, static, steps"):
        run("tiny", "speed", "cpu", 1.0, None)
    with pytest.raises(ValueError, match="expected a CUDA device, got none"):
        run("tiny", "plain", "cuda", 1.0, None)
