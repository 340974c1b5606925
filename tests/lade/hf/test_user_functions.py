"""What a user passes is called when `generate` would call it: as often, in that order, so far."""

import warnings
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
)
from transformers.generation.streamers import BaseStreamer

import lade
from tests.lade.both import ONE
from tests.lade.shared import shared_model
from tests.lade.tiny import BLOOM, IS_NEWEST, MAMBA2

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"seed": 1},
    "bloom": {**BLOOM, "attention": "eager"},
    "mamba2": {**MAMBA2, "attention": "eager"},
}
TWO = torch.cat([ONE, ONE.flip(1)])


class Log:
    """One of each kind of function, which all note what they are called with."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def options(self) -> dict[str, Any]:
        calls = self.calls

        class Processor(LogitsProcessor):  # type: ignore[misc]
            def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
                calls.append(("processor", input_ids.tolist(), scores.argmax(-1).tolist()))
                return scores

        class Criterion(StoppingCriteria):  # type: ignore[misc]
            def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
                calls.append(("criterion", input_ids.tolist(), sorted(_)))
                return torch.zeros(len(input_ids), dtype=torch.bool)

        class Streamer(BaseStreamer):  # type: ignore[misc]
            def put(self, value: Tensor) -> None:
                calls.append(("put", value.tolist()))

            def end(self) -> None:
                calls.append(("end",))

        def allowed(row: int, prefix: Tensor) -> list[int]:
            calls.append(("prefix", row, prefix.tolist()))
            return [20 + len(prefix) % 3] if len(prefix) % 5 else [*range(2, 90)]

        return {
            "logits_processor": LogitsProcessorList([Processor()]),
            "stopping_criteria": StoppingCriteriaList([Criterion()]),
            "streamer": Streamer(),
            "prefix_allowed_tokens_fn": allowed,
        }


def by_decode(model: Any, *args: Any, streamer: Any = None, **options: Any) -> Any:
    """Call `generate` with `lade.decode`, which a streamer reaches but for the prompt."""
    mine = {"custom_generate": lade.decode, "token_streamer": streamer}
    return model.generate(*args, streamer=streamer, **mine, **options)


def by_wrap(model: Any, *args: Any, **options: Any) -> Any:
    lade.wrap(model)
    try:
        return model.generate(*args, **options)
    finally:
        lade.unwrap(model)


def by_batcher(model: Any, *args: Any, **options: Any) -> Any:
    with lade.Batcher(model) as batcher:
        other = batcher.submit(ONE[:, :3], seed=3, do_sample=True, max_new_tokens=60)
        answer = batcher.submit(*args, seed=1, **options).result()
        other.result()
    return answer


WAYS: dict[str, Callable[..., Any]] = {
    "generate": lade.generate,
    "decode": by_decode,
    "wrap": by_wrap,
    "batcher": by_batcher,
}


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("ids", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize(
    ("family", "way"),
    [*(("llama", way) for way in WAYS), *((family, "generate") for family in [*FAMILIES][1:])],
)
def test_all_are_called_as_by_generate(family: str, way: str, ids: Any, do_sample: bool) -> None:
    model = shared_model(family, **FAMILIES[family])
    options: dict[str, Any] = {"do_sample": do_sample, "max_new_tokens": 24, "eos_token_id": None}
    theirs, mine = Log(), Log()
    torch.manual_seed(1)
    expected = model.generate(ids, **options, **theirs.options())
    pool = lade.NGramPool()
    for row in expected.tolist():
        pool.observe(row)
    torch.manual_seed(1)
    steps: list[lade.Step] = []
    config = lade.Config(max_draft_tokens=8)
    with_lade: dict[str, Any] = {"pool": pool, "config": config, "on_step": steps.append}
    # Batches with such functions are; and older transformers do not tell `lade.decode` that nobody
    # can look at the cache.
    is_plain = len(ids) > 1 or (way == "decode" and not IS_NEWEST)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if is_plain else "error", lade.PlainDecodingWarning)
        got = WAYS[way](model, ids, **with_lade, **options, **mine.options())
    assert got.tolist() == expected.tolist()
    assert mine.calls == theirs.calls
    assert any(step.num_accepted for step in steps) != is_plain


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


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_others", [0, 1], ids=["alone", "before another"])
@pytest.mark.parametrize("ids", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("way", ["generate", "batcher"])
@pytest.mark.filterwarnings("ignore::lade.PlainDecodingWarning")  # batches are plain
def test_a_processor_that_returns_nothing_is_named(
    way: str, ids: Tensor, num_others: int, do_sample: bool
) -> None:
    others = Log().options()["logits_processor"]
    processors = LogitsProcessorList([Forgetful(), *others[:num_others]])
    with pytest.raises(TypeError, match="expected Forgetful to return scores, a tensor, got None"):
        WAYS[way](
            shared_model(), ids, do_sample=do_sample, max_new_tokens=5, logits_processor=processors
        )
