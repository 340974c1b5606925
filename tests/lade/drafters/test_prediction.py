"""Drafts of a predicted answer: its place in the text is found again after any edit."""

import random

import pytest

from lade.drafters.prediction import Prediction

RNG = random.Random(0)
TEXT = [RNG.randrange(60) if RNG.random() < 0.5 else RNG.randrange(60, 3000) for _ in range(300)]
NEW = range(9001, 9031)
# Text with a name, the same with another one, and with that in one place alone.
OLD = [77 if place % 25 == 20 else token_id for place, token_id in enumerate(TEXT)]
RENAMED = [each for token_id in OLD for each in ([8001, 8002] if token_id == 77 else [token_id])]
ONCE = [8001 if place == 20 else token_id for place, token_id in enumerate(OLD)]


def steps_of(prediction: list[int], answer: list[int], num_nodes: int = 15) -> int:
    """Return the steps that an answer takes where each step verifies so many nodes."""
    drafter = Prediction(prediction)
    sequence, text, num_steps = drafter.open([1, 2, 3]), [1, 2, 3], 0
    while len(text) < 3 + len(answer):
        rest = answer[len(text) - 3 :]
        draft = drafter.draft(sequence, text, num_nodes)
        assert len(draft) <= num_nodes
        assert (draft.probs[:-1] >= draft.probs[1:]).all()
        paths = [path[: i + 1] for path in draft.candidates() for i in range(len(path))]
        depth = max((len(path) for path in paths if rest[: len(path)] == path), default=0)
        drafter.observe(sequence, rest[: 1 + depth])
        text += rest[: 1 + depth]
        num_steps += 1
    drafter.close(sequence)
    return num_steps


@pytest.mark.parametrize(
    ("prediction", "answer", "most"),
    [
        (TEXT, TEXT, 19),  # 300 tokens in steps of 16
        (TEXT, [*TEXT[:150], 9999, *TEXT[151:]], 21),  # a token replaced
        (TEXT, [*TEXT[:150], *NEW[:3], *TEXT[153:]], 24),
        (TEXT, [*TEXT[:100], *TEXT[130:]], 21),  # lines left out
        (TEXT, [*TEXT[:100], *NEW, *TEXT[100:]], 52),  # lines added, which nothing predicts
        (TEXT, [*NEW[:4], *TEXT], 25),  # a preface
        (TEXT, TEXT[20:], 21),
        (TEXT, [*TEXT[:99], *TEXT[200:], *TEXT[99:200]], 27),  # two parts exchanged
        (OLD, RENAMED, 25),  # not two or three more for each of twelve
        (OLD, ONCE, 24),
    ],
)
def test_the_place_is_found_again_after_an_edit(
    prediction: list[int], answer: list[int], most: int
) -> None:
    assert steps_of(prediction, answer) <= most


def test_what_is_wrong_is_soon_hardly_proposed_and_what_is_forced_is_followed() -> None:
    drafter, rng, text = Prediction(TEXT), random.Random(1), list[int]()
    sequence, promised = drafter.open([]), list[float]()
    for _ in range(200):
        promised.append(float(drafter.draft(sequence, text, 15).probs.sum()))
        text.append(rng.choice(TEXT))
        drafter.observe(sequence, text[-1:])
    assert promised[0] > 5
    assert sum(promised[100:]) / 100 < 0.5
    drafter = Prediction([10, 11, 12])
    first, second = drafter.open([5]), drafter.open([5])  # rows have places of their own
    assert drafter.draft(first, [5, 10], 9).token_ids.tolist() == [11, 12]
    assert len(drafter.draft(first, [5, 7], 9)) == 0
    drafter.observe(first, [10, 11])
    assert drafter.draft(first, [5, 10, 11], 9).token_ids.tolist() == [12]
    assert drafter.draft(second, [5], 9).token_ids.tolist() == [10, 11, 12]
