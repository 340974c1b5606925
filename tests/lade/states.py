"""State that a user adds to a model's forward pass, of many kinds; each kind can be set.

A kind takes a Llama of `SIZE` hidden states, changes it, and returns what sets its value: with 0.0
the model computes what it did, with anything else it mostly treats the tokens of a forward apart.
"""

import sys
import types
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AttentionMaskInterface
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SIZE = 32
STEERING = torch.randn(SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

Set = Callable[[float], None]
Kind = Callable[[Any], Set]
GLOBAL = {"alpha": 0.0}
KINDS: list[Kind] = []


def kind(make: Kind) -> Kind:
    KINDS.append(make)
    return make


#: Puts back what kinds have exchanged in torch and transformers, in every process.
EXCHANGED: dict[tuple[Any, str], Any] = {}


def exchange(holder: Any, name: str, function: Any) -> None:
    """Put a function in the place of another until `put_back`."""
    EXCHANGED.setdefault((holder, name), getattr(holder, name))
    setattr(holder, name, function)


def put_back() -> None:
    """Put back all functions and the mask of "sdpa"."""
    while EXCHANGED:
        (holder, name), before = EXCHANGED.popitem()
        setattr(holder, name, before)
    AttentionMaskInterface.register("sdpa", sdpa_mask)
    ALL_MASK_ATTENTION_FUNCTIONS._local_mapping.pop("sdpa", None)


def steered(states: Tensor, alpha: float) -> Tensor:
    """Add to the newest position of a forward alone, as most steering code does."""
    states = states.clone()
    states[:, -1] += alpha * STEERING.to(states.dtype)
    return states


def mlp_of(model: Any) -> Any:
    return model.model.layers[0].mlp


class Now:
    """An alpha that code of the user's looks up whenever it runs."""

    alpha = 0.0

    def put(self, alpha: float) -> None:
        self.alpha = alpha


# --- hooks; each value registers another one ------------------------------------------------------


class Exchanged:
    """A hook that is removed, and another registered in its place."""

    def __init__(self, register: Callable[[Any], Any], make: Callable[[float], Any]) -> None:
        self.register, self.make = register, make
        self.handle: Any = None

    def __call__(self, alpha: float) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.handle = self.register(self.make(alpha))


def exchanged(name: str, change: Callable[[Tensor, float], Tensor], where: Any = mlp_of) -> Kind:
    """Return the kind of hooks that make another output."""

    def make(alpha: float) -> Any:
        return lambda module, args, output: change(output, alpha)

    def of_model(model: Any) -> Set:
        return Exchanged(where(model).register_forward_hook, make)

    of_model.__name__ = name
    return of_model


def _first(output: Tensor, alpha: float) -> Tensor:
    output = output.clone()
    output[:, 0] += alpha * STEERING.to(output.dtype)
    return output


def logits(output: Tensor, alpha: float) -> Tensor:
    changed = output.clone()
    changed[:, -1] += alpha * 3 * output[:, -1].roll(1, -1)
    return changed


def _single(output: Tensor, alpha: float) -> Tensor:
    return output + alpha * STEERING.to(output.dtype) if output.shape[1] == 1 else output


class Hook:
    """A hook with an attribute."""

    def __init__(self, alpha: float = 0.0) -> None:
        self.alpha = alpha

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return steered(output, self.alpha)


closures = kind(exchanged("closures", steered))
on_the_head = kind(exchanged("on_the_head", logits, lambda model: model.lm_head))
first_position = kind(exchanged("first_position", _first))
single_tokens = kind(exchanged("single_tokens", _single))
means = kind(exchanged("means", lambda out, alpha: out - 0.3 * alpha * out.mean(1, keepdim=True)))


# --- hooks that look elsewhere --------------------------------------------------------------------


@kind
def hook_attribute(model: Any) -> Set:
    hook = Hook()
    mlp_of(model).register_forward_hook(hook)
    return partial(setattr, hook, "alpha")


@kind
def global_value(model: Any) -> Set:
    mlp_of(model).register_forward_hook(
        lambda module, args, output: steered(output, GLOBAL["alpha"])
    )
    return partial(GLOBAL.__setitem__, "alpha")


# --- modules of the user --------------------------------------------------------------------------


class Steering(nn.Module):
    """A user's layer that treats the newest position apart."""

    kept: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.alpha = 0.0
        self.gate = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.register_buffer("kept", torch.zeros((), dtype=torch.float64))

    def forward(self, states: Tensor) -> Tensor:
        alpha = self.alpha + float(self.gate) + float(self.kept)
        return steered(self.inner(states), alpha)


def steering_in(model: Any) -> Steering:
    layer = model.model.layers[0]
    layer.mlp = Steering(layer.mlp)
    return layer.mlp  # type: ignore[no-any-return]


@kind
def attribute(model: Any) -> Set:
    return partial(setattr, steering_in(model), "alpha")


@kind
def gate_by_data_in_place(model: Any) -> Set:
    layer = steering_in(model)
    return lambda alpha: layer.gate.data.fill_(alpha)  # type: ignore[return-value]


@kind
def buffer(model: Any) -> Set:
    return steering_in(model).kept.fill_  # type: ignore[return-value]


class LowRank(nn.Module):
    """A user's adapter, with a scale and a switch."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.alpha, self.active = inner, 0.0, True
        generator = torch.Generator().manual_seed(1)
        shape = (inner.out_features, inner.in_features)
        self.delta = torch.randn(shape, generator=generator, dtype=torch.float64) / 4

    def forward(self, states: Tensor) -> Tensor:
        made: Tensor = self.inner(states)
        return made + self.alpha * states @ self.delta.T.to(states.dtype) if self.active else made


@kind
def adapter_switch(model: Any) -> Set:
    adapter = mlp_of(model).up_proj = LowRank(mlp_of(model).up_proj)
    adapter.alpha = 1.0
    return lambda alpha: setattr(adapter, "active", alpha > 0)


class Scaled(nn.Module):
    """A parametrization with a plain attribute."""

    alpha = 0.0

    def forward(self, weight: Tensor) -> Tensor:
        return weight * (1 + self.alpha)


@kind
def parametrization(model: Any) -> Set:
    scaled = Scaled()
    parametrize.register_parametrization(mlp_of(model).up_proj, "weight", scaled)
    return partial(setattr, scaled, "alpha")


# --- functions in place of the model's own --------------------------------------------------------


def _patched(name: str, method: str) -> Kind:
    """Add the kind of a method in place of one that the class has."""

    def of_model(model: Any) -> Set:
        mlp = mlp_of(model)
        own = getattr(mlp, method)

        def put(alpha: float) -> None:
            def changed(self: nn.Module, *args: Any, **given: Any) -> Tensor:
                return steered(own(*args, **given), alpha)

            setattr(mlp, method, types.MethodType(changed, mlp))

        return put

    of_model.__name__ = name
    return kind(of_model)


patched_method = _patched("patched_method", "forward")


@kind
def activation(model: Any) -> Set:
    def put(alpha: float) -> None:
        def act(states: Tensor) -> Tensor:
            changed = nn.functional.silu(states)
            changed[:, -1] *= 1 + alpha
            return changed

        mlp_of(model).act_fn = act

    del mlp_of(model).act_fn  # it was a module
    return put


@kind
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


@kind
def global_hook(model: Any) -> Set:
    last = model.model.layers[1]

    def make(alpha: float) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            return steered(output, alpha) if module is last and alpha else None

        return hook

    return Exchanged(nn.modules.module.register_module_forward_hook, make)


# --- settings and weights of the model's own ------------------------------------------------------


@kind
def scaling(model: Any) -> Set:
    attention = model.model.layers[1].self_attn
    before = attention.scaling
    return lambda alpha: setattr(attention, "scaling", before * (1 + alpha))


@kind
def rotary_scaling(model: Any) -> Set:
    rotary = model.model.rotary_emb
    return lambda alpha: setattr(rotary, "attention_scaling", 1.0 + alpha / 4)


@kind
def weights(model: Any) -> Set:
    weight = mlp_of(model).up_proj.weight
    before = weight.detach().clone()
    return lambda alpha: setattr(weight, "data", before * (1 + alpha))


# --- numbers of code that came with a checkpoint --------------------------------------------------

_CODE = """
import dataclasses, types
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaMLP
@dataclasses.dataclass(slots=True)
class Args:
    scale: float = 1.0
    calls: int = 0
class OfArgs(LlamaMLP):
    def forward(self, states):
        self.args.calls += 1
        return super().forward(states) * self.args.scale
class OfClass(LlamaMLP):
    scale = 1.0
    def forward(self, states):
        return super().forward(states) * self.scale
bag, SCALE = types.SimpleNamespace(scale=1.0), 1.0
class OfFile(LlamaMLP):
    def forward(self, states):
        return super().forward(states) * SCALE
class OfBag(LlamaMLP):
    def forward(self, states):
        return super().forward(states) * bag.scale
class Swish:
    scale = 1.0
    def __call__(self, states):
        return functional.silu(states * self.scale)
def swish():
    scale = 1.0
    def put(value):
        nonlocal scale
        scale = value
    return lambda states: functional.silu(states * scale), put
"""


def _of_checkpoint(name: str, make: Callable[[Any, Any], Callable[[float], Any]]) -> Kind:
    """Add the kind of a number that remote code multiplies states by, somewhere."""

    def put_in(model: Any) -> Set:
        file = types.ModuleType(f"transformers_modules.states.{name}")
        sys.modules[file.__name__] = file
        exec(_CODE, vars(file))
        put = make(file, mlp_of(model))
        return lambda alpha: put(1 + alpha)

    put_in.__name__ = name
    return kind(put_in)


def _class(name: str, holder: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def make(file: Any, mlp: Any) -> Any:
        mlp.__class__, mlp.args = vars(file)[name], file.Args()
        return partial(setattr, holder(file) or mlp.args, "SCALE" if name == "OfFile" else "scale")

    return make


def _activation(is_object: bool, file: Any, mlp: Any) -> Any:
    del mlp.act_fn
    mlp.act_fn, put = (file.Swish(), None) if is_object else file.swish()
    return put or partial(setattr, mlp.act_fn, "scale")


remote_args = _of_checkpoint("remote_args", _class("OfArgs", lambda file: None))
remote_class = _of_checkpoint("remote_class", _class("OfClass", lambda file: file.OfClass))
remote_file = _of_checkpoint("remote_file", _class("OfFile", lambda file: file))
remote_bag = _of_checkpoint("remote_bag", _class("OfBag", lambda file: file.bag))
remote_activation = _of_checkpoint("remote_activation", partial(_activation, True))
remote_closure = _of_checkpoint("remote_closure", partial(_activation, False))


# --- code around a whole model, and code that sees the rows of a batch ----------------------------


def _around(name: str, change: Callable[[Tensor, float], Tensor]) -> Kind:
    """Add the kind of a forward that wraps the model's own, as trainers' do."""

    def put_in(model: Any) -> Set:
        own, now = model.forward, Now()

        def forward(self: Any, *args: Any, **given: Any) -> Any:
            output = own(*args, **given)
            output.logits = change(output.logits, now.alpha)
            return output

        model.forward = types.MethodType(forward, model)
        return now.put

    put_in.__name__ = name
    return kind(put_in)


def _last_row(output: Tensor, alpha: float) -> Tensor:
    changed = output.clone()
    changed[-1:] += 3 * alpha * output[-1:].roll(1, -1)
    return changed


wrapped_forward = _around("wrapped_forward", lambda out, alpha: out + 3 * alpha * out.roll(1, -1))
wrapped_for_a_row = _around("wrapped_for_a_row", _last_row)
rows_together = kind(exchanged("rows_together", lambda out, alpha: out - alpha * out.mean(0) / 2))


# --- what lade runs in the place of a model's own code --------------------------------------------


def _biases(name: str, of_model: Callable[[Any], Any]) -> Kind:
    """Add the kind of a bias that comes, and goes, after the first call."""

    def put_in(model: Any) -> Set:
        layer = of_model(model)
        generator = torch.Generator().manual_seed(2)
        bias = torch.randn(layer.weight.shape[0], generator=generator, dtype=torch.float64)

        def put(alpha: float) -> None:
            made = nn.Parameter((alpha * bias).to(layer.weight.dtype), requires_grad=False)
            layer.bias = made if alpha else None

        return put

    put_in.__name__ = name
    return kind(put_in)


bias = _biases("bias", lambda model: model.model.layers[1].self_attn.o_proj)
bias_of_the_head = _biases("bias_of_the_head", lambda model: model.lm_head)


@kind
def scaling_in_place(model: Any) -> Set:
    attention = model.model.layers[0].self_attn
    before = attention.scaling
    attention.scaling = torch.tensor(before)
    return lambda alpha: attention.scaling.fill_(before * (1 + alpha))


@kind
def angles_in_place(model: Any) -> Set:
    rotary = model.model.rotary_emb
    before = rotary.inv_freq.clone()
    return lambda alpha: rotary.inv_freq.copy_(before * (1 + alpha))


@kind
def sight(model: Any) -> Set:
    attention = model.model.layers[0].self_attn
    return lambda alpha: setattr(attention, "is_causal", not alpha)


def _narrow(alpha: float, *args: Any, mask_function: Any = None, **given: Any) -> Any:
    """Make masks of a window longer than a check's text, and of the first token."""
    inner = mask_function or causal_mask_function

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return inner(batch, head, query, key) & ((key > query - 18) | (key < 1))

    given |= {"allow_is_causal_skip": False} if alpha else {}
    return sdpa_mask(*args, mask_function=sees if alpha else inner, **given)


def _masks(name: str, implementation: str) -> Kind:
    """Add the kind of a mask function, under a name of its own or in the place of another."""

    def put_in(model: Any) -> Set:
        if implementation != "sdpa":
            ALL_ATTENTION_FUNCTIONS.register(implementation, sdpa_attention_forward)

        def put(alpha: float) -> None:
            AttentionMaskInterface.register(implementation, partial(_narrow, alpha))

        put(0.0)
        if implementation != "sdpa":
            model.set_attn_implementation(implementation)
        return put

    put_in.__name__ = name
    return kind(put_in)


@kind
def local_mask(model: Any) -> Set:
    """A mask function in transformers' own table alone, not in its class."""

    def put(alpha: float) -> None:
        ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = partial(_narrow, alpha)

    return put


registered_mask = _masks("registered_mask", "window_of_a_test")
mask_of_sdpa = _masks("mask_of_sdpa", "sdpa")


def _of_torch(name: str, holder: Any, function: str, change: Callable[[Tensor], Tensor]) -> Kind:
    """Add the kind of a function of torch or transformers that is exchanged."""

    def put_in(model: Any) -> Set:
        before = EXCHANGED.get((holder, function), getattr(holder, function))

        def put(alpha: float) -> None:
            def changed(*args: Any, **given: Any) -> Any:
                made = before(*args, **given)
                return change(made) if torch.is_tensor(made) else tuple(map(change, made))

            exchange(holder, function, changed if alpha else before)

        return put

    put_in.__name__ = name
    return kind(put_in)


def _coarse(made: Tensor) -> Tensor:
    return (made * 4).round() / 4 if made.is_floating_point() else made


patched_rsqrt = _of_torch("patched_rsqrt", torch, "rsqrt", _coarse)
patched_cache = _of_torch("patched_cache", DynamicLayer, "update", _coarse)


@kind
def weights_by_a_hook(model: Any) -> Set:
    layer, now = model.model.layers[1], Now()
    kept = {name: each.detach().clone() for name, each in layer.named_parameters()}

    def bring(module: nn.Module, _: Any) -> None:
        for name, parameter in module.named_parameters():
            parameter.data = kept[name] * (1 + now.alpha)

    layer.register_forward_pre_hook(bring)
    return now.put


@kind
def turned_states(model: Any) -> Set:
    """A hook of a layer whose result lies in memory column by column."""
    now = Now()
    turn = torch.eye(SIZE, dtype=torch.float64) + torch.outer(STEERING, STEERING) / SIZE
    model.model.layers[0].register_forward_hook(
        lambda module, args, out: (
            (turn.to(out.dtype) @ out.mT).mT * (1 + now.alpha) if now.alpha else out
        )
    )
    return now.put


@kind
def what_a_hook_keeps(model: Any) -> Set:
    """A hook of a layer that stores on its module what it saw, and what it is to add."""

    def keep(module: Any, _: Any, out: Tensor) -> Tensor:
        module.seen = out.detach()
        return steered(out, module.alpha)

    layer = model.model.layers[1]
    layer.register_forward_hook(keep)
    layer.alpha = 0.0
    return partial(setattr, layer, "alpha")


# --- what packages and processes leave behind -----------------------------------------------------


@kind
def adapter_on_parameters(model: Any) -> Set:
    """A low-rank adapter of PEFT on parameters, as on stacked experts; at first it adds nothing."""
    peft = pytest.importorskip("peft")
    names = [name for name, each in model.named_parameters() if ".experts." in name]
    names = names or ["mlp.up_proj.weight"]
    lora = peft.LoraConfig(r=2, target_parameters=[name.split("layers.0.")[-1] for name in names])
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        peft.inject_adapter_in_model(lora, model)
    model.eval()
    seconds = [each for name, each in model.named_parameters() if "lora_B" in name]
    kept = [torch.randn_like(each) for each in seconds]

    def put(alpha: float) -> None:
        with torch.no_grad():
            for each, full in zip(seconds, kept, strict=True):
                each.copy_(alpha * full)

    return put


@kind
def left_by_training(model: Any) -> Set:
    """Hooks and switches that training with checkpoints leaves behind."""
    before = mlp_of(model).down_proj.weight.detach().clone()

    def put(alpha: float) -> None:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of names that newer releases have
            model.train().gradient_checkpointing_enable()
            model.enable_input_require_grads()
            mlp_of(model).down_proj.weight.copy_(before * (1 + alpha))
            model.eval().gradient_checkpointing_disable()

    return put
