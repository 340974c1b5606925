"""A model cut between two of its layers: two halves that are the whole, or a refusal."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lade.drafters.exits import Cut, inputs_for, layers_of, why_not_cut
from lade.errors import UnsupportedModelError
from lade.probing.profile import profile_of
from tests.lade.tiny import FAMILIES, tiny_model
from tests.support.tiny import CannotBuild
from tests.support.tiny import tiny_model as tiny_architecture

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])

# Refused, or cut in some places only; test_first_layers.py holds that no other is refused.
REFUSED = {
    "hrm_text": "no list of layers",
    "mllama": "no list of layers",
    "xlstm": "no list of layers",
    "reformer": "do not run by themselves",
    "xlm": "differ from all of them",
    "zaya": "differ from all of them",
    "zaya-window": "differ from all of them",
}
IN_PART = ("gemma3n", "gemma3n_text", "hy_v4", "hy_v4-topk6", "inkling2_text")


def found(model: Any) -> Any:
    profile = profile_of(model)
    return profile, layers_of(model, profile)


def state_of(model: Any) -> list[Any]:
    """Every attribute of every module, and the identity of what they refer to."""
    return [
        (
            name,
            {key: id(value) for key, value in vars(module).items() if key != "_lade_profiles"},
            [dict.copy(vars(module)[key]) for key in ("_modules", "_forward_hooks")],
        )
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_halves_of_a_model_are_the_whole(family: str) -> None:
    model = tiny_model(family)
    profile, layers = found(model)
    assert len(layers) == len([*model.get_submodule(layers.name)])
    whole = model(IDS, use_cache=False).logits
    for num_layers in range(1, len(layers)):
        assert why_not_cut(model, profile, layers, num_layers) is None
        cut = Cut(model, layers, num_layers)
        first = cut.first(inputs_for(model, IDS))
        rest = cut.rest(inputs_for(model, IDS), first.hidden).logits
        torch.testing.assert_close(rest, whole)
        assert not torch.allclose(first.logits, whole)


def test_what_the_first_layers_say_is_a_smaller_model_s() -> None:
    model = tiny_model("llama")
    _, layers = found(model)
    smaller = copy.deepcopy(model)
    smaller.model.layers = smaller.model.layers[:2]
    smaller.config.num_hidden_layers = 2
    cut = Cut(model, layers, 2).first(inputs_for(model, IDS))
    torch.testing.assert_close(cut.logits, smaller(IDS).logits)
    torch.testing.assert_close(layers.exit_view(model, 2)(IDS).logits, smaller(IDS).logits)


def test_a_half_runs_its_own_layers_and_hooks_alone() -> None:
    model = tiny_model("llama")
    _, layers = found(model)
    ran: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    cut = Cut(model, layers, 1)
    hidden = cut.first(inputs_for(model, IDS)).hidden
    assert ran == [0]
    cut.rest(inputs_for(model, IDS), hidden)
    assert ran == [0, 1, 2]


class _Twice(nn.Module):
    """A layer that counts how often it was run, and so depends on it."""

    def __init__(self, layer: nn.Module, seen: list[int]) -> None:
        super().__init__()
        self.layer = layer
        self.seen = seen
        self.attention_type = getattr(layer, "attention_type", "full_attention")

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        self.seen[0] += 1
        return self.layer(hidden_states, **kwargs) * (1.0 + self.seen[0])


def test_a_model_whose_halves_are_not_the_whole_is_found_out() -> None:
    model = tiny_model("llama")
    seen = [0]
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = _Twice(layer, seen)
    profile, layers = found(model)
    reason = why_not_cut(model, profile, layers, 1)
    assert reason is not None
    assert "differ from all of them by" in reason


def test_a_model_that_shares_one_layer_is_refused_by_name() -> None:
    model = tiny_model("llama")
    model.model.layers[2] = model.model.layers[0]
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM cannot draft by its first"):
        found(model)


@pytest.mark.parametrize("name", [*REFUSED, *IN_PART])
def test_what_cannot_be_cut_is_refused(name: str) -> None:
    try:
        reasons = _reasons(name)
    except CannotBuild as reason:
        pytest.skip(str(reason))
    if name in REFUSED:
        assert all(reason is not None for reason in reasons)
        assert REFUSED[name] in str(reasons[0])
    else:
        assert reasons[0] is None
        assert any(reason is not None for reason in reasons)


def _reasons(name: str) -> list[str | None]:
    """Why a tiny model cannot be cut, by number of layers."""
    model = tiny_architecture(name)
    try:
        profile, layers = found(model)
    except UnsupportedModelError as refusal:
        return [str(refusal)]
    reasons: list[str | None] = []
    for num_layers in range(1, len(layers)):
        try:
            reasons.append(why_not_cut(model, profile, layers, num_layers))
        except UnsupportedModelError as refusal:
            reasons.append(str(refusal))
    return reasons
