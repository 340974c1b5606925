"""Choice, verification, statistics and configuration, each alone."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lade.batch import Batch, Limits, Text
from lade.config import Config
from lade.sampling.exact import ChoiceAtOnce, Likeliest, ProcessedChoice, Race
from lade.sampling.greedy import GreedyChoice
from lade.sampling.processors import Processors
from lade.stats import DecodeStats, Step
from lade.tree import Tree
from lade.verify import accepted_paths
from ngram_pool import Draft

CPU = torch.device("cpu")


def chain_with_branch() -> Tree:
    """Root 1; under it 5 and 6; under 5 another 5; under 6 a 7."""
    token_ids, parents = np.array([5, 6, 5, 7], np.int32), np.array([-1, -1, 0, 1], np.int32)
    depths, probs = np.array([1, 1, 2, 2], np.int32), np.array([0.5, 0.4, 0.3, 0.2])
    return Tree.build(1, Draft(token_ids, parents, depths, probs))


def text_of(*prompts: list[int], pad_token_id: int | None = None) -> Text:
    return Text(torch.tensor(prompts, dtype=torch.int64), pad_token_id)


class FixedChoice:
    """Chooses by row and node, and checks that the node is the row's last token."""

    max_lead = None
    ranked = None

    def __init__(self, text: Text, token_ids: dict[int, list[int]]) -> None:
        self.text = text
        self.token_ids = token_ids
        self.rounds: list[list[tuple[int, int]]] = []

    def wait(self) -> None:
        raise AssertionError("nothing to wait for")

    def look_at(self, logits: torch.Tensor, trees: Any) -> None:
        raise AssertionError("not needed here")

    def tokens_at(self, places: Any) -> list[int]:
        self.rounds.append(list(places))
        for row, node in places:
            assert node == 0 or self.text.token_ids[row][-1] == chain_with_branch().token_ids[node]
        return [self.token_ids[row][node] for row, node in places]

    def close(self) -> None:
        raise AssertionError("not needed here")


def walk(
    text: Text, choices: dict[int, list[int]], max_length: int = 99, is_lockstep: bool = False
) -> tuple[dict[int, list[int]], FixedChoice]:
    choice = FixedChoice(text, choices)

    def stop(rows: list[int]) -> None:
        for row in rows:
            text.is_finished[row] = len(text.token_ids[row]) >= max_length

    limits = Limits(max_length=99, stop=stop, is_lockstep=is_lockstep)
    batch = Batch(text, [[] for _ in choices], limits)
    paths = accepted_paths({row: chain_with_branch() for row in choices}, choice, batch)
    return paths, choice


@pytest.mark.parametrize(
    ("choices", "nodes", "token_ids"),
    [
        ([9, 0, 0, 0, 0], [0], [9]),  # nothing accepted: the bonus token alone
        ([5, 8, 0, 0, 0], [0, 1], [5, 8]),
        ([5, 5, 0, 4, 0], [0, 1, 3], [5, 5, 4]),
        ([6, 0, 7, 0, 2], [0, 2, 4], [6, 7, 2]),  # not (1, …): that is 5's branch
        ([6, 0, 5, 0, 0], [0, 2], [6, 5]),  # 5 is a node, but not under 6
    ],
)
def test_accepted_paths_follow_the_choices(
    choices: list[int], nodes: list[int], token_ids: list[int]
) -> None:
    text = text_of([3, 1])
    paths, _ = walk(text, {0: choices})
    assert paths == {0: nodes}
    assert text.token_ids == [[3, 1, *token_ids]]


def test_a_walk_that_stops_asks_for_no_token_more() -> None:
    text = text_of([3, 1])
    paths, choice = walk(text, {0: [5, 5, 0, 4, 0]}, max_length=3)
    assert paths == {0: [0]}
    assert len(choice.rounds) == 1


def test_rows_walk_on_alone_unless_they_are_joint() -> None:
    choices = {0: [9, 0, 0, 0, 0], 1: [5, 5, 0, 4, 0], 2: [6, 0, 5, 0, 0]}
    text = text_of([3, 1], [4, 1], [5, 1])
    paths, _ = walk(text, choices)
    assert paths == {0: [0], 1: [0, 1, 3], 2: [0, 2]}
    assert text.token_ids == [[3, 1, 9], [4, 1, 5, 5, 4], [5, 1, 6, 5]]
    text = text_of([3, 1], [4, 1], [5, 1])
    paths, choice = walk(text, choices, is_lockstep=True)
    assert paths == {0: [0], 1: [0], 2: [0]}
    assert choice.rounds == [[(0, 0), (1, 0), (2, 0)]]


# --- text -----------------------------------------------------------------------------------


def test_text_grows_row_by_row_and_pads_what_is_finished() -> None:
    text = text_of([3, 1], [4, 1], pad_token_id=0)
    for number in range(100):
        assert text.append(0, number) == number
        assert text.prefix(0).tolist() == [[3, 1, *range(number + 1)]]
    text.append(1, 8)
    text.is_finished[1] = True
    assert text.append(1, 9) == 0
    assert text.num_unpadded == [102, 3]
    assert text.prefix(1).tolist() == [[4, 1, 8, 0]]
    assert (text.longest, text.num_emitted(1)) == (102, 2)
    assert text.sequences().tolist() == [[3, 1, *range(100)], [4, 1, 8, *[0] * 99]]
    with pytest.raises(AssertionError):
        text.prefixes([0, 1])
    assert text_of([3, 1], [4, 1]).prefixes([0, 1]).tolist() == [[3, 1], [4, 1]]


def test_a_finished_row_without_padding_goes_on_with_its_own_tokens() -> None:
    text = text_of([3], [4])
    text.is_finished[0] = True
    assert text.append(0, 7) == 7
    assert text.append(1, 8) == 8
    assert text.sequences().tolist() == [[3, 7], [4, 8]]


# --- choice ---------------------------------------------------------------------------------


def look(choice: Any, logits: torch.Tensor, draft: Draft | None = None) -> None:
    tree = Tree.build(1, draft) if draft is not None else chain_with_branch()
    choice.look_at(logits, dict.fromkeys(range(logits.shape[0]), tree))
    choice.wait()


def test_greedy_choice_takes_the_first_of_equals() -> None:
    logits = torch.zeros(1, 2, 50_000)
    logits[0, 0, [30_000, 40_000]] = 2.0
    for dtype in (torch.float32, torch.bfloat16):
        choice = GreedyChoice()
        look(choice, logits.to(dtype))
        assert choice.tokens_at([(0, 0), (0, 1)]) == [30_000, 0]


def test_processors_see_the_prefix_of_the_node_and_leave_the_logits_alone() -> None:
    seen = []

    def spy(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append((input_ids.tolist(), scores.dtype, list(scores.shape)))
        scores[:, 2] = 100.0
        return scores

    logits = torch.arange(8.0).reshape(1, 2, 4).to(torch.bfloat16)
    before = logits.clone()
    chosen: list[Any] = []
    choice = ProcessedChoice(
        text_of([7, 8]),
        Processors([spy], 1),
        Likeliest(),
        CPU,
        lambda row, raw, scores: chosen.append((row, raw.tolist(), scores.tolist())),
    )
    look(choice, logits)
    assert choice.tokens_at([(0, 1)]) == [2]
    assert seen == [([[7, 8]], torch.float32, [1, 4])]
    assert torch.equal(logits, before)
    # transformers keeps what a processor writes in place in the raw logits too.
    assert chosen == [(0, [4, 5, 100, 7], [4, 5, 100, 7])]


def test_processors_are_sorted_by_what_they_depend_on() -> None:
    temperature, penalty = TemperatureLogitsWarper(0.5), RepetitionPenaltyLogitsProcessor(3.0)

    class MyTemperature(TemperatureLogitsWarper):  # type: ignore[misc]
        """May do anything."""

    for processors, need_prefix, is_lockstep in (
        ([], False, False),
        ([temperature], False, False),
        ([penalty, temperature], True, False),
        ([MyTemperature(0.5)], True, True),
    ):
        sorted_out = Processors(processors, num_rows=2)
        assert (sorted_out.need_prefix, sorted_out.is_lockstep) == (need_prefix, is_lockstep)
        assert not Processors(processors, num_rows=1).is_lockstep


def test_rows_of_unequal_length_are_processed_as_they_would_be_together() -> None:
    def allowed(row: int, prefix: torch.Tensor) -> list[int]:
        return [row, int(prefix[-1]) % 4, 4]

    prompts = [[0, 1, 2, 3], [0, 0, 1, 2]]
    try:
        penalty = RepetitionPenaltyLogitsProcessor(3.0, prompt_ignore_length=torch.tensor([1, 2]))
    except ValueError:  # older transformers penalise padding too, and take one number at most
        penalty = RepetitionPenaltyLogitsProcessor(3.0)
    batch: list[Any] = [
        penalty,
        PrefixConstrainedLogitsProcessor(allowed, 1),
        TemperatureLogitsWarper(0.5),
    ]
    scores = torch.randn(2, 5)
    together = LogitsProcessorList(batch)(torch.tensor(prompts), scores.clone())
    text = text_of(*prompts)
    processors = Processors(batch, 2)
    assert torch.equal(processors(text, [0, 1], scores.clone()), together)
    text.append(0, 3)
    longer = LogitsProcessorList(batch)(
        torch.tensor([[*prompts[0], 3], [0, *prompts[1]]]), scores.clone()
    )
    assert torch.equal(processors(text, [0], scores[:1].clone()), longer[:1])
    assert torch.equal(processors(text, [1], scores[1:].clone()), together[1:])


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_race_is_multinomial_column_by_column(num_rows: int, ahead: bool) -> None:
    columns = [torch.randn(num_rows, 30) for _ in range(6)]
    torch.manual_seed(5)
    expected = [torch.multinomial(c.softmax(-1), 1)[:, 0].tolist() for c in columns]
    state = torch.get_rng_state()
    torch.manual_seed(5)
    race = Race(num_rows, 30, CPU, ahead)
    got: dict[int, list[int]] = {}
    for row in range(num_rows):  # one row after the other: as ragged as can be
        picked = [race(c[row : row + 1], [row], [time]) for time, c in enumerate(columns)]
        got[row] = [int(p.token_ids) for p in picked]
        assert all(bool(p.is_valid) for p in picked)
    assert [[got[row][time] for row in range(num_rows)] for time in range(6)] == expected
    if ahead:  # nodes that are never emitted
        race(columns[0], list(range(num_rows)), [8] * num_rows)
        assert not torch.equal(torch.get_rng_state(), state)
    race.close(num_times=6)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_race_forgets_what_is_behind_and_limits_what_is_ahead() -> None:
    race = Race(8, 49_152, CPU, ahead=True)
    assert race.max_lead == 42
    assert Race(64, 200_000, CPU, ahead=True).max_lead == 8
    assert Race(1, 200_000, CPU, ahead=True).max_lead is None
    for ahead in (True, False):
        small = Race(2, 5, CPU, ahead=ahead)
        small(torch.zeros(2, 5), [0, 1], [9, 9])
        small.begin_step(first_time=7)
        assert list(small._noise) == [7, 8, 9]
        # Ahead it draws from a generator of its own, and nothing has to be put back.
        assert list(small._states) == ([] if ahead else [7, 8, 9])


@pytest.mark.parametrize("kind", [ProcessedChoice, ChoiceAtOnce])
def test_sampling_what_has_no_distribution_raises_as_multinomial_does(kind: Any) -> None:
    logits = torch.zeros(1, 5, 4)
    logits[0, 1] = float("nan")
    logits[0, 2, 3] = float("inf")
    logits[0, 3] = float("-inf")
    choice = kind(text_of([1]), Processors([], 1), Race(1, 4, CPU, kind is ChoiceAtOnce), CPU)
    look(choice, logits)
    choice.tokens_at([(0, 0)])
    for node in (1, 2, 3):
        with pytest.raises(RuntimeError, match="probability tensor contains either"):
            choice.tokens_at([(0, node)])
    greedy = kind(text_of([1]), Processors([], 1), Likeliest(), CPU)
    look(greedy, logits)
    assert greedy.tokens_at([(0, 1)]) == [0]  # as argmax has it


def record(recorded: list[Any], row: int, raw: torch.Tensor, scores: torch.Tensor) -> None:
    recorded.append((row, raw, scores))


def test_all_at_once_chooses_what_one_by_one_chooses() -> None:
    warpers = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(5), TopPLogitsWarper(0.8)]
    logits = torch.randn(2, 5, 40)
    results = []
    for kind in (ProcessedChoice, ChoiceAtOnce):
        torch.manual_seed(0)
        text = text_of([3, 1], [4, 1])
        text.append(1, 9)  # ahead by one
        recorded: list[Any] = []
        race = Race(2, 40, CPU, ahead=kind is ChoiceAtOnce)
        choice = kind(
            text,
            Processors(warpers, 2),
            race,
            CPU,
            partial(record, recorded),
        )
        look(choice, logits)
        tokens = [choice.tokens_at([(1, 0), (0, 0)])]
        text.append(0, 6)
        tokens.append(choice.tokens_at([(0, 2)]))
        results.append((tokens, recorded))
    (tokens, recorded), (other_tokens, other_recorded) = results
    assert tokens == other_tokens
    for (row, *values), (other_row, *others) in zip(recorded, other_recorded, strict=True):
        assert row == other_row
        for value, other in zip(values, others, strict=True):
            torch.testing.assert_close(value, other)


# --- statistics and configuration -----------------------------------------------------------


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


def test_config_refuses_what_it_cannot_mean() -> None:
    assert Config() == Config(None, None, "exact")
    wrong: list[dict[str, Any]] = [
        {"max_candidates": 0},
        {"max_draft_tokens": -1},
    ]
    for options in wrong:
        with pytest.raises(ValueError, match=r"expected Config\(max_"):
            Config(**options)
    with pytest.raises(TypeError, match=r"expected Config\(max_candidates=…\) to be an integer"):
        Config(max_candidates=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of 'exact', 'rejection', got 'typical'"):
        Config(acceptance="typical")  # type: ignore[arg-type]
