"""A verdict holds for the model that was checked: every change is noticed, one way or other."""

import copy
import gc
import pickle
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lade
from lade.errors import VerificationWarning
from lade.probing.profile import Profiles, profile_of
from lade.probing.structure import Structure
from tests.grids import thinned
from tests.lade.both import same_as_generate
from tests.lade.tiny import tiny_model

PROMPT = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
OPTIONS: dict[str, Any] = {
    "attention_mask": torch.ones_like(PROMPT),
    "do_sample": False,
    "max_new_tokens": 40,
    "pad_token_id": 0,
}


_quantize_dynamic: Any = torch.ao.quantization.quantize_dynamic


def llama(**options: Any) -> Any:
    options = {"dtype": torch.float32, "hidden_size": 32, **options}
    model = tiny_model("llama", seed=3, **options)
    model.generation_config.eos_token_id = None
    return model


def differs(model: Any, seed: int = 0, **options: Any) -> bool:
    """Tell whether lade's text is another than plain's, with drafts that are mostly right."""
    options = OPTIONS | options
    expected = model.generate(PROMPT, **options)
    pool = lade.NGramPool()
    pool.observe(expected[0].tolist())
    pool.observe(np.random.default_rng(seed).integers(2, 90, 200))
    config = lade.Config(max_draft_tokens=8, strict_drafter=True)
    got = lade.generate(model, PROMPT, pool=pool, config=config, **options)
    return bool(got.tolist() != expected.tolist())


# --- changes that a model can go through -----------------------------------------------------


def on_the_last_position(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """A hook that only the newest token of a forward sees."""
    changed = output.clone()
    changed[:, -1] *= 1.5
    return changed


def on_single_tokens(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """A hook that only forwards of one token see."""
    return output * 1.5 if output.shape[1] == 1 else output


def hook_last(model: Any) -> Any:
    model.model.layers[1].mlp.register_forward_hook(on_the_last_position)
    return model


def hook_single(model: Any) -> Any:
    model.model.layers[1].mlp.register_forward_hook(on_single_tokens)
    return model


def pre_hook(model: Any) -> Any:
    def halve(module: nn.Module, args: Any) -> Any:
        return (args[0] * 0.5, *args[1:]) if args[0].shape[1] == 1 else args

    model.model.layers[1].mlp.register_forward_pre_hook(halve)
    return model


def quantize_torch(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _quantize_dynamic(model, {nn.Linear}, torch.qint8)


def quantize_torch_in_place(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _quantize_dynamic(model, {nn.Linear}, torch.qint8, inplace=True)
    return model


def quantize_torchao(model: Any) -> Any:
    torchao = pytest.importorskip("torchao.quantization", reason="needs torchao")
    torchao.quantize_(model, torchao.Int8DynamicActivationInt8WeightConfig())
    return model


def deepcopied_and_hooked(model: Any) -> Any:
    return hook_last(copy.deepcopy(model))


def forward_on_the_instance(model: Any) -> Any:
    layer = model.model.layers[1].mlp
    own = layer.forward

    def forward(self: nn.Module, states: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = own(states)
        return on_the_last_position(self, (), made)

    layer.forward = types.MethodType(forward, layer)
    return model


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook on the last position": hook_last,
    "a hook on single tokens": hook_single,
    "a pre-hook": pre_hook,
    "quantize_dynamic": quantize_torch,
    "quantize_dynamic in place": quantize_torch_in_place,
    "torchao": quantize_torchao,
    "a deep copy, hooked": deepcopied_and_hooked,
    "a forward on the instance": forward_on_the_instance,
}


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.PlainDecodingWarning)
        yield


@pytest.mark.parametrize(
    "change",
    thinned(CHANGES.values(), hook_last, quantize_torch, deepcopied_and_hooked),
    ids=CHANGES,
)
def test_a_model_that_was_changed_is_checked_anew(change: Callable[[Any], Any]) -> None:
    model = llama()
    assert lade.probe(model).verification == "tree"
    model = change(model)
    fresh = profile_of(model)
    assert not fresh.results  # nothing of what was found before counts
    assert not any(differs(model, seed) for seed in range(2))


def test_a_model_whose_hook_was_removed_is_fast_again() -> None:
    model = llama()
    handle = model.model.layers[1].mlp.register_forward_hook(on_the_last_position)
    assert lade.probe(model).verification != "tree"
    handle.remove()
    assert lade.probe(model).verification == "tree"


def test_an_error_raised_during_the_check_alone_is_not_remembered_for_another_model() -> None:
    model = llama()

    def fail(*_: Any) -> None:
        raise RuntimeError("busy")

    handle = model.model.layers[0].register_forward_hook(fail)
    assert lade.probe(model).verification == "plain"
    handle.remove()
    assert lade.probe(model).verification == "tree"


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.half(),
        lambda model: model.train(),
        lambda model: setattr(model.config, "rms_norm_eps", 0.1),
        lambda model: model.config.rope_parameters.update(rope_theta=7.0),
        lambda model: setattr(model.model, "norm", nn.Identity()),
        lambda model: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight * 2)),
        lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.clone()),
        lambda model: setattr(model.lm_head, "bias", nn.Parameter(torch.zeros(97))),
        lambda model: model.model.layers.append(copy.deepcopy(model.model.layers[0])),
        lambda model: nn.utils.parametrizations.weight_norm(model.lm_head),
        lambda model: setattr(model, "prepare_inputs_for_generation", lambda *a, **k: {}),
        lambda model: setattr(model.model.layers[0], "training", True),
        lambda model: setattr(model.model.layers[0], "__class__", _OtherLayer),
    ],
)
def test_a_structure_sees_what_a_model_is_made_of(change: Callable[[Any], Any]) -> None:
    model = llama()
    structure = Structure(model)
    assert structure.is_of(model)
    global _OtherLayer
    _OtherLayer = type("OtherLayer", (type(model.model.layers[0]),), {})
    change(model)
    assert not structure.is_of(model)
    assert Structure(model).is_of(model)


_OtherLayer: type = object


def test_a_structure_holds_no_weight_that_was_exchanged() -> None:
    model = llama()
    structure = Structure(model)
    old = weakref.ref(model.model.layers[1].mlp.up_proj.weight)
    model.model.layers[1].mlp.up_proj = nn.Identity()
    assert old() is None
    assert not structure.is_of(model)


def test_a_model_that_was_used_goes_when_it_is_let_go() -> None:
    model = llama()
    lade.generate(model, PROMPT, **OPTIONS)
    there = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    gc.collect()
    gc.disable()  # no cycle holds it
    try:
        del model
        assert there() is None
    finally:
        gc.enable()


def test_values_of_weights_and_other_calls_are_no_change() -> None:
    model = llama()
    lade.generate(model, PROMPT, **OPTIONS)
    (profile,) = Profiles.of(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    wanted: dict[str, Any] = {"output_hidden_states": True, "return_dict_in_generate": True}
    lade.generate(model, PROMPT, **OPTIONS, **wanted)
    model.generate(PROMPT, **OPTIONS)
    assert [*Profiles.of(model)] == [profile]


def test_states_that_alternate_are_checked_once_each() -> None:
    model = llama()
    first = profile_of(model)
    model.train()
    second = profile_of(model)
    model.eval()
    assert profile_of(model) is first
    model.train()
    assert profile_of(model) is second


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_:FutureWarning")
def test_training_with_gradient_checkpointing_needs_no_second_check() -> None:
    """Transformers leaves one hook more on the embeddings each time that it is enabled."""
    model = llama().train()
    found = set()
    for _ in range(3):
        model.gradient_checkpointing_enable()
        model.gradient_checkpointing_disable()  # as trainers do around `generate`
        found.add(id(profile_of(model)))
        with torch.no_grad():
            model.lm_head.weight.mul_(0.9)
    assert len(found) == 1
    model.get_input_embeddings().register_forward_hook(on_the_last_position)
    before = profile_of(model)
    assert id(before) not in found
    model.get_input_embeddings().register_forward_hook(on_the_last_position)
    assert profile_of(model) is not before  # of the user's own, each counts


def test_copies_begin_with_nothing() -> None:
    model = llama()
    assert lade.probe(model).verification == "tree"
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not profile_of(copied).results
    assert profile_of(model).results


# --- what cannot be seen -------------------------------------------------------------------------


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no change be seen."""
    monkeypatch.setattr(Structure, "is_of", lambda self, model: True)


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize(
    "change",
    thinned(CHANGES.values(), hook_last, forward_on_the_instance),
    ids=CHANGES,
)
def test_a_spot_check_catches_what_the_structure_does_not(change: Callable[[Any], Any]) -> None:
    model = llama()
    assert lade.probe(model).verification == "tree"
    known = Profiles.of(model)
    model = change(model)
    model._lade_profiles = known  # also of a copy
    profile_of(model).first_check = 0
    with pytest.warns(VerificationWarning, match="differ from those for the same token alone"):
        assert not differs(model)  # nothing wrong was emitted
    assert not differs(model, 1)  # it was checked anew


FAMILIES = ["llama", "mistral", "gemma3_text", "gpt2", "deepseek_v3", "llama4_text"]


CASES = [("llama", 1), *((family, 3) for family in FAMILIES)]


@pytest.mark.parametrize("case", thinned(CASES, ("gemma3_text", 3)))
@pytest.mark.parametrize("verification", thinned(["tree", "chain"], "tree"))
def test_checks_of_any_step_change_nothing(case: tuple[str, int], verification: Any) -> None:
    family, num_rows = case
    model = tiny_model(family, seed=1)
    if num_rows == 1:
        model.generation_config.eos_token_id = None  # a text of one token has no steps
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5], [9, 9, 9, 9, 9, 9, 9], [0, 0, 5, 6, 5, 6, 5]])
    prompt = prompt[:num_rows]
    config = lade.Config(max_draft_tokens=8, verification=verification)
    num_steps = []
    for first in (0, 3, 10**9):
        profile_of(model).first_check = first
        options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 40, "config": config}
        expected, output = same_as_generate(model, prompt, accept=0.7, seed=1, **options)
        num_steps.append(output.stats.num_steps)
        for mine, theirs in zip(output.past_key_values, expected.past_key_values, strict=True):
            for a, b in zip(mine[:2], theirs[:2], strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert num_steps[1] > num_steps[2]


@pytest.mark.parametrize(
    ("dtype", "acceptance", "is_checked"),
    [
        (torch.float32, "exact", True),
        (torch.float32, "rejection", False),
        (torch.bfloat16, "exact", False),
    ],
)
def test_a_step_is_checked_without_a_reason_only_where_no_text_can_change(
    dtype: torch.dtype, acceptance: Any, is_checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama(dtype=dtype)
    config = lade.Config(max_draft_tokens=4, acceptance=acceptance)
    texts = []
    for num_calls in (10**9, 10**9, 1):
        monkeypatch.setattr("lade.hf.generation._CALLS_BETWEEN_CHECKS", num_calls)
        torch.manual_seed(0)
        options = OPTIONS | {
            "do_sample": True,
            "return_dict_in_generate": True,
            "max_new_tokens": 12,
        }
        output = lade.generate(model, PROMPT, pool=lade.NGramPool(), config=config, **options)
        texts.append((output.sequences.tolist(), output.stats.num_steps))
    assert texts[0] == texts[1]
    assert (texts[1] != texts[2]) == is_checked  # more steps
    assert texts[1][0] == texts[2][0]
