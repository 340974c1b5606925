"""Benchmarks: what they read, run, sum up and write."""

import json
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import lade
from lade.bench import memory, methods, plots, utilisation
from lade.bench.baselines import Answer, DraftModels, MethodInfo, new_rows
from lade.bench.batches import encode_batch, find_pad_token_id, in_batches
from lade.bench.memory import MemoryRun, measure_in_process
from lade.bench.methods import METHODS, make_method
from lade.bench.peak import Peak, Work
from lade.bench.pool import time_pool
from lade.bench.pool_requests import time_requests
from lade.bench.pool_threads import time_threads
from lade.bench.prompts import Prompt, read_prompts
from lade.bench.replay_report import Point
from lade.bench.report import (
    LOOPS,
    OVERALL,
    as_json,
    groups,
    source_table,
    table,
    table_of_files,
    time_table,
    write_json,
)
from lade.bench.run import (
    MIXED,
    Result,
    ends_in_loop,
    run_methods,
    share_repeated,
    summarise,
    warm_up_methods,
)
from lade.bench.settings import Settings
from lade.bench.tables import Sheet
from lade.bench.utilisation import Utilisation, measuring
from lade.config import VERIFICATIONS, Config
from lade.engines.options import PoolOptions, Sharing
from lade.errors import LadeError, MissingExtraError, UnsupportedModelError
from lade.models.loading import LoadedModel
from lade.stats import DecodeStats, SourceStats, Step
from tests.lade.tiny import byte_tokenizer, tiny_model

ROOT = Path(__file__).parents[3]


class LetterTokenizer:
    """One token a letter; enough to run a benchmark on a tiny model."""

    chat_template = None
    pad_token_id = None

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
        Prompt("81", "writing", "first", ("second",)),
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
    answers = {name: Answer([[1, 2, 3, 4, 5]], sec, 2, 2, 6) for name, sec in secs.items()}
    return Result([Prompt("1", category, "x")], num_pass, 10, answers, loops)


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
    assert summary.draft_tokens_per_step == 3.0
    assert summary.same_text == 1.0
    assert summarise(parts[LOOPS], "lade").speedup == 9.0
    assert summarise([result(0, "a", False, lade=1.0)], "lade").speedup is None


def test_summary_of_batches_counts_rows() -> None:
    plain = Answer(
        [[1, 2, 3, 4, 5], [1, 2, 9]], 2.0, num_steps=4, num_row_steps=6, num_draft_tokens=0
    )
    # The rows take two steps and one; the first has plain's text.
    lade = Answer(
        [[1, 2, 3, 4, 5], [1, 2, 8]], 1.0, num_steps=2, num_row_steps=3, num_draft_tokens=9
    )
    prompts = [Prompt("1", "a", "x"), Prompt("2", "b", "y")]
    results = [Result(prompts, 0, 7, {"plain": plain, "lade": lade}, False)]
    assert list(groups(results)) == [MIXED, OVERALL]
    summary = summarise(results, "plain")
    assert summary.mean_accepted_tokens == 1.0  # and not 1.5, of six tokens in four forwards
    assert summary.tokens_per_sec == 4.0
    summary = summarise(results, "lade")
    assert summary.num_prompts == 2
    assert summary.speedup == 2.0
    assert summary.mean_accepted_tokens == 2.0  # and not 3.0
    assert summary.draft_tokens_per_step == 3.0  # and not 4.5
    assert summary.same_text == 0.5
    (entry,) = as_json(results, ["plain", "lade"], {})["prompts"]
    assert entry["ids"] == ["1", "2"]
    assert entry["category"] == MIXED
    assert entry["plain"] == {
        "num_tokens": 8,
        "sec": 2.0,
        "num_steps": 4,
        "num_draft_tokens": 0,
        "num_rows": 2,
        "num_row_steps": 6,
    }
    assert entry["lade"]["same_text"] is False
    assert entry["lade"]["num_same_text"] == 1


def test_summary_has_the_rates_of_methods_that_count_them() -> None:
    stats = DecodeStats(num_steps=4, draft_sec=0.5)
    # Three steps with a draft, of which one ends on a rejection and one at the end of a path.
    stats.count_row_step(Step([1, 2], 4, 1, is_corrected=True))
    stats.count_row_step(Step([1, 2, 3], 2, 2))
    stats.count_row_step(Step([1], 2, 1))
    stats.count_row_step(Step([1], 0, 0))
    answer = Answer([[1] * 8], 1.0, 4, 4, 8, stats)
    assert (stats.num_drafted_row_steps, stats.num_corrected_row_steps) == (3, 1)
    assert stats.as_dict()["correction_rate"] == stats.correction_rate == 1 / 3
    results = [result(0, "a", False, plain=1.0)] * 2
    results = [each._replace(answers={**each.answers, "lade": answer}) for each in results]
    summary = summarise(results, "lade")
    assert summary.acceptance_rate == 0.5  # 4 of 8 tokens
    assert summary.correction_rate == 1 / 3  # and not 1 / 4: a step without a draft is none
    assert summary.draft_sec_per_step == 0.125
    plain = summarise(results, "plain")
    assert plain[-6:] == (None,) * 6
    sheet = table(results, ["plain", "lade"], Settings(8))
    shown = dict(zip(sheet.headings, sheet.sections[0][1], strict=True))
    assert [shown[name] for name in ("accepted", "corrected", "draft ms/step")] == [
        *("50%", "33%", "125.000")
    ]
    assert sheet.sections[0][0][-3:] == ("", "", "")
    (entry, _) = as_json(results, ["plain", "lade"], {})["prompts"]
    assert entry["lade"]["num_corrected_row_steps"] == 1
    assert "num_corrected_row_steps" not in entry["plain"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 0}, "expected max_new_tokens of 1 or more, got 0"),
        ({"batch_size": 0}, "expected batch_size of 1 or more, got 0"),
        ({"temperature": -1.0}, r"expected a finite temperature of 0 \(greedy\) or more, got -1"),
        ({"temperature": float("inf")}, "expected a finite temperature"),
        ({"temperature": 1.0, "top_p": 0.0}, "expected top_p above 0 and up to 1, got 0"),
        ({"num_return_sequences": 2}, "expected a temperature above 0 with 2 sequences"),
        ({"top_p": 0.9}, "expected a temperature above 0 with top_p=0.9"),
    ],
)
def test_settings_refuse_what_would_have_no_effect(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**{"max_new_tokens": 8, **values})


def test_settings_become_options_and_words() -> None:
    greedy = Settings(8)
    assert greedy.options() == {"do_sample": False, "max_new_tokens": 8}
    assert greedy.describe() == "greedy"
    assert greedy.has_one_row
    sampled = Settings(8, 0.7, top_p=0.9, batch_size=4, num_return_sequences=2)
    assert sampled.options(pad_token_id=3) == {
        "do_sample": True,
        "max_new_tokens": 8,
        "pad_token_id": 3,
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 0.9,
        "num_return_sequences": 2,
    }
    expected = "sampling at temperature 0.7, top-p 0.9, batches of 4, 2 sequences a prompt"
    assert sampled.describe() == expected
    assert not sampled.has_one_row


def tiny_loaded(seed: int = 4) -> LoadedModel:
    return LoadedModel(tiny_model("llama", seed=seed), LetterTokenizer(), "folder/tiny")


def test_texts_that_come_again_in_every_pass_are_counted() -> None:
    def of(num_pass: int, *rows: list[int]) -> Result:
        answer = Answer([*rows], 1.0, 1, 1, 0)
        prompts = [Prompt(str(len(rows)), "all", "x")] * len(rows)
        return Result(prompts, num_pass, 7, {"plain": answer}, False)

    results = [of(0, [1, 2]), of(0, [3], [4]), of(1, [1, 2]), of(1, [3], [5])]
    assert share_repeated(results[:2], "plain") is None
    assert share_repeated(results, "plain") == pytest.approx(2 / 3)
    assert share_repeated([*results, of(2, [1]), of(2, [3], [4])], "plain") == pytest.approx(1 / 3)
    # Interrupted in its second pass; the same prompt twice.
    assert share_repeated(results[:3], "plain") == 1.0
    assert share_repeated([*results[:1] * 2, of(1, [1, 2]), of(1, [7])], "plain") == 0.5
    for keep, column in ((False, ["67%"]), (True, ["", "67%"])):
        sheet = table(results, ["plain"], Settings(4), keep=keep)
        assert sheet.headings[-1] == "same each pass"
        assert [row[-1] for row in sheet.sections[-1]] == column
    assert "same each pass" not in table(results[:2], ["plain"], Settings(4)).headings
    assert (
        as_json(results, ["plain"], {})["summary"][OVERALL]["plain"]["share_repeated"] == 0.666667
    )


def test_batches_keep_the_order_and_are_padded_on_the_left() -> None:
    prompts = [Prompt(str(i), "a", text) for i, text in enumerate(["AB", "A", "ABC"])]
    assert in_batches(prompts, 2) == [prompts[:2], prompts[2:]]
    batch = encode_batch(tiny_loaded(), ["AB", "A", "ABC"], pad_token_id=9)
    assert batch["input_ids"].tolist() == [[9, 67, 68], [9, 9, 67], [67, 68, 69]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1], [0, 0, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    ("of_tokenizer", "of_model", "eos", "expected"),
    [
        *((5, 6, 7, 5), (0, 6, 7, 0), (None, 6, 7, 6)),
        *((None, None, 7, 7), (None, None, [8, 7], 8), (None, None, None, 0)),
    ],
)
def test_padding_falls_back_to_eos(
    of_tokenizer: int | None, of_model: int | None, eos: Any, expected: int
) -> None:
    defaults = SimpleNamespace(pad_token_id=of_model, eos_token_id=eos)
    model = SimpleNamespace(generation_config=defaults)
    loaded = LoadedModel(model, SimpleNamespace(pad_token_id=of_tokenizer), "x")
    assert find_pad_token_id(loaded) == expected


@pytest.mark.parametrize("eos", [96, [95, 96]])
def test_rows_end_with_their_eos_and_hold_no_padding(eos: Any) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=eos))
    sequences = torch.tensor([[0, 7, 1, 96, 96, 96], [7, 7, 1, 2, 96, 0], [7, 7, 1, 2, 3, 4]])
    assert new_rows(model, sequences, 2) == [[1, 96], [1, 2, 96], [1, 2, 3, 4]]
    model.generation_config.eos_token_id = None
    assert new_rows(model, sequences, 2)[0] == [1, 96, 96, 96]


def test_all_methods_run_and_agree(tmp_path: Path) -> None:
    prompts = [Prompt(str(i), "ab"[i % 2], text) for i, text in enumerate(["abcabc", "xy", "zzz"])]
    results: list[Result] = []
    order: list[str] = []
    run_methods(
        tiny_loaded(),
        prompts,
        list(METHODS),
        Settings(20),
        num_passes=2,
        config=Config(max_draft_tokens=6),
        models=DraftModels(tiny_model("qwen3"), num_layers=1),
        results=results,
        on_answer=lambda name, answer: order.append(name),
    )
    assert len(results) == 6
    assert order[:: len(METHODS)][:2] == ["plain", "prompt_lookup"]  # another one begins each time
    for each in results:
        texts = {tuple(answer.rows[0]) for answer in each.answers.values()}
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


def test_each_way_of_verifying_is_a_method_that_verifies_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verifications = {
        name: info.verification for name, info in METHODS.items() if info.verification is not None
    }
    assert verifications == {
        f"lade_{verification}": verification
        for verification in VERIFICATIONS
        if verification != "plain"
    }
    taken = []

    def generate(*args: Any, config: Config, **options: Any) -> Any:
        taken.append((config.verification, config.max_draft_tokens))
        return lade.generate(*args, config=config, **options)

    monkeypatch.setattr(methods, "generate", generate)
    config = Config(max_draft_tokens=4, verification="plain")
    assert warm_up_methods(tiny_loaded(), [*verifications], Settings(4), config) == {}
    assert taken == [(verification, 4) for verification in verifications.values()]


def test_a_way_that_the_model_cannot_do_is_left_out() -> None:
    loaded = tiny_loaded()
    loaded.model.config.alibi = True  # so that a rule says no to trees
    names = ["plain", "lade", "lade_tree", "lade_chain"]
    left_out = warm_up_methods(loaded, names, Settings(4))
    assert list(left_out) == ["lade_tree"]
    assert "cannot verify drafts by 'tree': its ALiBi bias" in left_out["lade_tree"]
    with pytest.raises(UnsupportedModelError, match="by 'tree'"):
        warm_up_methods(loaded, ["lade_tree"], Settings(4))
    with pytest.raises(UnsupportedModelError, match="by 'tree'"):
        warm_up_methods(loaded, ["plain", "lade"], Settings(4), Config(verification="tree"))


PROMPTS = [
    Prompt(str(i), "a", text) for i, text in enumerate(["abcabc", "xy", "zzz", "q", "hello"])
]


def run_all(
    names: list[str],
    settings: Settings,
    num_passes: int = 1,
    keep: bool = False,
    max_draft_tokens: int = 6,
) -> list[Result]:
    results: list[Result] = []
    config = Config(max_draft_tokens=max_draft_tokens)
    run_methods(
        *(tiny_loaded(), PROMPTS, names, settings),
        num_passes=num_passes,
        keep=keep,
        config=config,
        results=results,
    )
    return results


def rows_of(results: list[Result], method: str, num_pass: int = 0) -> list[list[int]]:
    return [row for r in results if r.num_pass == num_pass for row in r.answers[method].rows]


def test_prompts_get_the_same_greedy_text_alone_and_in_batches() -> None:
    alone = run_all(["plain"], Settings(12))
    batched = run_all(["plain"], Settings(12, batch_size=2))
    assert [len(each.prompts) for each in batched] == [2, 2, 1]
    assert rows_of(batched, "plain") == rows_of(alone, "plain")
    assert sum(r.num_prompt_tokens for r in batched) == sum(len(p.text) for p in PROMPTS)
    assert summarise(batched, "plain").mean_accepted_tokens == 1.0


def test_samples_follow_the_seed() -> None:
    settings = Settings(12, temperature=1.0, batch_size=2, num_return_sequences=3)
    results = run_all(["plain"], settings, num_passes=2)
    rows = rows_of(results, "plain")
    assert len(rows) == 3 * len(PROMPTS)
    assert len({tuple(row) for row in rows}) > len(PROMPTS)
    assert rows_of(results, "plain", num_pass=1) == rows
    assert rows_of(run_all(["plain"], replace(settings, seed=5)), "plain") != rows
    # A sampled text, too, is counted by what each row needed.
    assert summarise(results, "plain").mean_accepted_tokens == 1.0


@pytest.mark.parametrize(
    "settings",
    [
        Settings(16, batch_size=3),
        Settings(16, temperature=0.5),
        Settings(16, temperature=0.8, num_return_sequences=4),
        Settings(16, temperature=0.8, top_p=0.9, batch_size=2, num_return_sequences=2, seed=3),
    ],
    ids=Settings.describe,
)
def test_lade_makes_the_texts_of_plain_with_all_settings(settings: Settings) -> None:
    results = run_all(["plain", "lade", "lade_fresh"], settings)
    for name in ("lade", "lade_fresh"):
        assert rows_of(results, name) == rows_of(results, "plain")
        assert summarise(results, name).mean_accepted_tokens >= 1.0
        for each in results:
            answer = each.answers[name]
            assert answer.stats is not None
            assert answer.num_tokens == answer.stats.num_tokens
            own_count = answer.stats.mean_accepted_tokens
            assert summarise([each], name).mean_accepted_tokens == pytest.approx(own_count)


def test_kept_pools_know_the_answers_of_the_pass_before(tmp_path: Path) -> None:
    names = ["plain", "lade", "lade_fresh"]
    kept, anew = (run_all(names, Settings(24), num_passes=2, keep=keep) for keep in (True, False))

    def mat(results: list[Result], method: str, num_pass: int) -> float:
        part = [each for each in results if each.num_pass == num_pass]
        return summarise(part, method).mean_accepted_tokens

    assert mat(kept, "lade", 1) > 2 > mat(kept, "lade", 0)
    assert mat(kept, "lade_fresh", 1) == mat(kept, "lade_fresh", 0)
    assert mat(anew, "lade", 1) == mat(anew, "lade", 0) == mat(kept, "lade", 0)
    assert rows_of(kept, "lade", 1) == rows_of(kept, "plain", 0)
    sheet = table(kept, names, Settings(24), keep=True)
    labels = [row[2:4] for row in sheet.sections[0]]
    assert labels == [(name, f"pass {number}") for name in names for number in (1, 2)]
    path = tmp_path / "kept.json"
    described = {"model": "tiny", "dtype": "float64", "device": "cpu", "threads": 1}
    described |= {"max_new_tokens": 24, "keep": True}
    write_json(path, as_json(kept, names, described))
    of_lade = json.loads(path.read_text())["summary"][OVERALL]["lade"]
    assert [len(of_lade[name]) for name in ("each_pass", "speedup_of_each_pass")] == [2, 2]
    first, second = (of_pass["mean_accepted_tokens"] for of_pass in of_lade["each_pass"])
    assert second > first
    markdown = table_of_files([path]).as_markdown()
    assert re.search(r"\| kept \| greedy \| \d+ prompts? \| lade, pass 2 \|", markdown)
    assert len(plots.plot_speedups(tmp_path, "kept", json.loads(path.read_text())["summary"])) == 2
    assert "each_pass" not in as_json(anew, names, {})["summary"][OVERALL]["lade"]


@pytest.mark.parametrize("max_draft_tokens", [0, 3])
def test_one_budget_holds_for_all_methods(max_draft_tokens: int) -> None:
    names = ["plain", "prompt_lookup", "lade"]
    results = run_all(names, Settings(24), max_draft_tokens=max_draft_tokens)
    for name in names[1:]:
        assert rows_of(results, name) == rows_of(results, "plain")
        most = max(
            each.answers[name].num_draft_tokens / max(1, each.answers[name].num_steps)
            for each in results
        )
        assert most <= max_draft_tokens
        assert (most > 0) == (max_draft_tokens > 0)


def test_sheets_repeat_no_word_in_a_terminal_and_all_in_markdown() -> None:
    rows = [[("a", "x|y", "1"), ("a", "x|y", "2"), ("b", "x|y", "3")]]
    sheet = Sheet("Numbers", ("kind", "name", "n"), 2, rows, "one\ntwo")
    console = Console(width=16)
    with console.capture() as capture:
        console.print(sheet)
    shown = [line.strip() for line in capture.get().splitlines()]
    rows_shown = [line.split() for line in shown if line.startswith(("a", "b", "x|y"))]
    assert rows_shown == [["a"], ["x|y", "1"], ["x|y", "2"], ["b"], ["x|y", "3"]]
    assert sheet.as_markdown() == (
        "**Numbers**\n\n| kind | name | n |\n| --- | --- | ---: |\n"
        "| a | x\\|y | 1 |\n| a | x\\|y | 2 |\n| b | x\\|y | 3 |\n\none  \ntwo\n"
    )


def drawn(sheet: Sheet, width: int, **options: Any) -> list[str]:
    """Return the lines of a sheet on a terminal."""
    console = Console(width=width, **options)
    with console.capture() as capture:
        console.print(sheet, crop=False)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_sheets_fold_headings_and_leave_out_what_is_empty() -> None:
    rows = [[("a", "same", "10.5", "", "7"), ("bcd", "differs", "9", "", "")]]
    sheet = Sheet("Numbers", ("name", "text", "draft tokens/step", "none", "speed-up"), 1, rows)
    lines = drawn(sheet, 12)  # narrower than the table, which stays whole
    assert lines == [
        "Numbers",
        "              draft",
        "             tokens speed-",
        "name text     /step     up",
        "─" * 26,
        "a    same      10.5      7",
        "bcd  differs      9",
    ]


def test_sentences_of_a_sheet_stand_under_their_row() -> None:
    rows = [[("a", "fine", "", ""), ("b", "wrong", "one two three four", "five")]]
    sheet = Sheet(
        "Words", ("name", "text", "what", "why"), 1, rows, num_notes=2, warn_of=("wrong",)
    )
    assert drawn(sheet, 16)[3:] == [
        "a    fine",
        "b    wrong",
        "    one two",
        "    three four",
        "    five",
    ]
    coloured = drawn(sheet, 16, force_terminal=True, color_system="standard")
    assert [line for line in coloured if "\x1b[31m" in line] == ["\x1b[31mb    wrong\x1b[0m"]
    assert "| b | wrong | one two three four | five |" in sheet.as_markdown()


def test_tables_of_all_methods_fit_80_columns() -> None:
    stats = DecodeStats(num_steps=4, draft_sec=0.5)
    stats.count_row_step(Step([1, 2], 40, 1, is_corrected=True))
    answer = Answer([[1] * 8], 0.01, 4, 4, 8, stats)
    # Beside several passes, the longest name takes two columns more.
    excluded = ("rival", "pool+first_layers")
    names = [name for name in METHODS if not name.startswith(excluded)]
    for num_passes, keep in ((1, False), (2, False), (2, True)):
        results = [
            Result([Prompt("1", "a", "x")], i, 9, dict.fromkeys(names, answer), False)
            for i in range(num_passes)
        ]
        lines = drawn(table(results, names, Settings(8), keep=keep), 200)
        assert max(map(len, lines)) <= 80


def test_plots_are_written_as_png_and_svg(tmp_path: Path) -> None:
    results = [
        result(0, "a", False, plain=1.0, lade=0.5, lade_fresh=0.7),
        result(0, "b", True, plain=3.0, lade=0.5, lade_fresh=0.9),
    ]
    summary = as_json(results, ["plain", "lade", "lade_fresh"], {})["summary"]
    paths = plots.plot_speedups(tmp_path, "speedup", summary)
    assert [path.name for path in paths] == ["speedup.png", "speedup.svg"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in paths[1].read_text()
    made = [
        Point(group, "lade", nodes, num_pass, 1, 40, 2.0 + nodes / 100, 3.0, 0.5, 0.5, 0.001)
        for group in (OVERALL, LOOPS, "a")
        for nodes in (16, 8)
        for num_pass in (0, 1)
    ]
    assert all(path.stat().st_size > 1000 for path in plots.plot_curves(tmp_path, "mat", made))
    without_plain = as_json([result(0, "a", False, lade=1.0)], ["lade"], {})["summary"]
    with pytest.raises(ValueError, match="expected results of plain and another method"):
        plots.plot_speedups(tmp_path, "none", without_plain)


def test_plots_name_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r'pip install "lade-decoding\[plots\]"'):
        plots.check_folder(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_prompt_lookup_samples_one_sequence() -> None:
    results = run_all(["prompt_lookup"], Settings(12, temperature=0.7))
    assert all(0 < len(row) <= 12 for row in rows_of(results, "prompt_lookup"))


def test_a_batch_with_one_looping_row_is_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def looping(model: Any, inputs: Any, options: Any) -> Answer:
        rows = [
            [1, 2, 3] * 8 if length == 3 else [4, 5] for length in inputs["attention_mask"].sum(1)
        ]
        return Answer(rows, 1.0, 1, len(rows), 0)

    monkeypatch.setitem(METHODS, "plain", MethodInfo(lambda config: looping, "x"))
    results = run_all(["plain"], Settings(12, batch_size=2))  # "zzz" alone has three letters
    assert [each.loops for each in results] == [False, True, False]


def test_result_files_of_all_versions_are_shown_as_one_table(tmp_path: Path) -> None:
    settings = Settings(12, temperature=0.6, batch_size=2)
    new = tmp_path / "sampled.json"
    described = {"model": "tiny", "dtype": "float64", "device": "cpu", "threads": 1}
    described |= {"temperature": 0.6, "batch_size": 2, "max_new_tokens": 12}
    write_json(new, as_json(run_all(["plain"], settings), ["plain"], described))
    old = Path(__file__).parent / "smollm2_cpu_float32.json"  # knew greedy decoding alone
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table_of_files([old, new]))
    shown = capture.get()
    assert "sampling at temperature 0.6, batches of 2" in shown
    assert shown.count("greedy") == 1
    assert "prompt_lookup" in shown
    assert "1.40x" in shown  # lade's, overall, in the older file
    assert "smollm2_cpu_float32: smollm2-135m-instruct, float32" in shown
    for content in ("{", "[]", '{"timings": []}', '{"summary": {"overall": {"plain": {}}}}'):
        new.write_text(content)
        with pytest.raises(ValueError, match=r"expected sampled\.json to be a result file"):
            table_of_files([new])


def peak_of(peak_bytes: int, resident_bytes: int) -> Peak:
    return Peak(peak_bytes, resident_bytes, 2 * peak_bytes, False, 100, 1)


def test_memory_summary_takes_medians_and_holds_them_against_plain() -> None:
    peaks = {"plain": [(1000, 900), (1200, 1000), (900, 890)], "lade": [(1500, 1000)] * 3}
    runs = [
        MemoryRun(name, i, peak_of(*pair)) for name in peaks for i, pair in enumerate(peaks[name])
    ]
    summary = memory.summarise(runs, "lade")
    assert summary.peak_bytes == 1500
    assert summary.peak_ratio == 1.5  # of 1500 and 1000
    assert summary.growth_ratio == 5.0  # of 500 and 100, the median of 100, 200 and 10
    assert memory.summarise(runs[3:], "lade").peak_ratio is None
    still = [MemoryRun("plain", 0, peak_of(900, 900))]
    assert memory.summarise(still, "plain").growth_ratio is None
    content = memory.as_json(runs, ["plain", "lade", "lade_fresh"], {"repeats": 3})
    assert list(content["summary"]) == ["plain", "lade"]
    assert content["runs"][4]["growth_bytes"] == 500


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    """What a process is asked to do, with a saved tiny model."""
    path = tmp_path_factory.mktemp("tiny")
    byte_tokenizer().save_pretrained(path)
    tiny_model("llama", dtype=torch.float32, vocab_size=256).save_pretrained(path)
    settings = Settings(8, temperature=0.5, batch_size=2)
    texts = ["abcabc", "x", "hello"]
    return Work("plain", str(path), "cpu", "float32", 1, texts, settings, None)


def test_work_travels_as_json(work: Work) -> None:
    assert Work.from_json(work.as_json()) == work


def test_a_process_that_measures_plain_holds_nothing_of_lade(work: Work) -> None:
    program = (
        "import sys\nfrom lade.bench.peak import main\nmain()\n"
        "print([n for n in ('numba', 'llvmlite', 'ngram_pool') if n in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=work.as_json(), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    assert messages[:-1] == [{"batch": True}] * 2
    peak = Peak(**messages[-1]["peak"])
    assert 10**8 < peak.resident_bytes <= peak.peak_bytes <= peak.life_peak_bytes
    assert peak.growth_bytes < peak.resident_bytes
    assert 3 <= peak.num_tokens <= 24
    assert peak.threads == 1
    assert done.stderr.strip().endswith("[]")  # printed to standard output, and kept out of it


def test_a_process_that_fails_says_why(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LadeError, match=r"measuring plain failed: the model .* not be loaded"):
        measure_in_process(replace(work, model="/does/not/exist"), lambda: None)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(LadeError, match="measuring plain failed: the process ended with status 1"):
        measure_in_process(work, lambda: None)


def test_an_interruption_ends_the_process(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []

    class Watched(subprocess.Popen[str]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Watched)
    long = replace(work, texts=["x"] * 3000)
    with pytest.raises(KeyboardInterrupt):
        measure_in_process(long, interrupt)
    assert [process.returncode for process in started] == [-9]


def test_threads_that_share_a_pool_lose_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lade.bench.pool_threads._NUM_STEPS", 256)
    timing = time_threads(64, max_draft_tokens=8)
    assert timing.num_lost == 0
    assert 0 < timing.draft_us <= timing.draft_p99_us <= timing.longest_us


@pytest.mark.parametrize("sharing", ["none", "all"])
def test_a_proposers_steps_are_timed(sharing: Sharing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lade.bench.pool_requests._NUM_STEPS", 20)
    monkeypatch.setattr("lade.bench.pool_requests._NUM_SHARED", 20_000)
    likely = time_requests(4, sharing, 8)
    whole = time_requests(4, sharing, 8, min_probability=0.0)
    assert 0 < likely.step_ms <= likely.step_p95_ms
    assert likely.drafted < whole.drafted <= 8
    assert (likely.min_probability, whole.min_probability) == (PoolOptions().min_probability, 0.0)


def test_pool_timing_measures_a_full_pool() -> None:
    timing = time_pool(40_000, max_draft_tokens=16)
    assert timing.num_tokens == 40_000
    assert 0 < timing.nodes_per_draft <= 16
    assert 0 < timing.bytes_per_token <= 64
    assert 0 < timing.draft_us < timing.draft_p95_us
    assert timing.load_ms > 0
    assert timing.save_ms > 0


def test_transformers_own_assisted_decoding_is_counted_as_lades_is() -> None:
    model = tiny_model("llama", vocab_size=97)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 5, 6]])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    model.generation_config.eos_token_id = None
    models = DraftModels(tiny_model("llama", vocab_size=97), num_layers=1)  # always right
    models.assistant.generation_config.update(
        num_assistant_tokens=3, assistant_confidence_threshold=0.0, eos_token_id=None
    )
    options = Settings(17).options()
    plain = METHODS["plain"].make(None)(model, inputs, options)
    assisted = make_method("hf_assistant", None, None, models)(model, inputs, options)
    stats = assisted.stats
    assert stats is not None
    assert assisted.rows == plain.rows
    assert assisted.num_steps == 4  # the prompt's forward has a draft, too, and begins with four
    assert stats.num_draft_tokens <= 3 * 4
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    assert stats.num_corrected_row_steps == 0
    assert 0 < stats.forward_sec + stats.prefill_sec + stats.draft_sec <= assisted.sec * 1.001
    exiting = make_method("hf_early_exit", None, None, models)(model, inputs, options)
    assert exiting.rows == plain.rows
    assert exiting.stats is not None
    assert exiting.stats.num_row_steps == exiting.num_steps
    assert exiting.stats.num_corrected_row_steps > 0
    assert model.config.num_hidden_layers == 3  # as before


def test_tables_tell_where_time_goes_and_what_sources_did() -> None:
    stats = DecodeStats(num_steps=4, draft_sec=0.5, forward_sec=0.2)
    stats.sources = {"pool": SourceStats(4, 8, 3, 0.01), "assistant": SourceStats(2, 10, 6, 0.1)}
    use = Utilisation(2.0, 3.0, None)
    answer = Answer([[1] * 8], 1.0, 4, 4, 8, stats, use)
    results = [result(0, "a", False, plain=1.0)] * 2
    results = [each._replace(answers={**each.answers, "lade": answer}) for each in results]
    text = time_table(results, ["plain", "lade"]).as_markdown()
    assert "| plain |  |  |  |  |" in text
    assert "| lade | 125.000 | 50.000 | 1.50 |  |" in text
    sheet = source_table(results, ["plain", "lade"])
    assert sheet is not None
    assert "| lade | assistant | 4 | 20 | 12 | 60% | 50.000 | 0.20 |" in sheet.as_markdown()
    assert source_table(results, ["plain"]) is None
    content = as_json(results, ["plain", "lade"], {})
    entry = content["summary"][OVERALL]["lade"]
    assert entry["sources"]["pool"]["num_accepted_tokens"] == 6
    assert entry["busy_cores"] == 1.5
    assert entry["target_sec_per_step"] == 0.05
    assert content["prompts"][0]["lade"]["forward_sec"] == 0.2
    assert "sources" not in content["summary"][OVERALL]["plain"]


def test_utilisation_is_cpu_time_and_what_a_device_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    with measuring(torch.device("cpu")) as meter:
        sum(range(10**6))
    assert meter.utilisation is not None
    assert 0 < meter.utilisation.cpu_sec < 20 * meter.utilisation.sec
    assert meter.utilisation.device_share is None
    assert utilisation.why_no_device_share(torch.device("cpu")) is None
    known = [Utilisation(1.0, 2.0, 0.5), Utilisation(3.0, 3.0, 1.0)]
    assert utilisation.total([*known]) == Utilisation(4.0, 5.0, 0.875)
    assert utilisation.total([*known, Utilisation(4.0, 1.0, None)]) == Utilisation(8.0, 6.0, None)
    assert utilisation.total([*known, None]) is None

    def missing(device: Any) -> int:
        raise ModuleNotFoundError("pynvml does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    device = torch.device("cuda")
    assert "nvidia-ml-py" in (utilisation.why_no_device_share(device) or "")
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 40)
    assert utilisation.why_no_device_share(device) is None
    with measuring(device) as meter:
        threading.Event().wait(0.2)
    assert meter.utilisation is not None
    assert meter.utilisation.device_share == 0.4
