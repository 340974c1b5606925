"""A check leaves no mark: nothing of a model, its settings and loggers differs after it."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GenerationMixin,
    GraniteSpeechConfig,
    GraniteSpeechForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaMLP

import lade
from lade.errors import PlainDecodingWarning
from tests.lade.both import ONE
from tests.lade.tiny import COMMON, FAMILIES, byte_tokenizer, tiny_model
from tests.support.run import all_names
from tests.support.tiny import CannotBuild, NotText
from tests.support.tiny import tiny_model as support_model

CONFIG = lade.Config(max_draft_tokens=8)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}


def seen(value: Any) -> Any:
    """Return what tells whether an attribute was changed, in place or not."""
    if isinstance(value, Tensor):
        held = value.detach().flatten()[:64].tolist() if not value.is_meta else None
        return id(value), value._version, tuple(value.shape), repr(held)
    if isinstance(value, dict):
        return [(key, seen(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [seen(each) for each in value]
    return repr(value) if isinstance(value, int | float | str | set | None) else id(value)


def state_of(model: Any, loggers: Any) -> dict[Any, Any]:
    """Return all that a check must leave as it was."""
    state: dict[Any, Any] = {
        (name, attribute): seen(value)
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if attribute != "_lade_profiles"
    }
    for name in ("config", "generation_config"):
        state[name] = repr(getattr(model, name).to_dict())
    for name in loggers:
        logger = logging.getLogger(name)
        state["logger", name] = (
            *(logger.level, logger.disabled, logger.propagate),
            *(logger.handlers[:], logger.filters[:]),
        )
    state["random"] = torch.get_rng_state().tolist()
    return state


def assert_no_mark(model: Any) -> None:
    loggers = [*logging.root.manager.loggerDict]
    before = state_of(model, loggers)
    lade.probe(model)
    lade.warm_up(model, num_rows=2)
    after = state_of(model, loggers)
    assert after.keys() == before.keys()
    assert not [name for name in before if after[name] != before[name]]


def speech() -> Any:
    """Return a model whose own `generate` switches adapters by whether there is audio."""
    config = GraniteSpeechConfig(
        text_config={"model_type": "granite", **COMMON},
        audio_token_index=90,
        tie_word_embeddings=False,
        has_lora_adapter=False,
        encoder_config={
            "input_dim": 8,
            "num_layers": 1,
            "hidden_dim": 16,
            "num_heads": 2,
            "output_dim": 6,
            "context_size": 8,
            "max_pos_emb": 16,
            "conv_kernel_size": 3,
        },
        projector_config={
            "model_type": "blip_2_qformer",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "encoder_hidden_size": 16,
            "cross_attention_frequency": 1,
        },
    )
    return GraniteSpeechForConditionalGeneration(config).double().eval()


def images() -> Any:
    """Return a model that keeps in its modules how positions were counted in a prompt."""
    text = {key: COMMON[key] for key in ("hidden_size", "intermediate_size")}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = Qwen2VLConfig(
        text_config={
            **text,
            "vocab_size": 120,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 512,
            "rope_parameters": rope,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        vision_config={
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "in_channels": 3,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=100,
        video_token_id=101,
        vision_start_token_id=102,
        vision_end_token_id=103,
    )
    return Qwen2VLForConditionalGeneration(config).double().eval()


class ScaledMLP(LlamaMLP):  # type: ignore[misc]
    scale = 1.0

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.scale


class Scaled(LlamaForCausalLM):  # type: ignore[misc]
    """A class whose own `generate` sets something in its modules."""

    def generate(self, *args: Any, scale: float = 1.0, **kwargs: Any) -> Any:
        for layer in self.model.layers:
            layer.mlp.scale = scale
        return super().generate(*args, **kwargs)


def scaled() -> Any:
    torch.manual_seed(0)
    model = Scaled(LlamaConfig(**COMMON)).double().eval()
    for layer in model.model.layers:
        layer.mlp.__class__ = ScaledMLP
    return model


class Counting(nn.Module):
    """Counts its forwards, in an attribute, a list and a buffer."""

    counted: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.num, self.sizes = inner, 0, [0]
        self.register_buffer("counted", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.num += 1
        self.sizes.append(x.shape[1])
        self.counted += 1
        made: Tensor = self.inner(x)
        return made


def counting() -> Any:
    model = tiny_model()
    model.model.norm = Counting(model.model.norm)
    model.model.layers[0].empty = nn.ModuleDict()  # as layers of PEFT have, and which are false
    return model


@pytest.mark.parametrize("make", [speech, images, scaled, counting, tiny_model])
def test_nothing_of_a_model_differs_after_a_check(make: Any) -> None:
    assert_no_mark(make())


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # of models about their own settings
@pytest.mark.parametrize("name", [name for name in all_names() if name not in FAMILIES])
def test_nothing_of_any_model_differs_after_a_check(name: str) -> None:
    try:
        model = support_model(name, seed=1, dtype=torch.float32)
    except (CannotBuild, NotText) as why:
        pytest.skip(str(why)[:80])
    assert_no_mark(model)


def prompt_of_images(model: Any, rows: int) -> Any:
    ids = torch.tensor([[5, 6, 7, 8, 102, *[100] * 16, 103, 5, 6, 7]]).repeat(rows, 1)
    pixels = torch.randn(64, 96, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=pixels.repeat(rows, 1),
        image_grid_thw=torch.tensor([[1, 8, 8]] * rows),
        mm_token_type_ids=(ids == 100).int(),
        return_dict_in_generate=True,
        **{**GREEDY, "max_new_tokens": 6, "suppress_tokens": [100, 101, 102, 103]},
    )


@pytest.mark.parametrize("rows", [1, 4])
def test_a_turn_after_an_image_goes_on_as_if_nothing_was_checked(rows: int) -> None:
    def turn(checked: bool, call: Any) -> Any:
        torch.manual_seed(0)
        model = images()
        first = prompt_of_images(model, rows)
        if checked:
            lade.probe(model)
        ids = torch.cat([first.sequences, torch.full((rows, 1), 9)], 1)
        name = "cache" if "cache" in first else "past_key_values"
        options = {**GREEDY, "suppress_tokens": [100, 101, 102, 103], name: first[name]}
        types = (ids == 100).int()
        mask = torch.ones_like(ids)
        return call(model, ids, attention_mask=mask, mm_token_type_ids=types, **options).tolist()

    plain = type(images()).generate
    expected = turn(False, plain)
    assert turn(True, plain) == expected
    assert turn(False, lade.generate) == turn(True, lade.generate) == expected


def test_what_an_own_generate_sets_holds_in_its_call() -> None:
    expected = [scaled().generate(ONE, scale=each, **GREEDY).tolist() for each in (0.3, 2.0)]
    assert expected[0] != expected[1]
    model = scaled()
    for scale, text in [*zip((0.3, 2.0), expected, strict=True)] * 2:
        got = lade.generate(model, ONE, scale=scale, config=CONFIG, **GREEDY)
        assert got.tolist() == text
    with lade.Batcher(model, config=CONFIG) as batcher:  # one after the other
        requests = [batcher.submit(ONE, scale=each, **GREEDY) for each in (0.3, 2.0) * 3]
        assert [each.result().tolist() for each in requests] == expected * 3


class Refusing(LlamaForCausalLM):  # type: ignore[misc]
    """A class whose own `generate` knows its own arguments alone."""

    def generate(self, input_ids: Any, max_new_tokens: int = 5, do_sample: bool = True) -> Any:
        return super().generate(input_ids, max_new_tokens=max_new_tokens, do_sample=do_sample)


class Dropping(LlamaForCausalLM):  # type: ignore[misc]
    """A class whose own `generate` leaves out what it does not know."""

    def generate(self, input_ids: Any, **kwargs: Any) -> Any:
        known = {name: kwargs[name] for name in ("max_new_tokens", "do_sample") if name in kwargs}
        return super().generate(input_ids, **known)


class Forgetful(LlamaForCausalLM):  # type: ignore[misc]
    """A class whose own `generate` leaves out criteria alone."""

    def generate(self, *args: Any, stopping_criteria: Any = None, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs)


def test_stop_strings_reach_a_generate_that_drops_criteria() -> None:
    model = Forgetful(LlamaConfig(**{**COMMON, "vocab_size": 256, "eos_token_id": 255})).eval()
    tokenizer = byte_tokenizer()
    options: dict[str, Any] = {**GREEDY, "tokenizer": tokenizer}
    free = model.generate(ONE, **GREEDY)[0, ONE.shape[1] :]
    stop = tokenizer.decode(free[3:4])
    expected = model.generate(ONE, stop_strings=stop, **options)
    assert expected.shape[1] < ONE.shape[1] + len(free)
    with pytest.warns(PlainDecodingWarning, match="it drops stopping criteria"):
        got = lade.generate(model, ONE, stop_strings=stop, **options)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", [Refusing, Dropping])
def test_a_generate_that_takes_no_decoding_function_is_called_as_it_is(kind: Any) -> None:
    model = kind(LlamaConfig(**COMMON)).eval()
    assert type(model).generate is not GenerationMixin.generate
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 9}
    torch.manual_seed(3)
    expected = model.generate(ONE, **options)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with pytest.warns(PlainDecodingWarning, match="its own `generate`"):
        got = lade.generate(model, ONE, **options)
    assert got.tolist() == expected.tolist()
    assert torch.get_rng_state().equal(state)


def test_what_such_a_generate_raises_is_what_its_caller_sees() -> None:
    model = Refusing(LlamaConfig(**COMMON)).eval()
    with pytest.raises(TypeError, match="unexpected keyword argument 'top_k'"):
        lade.generate(model, ONE, top_k=3)
