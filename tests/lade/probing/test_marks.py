"""A check leaves no mark: nothing of a model, its settings and loggers differs after it."""

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import lade
from tests.lade.both import ONE
from tests.lade.hf.test_multimodal import tiny_vlm
from tests.lade.tiny import byte_tokenizer, tiny_model
from tests.support.run import all_names
from tests.support.tiny import CannotBuild, NotText
from tests.support.tiny import tiny_model as support_model

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
        if not attribute.startswith("_lade")
    }
    for name in ("config", "generation_config"):
        state[name] = repr(getattr(model, name).to_dict())
    for name in loggers:
        logger = logging.getLogger(name)
        settings = logger.level, logger.disabled, logger.propagate
        state["logger", name] = *settings, logger.handlers[:], logger.filters[:]
    state["random"] = torch.get_rng_state().tolist()
    return state


def images() -> Any:
    """Return a model that keeps in its modules how positions were counted in a prompt."""
    return tiny_vlm("qwen2_vl")[0]


def packed() -> Any:
    """Return a model whose weights a hook unpacks before the first forward, and then removes."""
    model = tiny_model("llama", seed=1)
    model.weights = [model.model.layers[1].mlp.down_proj._parameters.pop("weight")]

    def unpack(module: Any, args: Any) -> None:
        module.model.layers[1].mlp.down_proj.weight = module.weights[0]
        module.unpacks.remove()
        del module.unpacks

    model.unpacks = model.register_forward_pre_hook(unpack)
    return model


MADE = [
    *(pytest.param(make, id=make.__name__) for make in (tiny_model, images, packed)),
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in all_names()),
]


@pytest.mark.filterwarnings("ignore")  # of models about their own settings
@pytest.mark.parametrize("made", MADE)
def test_nothing_of_a_model_differs_after_a_check(made: Any) -> None:
    make = partial(support_model, made, seed=1, dtype=torch.float32)
    try:
        model = make() if isinstance(made, str) else made()
    except (CannotBuild, NotText) as why:
        pytest.skip(str(why)[:80])
    loggers = [*logging.root.manager.loggerDict]
    before = state_of(model, loggers)
    lade.probe(model)
    lade.warm_up(model, num_rows=2)
    after = state_of(model, loggers)
    assert after.keys() == before.keys()
    assert not [name for name in before if after[name] != before[name]]


# --- models whose class has a `generate` of its own -----------------------------------------------


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


def of_class(kind: type, **options: Any) -> Any:
    model = tiny_model(seed=1, **options)
    model.__class__ = kind
    return model


def test_stop_strings_reach_a_generate_that_drops_criteria() -> None:
    model = of_class(Forgetful, vocab_size=256, eos_token_id=255)
    tokenizer = byte_tokenizer()
    free = model.generate(ONE, **GREEDY)[0, ONE.shape[1] :]
    options: dict[str, Any] = {**GREEDY, "tokenizer": tokenizer}
    options["stop_strings"] = tokenizer.decode(free[3:4])
    expected = model.generate(ONE, **options)
    assert expected.shape[1] < ONE.shape[1] + len(free)
    with pytest.warns(lade.PlainDecodingWarning, match="it drops stopping criteria"):
        got = lade.generate(model, ONE, **options)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", [Refusing, Dropping])
def test_a_generate_that_takes_no_decoding_function_is_called_as_it_is(kind: Any) -> None:
    model = of_class(kind)
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 9}
    torch.manual_seed(3)
    expected = model.generate(ONE, **options)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with pytest.warns(lade.PlainDecodingWarning, match="its custom `generate`"):
        got = lade.generate(model, ONE, **options)
    assert got.tolist() == expected.tolist()
    assert torch.get_rng_state().equal(state)
    if kind is Refusing:
        with pytest.raises(TypeError, match="unexpected keyword argument 'top_k'"):
            lade.generate(model, ONE, top_k=3)
