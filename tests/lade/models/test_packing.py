"""Weights in 16 bits that compute in float32: the text is that of the model made float32."""

import copy
import pickle
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import lade
from lade.models import load, pack
from tests.grids import thinned_rows
from tests.lade.apps.cli.command import run
from tests.lade.both import EIGHT, ONE, THREE, same_as_generate
from tests.lade.forward.conftest import Ran, ran  # noqa: F401
from tests.lade.tiny import byte_tokenizer, tiny_model
from tests.support.tiny import tiny_model as any_tiny_model

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi3", "olmo2"),
    *("gpt_neox", "stablelm", "cohere", "granite", "lfm2", "starcoder2"),
)
LONG: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None}


def narrow(family: str = "llama", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """Return a model in 16 bits, whose matrices have rows of whole blocks."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    return tiny_model(family, seed=3, dtype=dtype, **{**sizes, **options})


@pytest.mark.parametrize(
    ("family", "dtype"),
    thinned_rows(
        product(FAMILIES, (torch.bfloat16, torch.float16)),
        *(("llama", torch.float16), ("gemma3_text", torch.bfloat16)),
    ),
    ids=str,
)
def test_the_text_is_that_of_the_model_in_float32(family: str, dtype: torch.dtype) -> None:
    model = narrow(family, dtype)
    wide = copy.deepcopy(model).float()
    assert pack(model) is model
    assert sum(each.dtype is dtype for each in model.parameters()) >= 5
    for ids in (ONE, THREE):
        for do_sample in (False, True):
            options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": do_sample}
            options |= {"attention_mask": (ids != 0).long(), "pad_token_id": 0}
            torch.manual_seed(1)
            expected = wide.generate(ids, **options)
            for by in (model.generate, lambda *a, **o: lade.generate(model, *a, **o, config=EIGHT)):
                torch.manual_seed(1)
                assert by(ids, **options).tolist() == expected.tolist()


def test_forwards_run_compiled(ran: list[Ran]) -> None:  # noqa: F811
    model = pack(narrow())
    same_as_generate(model, ONE, accept=0.7, config=EIGHT, **LONG)
    assert ran
    assert lade.probe(model).why_by_torch is None


def test_a_float32_model_that_16_bits_hold_takes_half_the_memory() -> None:
    wide = narrow().float()
    size, expected = sum(each.nbytes for each in wide.parameters()), wide.generate(ONE, **LONG)
    model = pack(wide)
    assert sum(each.nbytes for each in model.parameters()) < 0.55 * size
    assert model.lm_head.weight.dtype is torch.bfloat16
    assert lade.generate(model, ONE, **LONG).tolist() == expected.tolist()
    random = pack(tiny_model("llama", dtype=torch.float32, hidden_size=64))
    assert {each.dtype for each in random.parameters()} == {torch.float32}


def test_what_was_packed_is_saved_copied_pickled_and_trained(tmp_path: Path) -> None:
    model = narrow(tie_word_embeddings=True)
    expected = copy.deepcopy(model).float().generate(ONE, **LONG).tolist()
    pack(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for each in (saved, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert each.generate(ONE, **LONG).tolist() == expected
        assert each.lm_head.weight is each.model.embed_tokens.weight
    model(ONE, labels=ONE).loss.backward()
    assert all(each.grad is not None for each in model.parameters())
    # One matrix after the other is set in place, as an optimizer does.
    before = model.model.layers[0].mlp.down_proj.weight.clone()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
    wide = copy.deepcopy(saved)
    wide.model.layers[0].mlp.down_proj.weight = nn.Parameter(2 * before.float())
    assert lade.generate(model, ONE, **LONG).tolist() == wide.generate(ONE, **LONG).tolist()


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mixtral", "has a stack of 4 matrices"),
        ("mamba2", "rounds states to the dtype of weights"),
        ("xlstm", "rounds states to the dtype of weights"),
    ],
)
def test_what_cannot_be_packed_is_refused_and_stays_as_it_was(family: str, reason: str) -> None:
    model = any_tiny_model(family, dtype=torch.bfloat16)
    before = {name: (type(each), {*vars(each)}) for name, each in model.named_modules()}
    weights = {name: id(each) for name, each in model.named_parameters()}
    with pytest.raises(lade.UnsupportedModelError, match=reason):
        pack(model)
    assert before == {name: (type(each), {*vars(each)}) for name, each in model.named_modules()}
    assert weights == {name: id(each) for name, each in model.named_parameters()}


def test_a_checkpoint_of_16_bits_is_loaded_and_run_so(tmp_path: Path) -> None:
    """Factors of embeddings are those of float32, which loading in 16 bits would round."""
    model = narrow("gemma3_text", vocab_size=256, eos_token_id=None)
    for saved in (model, byte_tokenizer()):
        saved.save_pretrained(tmp_path)
    wide = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    loaded, tokenizer, _ = load(str(tmp_path))
    buffers = dict(wide.named_buffers())
    assert all(torch.equal(each, buffers[name]) for name, each in loaded.named_buffers())
    assert loaded.lm_head.weight.dtype is torch.bfloat16
    ids = tokenizer("abcabc", return_tensors="pt")["input_ids"]
    expected = wide.generate(ids, max_new_tokens=20, do_sample=False)
    assert lade.generate(loaded, ids, max_new_tokens=20, do_sample=False).tolist() == (
        expected.tolist()
    )
    done = run("generate", "abcabc", "--model", tmp_path, "--max-new-tokens", "20", "--raw")
    assert done.out == f"{tokenizer.decode(expected[0, ids.shape[1] :])}\n"
