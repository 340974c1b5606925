"""Assisted generation as transformers has it: the same options, and the text of plain generate."""

import copy
import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import lade
from lade.drafters import AssistantModel, CallPool, Merged
from lade.errors import UnsupportedOptionError
from lade.hf.assistance import Steering
from lade.probing.profile import Profiles
from tests.grids import thinned
from tests.lade.both import same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import tiny_model

PROMPT = torch.tensor([[5, 6, 7, 5, 6, 7, 8, 5, 6]])
BATCH = torch.tensor([[0, 0, 5, 6, 7, 5], [5, 6, 7, 8, 5, 6], [0, 9, 9, 3, 9, 9]])


@pytest.fixture(scope="module")
def model() -> Any:
    return shared_model("llama", 1)


@pytest.fixture(scope="module")
def assistant() -> Any:
    return shared_model("qwen3", 2)


def both(model: Any, ids: torch.Tensor = PROMPT, **options: Any) -> tuple[Any, Any]:
    """Compare plain `generate` without the options of assistants with lade, which has them."""
    of_lade = {name: options.pop(name) for name in [*options] if "assistant" in name}
    by = partial(lade.generate, **of_lade)
    return same_as_generate(model, ids, by=by, seed=3, **{"max_new_tokens": 16, **options})


def by_wrapped(model: Any, **options: Any) -> Any:
    return model.generate(**options)


STEERED = [
    {},
    {"num_assistant_tokens": 3},
    {"num_assistant_tokens": 2, "num_assistant_tokens_schedule": "heuristic"},
    {"num_assistant_tokens_schedule": "heuristic_transient"},
    {"num_assistant_tokens_schedule": "constant"},
    {"num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.1},
    {"assistant_confidence_threshold": 0.01},
    {"assistant_confidence_threshold": 0.3, "num_assistant_tokens": 4},
    {"assistant_confidence_threshold": 0.0},
]


@pytest.mark.parametrize(
    "steering", thinned(STEERED, *STEERED[:9:4]), ids=lambda each: "-".join(each) or "measured"
)
def test_an_assistant_changes_no_text(model: Any, assistant: Any, steering: dict[str, Any]) -> None:
    do_sample = STEERED.index(steering) % 2 == 0
    _, got = both(model, assistant_model=assistant, do_sample=do_sample, **steering)
    assert set(got.stats.sources) == {"pool", "assistant"}
    assert sum(got.stats.accepted_by_depth) == got.stats.num_accepted_tokens


@pytest.mark.parametrize("name", ["assistant_model", "assistant_early_exit"])
def test_batches_and_samples_have_the_text_of_plain_generate(
    model: Any, assistant: Any, name: str
) -> None:
    given: dict[str, Any] = {name: assistant if name == "assistant_model" else 1}
    for do_sample in (False, True):
        both(model, BATCH, do_sample=do_sample, **given)
    if name == "assistant_model":  # transformers itself refuses several samples with early exit
        both(model, num_return_sequences=3, do_sample=True, **given)


def test_the_pool_of_the_call_drafts_too() -> None:
    model, assistant = tiny_model("llama", 1), tiny_model("qwen3", 2)
    pool = lade.NGramPool()
    _, first = both(model, pool=pool, assistant_model=assistant)
    assert len(pool) > PROMPT.shape[1]
    _, second = both(model, pool=pool, assistant_model=assistant)
    assert second.stats.num_steps < first.stats.num_steps  # the pool knows the answer
    assert second.stats.sources["pool"].num_accepted_tokens > 8


def test_a_wrapped_model_takes_an_assistant(assistant: Any) -> None:
    model = tiny_model("llama", 1)
    lade.wrap(model, pool=lade.NGramPool())
    of_calls: list[dict[str, Any]] = [
        {"assistant_model": assistant},
        {"assistant_early_exit": 1},
        # transformers drops assistants before a custom function; the wrapper knows better.
        {"assistant_model": assistant, "custom_generate": lade.decode},
    ]
    for of_call in of_calls:
        _, got = same_as_generate(model, PROMPT, by=partial(by_wrapped, **of_call))
        assert ("assistant" in got.stats.sources) == ("assistant_model" in of_call)


def test_a_custom_function_takes_early_exit_and_drafters(model: Any, assistant: Any) -> None:
    def by(model: Any, **options: Any) -> Any:
        return model.generate(custom_generate=lade.decode, **options)

    early = partial(by, assistant_early_exit=1, num_assistant_tokens=2)
    _, got = same_as_generate(model, PROMPT, by=early)
    assert "first_layers" in got.stats.sources
    _, got = same_as_generate(model, PROMPT, drafter=AssistantModel(assistant), by=by)
    assert set(got.stats.sources) == {"assistant"}


def test_early_exit_may_stand_in_any_config(model: Any) -> None:
    config = GenerationConfig(assistant_early_exit=1, max_new_tokens=8, pad_token_id=0)
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(PROMPT),
        "return_dict_in_generate": True,
    }
    got = lade.generate(model, PROMPT, generation_config=config, **options)
    assert "first_layers" in got.stats.sources
    other = copy.deepcopy(model)
    other.generation_config.assistant_early_exit = 1
    got = lade.generate(other, PROMPT, max_new_tokens=8, **options)
    assert "first_layers" in got.stats.sources


# --- how far an assistant drafts --------------------------------------------------------------


def test_options_of_the_call_come_before_those_of_the_assistant() -> None:
    own = GenerationConfig(num_assistant_tokens=7, num_assistant_tokens_schedule="constant")
    assert Steering.of({}, None, own) == Steering(7, "constant")
    assert Steering.of({"num_assistant_tokens": 2}, None, own) == Steering(2, "constant")
    of_call = GenerationConfig(assistant_confidence_threshold=0.2)
    assert Steering.of({}, of_call, own) == Steering(7, "constant", 0.2)
    assert Steering.of({}, None, GenerationConfig()) == Steering()


def test_steered_drafts_are_chains_as_transformers_drafts_them() -> None:
    assert Steering().options() == {}
    assert Steering(3, threshold=0.0).options() == {
        "expansion": "chain",
        "confidence": 0.0,
        "length": 3,
    }
    confident = {"expansion": "chain", "confidence": 0.4, "length": "confidence"}
    assert Steering(3).options() == {**confident, "max_draft_tokens": 3}
    assert Steering(schedule="constant").options() == {**confident, "max_draft_tokens": 20}
    growing = Steering(4, "heuristic", 0.3).options()
    assert growing == {"expansion": "chain", "confidence": 0.3, "length": "measured"}


# --- what is kept -----------------------------------------------------------------------------


def test_the_drafter_of_an_assistant_is_kept_with_what_it_learned(model: Any) -> None:
    assistant = tiny_model("qwen3", 2)
    kept = Profiles.of(assistant).drafters
    both(model, assistant_model=assistant)
    (first,) = kept[model].values()
    both(model, assistant_model=assistant)
    assert [*kept[model].values()] == [first]
    for number in range(1, 12):
        both(model, assistant_model=assistant, num_assistant_tokens=number, max_new_tokens=2)
    assert len(kept[model]) == 8
    assert not Profiles.of(copy.deepcopy(assistant)).drafters


def test_neither_assistant_nor_target_is_kept_alive() -> None:
    target, assistant = tiny_model("llama", 1), tiny_model("qwen3", 2)
    both(target, assistant_model=assistant)
    reference = weakref.ref(assistant)
    del assistant
    gc.collect()
    assert reference() is None
    assistant = tiny_model("qwen3", 2)
    both(target, assistant_model=assistant)
    both(target, assistant_early_exit=1)
    reference = weakref.ref(target)
    del target
    gc.collect()
    assert reference() is None
    assert not Profiles.of(assistant).drafters


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_assistant_tokens": 0}, "expected num_assistant_tokens of at least 1, got 0"),
        ({"num_assistant_tokens_schedule": "wild"}, "expected num_assistant_tokens_schedule of"),
        ({"assistant_confidence_threshold": 2.0}, "expected assistant_confidence_threshold from"),
        ({"assistant_lookbehind": 5}, "does not support assistant_lookbehind"),
        ({"target_lookbehind": 5}, "does not support target_lookbehind"),
        ({"assistant_ensemble_weight": 0.5}, "does not support assistant_ensemble_weight"),
        (
            {"assistant_tokenizer": object()},
            "does not support assistant_tokenizer: an assistant mu",
        ),
        ({"assistant_early_exit": 1}, "expected assistant_model or assistant_early_exit, got both"),
        ({"num_beams": 2}, "num_beams=2"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name(
    model: Any, assistant: Any, options: dict[str, Any], message: str
) -> None:
    pool = lade.NGramPool(50)
    given: dict[str, Any] = {
        "attention_mask": torch.ones_like(PROMPT),
        "max_new_tokens": 4,
        "pool": pool,
    }
    with pytest.raises(ValueError, match=message):
        lade.generate(model, PROMPT, assistant_model=assistant, **given, **options)
    assert len(pool) == 0


def test_contradictions_and_wrong_types_are_refused(model: Any, assistant: Any) -> None:
    given: dict[str, Any] = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 4}
    drafter = Merged([CallPool()])
    for name, value in (("assistant_model", assistant), ("assistant_early_exit", 1)):
        with pytest.raises(ValueError, match=f"expected drafter or {name}, got both"):
            lade.generate(model, PROMPT, drafter=drafter, **{**given, name: value})
    with pytest.raises(ValueError, match="expected drafter or assistant_early_exit, got both"):
        model.generate(
            PROMPT, custom_generate=lade.decode, drafter=drafter, assistant_early_exit=1, **given
        )
    with pytest.raises(TypeError, match="expected assistant_model to be a transformers causal LM"):
        lade.generate(model, PROMPT, assistant_model=object(), **given)
    with pytest.raises(UnsupportedOptionError, match="does not support assistant_tokenizer"):
        lade.generate(model, PROMPT, assistant_tokenizer=object(), **given)
    with pytest.raises(UnsupportedOptionError, match="token_healing"):
        lade.generate(model, PROMPT, assistant_model=assistant, token_healing=True, **given)
