"""Quantized layers whose outputs follow other tokens, or turn last bits into steps."""

import warnings
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lade
from lade.probing.layers import why_not_exact
from tests.lade.tiny import tiny_model

OTHERS = "by other tokens"
STEPS = "in coarse steps"


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Quantized(nn.Module):
    """A linear layer of int8 weights."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.in_features = linear.in_features
        whole = linear.weight.detach()
        self.scale: Tensor = whole.abs().amax(1, keepdim=True) / 127
        self.weight = (whole / self.scale).round().char()

    def forward(self, states: Tensor) -> Tensor:
        weight: Tensor = self.weight.to(states.dtype) * self.scale
        return self.quantized(states) @ weight.T

    def quantized(self, states: Tensor) -> Tensor:
        return states


def rounded(states: Tensor, largest: Tensor) -> Tensor:
    return (states / largest * 127).round() * largest / 127


class PerTensor(Quantized):
    def quantized(self, states: Tensor) -> Tensor:
        return rounded(states, states.abs().max())


class PerToken(Quantized):
    def quantized(self, states: Tensor) -> Tensor:
        return rounded(states, states.abs().amax(-1, keepdim=True))


class Outliers(Quantized):
    """As LLM.int8(): columns with a large activation of any token are not quantized for any."""

    def quantized(self, states: Tensor) -> Tensor:
        is_large = (states.abs() > 6).any(-2, keepdim=True)
        largest = states.masked_fill(is_large, 0).abs().amax(-1, keepdim=True)
        return torch.where(is_large, states, rounded(states, largest.clamp(min=1e-9)))


class Noisy(Quantized):
    """Sums up in an order that differs each time, as some kernels do."""

    num_calls = 0

    def quantized(self, states: Tensor) -> Tensor:
        self.num_calls += 1
        return states * (1 + self.num_calls * 1e-6)


class Smooth(Quantized):
    """Fused with an activation."""

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.silu(super().forward(states))


class Tuple(PerTensor):
    """As routers of experts."""

    def forward(self, states: Tensor) -> Any:
        return super().forward(states), states


class Failing(Quantized):
    def quantized(self, states: Tensor) -> Tensor:
        raise RuntimeError("not by itself")


def with_layer(kind: Callable[[Any], Any], dtype: torch.dtype = torch.float32) -> Any:
    """Return a model whose last product is made by another layer."""
    model = tiny_model("llama", dtype=dtype)
    model.model.layers[1].mlp.down_proj = kind(model.model.layers[1].mlp.down_proj)
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [PerTensor, Outliers])
def test_layers_that_look_at_other_tokens_are_plain_in_any_precision(
    kind: Callable[[Any], Any], dtype: torch.dtype
) -> None:
    model = with_layer(kind, dtype)
    assert OTHERS in str(why_not_exact(model))
    found = lade.probe(model)
    assert found.verification == "plain"
    assert all(kind.__name__ in reason for reason in found.reasons.values())


def test_layers_that_round_activations_are_plain_where_text_is_promised() -> None:
    assert STEPS in str(why_not_exact(with_layer(PerToken)))
    assert lade.probe(with_layer(PerToken)).verification == "plain"
    assert why_not_exact(with_layer(PerToken, torch.bfloat16)) is None


@pytest.mark.parametrize("kind", [Quantized, Noisy, Smooth])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_layers_that_quantize_weights_alone_are_left_to_the_check(
    kind: Callable[[Any], Any], dtype: torch.dtype
) -> None:
    assert why_not_exact(with_layer(kind, dtype)) is None


def test_layers_of_weights_alone_verify_trees() -> None:
    assert lade.probe(with_layer(Quantized)).verification == "tree"


@pytest.mark.parametrize("kind", [Failing, Tuple])
def test_a_layer_that_does_not_run_by_itself_is_left_to_the_check(
    kind: Callable[[Any], Any],
) -> None:
    assert why_not_exact(with_layer(kind)) is None


def test_steps_of_float_layers_are_left_to_the_check_and_other_tokens_are_not() -> None:
    """A router of experts is made of steps."""

    class Router(nn.Linear):
        def forward(self, states: Tensor) -> Tensor:
            return super().forward(states).sign()

    class Capacity(nn.Linear):
        def forward(self, states: Tensor) -> Tensor:
            return super().forward(states).softmax(-2)

    kinds = {kind: kind(32, 4) for kind in (Router, Capacity)}
    assert why_not_exact(with_layer(lambda _: kinds[Router])) is None
    assert OTHERS in str(why_not_exact(with_layer(lambda _: kinds[Capacity])))


def test_layers_that_unpack_their_weights_at_the_first_forward_are_asked_after_it() -> None:
    class Packed(PerTensor):
        is_packed = True

        def quantized(self, states: Tensor) -> Tensor:
            if self.is_packed:
                raise RuntimeError("still packed")
            return super().quantized(states)

    model = with_layer(Packed)

    def unpack(root: Any, *_: Any) -> None:
        root.model.layers[1].mlp.down_proj.is_packed = False

    model.register_forward_pre_hook(unpack)
    found = lade.probe(model)
    assert all(OTHERS in reason for reason in found.reasons.values())
    assert found.verification == "plain"


def test_no_hook_of_the_user_is_called_and_plain_layers_are_not_run() -> None:
    model = with_layer(PerToken, torch.bfloat16)

    def refuse(*_: Any) -> None:
        raise AssertionError

    for module in model.modules():
        module.register_forward_pre_hook(refuse)
    assert why_not_exact(model) is None


def test_a_forward_on_the_instance_is_looked_at_and_one_kept_by_a_hook_is_not() -> None:
    def forward(self: Any, states: Tensor) -> Tensor:
        return nn.functional.linear(rounded(states, states.abs().max()), self.weight)

    def replaced(linear: Any) -> Any:
        linear.forward = MethodType(forward, linear)
        return linear

    assert OTHERS in str(why_not_exact(with_layer(replaced)))

    def offloaded(linear: Any) -> Any:
        linear._old_forward = linear.forward
        return replaced(linear)

    assert why_not_exact(with_layer(offloaded)) is None


def test_a_layer_inside_an_adapter_is_looked_at_once() -> None:
    class Adapter(nn.Module):
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.in_features = base.in_features
            self.base = base

        def forward(self, states: Tensor) -> Tensor:
            raise AssertionError

    assert "PerTensor" in str(why_not_exact(with_layer(lambda linear: Adapter(PerTensor(linear)))))
    assert why_not_exact(with_layer(Adapter)) is None


def test_quantize_dynamic_is_plain_whatever_a_check_finds() -> None:
    """Of three tokens, a draft may hold what the forward without it holds anyway."""
    model = tiny_model("llama", dtype=torch.float32, vocab_size=3)
    quantize: Any = torch.ao.quantization.quantize_dynamic
    found = lade.probe(quantize(model, {nn.Linear}, torch.qint8))
    assert found.verification == "plain"
    assert all(OTHERS in reason for reason in found.reasons.values())


def test_scales_of_whole_tensors_in_torchao_are_plain_also_in_half_precision() -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="needs torchao")
    kinds = {
        granularity: torchao.Int8DynamicActivationInt8WeightConfig(granularity=granularity())
        for granularity in (torchao.PerTensor, torchao.PerRow)
    }
    found = {}
    for granularity, config in kinds.items():
        model = tiny_model("llama", dtype=torch.bfloat16)
        torchao.quantize_(model, config)
        found[granularity] = str(why_not_exact(model))
    assert OTHERS in found[torchao.PerTensor]
    assert "Int8Tensor" in found[torchao.PerTensor]
    assert found[torchao.PerRow] == "None"
