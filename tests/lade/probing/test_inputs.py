"""Models whose class, or the user, prepares the inputs of forwards or decodes in its own way."""

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel, LlamaForCausalLM

import lade
from tests.lade.both import EIGHT, same_as_generate
from tests.lade.tiny import tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:lade decodes:lade.PlainDecodingWarning"),
    pytest.mark.filterwarnings("ignore:lade decodes:lade.VerificationWarning"),
]

PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 9, 11, 13, 5, 6, 7, 8, 20, 21, 22, 23]])
OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None, "do_sample": False}
KNOWN: dict[str, type] = {"llama": LlamaForCausalLM, "gpt2": GPT2LMHeadModel}

PREPARE = "prepare_inputs_for_generation"
UPDATE = "_update_model_kwargs_for_generation"
SAMPLE = "_sample"


def passing(self: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(KNOWN[self.config.model_type], PREPARE)(self, *args, **kwargs)


def anew(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let positions begin anew after 32 tokens."""
    inputs = passing(self, *args, **kwargs)
    if inputs.get("position_ids") is not None:
        inputs["position_ids"] = inputs["position_ids"] % 32
    return inputs


def window_of(num_tokens: int) -> Tensor:
    """Return a mask of the first token and the last 4, from 32 on."""
    mask = torch.ones(1, num_tokens, dtype=torch.long)
    if num_tokens > 32:
        mask[:, 1 : num_tokens - 4] = 0
    return mask


def windowed(self: Any, *args: Any, **kwargs: Any) -> Any:
    inputs = passing(self, *args, **kwargs)
    num_tokens = inputs["position_ids"].max() + 1
    return {**inputs, "attention_mask": window_of(int(num_tokens))}


def without_mask(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave out a mask for a single token, which has no need of one."""
    inputs = passing(self, *args, **kwargs)
    if inputs["input_ids"].shape[1] == 1:
        inputs["attention_mask"] = None
    return inputs


def late(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Give a single token a position that it would not have beside others."""
    inputs = passing(self, *args, **kwargs)
    if inputs["position_ids"].shape[1] == 1 and int(inputs["position_ids"]) > 30:
        inputs["position_ids"] = inputs["position_ids"] % 5
    return inputs


def updated(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Window by a mask that is kept for the next forward."""
    kept = getattr(KNOWN[self.config.model_type], UPDATE)(self, *args, **kwargs)
    return {**kept, "attention_mask": window_of(kept["position_ids"].shape[1])}


def updated_positions(self: Any, *args: Any, **kwargs: Any) -> Any:
    kept = getattr(KNOWN[self.config.model_type], UPDATE)(self, *args, **kwargs)
    if kept.get("position_ids") is not None:
        kept["position_ids"] = kept["position_ids"] % 32
    return kept


def sampled(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Decode as usual, and turn two tokens of the answer round."""
    found = getattr(KNOWN[self.config.model_type], SAMPLE)(self, *args, **kwargs)
    tokens = found if torch.is_tensor(found) else found.sequences
    tokens[:, [-1, -2]] = tokens[:, [-2, -1]]
    return found


CHANGES: dict[str, tuple[str, Any]] = {
    "passing": (PREPARE, passing),
    "anew": (PREPARE, anew),
    "windowed": (PREPARE, windowed),
    "without mask": (PREPARE, without_mask),
    "late": (PREPARE, late),
    "updated": (UPDATE, updated),
    "updated positions": (UPDATE, updated_positions),
    "sampled": (SAMPLE, sampled),
}
DRAFTS = ("passing", "anew")
HARMLESS = ("passing", "without mask")
changes = pytest.mark.parametrize("change", CHANGES)
families = pytest.mark.parametrize("family", KNOWN)
wheres = pytest.mark.parametrize("where", ["class", "object"])
samples = pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])


def changed(family: str, change: str, where: str) -> Any:
    """Return a model of a class with a method of its own, or with one in its attributes."""
    model = tiny_model(family, seed=2)
    name, function = CHANGES[change]
    if where == "class":
        model.__class__ = type("Own", (KNOWN[family],), {name: function, "__module__": __name__})
    else:
        setattr(model, name, MethodType(function, model))
    return model


def knowing(model: Any, **options: Any) -> Any:
    """Return a pool that knows the answer."""
    torch.manual_seed(0)
    text = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **OPTIONS | options)
    pool = lade.NGramPool()
    pool.observe(text[0].tolist())
    return pool


@samples
@wheres
@changes
@families
def test_own_methods_do_what_they_do_in_generate(
    family: str, change: str, where: str, do_sample: bool
) -> None:
    model = changed(family, change, where)
    given = {**OPTIONS, "do_sample": do_sample}
    pool = knowing(model, do_sample=do_sample)
    for config in (None, EIGHT, lade.Config(max_draft_tokens=0), EIGHT):
        _, got = same_as_generate(model, PROMPT, pool=pool, config=config, **given)
    if change in DRAFTS:
        assert got.stats.num_draft_tokens > 0
    assert got.stats.num_tokens == 40
    # `generate` looks for the loop in the class alone.
    is_harmless = change in HARMLESS or (change, where) == ("sampled", "object")
    usual = tiny_model(family, seed=2).generate(PROMPT, **OPTIONS).tolist()
    assert (model.generate(PROMPT, **OPTIONS).tolist() == usual) is is_harmless


@wheres
@changes
@families
def test_own_methods_do_so_in_a_function_of_generate(family: str, change: str, where: str) -> None:
    model = changed(family, change, where)
    expected = model.generate(PROMPT, **OPTIONS)
    pool = knowing(model)
    mine: dict[str, Any] = {"custom_generate": lade.decode, "pool": pool}
    for config in (None, EIGHT):
        got = model.generate(PROMPT, config=config, **mine, **OPTIONS)
        assert got.tolist() == expected.tolist()


@wheres
@changes
@families
def test_own_methods_do_so_beside_other_calls(family: str, change: str, where: str) -> None:
    model = changed(family, change, where)
    expected = model.generate(PROMPT, **OPTIONS).tolist()
    torch.manual_seed(3)
    other = {**OPTIONS, "do_sample": True}
    beside = model.generate(PROMPT[:, :7], **other).tolist()
    with lade.Batcher(model, pool=knowing(model), config=EIGHT) as batcher:
        first = batcher.submit(PROMPT[:, :7], seed=3, **other)
        requests = [batcher.submit(PROMPT, **OPTIONS) for _ in range(3)]
        assert first.result().tolist() == beside
        assert [each.result().tolist() for each in requests] == [expected] * 3
