"""`python -m benchmarks engines`, with answers in the place of engines; `make engines` has both."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import lade
from benchmarks import engines
from benchmarks.__main__ import app
from benchmarks.engines import EngineJob, Pass, RequestAnswer, summarise


def test_a_pass_is_summed_up_beside_the_same_pass_of_plain() -> None:
    loop = [7, 8] * 20
    answers = [RequestAnswer([1, 2, 3, 4, 5], 3, 0.1, 1.0), RequestAnswer(loop, 5, 0.3, 3.0)]
    counters = {"num_drafts": 4, "num_draft_tokens": 12, "num_accepted_tokens": 6}
    done = Pass(1, 1, 4.0, answers, {**counters, "num_failures": 0, "draft_sec_per_step": 0.001})
    found = summarise(done, None)
    # Neither the step of the prompt counts nor, where there are others, an answer that loops.
    assert (found["mat"], found["num_loops"], found["same_text"]) == (2.0, 1, None)
    assert (found["acceptance_length"], found["tokens_per_sec"]) == (2.5, 45 / 4)
    assert found["latency_sec"] == 2.0
    other = done._replace(answers=[answers[0]._replace(token_ids=[1]), answers[1]])
    assert summarise(done, other)["same_text"] == 0.5


def engines_of(texts: Mapping[str, int]) -> Any:
    """Return a stand-in for engines' processes: answers of one token, given here by method."""

    def alone(function: Any, job: EngineJob) -> Sequence[Pass]:
        if texts[job.method] < 0:
            raise lade.LadeError("answered ended with status 1")
        answers = [RequestAnswer([texts[job.method]], 1, 0.1, 0.2) for _ in job.prompts]
        counters = {"num_failures": 0, "draft_sec_per_step": 0.0}
        return [Pass(2, number, 1.0, answers, counters) for number in (1, 2)]

    return alone


@pytest.fixture
def run(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(engines, "find_spec", lambda name: True)
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: {"vllm": ["torch"]})
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts.write_text("one\ntwo\n")

    def run(texts: Mapping[str, int], *options: str) -> tuple[Any, Any]:
        monkeypatch.setattr(engines, "alone", engines_of(texts))
        monkeypatch.setattr("os.environ", {**os.environ})
        words = ["engines", "--prompts", str(prompts), "--model", folder, "--json", str(out)]
        done = CliRunner().invoke(app, [*words, *options], env={"COLUMNS": "200"})
        return done.exception, json.loads(out.read_text()) if out.exists() else None

    return run


def test_the_command_writes_all_methods_and_fails_where_one_says_something_else(run: Any) -> None:
    options = ("--methods", "plain,ngram,pool", "--concurrency", "2", "--check")
    error, content = run({"plain": 1, "ngram": 1, "pool": 1}, *options)
    assert error is None
    assert [(row["method"], row["pass"]) for row in content["rows"]] == [
        (method, num) for method in ("plain", "ngram", "pool") for num in (1, 2)
    ]
    assert (content["settings"]["dtype"], content["settings"]["num_prompts"]) == ("float32", 2)
    error, content = run({"plain": 1, "ngram": 1, "pool": 2}, *options)
    assert "pool, pass 1: 0.0% of the answers have plain's tokens" in str(error)
    assert content["rows"]  # what was found is kept
    error, content = run({"plain": 1, "ngram": -1}, "--methods", "plain,ngram")
    assert "ended with status 1" in str(error)
    assert content["settings"]["interrupted"]
    assert {row["method"] for row in content["rows"]} == {"plain"}


def test_a_check_is_in_float32(run: Any) -> None:
    error, _ = run({}, "--check", "--dtype", "bfloat16")
    assert "expected float32" in str(error)
