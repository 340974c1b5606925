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
from tests.lade.both import answered, same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import tiny_model

PROMPT = torch.tensor([[5, 6, 7, 5, 6, 7, 8, 5, 6]])


@pytest.fixture(scope="module")
def model() -> Any:
    return shared_model("llama", 1)


@pytest.fixture(scope="module")
def assistant() -> Any:
    return shared_model("qwen3", 2)


def both(model: Any, ids: torch.Tensor = PROMPT, **options: Any) -> Any:
    """Compare plain `generate` without the options of assistants with lade, which has them."""
    of_lade = {name: options.pop(name) for name in [*options] if "assistant" in name}
    by = partial(lade.generate, **of_lade)
    return same_as_generate(model, ids, by=by, seed=3, **{"max_new_tokens": 16, **options})[1]


def test_the_pool_of_the_call_drafts_too(assistant: Any) -> None:
    model, pool = tiny_model("llama", 1), lade.NGramPool()
    first = both(model, pool=pool, assistant_model=assistant)
    assert len(pool) > PROMPT.shape[1]
    second = both(model, pool=pool, assistant_model=assistant)
    assert second.stats.num_steps < first.stats.num_steps  # the pool knows the answer
    assert second.stats.sources["pool"].num_accepted_tokens > 8


def test_every_entry_point_takes_an_assistant_or_early_exit(assistant: Any) -> None:
    model = tiny_model("llama", 1)

    def by(model: Any, **options: Any) -> Any:
        return model.generate(**options)

    def sources(**options: Any) -> set[str]:
        _, got = same_as_generate(model, PROMPT, by=partial(by, **options))
        return {*got.stats.sources}

    custom: dict[str, Any] = {"custom_generate": lade.decode}
    assert "first_layers" in sources(assistant_early_exit=1, **custom)
    assert sources(drafter=AssistantModel(assistant), **custom) == {"assistant"}
    lade.wrap(model, pool=lade.NGramPool())
    assert "assistant" in sources(assistant_model=assistant)
    assert "first_layers" in sources(assistant_early_exit=1)
    # transformers drops assistants before a custom function; the wrapper knows better.
    assert "assistant" in sources(assistant_model=assistant, **custom)
    lade.wrap(model, drafter=lade.Drafter())
    assert "assistant" in sources(assistant_model=assistant)  # in place of the drafter


def test_early_exit_may_stand_in_any_config(model: Any) -> None:
    config = GenerationConfig(assistant_early_exit=1, max_new_tokens=8, pad_token_id=0)
    got = answered(model, PROMPT, generation_config=config)
    assert "first_layers" in got.stats.sources
    other = copy.deepcopy(model)
    other.generation_config.assistant_early_exit = 1
    assert "first_layers" in answered(other, PROMPT, max_new_tokens=8).stats.sources


def test_neither_assistant_nor_target_is_kept_alive() -> None:
    made = {"llama": tiny_model("llama", 1), "qwen3": tiny_model("qwen3", 2)}
    for gone in ("qwen3", "llama"):
        both(made["llama"], assistant_model=made["qwen3"])
        both(made["llama"], assistant_early_exit=1)
        reference = weakref.ref(made.pop(gone))
        gc.collect()
        assert reference() is None
        made["qwen3"] = tiny_model("qwen3", 2)


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"assistant_lookbehind": 5}, "does not support assistant_lookbehind without two tok"),
        ({"assistant_ensemble_weight": 0.5}, "does not support assistant_ensemble_weight"),
        ({"assistant_tokenizer": object()}, r"expected assistant_model= and tokenizer= beside"),
        ({"assistant_early_exit": 1}, "expected assistant_model or assistant_early_exit, got both"),
        ({"speculation_type": "tree"}, "does not support speculation_type='tree'"),
        ({"drafter": Merged([CallPool()])}, "expected drafter or assistant_model, got both"),
        ({"token_healing": True}, "token_healing"),
        ({"num_beams": 2}, "generation mode beam_search"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name(
    model: Any, assistant: Any, options: dict[str, Any], message: str
) -> None:
    pool = lade.NGramPool(50)
    given: dict[str, Any] = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 4}
    given |= {} if "drafter" in options else {"pool": pool}
    with pytest.raises(ValueError, match=message):
        lade.generate(model, PROMPT, assistant_model=assistant, **given, **options)
    assert len(pool) == 0
    if "drafter" in options:
        for call in (lade.generate, partial(type(model).generate, custom_generate=lade.decode)):
            with pytest.raises(ValueError, match="expected drafter or assistant_early_exit or use"):
                call(model, PROMPT, assistant_early_exit=1, **given, **options)


def test_what_is_no_assistant_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match="expected assistant_model to be a model of transformers"):
        lade.generate(model, PROMPT, assistant_model=object(), max_new_tokens=4)
    with pytest.raises(ValueError, match="expected assistant_model= and tokenizer= beside"):
        lade.generate(model, PROMPT, assistant_tokenizer=object(), max_new_tokens=4)
