"""Whatever model is handed in, the one decoded is the one that `generate` would run."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM, LogitsProcessor

import lade
from tests.lade.both import same_as_generate
from tests.lade.tiny import tiny_model

PROMPT = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
OPTIONS: dict[str, Any] = {
    "attention_mask": torch.ones_like(PROMPT),
    "do_sample": False,
    "max_new_tokens": 24,
    "pad_token_id": 0,
}
DOORS: dict[str, Callable[..., Any]] = {
    "generate": lade.generate,
    "wrap": lambda model, *args, **options: _wrapped(model, *args, **options),
    "decode": lambda model, *args, **options: model.generate(
        *args, custom_generate=lade.decode, **options
    ),
}


def _wrapped(model: Any, *args: Any, **options: Any) -> Any:
    lade.wrap(model)
    try:
        return model.generate(*args, **options)
    finally:
        lade.unwrap(model)


def _config_of(kind: str) -> Any:
    peft = pytest.importorskip("peft", reason="needs peft")
    if kind == "lora":
        return peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False)
    return peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)


def adapted(kind: str, of: type = LlamaForCausalLM) -> Any:
    """Return a model with adapters of PEFT, whose weights are not the identity."""
    peft = pytest.importorskip("peft", reason="needs peft")
    model = tiny_model("llama", seed=1, dtype=torch.float32)
    model.__class__ = of
    model.generation_config.eos_token_id = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        return peft.get_peft_model(model, _config_of(kind)).eval()


@pytest.mark.parametrize(
    ("kind", "door"),
    [("lora", "generate"), ("lora", "wrap"), ("prefix", "decode")],
)
@pytest.mark.filterwarnings("ignore")
def test_adapters_of_peft_count(kind: str, door: str) -> None:
    model = adapted(kind)
    expected = model.generate(input_ids=PROMPT, **OPTIONS)
    if kind != "lora":  # which is inside of the base model
        base = model.get_base_model().generate(PROMPT, **OPTIONS)
        if expected.tolist() == base.tolist():
            pytest.skip("this release of PEFT leaves prefixes out with this one of transformers")
    assert DOORS[door](model, input_ids=PROMPT, **OPTIONS).tolist() == expected.tolist()


class Around(torch.nn.Module):
    """A wrapper that is no model of transformers, as accelerate's, and TRL's with a value head."""

    def __init__(self, pretrained_model: Any) -> None:
        super().__init__()
        self.pretrained_model = pretrained_model


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "peft": lambda model: adapted("lora"),
    "around": Around,
    "twice": lambda model: Around(Around(model)),
}


@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_wrappers_are_looked_through(make: Callable[[Any], Any]) -> None:
    """By all that takes a model and does not generate."""
    wrapper = make(tiny_model("llama", seed=1))
    model = next(each for each in wrapper.modules() if isinstance(each, LlamaForCausalLM))
    options = OPTIONS | {"config": lade.Config(reuses_prefix=True), "max_time": 600.0}
    options["return_dict_in_generate"] = True
    assert lade.probe(wrapper, anew=True).model == "LlamaForCausalLM"
    lade.warm_up(wrapper)
    made = lade.prewarm(wrapper, 30, max_tokens=64)
    assert made.path == lade.prewarm(model, 30, max_tokens=1).path
    reused = []
    for forgets in (False, False, True):
        if forgets:
            lade.release(wrapper)
        stats = lade.generate(model, PROMPT, **options).stats
        assert stats.num_draft_tokens > 0  # with `max_time`, none without `warm_up`
        reused.append(stats.num_reused_tokens)
    assert reused == [0, PROMPT.shape[1] - 1, 0]


class NamesNothing(LlamaForCausalLM):  # type: ignore[misc]
    """A model whose methods take whatever comes, so that `generate` refuses `input_ids=`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return super().prepare_inputs_for_generation(*args, **kwargs)


@pytest.mark.parametrize(("kind", "door"), [("lora", DOORS["generate"]), (None, DOORS["wrap"])])
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_names_no_arguments_takes_its_prompt_by_place(
    kind: str | None, door: Callable[..., Any]
) -> None:
    model = tiny_model("llama", seed=1) if kind is None else adapted(kind, NamesNothing)
    if kind is None:
        model.__class__ = NamesNothing
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}
    with pytest.raises(ValueError, match="input_ids"):
        model.generate(input_ids=PROMPT, **options)
    assert door(model, PROMPT, **options).tolist() == model.generate(PROMPT, **options).tolist()


class TakesAnything(LlamaForCausalLM):  # type: ignore[misc]
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs)


class HasItsOwnNames(LlamaForCausalLM):  # type: ignore[misc]
    def generate(self, prompt: Any, how: Any = None, /, *, extra: int = 1, **kwargs: Any) -> Any:
        assert extra == 2
        return super().generate(prompt, how, **kwargs)


def remade(kind: type) -> Any:
    model = tiny_model("llama", seed=1)
    model.__class__ = kind
    return model


@pytest.mark.filterwarnings("ignore::lade.PlainDecodingWarning")  # of one like no other
@pytest.mark.parametrize("kind", [LlamaForCausalLM, TakesAnything, HasItsOwnNames])
def test_arguments_by_place_reach_a_wrapped_model(kind: type) -> None:
    model = remade(kind)
    config = GenerationConfig(do_sample=False, max_new_tokens=12, pad_token_id=0)
    mask: dict[str, Any] = {"attention_mask": torch.ones_like(PROMPT)}
    if kind is HasItsOwnNames:
        mask["extra"] = 2
    expected = model.generate(PROMPT, config, **mask)
    lade.wrap(model)
    seen: list[Any] = []
    got = model.generate(PROMPT, config, on_step=seen.append, **mask)
    assert got.tolist() == expected.tolist()
    assert seen  # it was lade


def test_a_generate_of_the_instance_is_the_models_own() -> None:
    model = tiny_model("llama", seed=1)
    expected = model.generate(PROMPT, **OPTIONS | {"max_new_tokens": 5})
    model.generate = functools.partial(type(model).generate, model, max_new_tokens=5)
    own = model.generate
    rest = {name: value for name, value in OPTIONS.items() if name != "max_new_tokens"}
    assert lade.generate(model, PROMPT, **rest).tolist() == expected.tolist()
    lade.wrap(model)
    lade.wrap(model)
    assert model.generate(PROMPT, **rest).tolist() == expected.tolist()
    lade.unwrap(model)
    assert model.generate is own


def test_another_custom_generate_of_a_wrapped_model_is_the_callers_choice() -> None:
    model = lade.wrap(tiny_model("llama", seed=1))
    pool = lade.NGramPool()
    got = model.generate(PROMPT, custom_generate=lade.decode, pool=pool, **OPTIONS)
    assert len(pool) == got.shape[1]

    def mine(model: Any, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return input_ids + 1

    assert model.generate(PROMPT, custom_generate=mine, **OPTIONS).tolist() == (PROMPT + 1).tolist()


@pytest.mark.filterwarnings("ignore:lade falls back:lade.PlainDecodingWarning")  # batches
@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_prompt_that_a_processor_writes_into_is_returned_as_generate_does(num_rows: int) -> None:
    class Writing(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            input_ids[:, 1] = 9
            return scores

    model = tiny_model("llama", seed=1)
    prompt = PROMPT.repeat(num_rows, 1)
    expected, _ = same_as_generate(
        model,
        fresh=lambda: {"input_ids": prompt.clone(), "logits_processor": [Writing()]},
        attention_mask=torch.ones_like(prompt),
    )
    assert expected.sequences[0, 1] == 9


def test_padding_that_is_no_number_is_decoded_plainly() -> None:
    """A query of padding that sees nothing is NaN in eager attention in float64."""
    model = tiny_model("mistral", seed=1, attention="eager", sliding_window=4)
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([[0, 0, 5, 6, 7, 5, 6, 7]])
    config = lade.Config(max_draft_tokens=4)
    same_as_generate(
        model, prompt, knows=True, config=config, max_new_tokens=30, plainly="no numbers"
    )
