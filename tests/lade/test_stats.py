"""What statistics say of themselves."""

import doctest
import sys

from lade import DecodeStats, Step
from lade.stats import WidthStats


def test_the_example_holds() -> None:
    results = doctest.testmod(sys.modules[DecodeStats.__module__])
    assert results.attempted > 0
    assert results.failed == 0


def test_a_rate_is_that_of_prefills_and_steps() -> None:
    stats = DecodeStats(num_prefills=2, prefill_sec=1.0, forward_sec=2.0, draft_sec=0.5)
    stats.verify_sec = stats.commit_sec = 0.25
    stats.count_row_step(Step([1, 2, 3, 4], 8, 3))
    assert stats.sec == 4.0
    assert stats.tokens_per_sec == 6 / 4.0  # those of the prefills included
    assert stats.as_dict()["tokens_per_sec"] == 1.5
    assert DecodeStats().tokens_per_sec == 0.0


def test_a_summary_is_one_line_without_what_there_is_not() -> None:
    stats = DecodeStats(num_prefills=1, prefill_sec=0.5)
    assert str(stats) == stats.summary() == "1 token in 0 steps, 2.0 tokens/s"
    stats.num_steps = 1
    stats.count_row_step(Step([7], 0, 0))
    assert str(stats) == "2 tokens in 1 step, 4.0 tokens/s, MAT 1.00, 0.0 draft tokens/step"
    stats.count_row_step(Step([1, 2, 3], 4, 2))
    assert str(stats).endswith("MAT 2.00, 2.0 draft tokens/step, 50% accepted")
    assert str(DecodeStats()) == "0 tokens in 0 steps"


def test_stats_count_and_add_up() -> None:
    stats = DecodeStats(num_prefills=1)
    stats.num_steps = 1  # of two rows
    stats.count_row_step(Step([1, 2, 3], num_draft_tokens=8, num_accepted=2, row=0))
    stats.count_row_step(Step([4], num_draft_tokens=4, num_accepted=0, row=1))
    assert (stats.num_row_steps, stats.num_tokens) == (2, 5)
    assert stats.mean_accepted_tokens == 2.0  # not 2.5: the prefill's token is no step's
    assert stats.acceptance_rate == 2 / 12
    assert stats.draft_tokens_per_step == 6.0
    assert stats.accepted_by_depth == [1, 1]
    other = DecodeStats(num_prefills=1, forward_sec=3.0, draft_sec=1.0)
    other.num_steps = 1
    other.count_row_step(Step([1, 2, 3, 4], num_draft_tokens=3, num_accepted=3))
    stats.add(other)
    assert stats.accepted_by_depth == [2, 2, 1]
    assert (stats.num_steps, stats.num_prefills, stats.num_tokens) == (2, 2, 10)
    assert stats.overhead == 0.25
    assert other.accepted_by_depth == [1, 1, 1]
    assert stats.as_dict()["mean_accepted_tokens"] == 8 / 3
    assert DecodeStats().mean_accepted_tokens == 0.0


def test_sums_of_statistics_have_what_was_expected_of_each_number_of_draft_tokens() -> None:
    total = DecodeStats()
    for num_steps in (1, 2):
        widths = {0: WidthStats(num_steps, 3.0, 0.5), 7: WidthStats(0, 6.0, 0.75)}
        total.add(DecodeStats(widths=widths))
    assert total.widths == {0: WidthStats(3, 6.0, 1.0), 7: WidthStats(0, 12.0, 1.5)}
    assert total.widths[7].tokens_per_sec == 8.0
    assert total.as_dict()["widths"][7]["sec"] == 1.5
