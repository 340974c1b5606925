"""A dense view of a model: its small operations done by the operators of `ops.py`.

Modules are recognised by what they do, not by their names: each is tried on a CPU, with random
numbers, and with stand-ins in place of its submodules, and has to give bitwise what our operator
gives. What is not recognised stays as it is, and so does every call whose arguments were not tried.
Products of matrices are not merged: that takes a second copy of the weights.
"""

import inspect
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lade.compat import Model, has_hook, without_old_names
from lade.gpu import ops
from lade.view import viewed

_ROTATE = "apply_rotary_pos_emb"  # the function that models call by this name
_LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


def dense_view(model: Model) -> Model | None:
    """Return a view of a model with fewer and larger operations, or None if nothing is recognised.

    The view computes what the model computes, up to the order in which a row of a norm is summed
    and the last bit of an exponential. The model must not be in training.
    """
    recognition = _Recognition()
    view = viewed(model, recognition.changes)
    if not recognition.num_changed:
        return None
    for module in [*view.modules()]:
        _chain(module)
    return view


class Norm(NamedTuple):
    """How a module normalises."""

    eps: float
    form: ops.Form


class _Recognition:
    """Finds out what modules do, once for all that differ in nothing but their weights."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self.num_changed = 0

    def changes(self, module: Any) -> dict[str, Any] | None:
        """Return the attributes that make a module dense, or None."""
        is_own = "forward" in vars(module) or has_hook(module) or module.training
        if is_own or type(module).forward is nn.Module.forward:
            return None
        changes = self._changes(module)
        self.num_changed += bool(changes)
        return changes

    def _changes(self, module: Any) -> dict[str, Any] | None:
        norm = self._once(_norm_of, module)
        if norm is not None:
            return {"forward": MethodType(_normed, module), "_lade_norm": norm, "_lade_ahead": None}
        activation = self._once(_activation_of, module)
        if activation is not None:
            return {"forward": MethodType(_gated, module), "_lade_activation": activation}
        defaults = self._once(_defaults_of_layer, module)
        if defaults is not None:
            norm = self._once(_norm_of, module.post_attention_layernorm)
            if norm is not None and self.changes(module.post_attention_layernorm):
                forward = MethodType(_layer, module)
                return {"forward": forward, "_lade_defaults": defaults, "_lade_next": None}
        forward = self._with_rotation(type(module).forward)
        return None if forward is None else {"forward": MethodType(forward, module)}

    def _once(self, find: Callable[[Any], Any], code: Any) -> Any:
        """Return what `find` finds in a module or function; None if that fails: it is another."""
        key = (find, _settings_of(code) if isinstance(code, nn.Module) else code)
        if key not in self._known:
            try:
                with torch.no_grad():
                    self._known[key] = find(code)
            except Exception:  # the model's own code is run, on inputs of ours
                self._known[key] = None
        return self._known[key]

    def _with_rotation(self, forward: Any) -> Any:
        """Return a forward that rotates by our operator, or None if it does not rotate."""
        forward = without_old_names(forward)
        if type(forward) is not FunctionType or _ROTATE not in forward.__code__.co_names:
            return None
        rotate = forward.__globals__.get(_ROTATE)
        if not callable(rotate):
            return None
        ours = self._once(_rotating, rotate)
        if ours is None:
            return None
        # The same code in a namespace of its own, so that the model's module stays as it is.
        names = {**forward.__globals__, _ROTATE: ours}
        made = FunctionType(
            forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
        )
        made.__kwdefaults__ = forward.__kwdefaults__
        return made


# --- norms ------------------------------------------------------------------------------------


def _norm_of(module: Any) -> Norm | None:
    """Return how a module normalises by root mean square, or None if it does something else."""
    if [*module._parameters] != ["weight"] or module._modules or module._buffers:
        return None
    weight, eps = module.weight, getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if type(eps) is not float or weight.dim() != 1 or weight.numel() > ops.MAX_NORMED:
        return None
    drawn = _random(9, 3, weight.numel())
    weight = drawn[0, 0].to(weight.dtype)
    trial = _trial_of(module, _parameters={"weight": weight})
    # Large and small numbers, so that the place of `eps` shows.
    rows = (drawn[1:] * torch.logspace(-4, 2, 8)[:, None, None]).to(weight.dtype)
    expected = trial.forward(rows)
    for form in ops.FORMS:
        if _is_same(ops.rms_norm(rows, weight, eps, form), expected):
            return Norm(eps, form)
    return None


def _normed(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Take the place of a norm's forward."""
    ahead, self._lade_ahead = self._lade_ahead, None
    if args or kwargs or not _is_plain(hidden_states, self.weight):
        return type(self).forward(self, hidden_states, *args, **kwargs)
    if ahead is not None and ahead[0] is hidden_states:
        return ahead[1]
    # What follows may want the strides that the numbers came with, such as those of heads.
    is_turned = hidden_states.dim() == 4 and not hidden_states.is_contiguous()
    states = hidden_states.transpose(1, 2) if is_turned else hidden_states
    if not states.is_contiguous():
        return type(self).forward(self, hidden_states)
    normed = ops.rms_norm(states, self.weight, *self._lade_norm)
    return normed.transpose(1, 2) if is_turned else normed


# --- gated MLPs -------------------------------------------------------------------------------


def _activation_of(module: Any) -> str | None:
    """Return the activation of an MLP that is down(activation(gate(x)) * up(x)), or None."""
    dtype = _dtype_of(module.gate_proj)
    # From tiny to huge, so that limits show.
    given, gate, up = (_random(3, 2, 3, 66) * 10.0 ** torch.arange(-3, 3).repeat(11)).to(dtype)
    stands_in = [_StandIn(gate), _StandIn(up), _StandIn(None)]
    names = ("gate_proj", "up_proj", "down_proj")
    modules = {**module._modules, **dict(zip(names, stands_in, strict=True))}
    got = _trial_of(module, _modules=modules).forward(given)
    if any(len(each.calls) != 1 for each in stands_in):
        return None
    if not all(each.calls[0] == ((given,), {}) for each in stands_in[:2]):
        return None
    for activation in ops.ACTIVATIONS:
        if _is_same(ops.gated(gate, up, activation), got):
            return activation
    return None


def _gated(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Take the place of an MLP's forward."""
    if args or kwargs:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
    if not _is_plain(gate, up) or gate.shape != up.shape:
        return type(self).forward(self, hidden_states)
    return self.down_proj(ops.gated(gate, up, self._lade_activation))


# --- rotations --------------------------------------------------------------------------------


def _rotates(rotate: Callable[..., Any]) -> bool:
    """Return whether a function rotates queries and keys by halves, as `ops.rotate` does."""
    for dtype in (torch.float32, torch.bfloat16):
        states = _random(2, 5, 6, 8).to(dtype).transpose(1, 2)
        query, key = states[:, :4], states[:, 4:]
        for rows in (1, 2):
            cos, sin = _random(2, rows, 5, 8).to(dtype).neg()
            got, expected = rotate(query, key, cos, sin), ops.rotate(query, key, cos, sin)
            if len(got) != 2 or not all(map(_is_same, got, expected)):
                return False
    return True


def _rotating(rotate: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a function that takes the place of `rotate`, or None if it does something else."""
    if not _rotates(rotate):
        return None

    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 4 or kwargs or not _is_plain(*args):
            return rotate(*args, **kwargs)
        q, k, cos, sin = args
        is_usual = (
            q.dim() == k.dim() == 4
            and cos.shape == sin.shape
            and cos.shape[0] in (1, q.shape[0])
            and cos.shape[1:] == (q.shape[2], q.shape[3]) == (k.shape[2], k.shape[3])
        )
        return ops.rotate(q, k, cos, sin) if is_usual else rotate(q, k, cos, sin)

    return apply_rotary_pos_emb


# --- layers -----------------------------------------------------------------------------------


def _defaults_of_layer(module: Any) -> dict[str, Any] | None:
    """Return what a layer passes to its attention by default, None if it is no usual layer.

    The usual layer is x + attention(norm(x)), then x + mlp(norm(x)), and passes all its arguments
    on to its attention.
    """
    if not {*_LAYER} <= module._modules.keys() or any(
        getattr(module, name, None) is None for name in _LAYER
    ):
        return None
    dtype = module.input_layernorm.weight.dtype
    given, normed, attended, normed_again, projected = _random(5, 2, 3, 16).to(dtype)
    outputs = (normed, (attended, None), normed_again, projected)
    stands_in = [_StandIn(output) for output in outputs]
    modules = {**module._modules, **dict(zip(_LAYER, stands_in, strict=True))}
    parameters = [*inspect.signature(type(module).forward).parameters.values()][2:]
    of_any = [each for each in parameters if each.kind is each.VAR_KEYWORD]
    named = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(of_any) + len(named) != len(parameters):
        return None
    passed = {each.name: object() for each in named}
    passed.update({"any_other": object()} if of_any else {})
    got = _trial_of(module, _modules=modules).forward(given, **passed)
    summed = given + attended
    calls = [each.calls for each in stands_in]
    if any(len(of_each) != 1 for of_each in calls):
        return None
    (first, _), (_, to_attention), (second, _), (third, _) = (of_each[0] for of_each in calls)
    is_usual = (
        len(first) == len(second) == len(third) == 1
        and calls[1][0] == ((), {"hidden_states": normed, **passed})
        and not calls[0][0][1]
        and not calls[2][0][1]
        and not calls[3][0][1]
        and first[0] is given
        and to_attention["hidden_states"] is normed
        and _is_same(second[0], summed)
        and third[0] is normed_again
        and _is_same(got, summed + projected)
    )
    return {each.name: each.default for each in named} if is_usual else None


def _layer(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Take the place of a layer's forward; sums and the norms after them are one operation."""
    if args or not _is_plain(hidden_states, self.post_attention_layernorm.weight):
        return type(self).forward(self, hidden_states, *args, **kwargs)
    normed = self.input_layernorm(hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **{**self._lade_defaults, **kwargs})
    summed, normed = _sum_and_norm(attended, hidden_states, self.post_attention_layernorm)
    projected = self.mlp(normed)
    after = self._lade_next
    if after is None or not _is_plain(projected, summed, after.weight):
        return summed + projected
    summed, normed = _sum_and_norm(projected, summed, after)
    after._lade_ahead = summed, normed  # if it is asked for this, and not for anything else
    return summed


def _sum_and_norm(x: Tensor, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    if not _is_plain(x, residual, norm.weight):
        summed = residual + x
        return summed, norm(summed)
    both: tuple[Tensor, Tensor] = ops.add_rms_norm(x, residual, norm.weight, *norm._lade_norm)
    return both


def _chain(module: nn.Module) -> None:
    """Tell the layers of a module which norm comes after each."""
    for layers in module._modules.values():
        if not isinstance(layers, nn.ModuleList):
            continue
        norms = [vars(layer)["_modules"].get("input_layernorm") for layer in layers]
        norms.append(module._modules.get("norm"))
        for layer, norm in zip(layers, norms[1:], strict=True):
            if "_lade_next" in vars(layer) and norm is not None and "_lade_norm" in vars(norm):
                vars(layer)["_lade_next"] = norm  # not as a submodule of two parents


def _settings_of(module: nn.Module) -> Any:
    """Return all that tells a module from others of its class, its weights aside."""
    plain = (int, float, bool, str, FunctionType)
    own = [(name, value) for name, value in vars(module).items() if type(value) in plain]
    dtypes = [parameter.dtype for parameter in module.parameters(recurse=False)]
    children = [
        # Those with weights of their own are tried by themselves, and only stood in for.
        (name, type(child) if any(True for _ in child.parameters()) else _settings_of(child))
        for name, child in module.named_children()
    ]
    return type(module), *own, *dtypes, *children


# --- trials -----------------------------------------------------------------------------------


class _StandIn:
    """Stands in for a submodule: notes its calls; returns its output, or for None its input."""

    def __init__(self, output: Any) -> None:
        self._output = output
        self.calls: list[tuple[Sequence[Any], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return args[0] if self._output is None else self._output


def _trial_of(module: nn.Module, **changes: Any) -> Any:
    """Return a module of the same class and settings, with other parameters or submodules."""
    trial = object.__new__(type(module))
    object.__setattr__(trial, "__dict__", {**vars(module), "training": False, **changes})
    return trial


def _random(*shape: int) -> Tensor:
    """Return random numbers; torch's own random state, which texts depend on, is left alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _is_same(one: Any, other: Any) -> bool:
    return (
        isinstance(one, Tensor)
        and one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def _is_plain(*tensors: Any) -> bool:
    """Return whether operators take these tensors: of one floating dtype, on one device."""
    if not all(isinstance(each, Tensor) for each in tensors):
        return False
    first: Tensor = tensors[0]
    return first.is_floating_point() and all(
        each.dtype == first.dtype and each.device == first.device for each in tensors
    )


def _dtype_of(module: Any) -> torch.dtype:
    """Return the dtype of a module's weights, or any other if they are quantised."""
    dtypes: list[torch.dtype] = [each.dtype for each in module.parameters()]
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.bfloat16)
