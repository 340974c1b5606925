"""A call whose drafts can no longer be verified goes on without drafts, and loses nothing."""

import copy
import warnings
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import lade
from tests.grids import thinned_rows
from tests.lade.both import EIGHT, ONE, THREE, ListStreamer, same_as_generate, tokens_of
from tests.lade.tiny import BLOOM, CACHE, MAMBA2, tiny_model

SEEN_BY_NO_CHECK = "what no check has seen"


class CallsProcessor(LogitsProcessor):  # type: ignore[misc]
    """Counts its calls, and does something else at every third."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return scores * (0.3 if len(self.lengths) % 3 == 0 else 1.1)


class Breaking:
    """Lets a forward of several tokens fail once so many steps were reported.

    Args:
        model: whose forward it is.
        after: number of steps; also of rows.
        error: what is raised.
    """

    def __init__(self, model: Any, after: int, error: type[Exception] = RuntimeError) -> None:
        self.after, self.error = after, error
        self.told: dict[int, list[int]] = {}
        self._num_steps = 0
        part = next(iter(model.children()))
        self._forward, part.forward = part.forward, self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        if self._num_steps >= self.after and output[0].shape[1] > 1:
            self._num_steps = -(10**9)
            raise self.error(SEEN_BY_NO_CHECK)
        return output

    def on_step(self, step: lade.Step) -> None:
        self._num_steps += 1
        self.told.setdefault(step.row, []).extend(step.token_ids)


def compared(
    model: Any, prompt: torch.Tensor, after: int = 2, joint: bool = False, **options: Any
) -> tuple[Any, Any]:
    """Run plain and lade, whose forward fails on the way; compare all that can be seen."""
    lade.probe(model, num_rows=len(prompt))
    breaking = Breaking(model, after)
    streamers, processors = [ListStreamer() for _ in "12"], [CallsProcessor() for _ in "12"]
    made: list[dict[str, Any]] = [{"streamer": each} for each in streamers]
    if joint:
        for each, processor in zip(made, processors, strict=True):
            each["logits_processor"] = LogitsProcessorList([processor])
    options = {"min_new_tokens": 12, "max_new_tokens": 20, "config": EIGHT, **options}
    with pytest.warns(lade.VerificationWarning, match=SEEN_BY_NO_CHECK):
        expected, got = same_as_generate(
            model,
            prompt,
            accept=0.7,
            may_fail=True,
            fresh=partial(next, iter(made)),
            by=partial(lade.generate, on_step=breaking.on_step),
            **options,
        )
    assert streamers[1].events == streamers[0].events
    assert processors[1].lengths == processors[0].lengths
    for row, answer in enumerate(tokens_of(expected).tolist()):
        new, told = answer[prompt.shape[1] :], breaking.told[row]
        assert new[: len(told)] == told
        assert all(token in (0, 96) for token in new[len(told) :])  # padding is not reported
    for name in ("scores", "logits"):
        theirs, mine = getattr(expected, name, None), getattr(got, name, None)
        assert (theirs is None) == (mine is None)
        for a, b in zip(_flat(theirs), _flat(mine), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    return expected, got


def _flat(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values or () if value is not None for tensor in _flat(value)]


EARLY_ENDS = {"repetition_penalty": 1.3, "eos_token_id": [*range(30, 50)]}
ASKED: list[dict[str, Any]] = [
    {"do_sample": True, "joint": True},
    {"do_sample": True, "output_scores": True, "output_logits": True},
    {"output_scores": True, **EARLY_ENDS},
]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {},
    # In float64, rows of padding are no numbers to eager attention.
    "bloom": {**BLOOM, "attention": "eager", "dtype": torch.float32},
    "mamba2": {**MAMBA2, "attention": "eager"},
}


@pytest.mark.parametrize(
    ("family", "asked"),
    thinned_rows(product(FAMILIES, range(3)), ("llama", 0), ("llama", 2), ("mamba2", 1)),
)
def test_a_forward_that_fails_on_the_way_loses_nothing(family: str, asked: int) -> None:
    model = tiny_model(family, seed=1, **FAMILIES[family])
    compared(model, ONE, **ASKED[asked])


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize(("after", "options"), [(1, {"do_sample": True}), (5, EARLY_ENDS)])
def test_nor_do_rows_of_a_batch(after: int, options: dict[str, Any]) -> None:
    model, told = tiny_model("llama", seed=1), list[lade.Step]()
    lade.probe(model, num_rows=3)

    def fail(module: Any, args: Any, output: Any) -> None:
        if len(told) >= 3 * after and output.shape[1] > 3:
            told.clear()
            handle.remove()
            raise RuntimeError(SEEN_BY_NO_CHECK)

    handle = model.lm_head.register_forward_hook(fail)
    options = {"min_new_tokens": 12, "max_new_tokens": 20, "config": EIGHT, **options}
    with pytest.warns(lade.VerificationWarning, match=SEEN_BY_NO_CHECK):
        same_as_generate(
            *(model, THREE),
            accept=0.7,
            may_fail=True,
            by=partial(lade.generate, on_step=told.append),
            **options,
        )


def test_a_chat_goes_on_in_its_cache() -> None:
    model = tiny_model("llama", seed=1)
    first = model.generate(
        ONE, attention_mask=torch.ones_like(ONE), max_new_tokens=5, return_dict_in_generate=True
    )
    longer = torch.cat([first.sequences, ONE], dim=1)
    caches = [{CACHE: copy.deepcopy(first[CACHE])} for _ in range(2)]
    breaking = Breaking(model, 3)
    config = lade.Config(max_draft_tokens=4)
    with pytest.warns(lade.VerificationWarning):
        _, got = same_as_generate(
            *(model, longer),
            by=partial(lade.generate, on_step=breaking.on_step),
            fresh=partial(next, iter(caches)),
            config=config,
            knows=True,
        )
    assert got[CACHE] is caches[1][CACHE]
    assert got[CACHE].get_seq_length() == got.sequences.shape[1] - 1


def test_what_plain_raises_too_is_raised() -> None:
    model = tiny_model("llama", seed=1)
    lade.probe(model)

    def fail(module: Any, args: Any, output: Any) -> None:
        if output.shape[1] == 1:
            raise KeyError("the user's own")

    model.lm_head.register_forward_hook(fail)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.PlainDecodingWarning)
        with pytest.raises(KeyError, match="the user's own"):
            lade.generate(model, ONE, max_new_tokens=8)
