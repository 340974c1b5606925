"""Reading a decoder: every family as it computes, and nothing that no plan has a place for."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import lade
from lade.forward import words
from lade.forward.comparing import UnsupportedForwardError
from lade.forward.job import forwards_for
from lade.forward.reading import Constant, DecoderPlan, ProductsPlan, read
from tests.grids import thinned
from tests.lade.forward.families import READABLE, model_of
from tests.lade.tiny import IS_NEWEST
from tests.support.tiny import tiny_model


def made_of(place: Any) -> Any:
    """Return what call gives the numbers of a place, if one does."""
    return getattr(place, "made", None)


def mixing_of(plan: DecoderPlan) -> list[Any]:
    """Return what mixes tokens in each layer."""
    return [layer.mixing for layer in plan.layers]


def of_products(plan: DecoderPlan) -> set[type]:
    """Return the types of modules that layers have products of."""
    phases = [each for layer in plan.layers for each in layer.phases]
    products = [x for each in phases if type(each) is ProductsPlan for x in each.products]
    return {type(each.module) for each in products}


def test_llama_is_read_as_it_is() -> None:
    model = model_of("llama", num_key_value_heads=2)
    plan = read(model)
    ((embedding, _),) = [pair for pair in plan.ahead[0].before.places if made_of(pair[0])]
    assert embedding.made == (model.model.embed_tokens, (words.TOKENS_GIVEN,), {})
    assert (len(plan.ahead), len(plan.last), plan.head) == (1, 2, model.lm_head)
    assert (plan.replaced, plan.last[-1].columns) == ((), None)
    assert {each.heads for each in mixing_of(plan)} == {(4, 2, 16, 16, 0)}
    assert {*plan.kinds} == {"full_attention"}
    names = ["RowsStep", "ProductsPlan", "MixingPlan", "ProductsPlan", "RowsStep"]
    names += ["ProductsPlan"] * 2
    for mine, theirs in zip(plan.layers, model.model.layers, strict=True):
        attention, mlp = theirs.self_attn, theirs.mlp
        assert [type(each).__name__ for each in mine.phases] == names
        before, first, mixing, out, between, inner, down = mine.phases
        rows = [each.before for each in (before, between)]
        norms = theirs.input_layernorm, theirs.post_attention_layernorm
        constants = [x for each in rows for x, _ in each.places if type(x) is Constant]
        assert [x.module for x in constants] == [*norms]
        # All layers have the same programs, each with its own weights.
        assert [x.text for x in rows] == [x.before.text for x in plan.layers[0].phases[::4]]
        assert [
            product.module for phase in (first, out, inner, down) for product in phase.products
        ] == [
            *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
            *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
        ]
        assert "(silu(a0[i]) * a1[i])" in inner.columns.text
        assert (mixing.settings, mixing.keys_of) == ((0.25, 0.0, None), None)


keys_of = attrgetter("keys_of")


def of_family(family: str, tells: Callable[[DecoderPlan], Any]) -> Any:
    return tells(read(model_of(family)))


def test_what_sets_families_apart_is_read() -> None:
    for family, tells, expected in (
        # The `sdpa` of older transformers ignores it.
        ("gemma2", lambda plan: mixing_of(plan)[0].settings[1], 50.0 if IS_NEWEST else 0.0),
        ("gemma2", lambda plan: "tanh(" in plan.last[-1].columns.text, True),
        ("gemma", lambda plan: "gelu_by_tanh(" in plan.layers[0].phases[-2].columns.text, True),
        ("nemotron", lambda plan: len(plan.layers[0].phases[-2].products), 1),
        ("phi3", lambda plan: len(plan.layers[0].phases[1].products), 1),
        ("gpt2", lambda plan: len(plan.embeddings), 2),
        ("gpt2", lambda plan: of_products(plan), {Conv1D}),
        ("opt", lambda plan: "* F(0.25)" in mixing_of(plan)[0].rows.text, True),
        ("bert", lambda plan: len(plan.last), 4),
        ("nanochat", lambda plan: "np.sqrt" in plan.ahead[0].before.text, True),
        ("phi", lambda plan: f"word={words.SAVED}," in str(plan), True),
        ("afmoe", lambda plan: "sigmoid(" in plan.layers[0].phases[3].before.text, True),
        ("qwen3_next", lambda plan: "sigmoid(" in plan.layers[1].phases[3].before.text, True),
        ("deepseek_v3", lambda plan: mixing_of(plan)[0].heads, (4, 1, 16, 16, 8)),
        ("deepseek_v3", lambda plan: mixing_of(plan)[0].latents[1:], (8, 8, 8)),
        ("deepseek_v3", lambda plan: len(plan.layers[0].phases), 9),
        ("mimo_v2_flash", lambda plan: mixing_of(plan)[0].heads, (4, 2, 32, 16, 0)),
        ("sarvam_mla", lambda plan: len(plan.layers[0].phases), 7),
        ("gemma3_text", lambda plan: {*plan.kinds}, {"full_attention", "sliding_attention"}),
        ("granite_swa", lambda plan: mixing_of(plan)[0].settings[2] is None, False),
        ("gemma4_text", lambda plan: plan.layers[0].phases[-1].products[0].num_inputs, 16),
        (
            "gemma4_text-shared",
            lambda plan: [x.keys_of for x in mixing_of(plan)],
            [None, None, 0, 1],
        ),
        ("gemma4_unified", lambda plan: len(plan.ahead), 1),
        ("gemma4_unified", lambda plan: {token for _, token in plan.replaced}, {0}),
        ("gpt_oss", lambda plan: mixing_of(plan)[0].settings[2] is None, False),
    ):
        got = of_family(family, tells)
        assert got[:4] == expected if isinstance(got, list) else got == expected, family


@pytest.mark.parametrize("family", ["bloom", "falcon", "deepseek_v32", "mpt", "gpt_neo"])
def test_what_no_plan_has_a_place_for_is_not_read(family: str) -> None:
    assert forwards_for(tiny_model(family, dtype=torch.float32)) is None


def test_heads_of_no_whole_vectors_are_refused() -> None:
    model = tiny_model("llama", dtype=torch.float32, head_dim=12)
    assert {each.heads[2:4] for each in mixing_of(read(model))} == {(12, 12)}
    assert forwards_for(model) is None


def test_columns_of_no_whole_vectors_are_refused_where_they_lie_side_by_side() -> None:
    model = model_of("gpt2", n_inner=100)
    assert read(model).layers[0].phases[-1].products[0].num_inputs == 100
    assert forwards_for(model) is None


def test_the_module_that_does_not_fit_is_told() -> None:
    probed = lade.probe(model_of("llama"))
    assert probed.why_by_torch is None
    assert "run by torch" not in str(probed)
    probed = lade.probe(tiny_model("deepseek_v32", dtype=torch.float32))
    assert probed.why_by_torch == "model.layers.0: its attention gets ['indices']"
    assert str(probed).endswith(f"\n  run by torch: {probed.why_by_torch}")
    assert "float64" in str(lade.probe(tiny_model("llama")).why_by_torch)


# --- models that somebody changed -----------------------------------------------------------------


def subclassed(module: nn.Module, change: Callable[[Any], Any]) -> None:
    """Let a module return what `change` makes of its results."""
    kind = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(kind.forward(self, *args, **kwargs))

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def _first(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    return lambda out: (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


def _with_logits(out: Any) -> Any:
    out.logits = out.logits + 1
    return out


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a product": lambda model: subclassed(model.model.layers[1].mlp.up_proj, lambda out: out * 1),
    "the head": lambda model: subclassed(model.lm_head, lambda out: out + 1),
    "logits": lambda model: subclassed(model, _with_logits),
    "an MLP": lambda model: subclassed(model.model.layers[1].mlp, lambda out: 1.01 * out),
    "attention": lambda model: subclassed(
        model.model.layers[1].self_attn, _first(lambda out: out + 0.01)
    ),
    "a layer": lambda model: subclassed(model.model.layers[0], _first(lambda out: 1.01 * out)),
    "the last layer": lambda model: subclassed(
        model.model.layers[-1], _first(lambda out: 1.01 * out)
    ),
    "a norm": lambda model: subclassed(model.model.layers[0].input_layernorm, torch.tanh),
    "the last norm": lambda model: subclassed(model.model.norm, lambda out: out.clamp(-1, 1)),
    "an activation": lambda model: setattr(model.model.layers[2].mlp, "act_fn", nn.ELU()),
    "a hook": lambda model: model.model.layers[0].mlp.register_forward_hook(lambda *_: None),
    "a hook before": lambda model: model.lm_head.register_forward_pre_hook(lambda *_: None),
    "an own forward": lambda model: setattr(
        model.model.layers[0].mlp, "forward", partial(model.model.layers[0].mlp.forward)
    ),
    "sight of later tokens": lambda model: setattr(
        model.model.layers[0].self_attn, "is_causal", False
    ),
    "no layer": lambda model: setattr(model.model, "layers", nn.ModuleList()),
    "a layer twice": lambda model: setattr(
        model.model, "layers", nn.ModuleList([model.model.layers[0]] * 3)
    ),
    "a parametrization": lambda model: nn.utils.parametrizations.weight_norm(
        model.model.layers[0].mlp.up_proj
    ),
}


#: These change a token's numbers alone: what is then in programs.
OF_ROWS = {
    "logits": "+ F(1.0)",
    "an MLP": "F(1.01)",
    "attention": "F(0.01)",
    "a layer": "F(1.01)",
    "the last layer": "F(1.01)",
    "a norm": "tanh(",
    "the last norm": "at_most(",
}


@pytest.mark.parametrize("change", OF_ROWS)
def test_code_of_others_is_read_where_it_is_of_rows(change: str) -> None:
    model = model_of("llama")
    assert OF_ROWS[change] not in str(read(model))
    CHANGES[change](model)
    assert OF_ROWS[change] in str(read(model))


def test_products_may_follow_each_other() -> None:
    model = model_of("llama")
    mlp, more = model.model.layers[0].mlp, nn.Linear(64, 64)
    model.model.layers[0].mlp = nn.Sequential(mlp, more)
    first, second, *_ = read(model).layers
    assert len(first.phases) == len(second.phases) + 2
    assert first.phases[-1].products[0].module is more


@pytest.mark.parametrize("change", [each for each in CHANGES if each not in OF_ROWS])
def test_code_of_others_is_noticed(change: str) -> None:
    model = model_of("llama")
    assert read(model)
    CHANGES[change](model)
    with pytest.raises((UnsupportedForwardError, KeyError, RuntimeError, TypeError)):
        read(model)
    assert forwards_for(model) is None


# --- what reading leaves behind -------------------------------------------------------------------


@pytest.mark.parametrize("family", thinned(READABLE, "llama", "gemma3_text"))
def test_reading_leaves_a_model_as_it_was(family: str) -> None:
    model = model_of(family)
    rope = getattr(getattr(model, "model", None), "rotary_emb", None)

    def state() -> Any:
        modules = [*model.modules()]
        return (
            [{name: id(each) for name, each in vars(module).items()} for module in modules],
            [[*module._forward_hooks, *module._forward_pre_hooks] for module in modules],
            [weight._version for weight in (*model.parameters(), *model.buffers())],
            model.config.to_dict(),
            rope and {name: each.tolist() for name, each in rope.named_buffers()},
            torch.get_rng_state().tolist(),
        )

    before = state()
    read(model)
    assert state() == before


def test_angles_that_grow_with_the_text_stay_those_of_short_ones() -> None:
    """A forward at positions far away would scale them, of the model that it is of."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = model_of("llama", rope_parameters=rope)
    positions = torch.arange(7)[None]
    states = torch.zeros(1, 7, 64)
    rotary = model.model.rotary_emb
    frequencies = rotary.inv_freq.clone()
    expected = [each.clone() for each in rotary(states, positions)]
    (mixing, *_) = mixing_of(read(model))
    assert mixing.rows is not None
    assert any(made_of(place) for place, _ in mixing.rows.places)
    assert torch.equal(rotary.inv_freq, frequencies)
    assert all(map(torch.equal, rotary(states, positions), expected))
