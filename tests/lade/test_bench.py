"""Benchmarks: what they read, run, sum up and write."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lade.bench.methods import METHODS, Answer
from lade.bench.pool import time_pool
from lade.bench.prompts import Prompt, read_prompts
from lade.bench.report import LOOPS, OVERALL, as_json, groups, write_json
from lade.bench.run import Result, ends_in_loop, run_methods, summarise
from lade.config import Config
from lade.models import LoadedModel
from tests.lade.tiny import tiny_model


class LetterTokenizer:
    """One token a letter; enough to run a benchmark on a tiny model."""

    chat_template = None

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        ids = torch.tensor([[2 + ord(letter) % 90 for letter in text]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_prompt_files_may_be_json_lines_or_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(
        '{"question_id": 81, "category": "writing", "turns": ["first", "second"]}\n'
        "\n"
        '{"prompt": "alone"}\n'
        "plain line\n"
    )
    assert read_prompts(path) == [
        Prompt("81", "writing", "first"),
        Prompt("3", "all", "alone"),
        Prompt("4", "all", "plain line"),
    ]
    path.write_text("\n".join(f"p{i}" for i in range(10)))
    assert [prompt.text for prompt in read_prompts(path, limit=4)] == ["p0", "p2", "p5", "p7"]
    assert len(read_prompts(path, limit=99)) == 10
    for bad in ("", '{"turns": []}', '{"question": "x"}', "{broken"):
        path.write_text(bad)
        with pytest.raises(ValueError, match=r"prompts\.txt"):
            read_prompts(path)


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        (list(range(100)), False),
        ([1] * 24, True),
        ([1] * 23, False),
        ([9, 8, 7] + [1, 2, 3] * 8, True),
        ([1, 2, 3] * 8 + [9], False),
        (list(range(32)) * 3, True),
        (list(range(33)) * 4, False),  # a repeated list of 33 tokens is no small loop
        (list(range(32)) * 2, False),
    ],
)
def test_loops_at_the_end_are_recognised(token_ids: list[int], expected: bool) -> None:
    assert ends_in_loop(token_ids) is expected


def result(num_pass: int, category: str, loops: bool, **secs: float) -> Result:
    answers = {name: Answer([1, 2, 3, 4, 5], sec, 2, 6) for name, sec in secs.items()}
    return Result(Prompt("1", category, "x"), num_pass, 10, answers, loops)


def test_summary_sums_times_first_and_takes_the_median_of_passes() -> None:
    results = [
        result(0, "a", False, plain=1.0, lade=0.5),
        result(0, "b", False, plain=3.0, lade=0.5),
        result(1, "a", False, plain=1.0, lade=1.0),
        result(1, "b", False, plain=1.0, lade=1.0),
        result(2, "a", False, plain=2.0, lade=1.0),
        result(2, "b", False, plain=2.0, lade=1.0),
        result(2, "b", True, plain=9.0, lade=1.0),
    ]
    parts = groups(results)
    assert list(parts) == ["a", "b", OVERALL, LOOPS]
    summary = summarise(parts[OVERALL], "lade")
    assert summary.speedup == 2.0  # of 4.0, 1.0 and 2.0
    assert summary.tokens_per_sec == 5.0
    assert summary.mean_accepted_tokens == 2.0  # four tokens in two steps; the fifth is prefill's
    assert summary.nodes_per_step == 3.0
    assert summary.same_text == 1.0
    assert summarise(parts[LOOPS], "lade").speedup == 9.0
    assert summarise([result(0, "a", False, lade=1.0)], "lade").speedup is None


def test_all_methods_run_and_agree(tmp_path: Path) -> None:
    loaded = LoadedModel(tiny_model("llama", seed=4), LetterTokenizer(), "folder/tiny")
    prompts = [Prompt(str(i), "ab"[i % 2], text) for i, text in enumerate(["abcabc", "xy", "zzz"])]
    results: list[Result] = []
    order: list[str] = []
    run_methods(
        loaded,
        prompts,
        list(METHODS),
        max_new_tokens=20,
        num_passes=2,
        config=Config(max_draft_tokens=6),
        results=results,
        on_answer=lambda name, answer: order.append(name),
    )
    assert len(results) == 6
    assert order[:8:4] == ["plain", "prompt_lookup"]  # another one begins each time
    for each in results:
        texts = {tuple(answer.token_ids) for answer in each.answers.values()}
        assert len(texts) == 1
        assert each.answers["plain"].num_steps == 19
        assert 0 < each.answers["prompt_lookup"].num_steps <= 19
        assert each.answers["lade"].stats is not None
    path = tmp_path / "result.json"
    write_json(path, as_json(results, list(METHODS), {"threads": 1}))
    content: Any = json.loads(path.read_text())
    assert len(content["prompts"]) == 6
    assert content["summary"][OVERALL]["plain"]["speedup"] == 1.0
    assert len(content["summary"][OVERALL]["lade"]["speedup_of_each_pass"]) == 2
    assert {"cpu", "num_cores", "torch", "transformers", "date"} <= set(content["environment"])
    assert str(tmp_path) not in path.read_text()


def test_pool_timing_measures_a_full_pool() -> None:
    timing = time_pool(20_000, max_nodes=16)
    assert timing.num_tokens == 20_000
    assert 0 < timing.nodes_per_draft <= 16
    assert 0 < timing.bytes_per_token <= 64
    assert 0 < timing.draft_us < timing.draft_p95_us
