"""What is refused, and by which name: the one that the user has written."""

from typing import Any

import pytest
import torch
from transformers import BatchEncoding, GenerationConfig

import lade
from lade.errors import UnsupportedOptionError
from lade.hf.options import refuse_unsupported_options
from tests.lade.both import ONE
from tests.lade.shared import shared_model
from tests.lade.tiny import tiny_model

PROMPT = torch.tensor([[5, 6, 7, 5, 6]])
MASK = torch.ones_like(PROMPT)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prompt_lookup_num_tokens": 3},
            "prompt_lookup_num_tokens=3 (generation mode assisted_generation)",
        ),
        (
            {"assistant_early_exit": 1, "prompt_lookup_num_tokens": 3},
            "prompt_lookup_num_tokens=3 (generation mode assisted_generation)",
        ),
        ({"num_beams": 4}, "num_beams=4 (generation mode beam_search)"),
        (
            {"num_beams": 2, "do_sample": True, "prompt_lookup_num_tokens": 3},
            "num_beams=2 (generation mode beam_sample)",
        ),
        (
            {"penalty_alpha": 0.6, "top_k": 4},
            "penalty_alpha=0.6 (generation mode contrastive_search)",
        ),
        ({"dola_layers": "high"}, "dola_layers='high' (generation mode dola_generation)"),
        ({"dola_layers": [0, 2]}, "dola_layers (generation mode dola_generation)"),
    ],
)
def test_a_mode_is_refused_by_the_option_that_asks_for_it(
    model: Any, options: dict[str, Any], message: str
) -> None:
    for given in (options, {"generation_config": GenerationConfig(**options)}):
        with pytest.raises(UnsupportedOptionError) as refused:
            lade.generate(model, PROMPT, attention_mask=MASK, max_new_tokens=4, **given)
        is_own = "beam" in message or "assisted" in message
        way_out = "; model.generate decodes so" if is_own else ""
        said = f"lade does not support {message} yet{way_out}"
        assert str(refused.value) == said


def test_a_mode_that_the_models_own_config_asks_for_is_named_too() -> None:
    model = tiny_model("llama")
    model.generation_config.prompt_lookup_num_tokens = 2
    with pytest.raises(UnsupportedOptionError, match=r"support prompt_lookup_num_tokens=2 \(gen"):
        lade.generate(model, PROMPT, attention_mask=MASK, max_new_tokens=4)


def test_what_does_not_change_the_mode_is_not_refused(model: Any) -> None:
    for options in ({"num_beams": 1}, {"penalty_alpha": 0.6, "do_sample": True}, {"top_k": 3}):
        refuse_unsupported_options(model, GenerationConfig(**options))


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"token_healing": True}])
def test_a_wrapped_model_says_how_to_get_its_own_generate_back(options: dict[str, Any]) -> None:
    model = lade.wrap(tiny_model("llama"))
    with pytest.raises(UnsupportedOptionError, match=r"yet; lade\.unwrap\(model\) gives the mod"):
        model.generate(PROMPT, attention_mask=MASK, max_new_tokens=4, **options)
    if "num_beams" in options:
        lade.unwrap(model)
        assert model.generate(PROMPT, attention_mask=MASK, max_new_tokens=4, **options).shape[1] > 5


@pytest.mark.parametrize(
    ("wrong", "way_out"),
    [
        ("Hello", "tokenize it"),
        ([5, 6], "torch.tensor([token_ids])"),
        (BatchEncoding({"input_ids": ONE}), "lade.generate(model, **inputs)"),
        (5, "got int"),
    ],
)
def test_what_is_no_tensor_of_ids_is_refused_with_a_way_out(wrong: Any, way_out: str) -> None:
    with pytest.raises(TypeError, match="expected input_ids to be a tensor") as told:
        lade.generate(shared_model("llama"), wrong)
    assert way_out in str(told.value)
