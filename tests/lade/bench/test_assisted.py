"""The formula of assisted generation: against a simulation, as a table, and against real runs."""

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest

from lade.bench.assisted import (
    compare,
    comparison_table,
    expected_tokens,
    predict,
    what_if_table,
)
from lade.bench.project import StepCosts


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
    # Leviathan et al., table 1: the speed-ups for gamma = 2, 3, 5, 10 at c = 0 are 2.44 of 0.8, ….
    for acceptance, size, speedup in (
        (0.6, 2, 1.96),
        (0.7, 3, 2.53),
        (0.8, 2, 2.44),
        (0.8, 5, 3.69),
        (0.9, 2, 2.71),
        (0.9, 10, 6.86),
    ):
        (made,) = predict([acceptance], 0.0, [size])
        assert made.speedup == pytest.approx(speedup, abs=0.005)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.1], 0.1, [2]), "expected an acceptance of 0 to 1, got 1.1"),
        (([0.5], -1.0, [2]), "expected a cost ratio of 0 or more, got -1.0"),
        (([0.5], 0.1, [-2]), "expected 0 draft tokens or more, got -2"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(*arguments)


def test_the_best_k_grows_with_acceptance_and_shrinks_with_costs() -> None:
    def best(made: Any) -> list[int]:
        return [each.num_draft_tokens for each in made if each.is_best]

    sizes = [1, 2, 3, 4, 6, 8, 12, 16]
    assert best(predict([0.5, 0.7, 0.9], 0.05, sizes)) == [3, 6, 12]
    assert best(predict([0.5, 0.7, 0.9], 0.3, sizes)) == [1, 2, 6]
    costs = StepCosts({1: 1.0, 17: 4.0}, "costs")  # every token more costs, too
    assert best(predict([0.5, 0.7, 0.9], 0.05, sizes, costs)) == [1, 2, 6]
    (tie,) = [each for each in predict([0.0], 0.0, sizes) if each.is_best]
    assert tie.num_draft_tokens == 1  # of equal ones, the smallest


def test_the_table_has_a_row_for_each_k_and_marks_the_best() -> None:
    text = what_if_table(predict([0.5, 0.8], 0.1, [1, 2, 4])).as_markdown()
    assert "|  | K | step cost | 0.5 | 0.8 |" in text
    assert "| speed-up | 2 |  | 1.46x* | 2.03x |" in text
    assert "| speed-up | 4 |  | 1.38x | 2.40x* |" in text
    assert "| tokens per step | 4 |  | 1.94 | 3.36 |" in text
    costs = StepCosts({1: 1.0, 2: 1.5, 5: 3.0}, "costs.csv")
    text = what_if_table(predict([0.8], 0.1, [1, 4], costs), "costs.csv").as_markdown()
    assert "| speed-up | 4 | 3.00 | 0.99x |" in text
    assert "by costs.csv, one token being 1" in text


def results(path: Path, **entry: float) -> Path:
    """Write what `lade bench run` would of ten prompts, of a method with these counts."""
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
    assert (made.results, made.method) == ("run", "assistant")
    assert made.num_draft_tokens == 4
    assert made.share_drafted == 1
    assert made.acceptance == pytest.approx(0.7, abs=0.01)
    assert made.cost_ratio == pytest.approx(0.1, abs=1e-6)
    assert made.step_cost == pytest.approx(1.2, abs=1e-6)
    assert made.tokens_per_step == pytest.approx(made.measured_tokens_per_step, rel=0.01)
    assert made.speedup == pytest.approx(made.measured_speedup, rel=0.01)
    assert made.speedup == pytest.approx(expected_tokens(0.7, 4) / 1.6, rel=0.02)
    assert "| run | assistant | 4.0 | 100% | 0.70 | 0.10 | 1.20 |" in (
        comparison_table([made]).as_markdown()
    )
    (of_costs,) = compare(path, StepCosts({1: 1.0, 5: 2.0}, "costs"))
    assert of_costs.step_cost == 2


def test_steps_without_a_draft_are_told_apart(tmp_path: Path) -> None:
    counts = simulated(0.7, 4, 20_000)
    num_plain = counts["num_steps"]  # as many without a draft
    counts["num_steps"] += num_plain
    counts["num_tokens"] += num_plain
    (made,) = compare(results(tmp_path / "run.json", **counts, draft_sec=1.0, sec=100.0))
    assert made.share_drafted == 0.5
    assert made.step_cost is None  # files of earlier versions do not tell
    assert made.tokens_per_step == pytest.approx(made.measured_tokens_per_step, rel=0.01)


def test_what_is_no_result_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text in ("{", "[]", '{"prompts": [], "settings": {}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"other\.json to be a result file of lade bench run"):
            compare(path)
    undrafted = dict.fromkeys(
        (
            *("num_drafted_row_steps", "num_corrected_row_steps", "num_accepted_tokens"),
            *("num_draft_tokens", "draft_sec"),
        ),
        0,
    )
    path = results(path, **undrafted, num_steps=100, sec=1.0)
    with pytest.raises(ValueError, match=r"expected a method of other\.json to have drafted"):
        compare(path)
