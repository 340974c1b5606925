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
    model.generation_config.num_beams = 2
    with pytest.raises(UnsupportedOptionError, match=r"support num_beams=2 \(gen"):
        lade.generate(model, PROMPT, attention_mask=MASK, max_new_tokens=4)


@pytest.mark.parametrize(
    "way", [lade.generate, lambda model, *a, **k: lade.wrap(model).generate(*a, **k)]
)
def test_prompt_lookup_is_a_limit_of_draft_tokens(way: Any) -> None:
    model = tiny_model("llama", seed=1)
    prompt = PROMPT.repeat(1, 4)
    expected = model.generate(prompt, do_sample=False, max_new_tokens=40)
    pool = lade.NGramPool()
    pool.observe(expected[0].tolist())
    most: list[int] = []
    for limit in (2, 30):
        steps: list[lade.Step] = []
        got = way(
            model,
            prompt,
            pool=pool,
            on_step=steps.append,
            do_sample=False,
            max_new_tokens=40,
            prompt_lookup_num_tokens=limit,
        )
        assert got.equal(expected)
        most.append(max(step.num_draft_tokens for step in steps))
    assert most[0] <= 2 < most[1]
    for config in (lade.Config(max_draft_tokens=8), lade.Config(step_costs={1: 1.0, 99: 1.0})):
        steps = []
        told: dict[str, Any] = {"on_step": steps.append, "config": config, "pool": pool}
        way(model, prompt, **told, max_new_tokens=40, prompt_lookup_num_tokens=2)
        assert max(step.num_draft_tokens for step in steps) == 2
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens of at least 1, got 0"):
        way(model, prompt, max_new_tokens=4, prompt_lookup_num_tokens=0)


def test_an_assistant_of_a_call_takes_the_place_of_the_drafter_of_a_wrapped_model() -> None:
    model = lade.wrap(tiny_model("llama", seed=1), drafter=lade.Drafter())
    got = model.generate(
        PROMPT,
        assistant_model=tiny_model("llama", seed=1, num_hidden_layers=2),
        do_sample=False,
        max_new_tokens=8,
        return_dict_in_generate=True,
    )
    assert "assistant" in " ".join(got.stats.sources).lower()


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
