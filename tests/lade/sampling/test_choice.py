"""The target's own token at a node: greedy, processed one by one or all at once, drawn."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lade.drafting.drafts import chain
from lade.sampling.exact import ChoiceAtOnce, Likeliest, NoiseRace, ProcessedChoice
from lade.sampling.greedy import GreedyChoice
from lade.sampling.processors import Processors
from lade.tree import Tree
from ngram_pool import Draft
from tests.lade.test_verify import chain_with_branch, text_of

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("kind", ["greedy", "ranked", "processed", "at once"])
def test_trees_one_after_the_other_get_the_tokens_of_padded_ones(kind: str) -> None:
    torch.manual_seed(0)
    trees = {3: Tree.build(1, Draft.empty()), 5: chain_with_branch(), 6: Tree.build(2, chain([4]))}
    sizes = [*map(len, trees.values())]
    padded = torch.randn(3, max(sizes), 50)
    packed = torch.cat([of_row[:size] for of_row, size in zip(padded, sizes, strict=True)])[None]
    places = [(row, node) for row, tree in trees.items() for node in range(len(tree))]

    def tokens(logits: torch.Tensor) -> list[int]:
        text = text_of(*[[7]] * 7)
        processors = Processors([TemperatureLogitsWarper(0.5)], 7)
        choice: Any = GreedyChoice(4 if kind == "ranked" else 0)
        if kind in ("processed", "at once"):
            torch.manual_seed(1)
            of_kind = ChoiceAtOnce if kind == "at once" else ProcessedChoice
            choice = of_kind(text, processors, NoiseRace(7, 50, CPU, ahead=kind == "at once"), CPU)
        choice.look_at(logits, trees)
        choice.wait()
        chosen: list[int] = choice.tokens_at(places)
        return chosen

    assert tokens(packed) == tokens(padded)
    assert kind in ("processed", "at once") or tokens(packed) == packed[0].argmax(-1).tolist()


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
    prompts = [[0, 1, 2, 3], [0, 0, 1, 2]]
    try:
        penalty = RepetitionPenaltyLogitsProcessor(3.0, prompt_ignore_length=torch.tensor([1, 2]))
    except ValueError:  # older transformers penalise padding too, and take one number at most
        penalty = RepetitionPenaltyLogitsProcessor(3.0)
    batch: list[Any] = [
        penalty,
        NoRepeatNGramLogitsProcessor(2),
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
    race, before = NoiseRace(num_rows, 30, CPU, ahead), torch.get_rng_state()
    got: dict[int, list[int]] = {}
    for row in range(num_rows):  # one row after the other: as ragged as can be
        picked = [race(c[row : row + 1], [row], [time]) for time, c in enumerate(columns)]
        got[row] = [int(p.token_ids) for p in picked]
        assert all(bool(p.is_valid) for p in picked)
    assert [[got[row][time] for row in range(num_rows)] for time in range(6)] == expected
    if ahead:  # nodes that are never emitted
        race(columns[0], list(range(num_rows)), [8] * num_rows)
        assert torch.equal(torch.get_rng_state(), before)  # what is everybody's is not drawn from
    race.close(num_times=6)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_race_forgets_what_is_behind_and_limits_what_is_ahead() -> None:
    race = NoiseRace(8, 49_152, CPU, ahead=True)
    assert race.max_lead == 42
    assert NoiseRace(64, 200_000, CPU, ahead=True).max_lead == 8
    assert NoiseRace(1, 200_000, CPU, ahead=True).max_lead is None
    for ahead in (True, False):
        small = NoiseRace(2, 5, CPU, ahead=ahead)
        small(torch.zeros(2, 5), [0, 1], [9, 9])
        small.begin_step(first_time=7)
        assert list(small._noise) == [7, 8, 9]
        # Ahead it draws from a generator of its own, and nothing has to be put back.
        assert list(small._states) == ([] if ahead else [7, 8, 9])


@pytest.mark.parametrize("kind", [ProcessedChoice, ChoiceAtOnce])
def test_sampling_what_has_no_distribution_raises_as_multinomial_does(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.zeros(1, 5, 4)
    logits[0, 1] = float("nan")
    logits[0, 2, 3] = float("inf")
    logits[0, 3] = float("-inf")
    choice = kind(text_of([1]), Processors([], 1), NoiseRace(1, 4, CPU, kind is ChoiceAtOnce), CPU)
    look(choice, logits)
    choice.tokens_at([(0, 0)])
    with pytest.raises(RuntimeError) as of_torch:
        torch.multinomial(logits[0, 1].softmax(dim=-1), 1)
    # On CUDA that is an assertion, after which nothing runs there: lade may not even ask.
    monkeypatch.setattr(torch, "multinomial", None)
    for node in (1, 2, 3):
        with pytest.raises(RuntimeError, match=re.escape(str(of_torch.value))):
            choice.tokens_at([(0, node)])
    greedy = kind(text_of([1]), Processors([], 1), Likeliest(), CPU)
    look(greedy, logits)
    assert greedy.tokens_at([(0, 1)]) == [0]  # as argmax has it


def record(recorded: list[Any], row: int, raw: torch.Tensor, scores: torch.Tensor) -> None:
    recorded.append((row, raw, scores))


# Ten nodes are sorted at once; of forty, only those where tokens are emitted.
@pytest.mark.parametrize(("width", "expected_at_once"), [(5, [10]), (20, [2, 1])])
def test_all_at_once_chooses_what_one_by_one_chooses(
    width: int, expected_at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_sorted: list[int] = []
    process = TopPLogitsWarper.__call__

    def count(self: Any, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        num_sorted.append(len(scores))
        return process(self, input_ids, scores)  # type: ignore[no-any-return]

    monkeypatch.setattr(TopPLogitsWarper, "__call__", count)
    warpers = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(5), TopPLogitsWarper(0.8)]
    logits = torch.randn(2, width, 40)
    results = []
    for kind in (ProcessedChoice, ChoiceAtOnce):
        torch.manual_seed(0)
        text = text_of([3, 1], [4, 1])
        text.append(1, 9)  # ahead by one
        recorded: list[Any] = []
        race = NoiseRace(2, 40, CPU, ahead=kind is ChoiceAtOnce)
        choice = kind(text, Processors(warpers, 2), race, CPU, partial(record, recorded))
        look(choice, logits)
        tokens = [choice.tokens_at([(1, 0), (0, 0)])]
        text.append(0, 6)
        tokens.append(choice.tokens_at([(0, 2)]))
        results.append((tokens, recorded))
    assert num_sorted == [2, 1, *expected_at_once]
    (tokens, recorded), (other_tokens, other_recorded) = results
    assert tokens == other_tokens
    for (row, *values), (other_row, *others) in zip(recorded, other_recorded, strict=True):
        assert row == other_row
        for value, other in zip(values, others, strict=True):
            torch.testing.assert_close(value, other)
