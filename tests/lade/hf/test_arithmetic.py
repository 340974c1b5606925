"""Of models in 16 bits, texts are those that the same numbers give in float32."""

import copy
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lade
from lade.compat import CACHE
from lade.probing.profile import computing
from tests.equality.table import case_of, cases
from tests.fuzz.compare import call_plain, compare
from tests.fuzz.run import deterministic
from tests.grids import thinned
from tests.lade.both import EIGHT, ONE, THREE, same_as_generate
from tests.lade.forward.families import PLAIN, READABLE, model_of

NARROW = [torch.bfloat16, torch.float16]
TEXT = torch.tensor([[5, 6, 7, 8, 9, 10] * 5 + [5, 6, 7]])
SERVED = [family for family in READABLE if family != "mllama"]
LATENTS = "axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "sarvam_mla"
QUICK = ("llama", "qwen3_next")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prove often, and let compiled forwards run though tiny models are faster by torch."""
    monkeypatch.setattr("lade.probing.proof.DISTANCE", 8)
    monkeypatch.setattr("lade.forward.job._CLEAR", 0.0)


def narrow_of(family: str, dtype: torch.dtype, **options: Any) -> Any:
    """Return a model in 16 bits that a compiled forward runs."""
    model = model_of(family, dtype, **options)
    with torch.no_grad():
        assert computing(model) is not model, lade.probe(model).why_by_torch
    return model


def same_as_float32(model: Any, *args: Any, **options: Any) -> Any:
    """Compare lade with `generate` of the same numbers in float32; return lade's output."""
    whole: Any = copy.deepcopy(model).float()

    def by(_: Any, **given: Any) -> Any:
        return lade.generate(model, **given)

    return same_as_generate(whole, *args, by=by, **options)[1]


@pytest.mark.parametrize("dtype", thinned(NARROW, torch.bfloat16), ids=str)
@pytest.mark.parametrize("family", thinned(SERVED, *QUICK))
def test_the_text_is_that_of_float32(family: str, dtype: torch.dtype) -> None:
    """Whatever is drafted, batched, padded, kept or proved."""
    model = narrow_of(family, dtype)
    for num in (0, 3, 40):
        config = lade.Config(max_draft_tokens=num)
        got = same_as_float32(model, TEXT, accept=0.7, config=config, max_new_tokens=40)
        assert got.stats.arithmetic == "float32"
    same_as_float32(model, ONE, accept=0.8, do_sample=True, config=EIGHT)
    same_as_float32(model, TEXT.repeat(1, 5), knows=True)
    whole = copy.deepcopy(model).float()
    given: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    kept = {"config": lade.Config(reuses_prefix=True), "pool": lade.NGramPool(), **given}
    for length in (20, 33):
        ids = TEXT[:, :length]
        assert lade.generate(model, ids, **kept).tolist() == whole.generate(ids, **given).tolist()
    is_apart = family in (*PLAIN, *LATENTS) or hasattr(model.config, "layer_types")
    if not is_apart:
        same_as_float32(model, THREE, max_new_tokens=12, config=EIGHT)
        with lade.Batcher(model) as batcher:
            texts = [TEXT, TEXT.flip(1)]
            requests = [batcher.submit(ids, **given) for ids in texts]
            for ids, request in zip(texts, requests, strict=True):
                assert request.result(60).tolist() == whole.generate(ids, **given).tolist()


def test_calls_with_any_options_are_those_of_float32() -> None:
    """In the cases of the equality table."""
    num = 0

    def in_float32(model: Any, *others: Any) -> Any:
        return call_plain(copy.deepcopy(model).float(), *others)

    for number, (row, _) in enumerate(cases()):
        # A copy of a model collects hidden states twice.
        if row["model"] == "llama" and row["output"] != "states":
            found = row | {"model": "llama bfloat16", "method": "as found"}
            with deterministic():
                verdict = compare(case_of(found, Random(number)), theirs=in_float32)
            # Caches have the model's dtype.
            caches = "cache", "the cache"
            apart = [each for each in verdict.differences if not each.startswith(caches)]
            assert not apart, (found, apart)
            num += 1
    assert num > 10


def test_the_models_own_arithmetic_can_be_asked_for() -> None:
    model = narrow_of("llama", torch.bfloat16)
    for config in (lade.Config(arithmetic="model"), lade.Config(uses_kernels=False)):
        _, got = same_as_generate(model, TEXT, config=config)
        assert got.stats.arithmetic == "bfloat16"
    with pytest.raises(ValueError, match="arithmetic"):
        lade.Config(arithmetic="bfloat16")  # type: ignore[arg-type]


def test_a_model_that_rounds_its_states_computes_as_it_does() -> None:
    model = model_of("mamba2", torch.bfloat16)
    why = lade.probe(model).why_by_torch
    assert why is not None
    assert "rounds states to the dtype of weights" in why
    assert same_as_generate(model, TEXT)[1].stats.arithmetic == "bfloat16"


def test_a_model_follows_what_becomes_of_its_weights() -> None:
    """Those that are shared, and those that are copied in float32."""
    model = narrow_of("llama", torch.bfloat16)
    layer = model.model.layers[0]
    same_as_float32(model, TEXT)
    layer.mlp.up_proj.weight.data.mul_(2)
    layer.input_layernorm.weight.data.mul_(1.5)
    same_as_float32(model, TEXT)
    layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight.flip(0))
    layer.input_layernorm.weight = nn.Parameter(layer.input_layernorm.weight.flip(0))
    same_as_float32(model, TEXT)
    model.float()
    same_as_generate(model, TEXT)
    model.half()
    same_as_float32(model, TEXT)
    assert {each.dtype for each in model.parameters()} == {torch.float16}


def test_caches_are_of_the_models_dtype() -> None:
    model = narrow_of("llama", torch.bfloat16)
    given: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    first = lade.generate(model, TEXT, return_dict_in_generate=True, **given)
    cache = getattr(first, CACHE)
    held = {each.dtype for layer in cache.layers for each in (layer.keys, layer.values)}
    assert held == {torch.bfloat16}
    later = lade.generate(model, first.sequences, **{CACHE: cache}, **given)
    assert later.shape[1] == TEXT.shape[1] + 12
    assert cache.layers[0].keys.dtype is torch.bfloat16


@pytest.mark.parametrize("changes", [None, "result", "in place"])
def test_hooks_get_the_models_dtype(changes: str | None) -> None:
    """Looking at states leaves the text as it is; what a hook changes is rounded there alone."""
    model, seen = narrow_of("llama", torch.bfloat16), set[torch.dtype]()

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
        seen.add(out.dtype)
        if changes == "in place":
            out.mul_(2)
        return out * 2 if changes == "result" else None

    model.model.layers[1].register_forward_hook(hook)
    got = lade.generate(model, TEXT, max_new_tokens=12, do_sample=False, config=EIGHT)
    assert seen == {torch.bfloat16}
    if changes is None:
        whole = copy.deepcopy(model).float()
        assert got.tolist() == whole.generate(TEXT, max_new_tokens=12, do_sample=False).tolist()
    else:
        assert got.shape[1] == TEXT.shape[1] + 12
