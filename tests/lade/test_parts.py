"""Choice, verification, budget, statistics and configuration, each alone."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from lade.budget import FixedBudget, MeasuredBudget
from lade.choose import GreedyChoice, Prefix, ProcessedGreedyChoice
from lade.config import Config
from lade.stats import DecodeStats, Step
from lade.tree import Tree
from lade.verify import accepted_path
from ngram_pool import Draft

CPU = torch.device("cpu")


def chain_with_branch() -> Tree:
    """Root 1; under it 5 and 6; under 5 another 5; under 6 a 7."""
    token_ids, parents = np.array([5, 6, 5, 7], np.int32), np.array([-1, -1, 0, 1], np.int32)
    depths, probs = np.array([1, 1, 2, 2], np.int32), np.array([0.5, 0.4, 0.3, 0.2])
    return Tree.build(1, Draft(token_ids, parents, depths, probs), CPU)


class FixedChoice:
    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.asked: list[tuple[int, list[int]]] = []

    def look_at(self, logits: torch.Tensor) -> None:
        raise AssertionError("not needed here")

    def token_at(self, node: int, committed: list[int]) -> int:
        self.asked.append((node, list(committed)))
        return self.token_ids[node]


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ([9, 0, 0, 0, 0], [(0, 9)]),  # nothing accepted: the bonus token alone
        ([5, 8, 0, 0, 0], [(0, 5), (1, 8)]),
        ([5, 5, 0, 4, 0], [(0, 5), (1, 5), (3, 4)]),
        ([6, 0, 7, 0, 2], [(0, 6), (2, 7), (4, 2)]),  # not (1, …): that is 5's branch
        ([6, 0, 5, 0, 0], [(0, 6), (2, 5)]),  # 5 is a node, but not under 6
    ],
)
def test_accepted_path_follows_the_choices(
    choices: list[int], expected: list[tuple[int, int]]
) -> None:
    choice = FixedChoice(choices)
    committed = [3, 1]
    for node, token_id in accepted_path(chain_with_branch(), choice, committed):
        committed.append(token_id)
        assert node == choice.asked[-1][0]
    assert [
        (node, token) for (node, _), token in zip(choice.asked, committed[2:], strict=True)
    ] == (expected)
    assert [prefix for _, prefix in choice.asked] == [
        committed[: 2 + i] for i in range(len(expected))
    ]


def test_a_walk_that_stops_asks_for_no_token_more() -> None:
    choice = FixedChoice([5, 5, 0, 4, 0])
    next(accepted_path(chain_with_branch(), choice, [1]))
    assert len(choice.asked) == 1


def test_greedy_choice_takes_the_first_of_equals() -> None:
    logits = torch.zeros(2, 50_000)
    logits[0, [30_000, 40_000]] = 2.0
    for dtype in (torch.float32, torch.bfloat16):
        choice = GreedyChoice()
        choice.look_at(logits.to(dtype))
        assert [choice.token_at(0, []), choice.token_at(1, [])] == [30_000, 0]


def test_processors_see_the_prefix_of_the_node_and_leave_the_logits_alone() -> None:
    seen = []

    def spy(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append((input_ids.tolist(), scores.dtype, list(scores.shape)))
        scores[:, 2] = 100.0
        return scores

    logits = torch.arange(8.0).reshape(2, 4).to(torch.bfloat16)
    before = logits.clone()
    choice = ProcessedGreedyChoice(LogitsProcessorList([spy]), CPU)
    choice.look_at(logits)
    assert choice.token_at(1, [7, 8]) == 2
    assert seen == [([[7, 8]], torch.float32, [1, 4])]
    assert torch.equal(logits, before)
    for committed, expected in (([0], 1), ([1], 2)):
        penalty = ProcessedGreedyChoice(RepetitionPenaltyLogitsProcessor(3.0), CPU)
        penalty.look_at(torch.tensor([[1.0, 2.0, 1.5]]))
        assert penalty.token_at(0, committed) == expected


def test_a_prefix_grows_with_the_committed_tokens() -> None:
    prefix = Prefix(CPU)
    committed: list[int] = []
    for number in range(50):
        committed += [number, number + 1][: 1 + number % 2]
        assert prefix.of(committed).tolist() == [committed]
    assert prefix.of(committed).tolist() == [committed]  # nothing new


# --- budget ---------------------------------------------------------------------------------


def run_budget(
    budget: MeasuredBudget, cost: Any, probs: list[float], num_steps: int, hit_rate: float = 0.6
) -> list[int]:
    """Let a budget decide against a made-up machine; return its last hundred decisions."""
    hits = itertools.accumulate(itertools.repeat(hit_rate, num_steps))
    sizes = []
    before = 0
    for hit in hits:
        num_nodes = budget.num_nodes(probs)
        assert 0 <= num_nodes <= len(probs)
        came, before = int(hit) > before, int(hit)
        budget.record(num_nodes, cost(num_nodes + 1), expected=sum(probs[:1]), came=came)
        sizes.append(num_nodes)
    return sizes[-100:]


SLOWLY_FALLING = [0.6 * 0.85**i for i in range(63)]


def test_budget_takes_all_where_nodes_are_free() -> None:
    sizes = run_budget(MeasuredBudget(), lambda size: 0.01, SLOWLY_FALLING, 500)
    assert np.median(sizes) >= 39


def test_budget_takes_none_where_nodes_cost_more_than_they_bring() -> None:
    sizes = run_budget(MeasuredBudget(), lambda size: 0.01 * size, [0.3] * 20, 500, hit_rate=0.3)
    assert np.median(sizes) == 0
    assert np.mean(np.array(sizes) > 0) < 0.1


def test_budget_steps_over_a_cliff() -> None:
    """float32 on some CPUs: two tokens cost 1.6 times one, eight hardly more than two."""
    costs = {1: 0.035, **{size: 0.055 + 0.0005 * size for size in range(2, 10)}}
    sizes = run_budget(
        MeasuredBudget(), lambda size: costs.get(size, 0.006 * size), SLOWLY_FALLING, 600
    )
    assert 4 <= np.median(sizes) <= 9


def test_budget_stops_trusting_a_drafter_that_promises_too_much() -> None:
    cost = {size: 0.01 * (1 + 0.1 * size) for size in range(1, 65)}
    honest = run_budget(MeasuredBudget(), cost.__getitem__, [0.5] * 8, 600, hit_rate=0.5)
    boastful = run_budget(MeasuredBudget(), cost.__getitem__, [0.5] * 8, 600, hit_rate=0.02)
    assert np.median(honest) == 8
    assert np.median(boastful) == 0


def test_budget_recovers_from_one_slow_measurement() -> None:
    budget = MeasuredBudget()
    run_budget(budget, lambda size: 0.01, SLOWLY_FALLING, 300)
    budget.record(39, 10.0, expected=0.6, came=True)
    assert np.median(run_budget(budget, lambda size: 0.01, SLOWLY_FALLING, 300)) >= 24


def test_budget_state_is_bounded() -> None:
    budget = MeasuredBudget()
    for length in [*range(64), *range(64)]:
        run_budget(budget, lambda size: 0.01, [0.5] * length, 20)
    assert len(budget._sec) <= 64
    assert budget.num_nodes([]) == 0


def test_fixed_budget_verifies_the_whole_draft() -> None:
    budget = FixedBudget(5)
    assert budget.max_nodes == 5
    assert budget.num_nodes([0.1, 0.1, 0.1]) == 3
    budget.record(3, 1.0, 0.1, came=False)


# --- statistics and configuration -----------------------------------------------------------


def test_stats_count_and_add_up() -> None:
    stats = DecodeStats(num_prefills=1)
    stats.count_step(Step([1, 2, 3], num_draft_tokens=8, num_accepted=2))
    stats.count_step(Step([4], num_draft_tokens=4, num_accepted=0))
    assert (stats.num_steps, stats.num_tokens) == (2, 5)
    assert stats.mean_accepted_tokens == 2.0  # not 2.5: the prefill's token is no step's
    assert stats.acceptance_rate == 2 / 12
    assert stats.nodes_per_step == 6.0
    assert stats.accepted_by_depth == [1, 1]
    other = DecodeStats(num_prefills=1, forward_sec=3.0, draft_sec=1.0)
    other.count_step(Step([1, 2, 3, 4], num_draft_tokens=3, num_accepted=3))
    stats.add(other)
    assert stats.accepted_by_depth == [2, 2, 1]
    assert (stats.num_steps, stats.num_prefills, stats.num_tokens) == (3, 2, 10)
    assert stats.overhead == 0.25
    assert other.accepted_by_depth == [1, 1, 1]
    assert stats.as_dict()["mean_accepted_tokens"] == 8 / 3
    assert DecodeStats().mean_accepted_tokens == 0.0


def test_config_refuses_what_it_cannot_mean() -> None:
    assert Config() == Config(None, None, None)
    for options in ({"max_candidates": 0}, {"max_draft_tokens": -1}, {"max_ngram_size": 0}):
        with pytest.raises(ValueError, match=r"expected Config\(max_"):
            Config(**options)
    with pytest.raises(TypeError, match=r"expected Config\(max_candidates=…\) to be an integer"):
        Config(max_candidates=2.0)  # type: ignore[arg-type]
