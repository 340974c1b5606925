"""What a grammar forces is drafted, and asking about it changes nothing."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

import lade
from tests.lade.both import same_as_generate
from tests.lade.drafting.made import OPTIONS, PROMPT, chain_of
from tests.lade.shared import shared_model
from tests.lade.tiny import tiny_model

# --- processors that know -----------------------------------------------------------------------


class Knowing(LogitsProcessor, lade.ForcedTokens):  # type: ignore[misc]
    """Allows one text only; what it foresees is as asked for."""

    def __init__(self, foresee: Callable[[int], Any], text: Sequence[int] = ()) -> None:
        self._foresee, self._text = foresee, text

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        num_new = input_ids.shape[1] - PROMPT.shape[1]
        if num_new < len(self._text):
            scores[:, [i for i in range(scores.shape[1]) if i != self._text[num_new]]] = -torch.inf
        return scores

    def forced_tokens(self, row: int, committed: Sequence[int], max_tokens: int) -> list[int]:
        foreseen: list[int] = self._foresee(len(committed) - PROMPT.shape[1])
        return foreseen


class Behind(lade.Drafter):
    """Keeps what it is asked to draft behind, and drafts one token there."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> lade.Draft:
        self.asked.append([*committed])
        return chain_of([9]).first(max_draft_tokens)


def test_forced_tokens_stand_before_what_the_drafter_proposes() -> None:
    text = [20, 33, 40, 41, 42, 50, 51, 52, 53, 54, 55, 56]
    knowing, behind = Knowing(lambda num: text[num : num + 3], text), Behind()
    config = lade.Config(max_draft_tokens=8, strict_drafter=True)
    options = {**OPTIONS, "logits_processor": [knowing]}
    model = shared_model("llama", seed=2)
    _, got = same_as_generate(model, PROMPT, drafter=behind, config=config, **options)
    assert got.stats.num_accepted_tokens > 7  # three of four
    assert [asked[len(PROMPT[0]) :] for asked in behind.asked[:2]] == [text[:4], text[:8]]


def test_no_name_of_an_attribute_makes_a_processor_know() -> None:
    class Called(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

        def forced_tokens(self, *_: Any) -> list[int]:
            raise AssertionError("it is not lade's to call")

    config = lade.Config(strict_drafter=True)
    same_as_generate(shared_model(), PROMPT, config=config, logits_processor=[Called()])


def _draws() -> list[int]:
    torch.rand(3)
    return []


@pytest.mark.parametrize(
    "foresee",
    [lambda: 1 / 0, lambda: None, lambda: ["x"], lambda: [2**40, -3], lambda: [[7]], _draws],
)
def test_what_a_processor_foresees_can_fail_no_call_and_change_no_text(foresee: Any) -> None:
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12, "seed": 1}
    knowing = Knowing(lambda num: foresee())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.DrafterWarning)
        same_as_generate(tiny_model(), PROMPT, logits_processor=[knowing], **options)


def test_an_author_sees_what_foresight_raises() -> None:
    given: dict[str, Any] = {"config": lade.Config(strict_drafter=True), "max_new_tokens": 4}
    with pytest.raises(ZeroDivisionError):
        lade.generate(tiny_model(), PROMPT, logits_processor=[Knowing(lambda num: 1 / 0)], **given)
