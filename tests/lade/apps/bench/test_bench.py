"""How `lade bench` and `benchmarks run` count: sums, medians, batches, loops; how tables are drawn.

Private, since no command prints chosen figures. Commands are tested in
`tests/lade/apps/cli/test_measuring.py`, and `run` with all settings in `tests/benchmarks`.
"""

from typing import Any

import pytest
import torch

from benchmarks.methods import METHODS, Given
from benchmarks.run import BenchSettings, median_of_passes, run_methods
from lade.apps.bench.methods import Answer
from lade.apps.bench.prompts import Prompt, read_prompts
from lade.apps.bench.report import LOOPS, OVERALL, compared, groups
from lade.apps.bench.run import MIXED, Result, summarise
from lade.config import Config
from lade.models.loading import LoadedModel
from lade.stats import DecodeStats, ends_in_loop
from tests.lade.tiny import tiny_model


class LetterTokenizer:
    """One token a letter; enough to run a benchmark on a tiny model."""

    chat_template = None
    pad_token_id = None

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        ids = torch.tensor([[2 + ord(letter) % 90 for letter in text]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def tiny_loaded(seed: int = 4) -> LoadedModel:
    return LoadedModel(tiny_model("llama", seed=seed), LetterTokenizer(), "folder/tiny")


PROMPTS = [
    Prompt(str(i), "a", text) for i, text in enumerate(["abcabc", "xy", "zzz", "q", "hello"])
]


def result(num_pass: int, category: str, loops: bool, **secs: float) -> Result:
    stats = DecodeStats(2, 2, 6, num_committed_tokens=4, num_prefills=1)
    answers = {name: Answer([[1, 2, 3, 4, 5]], sec, stats) for name, sec in secs.items()}
    return Result([Prompt("1", category, "x")], 10, answers, loops, num_pass)


def test_prompt_files_may_be_json_lines_or_text(tmp_path: Any) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(
        '\ufeff{"question_id": 81, "category": "writing", "turns": ["first", "second"]}\r\n'
        '\n{"prompt": "one\u2028line"}\nplain line\n'.encode()
    )
    assert read_prompts(path) == [
        Prompt("81", "writing", "first", ("second",)),
        Prompt("3", "all", "one\u2028line"),
        Prompt("4", "all", "plain line"),
    ]


def test_loops_at_the_end_are_recognised() -> None:
    assert all(map(ends_in_loop, ([1] * 24, [9, 8, 7] + [1, 2, 3] * 8, [*range(32)] * 3)))
    # The last one repeats a list that is too long for a loop.
    assert not any(map(ends_in_loop, ([1] * 23, [1, 2, 3] * 8 + [9], [*range(33)] * 4)))


def test_summaries_sum_times_first_and_take_the_median_of_passes() -> None:
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
    summary = median_of_passes(parts[OVERALL], "lade")
    assert summary.speedup == 2.0  # of 4.0, 1.0 and 2.0
    assert summary.tokens_per_sec == 5.0
    assert summary.mean_accepted_tokens == 2.0  # four tokens in two steps; the fifth is prefill's
    assert summary.draft_tokens_per_step == 3.0
    assert summary.same_text == 1.0
    assert summarise(parts[LOOPS], "lade").speedup == 9.0
    assert summarise([result(0, "a", False, lade=1.0)], "lade").speedup is None


def test_summaries_of_batches_count_rows() -> None:
    rows = [[1, 2, 3, 4, 5], [1, 2, 9]]
    plain = Answer(rows, 2.0, DecodeStats(4, 6, 0, num_committed_tokens=6))
    # The rows take two steps and one; the first has plain's text.
    lade = Answer([rows[0], [1, 2, 8]], 1.0, DecodeStats(2, 3, 9, num_committed_tokens=6))
    prompts = [Prompt("1", "a", "x"), Prompt("2", "b", "y")]
    results = [Result(prompts, 7, {"plain": plain, "lade": lade}, False)]
    assert list(groups(results)) == [MIXED, OVERALL]
    assert summarise(results, "plain").mean_accepted_tokens == 1.0  # and not 1.5
    summary = summarise(results, "lade")
    assert (summary.num_prompts, summary.speedup, summary.same_text) == (2, 2.0, 0.5)
    assert summary.mean_accepted_tokens == 2.0  # and not 3.0
    assert summary.draft_tokens_per_step == 3.0  # and not 4.5


@pytest.mark.parametrize(
    "settings",
    [
        BenchSettings(16, batch_size=3),
        BenchSettings(16, 0.8, top_p=0.9, batch_size=2, num_return_sequences=2, seed=3, passes=2),
    ],
    ids=BenchSettings.describe,
)
def test_all_methods_make_the_texts_of_plain_in_batches_and_passes(settings: Any) -> None:
    results: list[Result] = []
    methods = {name: METHODS[name] for name in ("plain", "lade", "lade_fresh")}
    given = Given(Config(max_draft_tokens=6))
    run_methods(*(tiny_loaded(), PROMPTS, methods, settings, given), results=results)
    assert len(results) == settings.passes * -(-len(PROMPTS) // settings.batch_size)
    assert sum(r.num_prompt_tokens for r in results) == settings.passes * 17
    for name in methods:
        for each in results:
            assert each.answers[name].rows == each.answers["plain"].rows
    assert summarise(results, "plain").mean_accepted_tokens == 1.0
    assert summarise(results, "lade").mean_accepted_tokens > 1.0
    first, last = (results[0].answers, results[-(len(results) // settings.passes)].answers)
    assert first["lade"].rows == last["lade"].rows  # the same seeds in each pass


# --- what is shown ------------------------------------------------------------------------------


def test_sides_are_held_against_plain() -> None:
    texts = {"plain": ([1, 2, 3], 3.0), "lade": ([1, 2, 3], 1.5), "x": ([1, 2, 4], 6.0)}
    stats = DecodeStats()
    plain, lade, other = compared(
        {name: Answer([row], sec, stats) for name, (row, sec) in texts.items()}
    )
    assert plain == "plain  3 tokens in 3.0 s, 1.0 tokens a second"
    assert lade == "lade   3 tokens in 1.5 s, 2.0 tokens a second, 2.00x plain, same text"
    assert other == "x      3 tokens in 6.0 s, 0.5 tokens a second, 0.50x plain, differs at token 3"
