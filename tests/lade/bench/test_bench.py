"""`lade bench`: what it reads, runs, sums up and writes."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from lade.bench import plots
from lade.bench.baselines import Answer, Given, MethodInfo, new_rows
from lade.bench.batches import encode_batch, find_pad_token_id, in_batches
from lade.bench.methods import METHODS
from lade.bench.prompts import Prompt, read_prompts
from lade.bench.report import LOOPS, OVERALL, as_json, groups, source_table, table
from lade.bench.run import MIXED, Result, run_methods, summarise
from lade.bench.settings import BenchSettings
from lade.bench.tables import Sheet
from lade.config import Config
from lade.errors import MissingExtraError
from lade.models.loading import LoadedModel
from lade.stats import DecodeStats, SourceStats, Step, ends_in_loop
from tests.grids import thinned
from tests.lade.tiny import tiny_model


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
    assert plain[-4:] == (None,) * 4
    sheet = table(results, ["plain", "lade"], BenchSettings(8))
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
    ],
)
def test_settings_refuse_what_would_have_no_effect(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchSettings(**{"max_new_tokens": 8, **values})


def test_settings_become_options_and_words() -> None:
    greedy = BenchSettings(8)
    assert greedy.options() == {"do_sample": False, "max_new_tokens": 8}
    assert greedy.describe() == "greedy"
    sampled = BenchSettings(8, 0.7, top_p=0.9, batch_size=4, num_return_sequences=2)
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


def tiny_loaded(seed: int = 4) -> LoadedModel:
    return LoadedModel(tiny_model("llama", seed=seed), LetterTokenizer(), "folder/tiny")


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


PROMPTS = [
    Prompt(str(i), "a", text) for i, text in enumerate(["abcabc", "xy", "zzz", "q", "hello"])
]


def run_all(names: list[str], settings: BenchSettings, max_draft_tokens: int = 6) -> list[Result]:
    results: list[Result] = []
    methods = {name: METHODS[name] for name in names}
    given = Given(Config(max_draft_tokens=max_draft_tokens))
    run_methods(*(tiny_loaded(), PROMPTS, methods, settings, given), results=results)
    return results


def rows_of(results: list[Result], method: str, num_pass: int = 0) -> list[list[int]]:
    return [row for r in results if r.num_pass == num_pass for row in r.answers[method].rows]


def test_prompts_get_the_same_greedy_text_alone_and_in_batches() -> None:
    alone = run_all(["plain"], BenchSettings(12))
    batched = run_all(["plain"], BenchSettings(12, batch_size=2))
    assert [len(each.prompts) for each in batched] == [2, 2, 1]
    assert rows_of(batched, "plain") == rows_of(alone, "plain")
    assert sum(r.num_prompt_tokens for r in batched) == sum(len(p.text) for p in PROMPTS)
    assert summarise(batched, "plain").mean_accepted_tokens == 1.0


def test_samples_follow_the_seed() -> None:
    settings = BenchSettings(12, temperature=1.0, batch_size=2, num_return_sequences=3, passes=2)
    results = run_all(["plain"], settings)
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
        BenchSettings(16, batch_size=3),
        pytest.param(BenchSettings(16, temperature=0.5), marks=pytest.mark.exhaustive),
        pytest.param(
            BenchSettings(16, temperature=0.8, num_return_sequences=4), marks=pytest.mark.exhaustive
        ),
        BenchSettings(16, temperature=0.8, top_p=0.9, batch_size=2, num_return_sequences=2, seed=3),
    ],
    ids=BenchSettings.describe,
)
def test_lade_makes_the_texts_of_plain_with_all_settings(settings: BenchSettings) -> None:
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


@pytest.mark.parametrize("max_draft_tokens", thinned([0, 3], 3))
def test_one_budget_holds_for_all_methods(max_draft_tokens: int) -> None:
    names = ["plain", "prompt_lookup", "lade"]
    results = run_all(names, BenchSettings(24), max_draft_tokens=max_draft_tokens)
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


def test_tables_of_all_methods_fit_80_columns() -> None:
    stats = DecodeStats(num_steps=4, draft_sec=0.5)
    stats.count_row_step(Step([1, 2], 40, 1, is_corrected=True))
    answer = Answer([[1] * 8], 0.01, 4, 4, 8, stats)
    results = [Result([Prompt("1", "a", "x")], 0, 9, dict.fromkeys(METHODS, answer), False)]
    lines = drawn(table(results, [*METHODS], BenchSettings(8)), 200)
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
    without_plain = as_json([result(0, "a", False, lade=1.0)], ["lade"], {})["summary"]
    with pytest.raises(ValueError, match="expected results of plain and another method"):
        plots.plot_speedups(tmp_path, "none", without_plain)


def test_plots_name_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r'pip install "lade-decoding\[plots\]"'):
        plots.check_folder(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_prompt_lookup_samples_one_sequence() -> None:
    results = run_all(["prompt_lookup"], BenchSettings(12, temperature=0.7))
    assert all(0 < len(row) <= 12 for row in rows_of(results, "prompt_lookup"))


def test_a_batch_with_one_looping_row_is_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def looping(model: Any, inputs: Any, options: Any) -> Answer:
        rows = [
            [1, 2, 3] * 8 if length == 3 else [4, 5] for length in inputs["attention_mask"].sum(1)
        ]
        return Answer(rows, 1.0, 1, len(rows), 0)

    monkeypatch.setitem(METHODS, "plain", MethodInfo(lambda given: looping, "x"))
    results = run_all(["plain"], BenchSettings(12, batch_size=2))  # "zzz" alone has three letters
    assert [each.loops for each in results] == [False, True, False]


def test_tables_tell_what_sources_did() -> None:
    stats = DecodeStats(num_steps=4, draft_sec=0.5, forward_sec=0.2)
    stats.sources = {"pool": SourceStats(4, 8, 3, 0.01), "assistant": SourceStats(2, 10, 6, 0.1)}
    answer = Answer([[1] * 8], 1.0, 4, 4, 8, stats, cpu_sec=1.5)
    results = [result(0, "a", False, plain=1.0)] * 2
    results = [each._replace(answers={**each.answers, "lade": answer}) for each in results]
    sheet = source_table(results, ["plain", "lade"])
    assert sheet is not None
    assert "| lade | assistant | 4 | 20 | 12 | 60% | 0.20 |" in sheet.as_markdown()
    assert source_table(results, ["plain"]) is None
    content = as_json(results, ["plain", "lade"], {})
    entry = content["summary"][OVERALL]["lade"]
    assert entry["sources"]["pool"]["num_accepted_tokens"] == 6
    assert entry["busy_cores"] == 1.5
    assert content["prompts"][0]["lade"]["forward_sec"] == 0.2
    assert "sources" not in content["summary"][OVERALL]["plain"]
    assert content["summary"][OVERALL]["plain"]["busy_cores"] is None
