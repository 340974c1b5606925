"""A check leaves no mark: nothing of a model, its settings and loggers differs after it."""

import copy
import dataclasses
import logging
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import lade
from tests.grids import thinned
from tests.lade.both import ONE
from tests.lade.hf.test_multimodal import tiny_vlm
from tests.lade.tiny import byte_tokenizer, tiny_model
from tests.support.run import all_names
from tests.support.tiny import CannotBuild, NotText
from tests.support.tiny import tiny_model as support_model

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
LONG = torch.randint(3, 90, (1, 300), generator=torch.Generator().manual_seed(0))


def seen(value: Any) -> Any:
    """Return what tells whether an attribute was changed, in place or not."""
    if isinstance(value, Tensor):
        held = value.detach().flatten()[:64].tolist() if not value.is_meta else None
        return id(value), value._version, tuple(value.shape), repr(held)
    if isinstance(value, dict):
        return [(key, seen(each)) for key, each in value.items()]
    if type(value) is Note:
        return seen(vars(value))
    if isinstance(value, list | tuple | deque):
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


@dataclasses.dataclass
class Note:
    """An object of a module's file."""

    num: int = 0
    seen: list[int] = dataclasses.field(default_factory=list)


class Remembering(nn.Module):
    """A user's layer that remembers every call, in as many ways as there are."""

    count: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.note, self.last = inner, Note(), torch.zeros(3)
        self.num, self.nested, self.recent = 0, {"of": {"sizes": [0]}}, deque([0], 4)
        self.names, self.tensors = {"start"}, [torch.zeros(2), torch.zeros(2)]
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, states: Tensor) -> Tensor:
        size = states.shape[1]
        self.num, self.note.num = self.num + 1, self.note.num + 1
        self.last[0] = size
        self.tensors[1].add_(size)
        for sizes in (self.nested["of"]["sizes"], self.note.seen, self.recent):
            sizes.append(size)
        self.names.add(str(size))
        self.count.add_(1)
        made: Tensor = self.inner(states)
        return made


def remembering() -> Any:
    model = tiny_model("llama", seed=1)
    model.model.layers[1].mlp.up_proj = Remembering(model.model.layers[1].mlp.up_proj)
    return model


def rope(kind: str) -> Any:
    """Return a model whose rotary embedding remembers the longest text, which was a long one."""
    of_kind: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        of_kind |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
        of_kind["original_max_position_embeddings"] = 40
    sizes: dict[str, Any] = {"head_dim": 16, "max_position_embeddings": 40}
    model = tiny_model(dtype=torch.float32, rope_parameters=of_kind, **sizes)
    model.generate(LONG, **GREEDY)
    return model


def dynamic() -> Any:
    return rope("dynamic")


def longrope() -> Any:
    return rope("longrope")


QUICK = tiny_model, images, packed, remembering, dynamic, longrope
MADE = [
    *(pytest.param(make, id=make.__name__) for make in QUICK),
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in all_names()),
]


@pytest.mark.filterwarnings("ignore")  # of models about their own settings
@pytest.mark.parametrize("made", MADE)
def test_nothing_of_a_model_differs_after_a_check(made: Any, tmp_path: Path) -> None:
    make = partial(support_model, made, seed=1, dtype=torch.float32)
    try:
        model = make() if isinstance(made, str) else made()
    except (CannotBuild, NotText) as why:
        pytest.skip(str(why)[:80])
    loggers = [*logging.root.manager.loggerDict]
    before = state_of(model, loggers)
    lade.probe(model)
    lade.warm_up(model, num_rows=2)
    with suppress(lade.LadeError):  # it falls back to standard decoding
        lade.prewarm(model, 10.0, max_tokens=8, folder=tmp_path)
    after = state_of(model, loggers)
    assert after.keys() == before.keys()
    assert not [name for name in before if after[name] != before[name]]


@pytest.mark.filterwarnings("ignore::lade.PlainDecodingWarning")
@pytest.mark.parametrize("kind", thinned(["dynamic", "longrope"], "longrope"))
def test_calls_leave_the_angles_that_generate_leaves(kind: str) -> None:
    model = rope(kind)
    twin, config = copy.deepcopy(model), lade.Config(reuses_prefix=True)
    for num in (120, 20, 60, 121):
        expected = twin.generate(LONG[:, :num], **GREEDY)
        assert torch.equal(lade.generate(model, LONG[:, :num], config=config, **GREEDY), expected)
        mine, theirs = model.model.rotary_emb, twin.model.rotary_emb
        assert torch.equal(mine.inv_freq, theirs.inv_freq)
        assert getattr(mine, "max_seq_len_cached", 0) == getattr(theirs, "max_seq_len_cached", 0)


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
