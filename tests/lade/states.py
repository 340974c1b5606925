"""State of the user's own in a model's forwards, of many kinds, each of which can be set.

A kind takes a Llama of `SIZE` hidden states, changes it, and returns what sets its value: with 0.0
the model computes what it did, with anything else it mostly treats the tokens of a forward apart.
"""

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SIZE = 32
STEERING = torch.randn(SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

Set = Callable[[float], None]
Kind = Callable[[Any], Set]
GLOBAL = {"alpha": 0.0}


def steered(states: Tensor, alpha: float) -> Tensor:
    """Add to the newest position of a forward alone, as most steering code does."""
    states = states.clone()
    states[:, -1] += alpha * STEERING
    return states


class Exchanged:
    """A hook that is removed, and another registered in its place."""

    def __init__(self, module: nn.Module, make: Callable[[float], Any]) -> None:
        self.module, self.make = module, make
        self.handle: Any = None

    def __call__(self, alpha: float) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.handle = self.module.register_forward_hook(self.make(alpha))


class Hook:
    """A hook with an attribute."""

    def __init__(self, alpha: float = 0.0) -> None:
        self.alpha = alpha

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return steered(output, self.alpha)

    def method(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return steered(output, self.alpha)


class Steering(nn.Module):
    """A layer of one's own that treats the newest position apart."""

    kept: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.alpha = 0.0
        self.gate = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.register_buffer("kept", torch.zeros((), dtype=torch.float64))
        self.settings = {"alpha": 0.0}

    def forward(self, states: Tensor) -> Tensor:
        alpha = self.alpha + self.settings["alpha"]
        return steered(self.inner(states), alpha + float(self.gate) + float(self.kept))


def hook_of(alpha: float) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return steered(output, alpha)

    return hook


def with_default(alpha: float) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor, alpha: float = alpha) -> Tensor:
        return steered(output, alpha)

    return hook


def without_gradient(alpha: float) -> Any:
    return torch.no_grad()(hook_of(alpha))


def with_arguments(alpha: float, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return steered(output, alpha)


def by_global(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return steered(output, GLOBAL["alpha"])


def mlp_of(model: Any) -> Any:
    return model.model.layers[0].mlp


def steering_in(model: Any) -> Steering:
    layer = model.model.layers[0]
    layer.mlp = Steering(layer.mlp)
    return layer.mlp  # type: ignore[no-any-return]


def closures(model: Any) -> Set:
    return Exchanged(mlp_of(model), hook_of)


def defaults(model: Any) -> Set:
    return Exchanged(mlp_of(model), with_default)


def partials(model: Any) -> Set:
    return Exchanged(mlp_of(model), lambda alpha: partial(with_arguments, alpha))


def objects(model: Any) -> Set:
    return Exchanged(mlp_of(model), Hook)


def methods(model: Any) -> Set:
    return Exchanged(mlp_of(model), lambda alpha: Hook(alpha).method)


def decorated(model: Any) -> Set:
    return Exchanged(mlp_of(model), without_gradient)


def on_embeddings(model: Any) -> Set:
    return Exchanged(model.model.embed_tokens, hook_of)


def on_the_head(model: Any) -> Set:
    def make(alpha: float) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            changed = output.clone()
            changed[:, -1] += alpha * 3 * output[:, -1].roll(1, -1)
            return changed

        return hook

    return Exchanged(model.lm_head, make)


def first_position(model: Any) -> Set:
    def make(alpha: float) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            changed = output.clone()
            changed[:, 0] += alpha * STEERING
            return changed

        return hook

    return Exchanged(mlp_of(model), make)


def single_tokens(model: Any) -> Set:
    def make(alpha: float) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output + alpha * STEERING if output.shape[1] == 1 else output

        return hook

    return Exchanged(mlp_of(model), make)


def means(model: Any) -> Set:
    def make(alpha: float) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output - 0.3 * alpha * output.mean(1, keepdim=True)

        return hook

    return Exchanged(mlp_of(model), make)


def pre_hooks(model: Any) -> Set:
    handles: list[Any] = []

    def put(alpha: float) -> None:
        while handles:
            handles.pop().remove()
        handles.append(
            mlp_of(model).register_forward_pre_hook(lambda _, args: (steered(args[0], alpha),))
        )

    return put


def cell(model: Any) -> Set:
    now = 0.0

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return steered(output, now)

    def put(alpha: float) -> None:
        nonlocal now
        now = alpha

    mlp_of(model).register_forward_hook(hook)
    return put


def hook_attribute(model: Any) -> Set:
    hook = Hook()
    mlp_of(model).register_forward_hook(hook)
    return partial(setattr, hook, "alpha")


def global_value(model: Any) -> Set:
    mlp_of(model).register_forward_hook(by_global)
    return partial(GLOBAL.__setitem__, "alpha")


def attribute(model: Any) -> Set:
    return partial(setattr, steering_in(model), "alpha")


def nested_attribute(model: Any) -> Set:
    return partial(steering_in(model).settings.__setitem__, "alpha")


def gate(model: Any) -> Set:
    layer = steering_in(model)

    def put(alpha: float) -> None:
        with torch.no_grad():
            layer.gate.fill_(alpha)

    return put


def gate_by_data(model: Any) -> Set:
    layer = steering_in(model)

    def put(alpha: float) -> None:
        layer.gate.data = torch.tensor(alpha, dtype=torch.float64)

    return put


def gate_by_data_in_place(model: Any) -> Set:
    layer = steering_in(model)
    return lambda alpha: layer.gate.data.fill_(alpha)  # type: ignore[return-value]


def buffer(model: Any) -> Set:
    return lambda alpha: steering_in_place(model).fill_(alpha)  # type: ignore[return-value]


def steering_in_place(model: Any) -> Tensor:
    if not isinstance(mlp_of(model), Steering):
        steering_in(model)
    return mlp_of(model).kept  # type: ignore[no-any-return]


def patched_method(model: Any) -> Set:
    mlp = mlp_of(model)
    own = mlp.forward

    def put(alpha: float) -> None:
        def forward(self: nn.Module, states: Tensor) -> Tensor:
            return steered(own(states), alpha)

        mlp.forward = types.MethodType(forward, mlp)

    return put


def patched_later(model: Any) -> Set:
    """Put a method in place of one that the class has, which was not there when it was checked."""
    mlp = mlp_of(model)
    own = mlp._call_impl

    def put(alpha: float) -> None:
        def call(self: nn.Module, *args: Any, **given: Any) -> Tensor:
            return steered(own(*args, **given), alpha)

        mlp._call_impl = types.MethodType(call, mlp)

    return put


def activation(model: Any) -> Set:
    def put(alpha: float) -> None:
        def act(states: Tensor) -> Tensor:
            changed = nn.functional.silu(states)
            changed[:, -1] *= 1 + alpha
            return changed

        mlp_of(model).act_fn = act

    del mlp_of(model).act_fn  # it was a module
    return put


class Scaled(nn.Module):
    """A parametrization with a plain attribute."""

    alpha = 0.0

    def forward(self, weight: Tensor) -> Tensor:
        return weight * (1 + self.alpha)


def parametrization(model: Any) -> Set:
    scaled = Scaled()
    parametrize.register_parametrization(mlp_of(model).up_proj, "weight", scaled)
    return partial(setattr, scaled, "alpha")


class LowRank(nn.Module):
    """An adapter of one's own, with a scale and a switch."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.alpha, self.active = inner, 0.0, True
        generator = torch.Generator().manual_seed(1)
        shape = (inner.out_features, inner.in_features)
        self.delta = torch.randn(shape, generator=generator, dtype=torch.float64) / 4

    def forward(self, states: Tensor) -> Tensor:
        made: Tensor = self.inner(states)
        return made + self.alpha * states @ self.delta.T if self.active else made


def adapter_scale(model: Any) -> Set:
    mlp_of(model).up_proj = LowRank(mlp_of(model).up_proj)
    return partial(setattr, mlp_of(model).up_proj, "alpha")


def adapter_switch(model: Any) -> Set:
    adapter = mlp_of(model).up_proj = LowRank(mlp_of(model).up_proj)
    adapter.alpha = 1.0
    return lambda alpha: setattr(adapter, "active", alpha > 0)


def scaling(model: Any) -> Set:
    attention = model.model.layers[1].self_attn
    before = attention.scaling
    return lambda alpha: setattr(attention, "scaling", before * (1 + alpha))


def variance(model: Any) -> Set:
    norm = model.model.layers[1].input_layernorm
    return lambda alpha: setattr(norm, "variance_epsilon", 1e-6 + alpha / 9)


def rotary_scaling(model: Any) -> Set:
    rotary = model.model.rotary_emb
    return lambda alpha: setattr(rotary, "attention_scaling", 1.0 + alpha / 4)


def weights(model: Any) -> Set:
    weight = mlp_of(model).up_proj.weight
    before = weight.detach().clone()

    def put(alpha: float) -> None:
        weight.data = before * (1 + alpha)

    return put


def registered_attention(model: Any) -> Set:
    name = f"of_one_s_own_{id(model)}"
    sdpa: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def put(alpha: float) -> None:
        def attention(module: nn.Module, *states: Tensor, scaling: Any = None, **given: Any) -> Any:
            return sdpa(module, *states, scaling=(scaling or 0.1) * (1 + alpha), **given)

        ALL_ATTENTION_FUNCTIONS.register(name, attention)

    put(0.0)
    model.set_attn_implementation(name)
    return put


def global_hook(model: Any) -> Set:
    handles: list[Any] = []

    def put(alpha: float) -> None:
        while handles:
            handles.pop().remove()
        last = model.model.layers[1]

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            return steered(output, alpha) if module is last and alpha else None

        handles.append(nn.modules.module.register_module_forward_hook(hook))

    put.handles = handles  # type: ignore[attr-defined]
    return put


KINDS: list[Kind] = [
    *(closures, defaults, partials, objects, methods, decorated, on_embeddings, on_the_head),
    *(first_position, single_tokens, means, pre_hooks, cell, hook_attribute, global_value),
    *(attribute, nested_attribute, gate, gate_by_data, gate_by_data_in_place, buffer),
    *(
        patched_method,
        patched_later,
        activation,
        parametrization,
        adapter_scale,
        adapter_switch,
        scaling,
    ),
    *(variance, rotary_scaling, weights, registered_attention, global_hook),
]
