"""How `lade bench` and `benchmarks run` count: sums, medians, batches, loops; how tables are drawn.

Private, since no command prints chosen figures. Commands are tested in
`tests/lade/apps/cli/test_measuring.py`, and `run` with all settings in `tests/benchmarks`.
"""

from typing import Any

from benchmarks.run import median_of_passes
from lade.apps.bench.methods import Answer
from lade.apps.bench.prompts import Prompt, read_prompts
from lade.apps.bench.report import LOOPS, OVERALL, compared, groups
from lade.apps.bench.run import MIXED, Result, summarise
from lade.stats import DecodeStats, ends_in_loop


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
