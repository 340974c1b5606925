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
from lade.probing.watch import Watch
from tests.grids import thinned
from tests.lade.tiny import BatchDrafter, tiny_model

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


def edited_in_place(model: Any) -> Any:
    """What nobody can see from outside: an attribute of a layer, read by code that was there."""
    model.model.layers[1].mlp.act_fn.is_on = True
    return model


class Switchable(nn.Module):
    """An activation that can be told to treat the newest token of a forward apart."""

    is_on = False

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        made = nn.functional.silu(states)
        return on_the_last_position(self, (), made) if self.is_on else made


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


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_that_was_changed_is_checked_anew(change: Callable[[Any], Any]) -> None:
    model = llama()
    assert lade.probe(model).verification == "tree"
    model = change(model)
    fresh = profile_of(model)
    assert not fresh.results  # nothing of what was found before counts
    assert not any(differs(model, seed) for seed in range(3))


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
    thinned(CHANGES.values(), hook_last, quantize_torch, forward_on_the_instance),
    ids=CHANGES,
)
def test_the_watch_catches_what_the_structure_does_not(change: Callable[[Any], Any]) -> None:
    model = llama()
    assert lade.probe(model).verification == "tree"
    known = Profiles.of(model)
    model = change(model)
    model._lade_profiles = known  # also of a copy
    profile_of(model).watch = Watch(first=1, last=1)
    with pytest.warns(VerificationWarning, match="differ from those for the same token alone"):
        assert [differs(model, seed) for seed in range(3)]
    assert not any(differs(model, seed) for seed in range(3))  # it was checked anew


def test_a_model_edited_in_place_is_noticed_by_itself_and_by_recheck() -> None:
    model = llama()
    for layer in model.model.layers:
        layer.mlp.act_fn = Switchable()
    assert lade.probe(model).verification == "tree"
    edited_in_place(model)
    assert lade.probe(model).verification == "tree"  # nobody can know
    assert lade.recheck(model).verification != "tree"
    assert not any(differs(model, seed) for seed in range(3))
    model.model.layers[1].mlp.act_fn.is_on = False
    assert lade.recheck(model).verification == "tree"
    profile_of(model).watch = Watch(first=1, last=1)
    edited_in_place(model)
    with pytest.warns(VerificationWarning):
        differs(model)
    assert lade.probe(model).verification != "tree"


FAMILIES = ["llama", "mistral", "gemma3_text", "gpt2", "deepseek_v3", "llama4_text"]


@pytest.mark.parametrize("family", thinned(FAMILIES, "llama", "gemma3_text"))
@pytest.mark.parametrize("verification", ["tree", "rows", "chain"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_watch_at_every_step_changes_nothing(
    family: str, verification: Any, num_rows: int
) -> None:
    model = tiny_model(family, seed=1)
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5], [9, 9, 9, 9, 9, 9, 9], [0, 0, 5, 6, 5, 6, 5]])
    prompt = prompt[:num_rows]
    options = OPTIONS | {
        "attention_mask": (prompt != 0).long(),
        "do_sample": True,
        "return_dict_in_generate": True,
    }
    torch.manual_seed(1)
    expected = model.generate(prompt, **options)
    answers = [
        [token for token, m in zip(row, [*mask, *[1] * 40], strict=False) if m]
        for row, mask in zip(
            expected.sequences.tolist(), options["attention_mask"].tolist(), strict=True
        )
    ]
    outputs = []
    for first in (1, 10**9):
        profile_of(model).watch = Watch(first=first, last=first)
        drafter = BatchDrafter(answers, np.random.default_rng(0), accept=0.7)
        torch.manual_seed(1)
        config = lade.Config(max_draft_tokens=8, verification=verification)
        outputs.append(lade.generate(model, prompt, drafter=drafter, config=config, **options))
    watched, unwatched = outputs
    assert watched.sequences.tolist() == expected.sequences.tolist()
    assert watched.stats.num_steps == unwatched.stats.num_steps
    for mine, theirs in zip(watched.past_key_values, unwatched.past_key_values, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine[:2], theirs[:2], strict=True))


def test_looks_are_rare_and_rarer() -> None:
    watch = Watch()
    looks: list[int] = []
    steps = 0
    while len(looks) < 8:
        steps += 1
        if watch.is_due():
            looks.append(steps)
            assert not watch.is_wrong(0.0, 1.0, is_exact=True)
    between = np.diff([0, *looks])
    assert between[0] >= 1 / 0.003  # a look is about a step
    assert (np.diff(between) >= 0).all()
    assert between[-1] == 4096


def test_one_look_condemns_where_text_is_exact_and_three_do_in_half_precision() -> None:
    watch = Watch(first=10, last=10)
    assert watch.is_wrong(1.0, 0.3, is_exact=True)
    assert not watch.is_wrong(1.0, 0.3, is_exact=False)
    assert watch.is_due()  # at once again
    assert not watch.is_wrong(0.1, 0.3, is_exact=False)  # by chance
    assert [watch.is_wrong(1.0, 0.3, is_exact=False) for _ in range(3)] == [False, False, True]
