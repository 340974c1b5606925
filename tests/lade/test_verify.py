"""Walking down a tree along the target's choices."""

from typing import Any

import pytest
import torch

from lade.batch import Batch, Limits, Text
from lade.drafting.drafts import draft_of
from lade.sampling.choice import Choice
from lade.tree import Tree
from lade.verify import accepted_paths


def chain_with_branch() -> Tree:
    """Root 1; under it 5 and 6; under 5 another 5; under 6 a 7."""
    return Tree.build(1, draft_of([5, 6, 5, 7], [-1, -1, 0, 1], [0.5, 0.4, 0.3, 0.2]))


def text_of(*prompts: list[int], pad_token_id: int | None = None) -> Text:
    return Text(torch.tensor(prompts, dtype=torch.int64), pad_token_id)


class FixedChoice(Choice):
    """Chooses by row and node, and checks that the node is the row's last token."""

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


def test_rows_walk_on_alone_unless_they_are_in_lockstep() -> None:
    choices = {0: [9, 0, 0, 0, 0], 1: [5, 5, 0, 4, 0], 2: [6, 0, 5, 0, 0]}
    text = text_of([3, 1], [4, 1], [5, 1])
    paths, _ = walk(text, choices)
    assert paths == {0: [0], 1: [0, 1, 3], 2: [0, 2]}
    assert text.token_ids == [[3, 1, 9], [4, 1, 5, 5, 4], [5, 1, 6, 5]]
    text = text_of([3, 1], [4, 1], [5, 1])
    paths, choice = walk(text, choices, is_lockstep=True)
    assert paths == {0: [0], 1: [0], 2: [0]}
    assert choice.rounds == [[(0, 0), (1, 0), (2, 0)]]
