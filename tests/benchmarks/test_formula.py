"""The formula of assisted generation: against a simulation, and against real runs."""

import json
import math
from pathlib import Path
from random import Random

import pytest

from benchmarks.formula import compare, expected_tokens, table


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4, 9])
def test_the_formula_is_what_a_simulation_comes_to(
    acceptance: float, num_draft_tokens: int
) -> None:
    """The mean of 20,000 steps: six standard errors are a false alarm in one of 10^8 runs."""
    rng, num_steps = Random(0), 20_000
    counts = []
    for _ in range(num_steps):
        num_accepted = 0
        while num_accepted < num_draft_tokens and rng.random() < acceptance:
            num_accepted += 1
        counts.append(num_accepted + 1)  # and the bonus token
    mean = sum(counts) / num_steps
    variance = sum((count - mean) ** 2 for count in counts) / num_steps
    error = math.sqrt(variance / num_steps)
    assert expected_tokens(acceptance, num_draft_tokens) == pytest.approx(
        mean, abs=6 * error + 1e-12
    )


def test_known_values() -> None:
    assert expected_tokens(0.8, 5) == pytest.approx(3.68928)
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.0, 5) == 1


def results(path: Path, **entry: float) -> Path:
    """Write what a run would of ten prompts, of a method with these counts."""
    plain = {"num_tokens": 101, "sec": 10.1, "num_steps": 100, "num_draft_tokens": 0}
    prompt = {"loops": False, "plain": plain, "assistant": {"num_tokens": 101, **entry}}
    content = {
        "settings": {"methods": {"plain": "", "assistant": "", "uncounted": ""}},
        "prompts": [{**prompt, "uncounted": plain} for _ in range(10)],
    }
    path.write_text(json.dumps(content))
    return path


def simulated(acceptance: float, num_draft_tokens: int, num_tokens: int) -> dict[str, float]:
    """Return the counts of decoding with draft tokens that are accepted at random."""
    rng = Random(1)
    counts = dict.fromkeys(
        (
            *("num_steps", "num_draft_tokens", "num_accepted_tokens"),
            *("num_drafted_row_steps", "num_corrected_row_steps"),
        ),
        0,
    )
    committed = 0
    while committed < num_tokens:
        num_accepted = 0
        while num_accepted < num_draft_tokens and rng.random() < acceptance:
            num_accepted += 1
        counts["num_steps"] += 1
        counts["num_draft_tokens"] += num_draft_tokens
        counts["num_accepted_tokens"] += num_accepted
        counts["num_drafted_row_steps"] += 1
        counts["num_corrected_row_steps"] += num_accepted < num_draft_tokens
        committed += num_accepted + 1
    return {**counts, "num_tokens": committed + 1}


def test_a_run_of_constant_k_is_what_the_formula_says(tmp_path: Path) -> None:
    counts = simulated(0.7, 4, 20_000)
    num_steps = counts["num_steps"]
    forward_sec, draft_sec = 0.12 * num_steps, 0.01 * 4 * num_steps  # of plain's 0.1 s for a token
    sec = forward_sec + draft_sec
    path = results(
        tmp_path / "run.json", **counts, forward_sec=forward_sec, draft_sec=draft_sec, sec=sec
    )
    (made,) = compare(path)  # the method that counts no drafts is left out
    assert made.method == "assistant"
    assert made.num_draft_tokens == 4
    assert made.share_drafted == 1
    assert made.acceptance == pytest.approx(0.7, abs=0.01)
    assert made.cost_ratio == pytest.approx(0.1, abs=1e-6)
    assert made.step_cost == pytest.approx(1.2, abs=1e-6)
    assert made.tokens_per_step == pytest.approx(made.measured_tokens_per_step, rel=0.01)
    assert made.speedup == pytest.approx(made.measured_speedup, rel=0.01)
    assert made.speedup == pytest.approx(expected_tokens(0.7, 4) / 1.6, rel=0.02)
    assert "| assistant | 4.0 | 100% | 0.70 | 0.10 | 1.20 |" in table([made]).as_markdown()


def test_steps_without_a_draft_are_told_apart(tmp_path: Path) -> None:
    counts = simulated(0.7, 4, 20_000)
    num_plain = counts["num_steps"]  # as many without a draft
    counts["num_steps"] += num_plain
    counts["num_tokens"] += num_plain
    times = {"draft_sec": 1.0, "forward_sec": 90.0, "sec": 100.0}
    (made,) = compare(results(tmp_path / "run.json", **counts, **times))
    assert made.share_drafted == 0.5
    assert made.tokens_per_step == pytest.approx(made.measured_tokens_per_step, rel=0.01)


def test_what_is_no_result_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text in ("{", "[]", '{"prompts": [], "settings": {}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"other\.json to be a result file of a run"):
            compare(path)
    undrafted = dict.fromkeys(
        (
            *("num_drafted_row_steps", "num_corrected_row_steps", "num_accepted_tokens"),
            *("num_draft_tokens", "draft_sec", "forward_sec"),
        ),
        0,
    )
    path = results(path, **undrafted, num_steps=100, sec=1.0)
    with pytest.raises(ValueError, match=r"expected a method of other\.json to have drafted"):
        compare(path)
