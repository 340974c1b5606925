"""Reading a decoder: every family as it computes, and nothing that no plan has a place for."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import MagicMock
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import lade
from lade.forward import reading
from lade.forward.comparing import UnsupportedForwardError
from lade.forward.job import forwards_for
from lade.forward.reading import DecoderPlan, read
from lade.forward.watching import Watched, watch
from lade.machine.garbage import without_collection
from tests.grids import thinned
from tests.lade.forward.families import READABLE, model_of
from tests.support.tiny import tiny_model


def mixing_of(plan: DecoderPlan) -> list[Any]:
    """Return what mixes tokens in each layer."""
    return [layer.mixing for layer in plan.layers]


REASONS = {
    "bloom": "BloomAttention: torch's baddbmm adds to scores",
    "falcon-alibi": "FalconAttention: torch's add changes scores",
    "mpt": "MptAttention: torch's masked_fill changes scores",
    "gpt_neo": "GPTNeoSelfAttention: torch's where changes scores",
    "deepseek_v32": "its attention gets .'indices'",
}


@pytest.mark.parametrize("family", REASONS)
def test_what_no_plan_has_a_place_for_is_refused_by_name(family: str) -> None:
    with pytest.raises(UnsupportedForwardError, match=REASONS[family]):
        read(model_of(family))
    assert forwards_for(model_of(family)) is None


def test_heads_of_no_whole_vectors_are_refused() -> None:
    model = tiny_model("llama", dtype=torch.float32, head_dim=12)
    assert {x[-1] for each in mixing_of(read(model)) for x in each.added} == {12}
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


@pytest.mark.parametrize("family", thinned(READABLE, "gemma4_text-shared", "laguna", "qwen3_5"))
def test_layers_that_are_alike_have_one_plan_with_their_own_modules(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(family)
    plan = read(model)
    monkeypatch.setattr(reading._Reader, "_likeness", lambda *_: object())
    assert read(model) == plan


ODD: dict[str, Callable[[Any], Any]] = {
    "a number": lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.1),
    "its scaling": lambda layer: setattr(layer.self_attn, "scaling", 0.3),
    "an operator": lambda layer: setattr(layer.mlp, "act_fn", nn.Tanh()),
}


@pytest.mark.parametrize("change", ODD)
def test_a_layer_that_differs_is_read(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", num_hidden_layers=5)
    ODD[change](model.model.layers[2])
    layer = MagicMock(side_effect=reading._Reader._layer, autospec=True)
    monkeypatch.setattr(reading._Reader, "_layer", lambda *given: layer(*given))
    plan = read(model)
    assert layer.call_count == 4  # of the first one and this one, for two texts
    monkeypatch.setattr(reading._Reader, "_likeness", lambda *_: object())
    assert read(model) == plan


def test_nothing_of_a_forward_stays_once_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = list[ref[Tensor]]()

    def noting(*args: Any, **options: Any) -> Watched:
        found = watch(*args, **options)
        kept.extend(ref(each.tensor) for each in found.trace.seen)
        return found

    monkeypatch.setattr(reading, "watch", noting)
    with without_collection():
        read(model_of("llama"))
        assert len(kept) > 300
        assert [each for each in kept if each() is not None] == []


# --- positions that a model counts ----------------------------------------------------------------

COUNTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "places behind a cache": lambda places, _: places,
    "places from another one on": lambda places, _: places + 3,
    "in each forward": lambda places, before: places - before,
    "what the cache holds": lambda places, before: places + before,
}


@pytest.mark.parametrize("count", COUNTS)
def test_positions_count_as_places_in_the_text(count: str) -> None:
    model = model_of("bart")
    table: Any = model.model.decoder.embed_positions
    kind = type(table)

    def forward(self: Any, ids: Tensor, before: int, position_ids: Tensor) -> Any:
        return kind.forward(self, ids, before, COUNTS[count](position_ids, before))

    table.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    if count.startswith("places"):
        plan = read(model)
        assert plan.counts
        (looked_up,) = (each for each in reading._calls_of(plan.ahead) if each.table)
        assert looked_up.offset == table.offset + 3 * ("another" in count)
    else:
        with pytest.raises(UnsupportedForwardError):
            read(model)


def test_positions_that_a_model_takes_are_not_counted() -> None:
    assert not any(read(model_of(family)).counts for family in ("opt", "ctrl"))


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
    "whether tokens are odd": lambda model: subclassed(
        model.model.layers[1].mlp, lambda out: out * (1 + out.shape[1] % 2)
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
