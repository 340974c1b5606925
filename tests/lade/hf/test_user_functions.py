"""What a user passes is called when `generate` would call it: as often, in that order, so far."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

import lade
from tests.lade.both import EIGHT, ONE, ListStreamer, same_as_generate
from tests.lade.shared import shared_model

TWO = torch.cat([ONE, ONE.flip(1)])


def by_batcher(model: Any, *args: Any, **options: Any) -> Any:
    with lade.Batcher(model) as batcher:
        other = batcher.submit(ONE[:, :3], seed=3, do_sample=True, max_new_tokens=60)
        answer = batcher.submit(*args, seed=1, **options).result()
        other.result()
    return answer


WAYS: dict[str, Callable[..., Any]] = {
    "generate": lade.generate,
    "batcher": by_batcher,
}


class Form:
    """Forces the pieces of a form in turn; the model fills in every fifth token."""

    def __init__(self) -> None:
        self.place = 0

    def __call__(self, row: int, prefix: Tensor) -> list[int]:
        self.place += 1
        return [*range(90)] if self.place % 5 == 0 else [20 + self.place % 5]


@pytest.mark.parametrize("config", [None, lade.Config(max_draft_tokens=8)])
def test_a_prefix_function_may_keep_state(config: Any) -> None:
    model = shared_model("llama", seed=1)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}
    expected = model.generate(ONE, prefix_allowed_tokens_fn=Form(), **options)
    got = lade.generate(model, ONE, prefix_allowed_tokens_fn=Form(), config=config, **options)
    assert got.tolist() == expected.tolist()


class Stopping(BaseStreamer):  # type: ignore[misc]
    """Calls back once it has so many tokens."""

    def __init__(self, most: int, then: Callable[[], None]) -> None:
        self._left, self._then = most, then

    def put(self, value: Tensor) -> None:
        self._left -= value.numel()
        if self._left <= 0:
            self._then()

    def end(self) -> None:
        pass


class Flag(StoppingCriteria):  # type: ignore[misc]
    is_set = False

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), self.is_set)


@pytest.mark.parametrize("kind", ["flag", "length"])
def test_a_streamer_ends_a_text_where_generate_would(kind: str) -> None:
    model = shared_model("llama", seed=1)
    expected = model.generate(ONE, do_sample=False, max_new_tokens=40)
    pool = lade.NGramPool()
    pool.observe(expected[0].tolist())

    def fresh() -> dict[str, Any]:
        criterion: Any = Flag() if kind == "flag" else MaxLengthCriteria(ONE.shape[1] + 40)
        name, value = ("is_set", True) if kind == "flag" else ("max_length", 0)
        streamer = Stopping(ONE.shape[1] + 6, lambda: setattr(criterion, name, value))
        return {"streamer": streamer, "stopping_criteria": StoppingCriteriaList([criterion])}

    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40}
    plain = model.generate(ONE, **fresh(), **options)
    config = lade.Config(max_draft_tokens=8)
    got = lade.generate(model, ONE, pool=pool, config=config, **fresh(), **options)
    assert got.tolist() == plain.tolist()
    assert plain.shape[1] < expected.shape[1]


class Forgetful(LogitsProcessor):  # type: ignore[misc]
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        scores.add_(1.0)  # and returns nothing


@pytest.mark.parametrize(
    ("way", "ids", "num_others", "do_sample"),
    [
        ("generate", ONE, 0, False),
        ("generate", TWO, 1, True),
        ("batcher", ONE, 1, False),
        ("batcher", TWO, 0, True),
    ],
)
@pytest.mark.filterwarnings("ignore::lade.PlainDecodingWarning")  # batches are plain
def test_a_processor_that_returns_nothing_is_named(
    way: str, ids: Tensor, num_others: int, do_sample: bool
) -> None:
    others = [TemperatureLogitsWarper(0.5)]
    processors = LogitsProcessorList([Forgetful(), *others[:num_others]])
    with pytest.raises(TypeError, match="expected Forgetful to return scores, a tensor, got None"):
        WAYS[way](
            shared_model(), ids, do_sample=do_sample, max_new_tokens=5, logits_processor=processors
        )


class Replacing(StoppingCriteria):  # type: ignore[misc]
    """Replaces every third token."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if input_ids.shape[1] % 3 == 0:
            input_ids[:, -1] = (input_ids[:, -1] + 1) % 90
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Writing(ListStreamer):
    """Writes into what it is given."""

    def put(self, value: Tensor) -> None:
        super().put(value)
        if value.dim() == 1:
            value.zero_()


@pytest.mark.parametrize("rows", [ONE, TWO])
def test_criteria_may_replace_tokens_and_streamers_may_write(rows: Tensor) -> None:
    streamers = [Writing(), Writing()]
    made = [{"streamer": each, "stopping_criteria": [Replacing()]} for each in streamers]
    kind = {"plainly": "sees all rows"} if len(rows) > 1 else {"accept": 0.9, "config": EIGHT}
    same_as_generate(shared_model("llama", seed=1), rows, fresh=lambda: made.pop(0), **kind)
    assert streamers[0].events == streamers[1].events


def test_a_criterion_that_replaces_tokens_of_rows_that_run_ahead_is_refused() -> None:
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9}
    with pytest.raises(lade.LadeError, match="leave the tokens of a batch as they are"):
        lade.generate(shared_model(), TWO, stopping_criteria=[Replacing()], **options)
