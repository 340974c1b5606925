import random

import pytest

from lade.drafters.prediction import Prediction

RNG = random.Random(0)
TEXT = [RNG.randrange(60) if RNG.random() < 0.5 else RNG.randrange(60, 3000) for _ in range(300)]
NEW = range(9001, 9031)


def steps_of(prediction: list[int], answer: list[int], num_nodes: int = 15) -> int:
    """Return the steps that an answer takes where each step verifies so many nodes."""
    drafter = Prediction(prediction)
    sequence, text, num_steps = drafter.open([1, 2, 3]), [1, 2, 3], 0
    while len(text) < 3 + len(answer):
        rest = answer[len(text) - 3 :]
        draft = drafter.draft(sequence, text, num_nodes)
        assert len(draft) <= num_nodes
        assert (draft.probs[:-1] >= draft.probs[1:]).all()
        assert all(-1 <= parent < node for node, parent in enumerate(draft.parents.tolist()))
        depths = [_common(path, rest) for path in draft.candidates()]
        new = rest[: 1 + max(depths, default=0)]
        drafter.observe(sequence, new)
        text += new
        num_steps += 1
    drafter.close(sequence)
    return num_steps


def _common(path: list[int], text: list[int]) -> int:
    pairs = zip(path, text, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(path), len(text)))


def test_what_is_right_comes_with_as_many_tokens_as_a_step_verifies() -> None:
    assert steps_of(TEXT, TEXT) == 19  # 300 tokens in steps of 16


@pytest.mark.parametrize(
    ("answer", "num_more"),
    [
        ([*TEXT[:150], 9999, *TEXT[151:]], 2),  # a token replaced
        ([*TEXT[:150], *NEW[:3], *TEXT[153:]], 5),
        ([*TEXT[:100], *TEXT[130:]], 2),  # lines left out
        ([*TEXT[:100], *NEW, *TEXT[100:]], 33),  # lines added, which nothing predicts
        ([*NEW[:4], *TEXT], 6),  # a preface
        (TEXT[20:], 2),
        ([*TEXT[:99], *TEXT[200:], *TEXT[99:200]], 8),  # two parts exchanged
    ],
)
def test_the_place_is_found_again_after_an_edit(answer: list[int], num_more: int) -> None:
    assert steps_of(TEXT, answer) <= 19 + num_more


def test_what_was_renamed_once_is_expected_to_be_renamed_again() -> None:
    old = [77 if place % 25 == 20 else token_id for place, token_id in enumerate(TEXT)]
    new = [each for token_id in old for each in ([8001, 8002] if token_id == 77 else [token_id])]
    assert steps_of(old, new) <= 25  # not two or three more for each of twelve


def test_what_is_not_renamed_again_costs_one_step_more() -> None:
    old = [77 if place % 25 == 20 else token_id for place, token_id in enumerate(TEXT)]
    new = [8001 if place == 20 else token_id for place, token_id in enumerate(old)]
    assert steps_of(old, new) <= 24


def test_what_is_wrong_is_soon_hardly_proposed() -> None:
    drafter = Prediction(TEXT)
    sequence, rng = drafter.open([]), random.Random(1)
    text: list[int] = []
    promised = []
    for _ in range(200):
        promised.append(float(drafter.draft(sequence, text, 15).probs.sum()))
        text.append(rng.choice(TEXT))
        drafter.observe(sequence, text[-1:])
    assert promised[0] > 5
    assert sum(promised[100:]) / 100 < 0.5


def test_forced_tokens_are_followed_before_they_are_observed() -> None:
    drafter = Prediction([10, 11, 12, 13, 14])
    sequence = drafter.open([5])
    assert drafter.draft(sequence, [5, 10, 11], 9).token_ids.tolist() == [12, 13, 14]
    assert len(drafter.draft(sequence, [5, 10, 7], 9)) == 0
    drafter.observe(sequence, [10, 11])
    assert drafter.draft(sequence, [5, 10, 11], 9).token_ids.tolist() == [12, 13, 14]


def test_rows_have_places_of_their_own() -> None:
    drafter = Prediction([10, 11, 12, 13])
    first, second = drafter.open([5]), drafter.open([5])
    drafter.observe(first, [10, 11])
    assert drafter.draft(first, [5, 10, 11], 9).token_ids.tolist() == [12, 13]
    assert drafter.draft(second, [5], 9).token_ids.tolist() == [10, 11, 12, 13]


def test_nothing_comes_after_the_end() -> None:
    drafter = Prediction([10])
    sequence = drafter.open([5])
    drafter.observe(sequence, [10])
    assert len(drafter.draft(sequence, [5, 10], 9)) == 0
