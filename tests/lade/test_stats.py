"""What statistics say of themselves."""

import doctest

import lade.stats
from lade.stats import DecodeStats, Step


def test_the_example_holds() -> None:
    results = doctest.testmod(lade.stats)
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


def test_mat_counts_steps_without_a_draft_that_an_acceptance_length_leaves_out() -> None:
    stats = DecodeStats()
    stats.count_row_step(Step([1, 2, 3], 4, 2))
    stats.count_row_step(Step([4], 0, 0))
    assert stats.mean_accepted_tokens == 2.0
    assert 1 + stats.num_accepted_tokens / stats.num_drafted_row_steps == 3.0
