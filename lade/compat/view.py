"""Views of a model: a few modules replaced, with the same weights, hooks and leaf modules.

Changes that one call needs, such as another attention or a look at hidden states, must not be
visible to other calls, other threads or the user. So the model itself is never modified: a view is
a separate model, made for the call in a fraction of a millisecond by copying only the modules that
must differ.
"""

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from itertools import islice
from operator import is_, is_not
from types import CellType, FunctionType, MethodType
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig

from lade.compat import Model, device_of_inputs, experts_of

HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)

#: Hooks that torch calls.
HOOKED = ("_forward_hooks", "_forward_pre_hooks")

#: Returns the attributes to change in a module, its class among them; None to leave it as it is.
Change = Callable[[nn.Module], dict[str, Any] | None]


class FastViews(Protocol):
    """Makes views of a model whose forwards are faster than its own."""

    #: Whether weights are packed, which torch would unpack in each forward.
    is_packed: bool

    def view(self, model: Model) -> Model:
        """Return a view of a model, or of a view of it; the model itself if nothing is faster."""

    def pays(self, num_rows: int) -> bool:
        """Return whether a prompt or a step of `num_rows` tokens should run by a view."""


def with_forward(model: Model, forward: Callable[..., Any]) -> Model:
    """Return a view with all modules of the model and another forward, a method of the view.

    A forward that wraps that of the model's class goes on wrapping it.
    """
    twin, own = _twin_of(model, {}), type(model).forward
    outer = vars(twin).get("forward")
    made = MethodType(forward, twin) if outer is None else referring(outer, {id(own): forward})
    vars(twin)["forward"] = vars(twin)[BEFORE]["forward"] = made
    return twin


def wraps_own_forward(module: nn.Module) -> bool:
    """Return whether a forward that stands on a module wraps, or is, that of its class."""
    outer = vars(module).get("forward")
    return outer is not None and referring(outer, {id(type(module).forward): object}) is not outer


def with_attention(model: Model, attention: str) -> Model:
    """Return a view whose text part uses another attention implementation.

    It is set where transformers looks for it: in the configs that modules refer to. A module
    without submodules does not attend, such as one that makes rotary angles, and is left as it is.
    """
    text = model.config.get_text_config(decoder=True)  # may be a new object
    copies: dict[int, Any] = {}
    copy.deepcopy((model.config, text), copies)
    copies[id(text)]._attn_implementation = attention
    return _with_configs(model, copies, lambda module: bool(module._modules))


def with_decoding_experts(model: Model) -> Model:
    """Return a view with the experts that `generate` decodes single tokens with.

    On all devices but a CPU it replaces "grouped_mm" by "batched_mm", which copies the weights of
    every expert of every token. For one token, copying is less work than sorting; for a tree, it
    would take more memory than all experts have. Returns the model itself if nothing is replaced.
    """
    if device_of_inputs(model).type == "cpu" or "grouped_mm" not in experts_of(model):
        return model
    return _with_experts(model, "batched_mm", only="grouped_mm")


def with_eager_experts(model: Model) -> Model:
    """Return a view whose experts run one by one; the model itself if they do, or it has none.

    Other implementations run all experts at once, and need their weights in one tensor.
    """
    return model if experts_of(model) <= {"eager"} else _with_experts(model, "eager")


def _with_experts(model: Model, implementation: str, only: str | None = None) -> Model:
    """Return a view whose configs name another implementation of experts, in place of `only`."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for copied in copies.values():
        current = getattr(copied, "_experts_implementation", None)
        if current is not None and only in (None, current):
            copied._experts_implementation = implementation
    return _with_configs(model, copies)


def with_first_layers(
    model: Model, layers: nn.ModuleList, num_layers: int, *, cuts_cache: bool
) -> Model:
    """Return a view that runs the first layers only.

    Args:
        model: the model.
        layers: the list of its layers.
        num_layers: how many to run.
        cuts_cache: whether KV caches have these layers only, by the config. Models whose last
            layers share keys count layers from the end, and need all.
    """
    first = {"_modules": dict(islice(layers._modules.items(), num_layers))}
    view = viewed(model, lambda module: first if module is layers else None)
    if not cuts_cache:
        return view
    text, copies = model.config.get_text_config(decoder=True), dict[int, Any]()
    copy.deepcopy((model.config, text), copies)
    short = copies[id(text)]
    short.num_hidden_layers = num_layers
    if getattr(short, "layer_types", None) is not None:
        short.layer_types = short.layer_types[:num_layers]
    return _with_configs(view, copies, lambda module: bool(module._modules))


# Elements of a tensor that a forward may write to, such as a count; a larger one holds a table or
# weights.
_MOST_WRITTEN = 2**12
_FIXED = {bool, int, float, str, type(None)}


def apart(model: Model) -> Model:
    """Return a view that shares nothing with the model but weights, large tensors and config.

    What forwards or methods set in the view or its modules, or write to in place, stays there: also
    in containers, and in objects of the file that has a module's class.
    """
    made: dict[int, Any] = {}

    def change(module: nn.Module) -> dict[str, Any]:
        file = type(module).__module__
        held = {name: each for name, each in vars(module).items() if name != BEFORE}
        copied = {name: _copied(each, file, made) for name, each in held.items()}
        for name in HOOKS:
            hooks = vars(module)[name]
            of_twin = isinstance(hooks, HooksOf)
            copied[name] = hooks.copy() if of_twin else OrderedDict(hooks)
        for name, value in held.items():
            if isinstance(value, RemovableHandle):
                copied[name] = _handle_in(copied, value, module)
        return copied

    return viewed(model, change)


def _handle_in(copied: dict[str, Any], handle: RemovableHandle, module: nn.Module) -> Any:
    """Return a handle that removes a hook of a view, not of the model.

    compressed-tensors removes the hook that unpacks its weights when the hook is called.
    """
    hooks, twin = handle.hooks_dict_ref(), copy.copy(handle)
    of_view = [copied[name] for name in HOOKS if vars(module)[name] is hooks]
    twin.hooks_dict_ref, twin.extra_dict_ref = ref(of_view[0] if of_view else OrderedDict()), ()
    return twin


def _copied(value: Any, file: str, made: dict[int, Any]) -> Any:
    """Return a copy of what a forward may write to, or the value itself; see `apart`.

    Args:
        file: objects of its classes are copied.
        made: the copies so far, by the id of what they are copies of, which others hold.
    """
    kind: Any = type(value)
    if kind in _FIXED:
        return value
    is_object = kind.__module__ == file and hasattr(value, "__dict__")
    is_object = is_object and kind.__reduce__ is object.__reduce__ and not issubclass(kind, Tensor)
    is_tensor = kind is Tensor and not value.is_meta and value.numel() <= _MOST_WRITTEN
    if isinstance(value, nn.Module | type | PreTrainedConfig) or not (
        is_object or is_tensor or isinstance(value, dict | list | set | deque)
    ):
        return value
    if id(value) not in made:
        is_usual = kind in (dict, OrderedDict)  # which `copy` copies in ten times as long
        twin = made[id(value)] = (
            value.clone() if is_tensor else value.copy() if is_usual else copy.copy(value)
        )
        held = vars(twin) if is_object else twin
        if twin is not value and isinstance(held, dict | list | deque):
            for key in [*held] if isinstance(held, dict) else range(len(held)):
                if (copied := _copied(held[key], file, made)) is not held[key]:
                    held[key] = copied
    return made[id(value)]


def keep_attributes(view: Model, model: Model) -> None:
    """Copy attributes that forwards have set in a view to the model, as if they had run in it.

    Some models store how they counted positions in a prompt; transformers stores that it collects
    outputs.
    """
    left: list[tuple[Any, Any]] = [(view, model)]
    while left:
        mine, theirs = left.pop()
        if mine is theirs:
            continue
        before = vars(mine)[BEFORE]
        for name, value in vars(mine).items():
            if name != BEFORE and before.get(name) is not value:
                vars(theirs)[name] = value
        pairs = ((child, theirs._modules.get(name)) for name, child in mine._modules.items())
        left += [(child, other) for child, other in pairs if None not in (child, other)]


BEFORE = "_lade_before"  # all attributes of a view's module as of its creation


def viewed(module: nn.Module, change: Change, made: dict[int, nn.Module] | None = None) -> Any:
    """Return a view with some attributes of some modules changed.

    Args:
        module: a model, or a view of one; or, with `made`, a module in it, which is returned itself
            if nothing in it changes.
        change: returns the attributes to change; a method that is bound to the module is bound to
            its counterpart in the view.
        made: results so far, by the id of the module they replace.
    """
    is_root, made = made is None, {} if made is None else made
    changed = change(module)
    children: Mapping[str, Any] = (changed or {}).get("_modules", module._modules)
    if changed is None and not children and not is_root:
        return module
    if id(module) not in made:
        made[id(module)] = module  # for modules that contain themselves
        views = {  # a container that is empty is false
            name: None if child is None else viewed(child, change, made)
            for name, child in children.items()
        }
        if changed or is_root or any(map(is_not, views.values(), children.values())):
            made[id(module)] = _twin_of(module, {**(changed or {}), "_modules": views})
    return made[id(module)]


class HooksOf(MutableMapping[int, Any]):
    """The hooks of a module for its twin: each hook gets the module, and stores in it.

    Torch calls the items; the values are the hooks themselves.

    Args:
        module: has the hooks.
        name: of the attribute that has them.
        dtype: of tensors that hooks get, if the twin computes in float32 and the module does not.
    """

    def __init__(self, module: nn.Module, name: str, dtype: torch.dtype | None = None) -> None:
        self._module, self._hooks, self._dtype = module, vars(module)[name], dtype

    def __getitem__(self, key: int) -> Any:
        if self._dtype is not None:
            return partial(_given_narrow, self._hooks[key], self._module, self._dtype)
        return partial(_given, self._hooks[key], self._module)

    def __setitem__(self, key: int, hook: Any) -> None:
        self._hooks[key] = hook

    def __delitem__(self, key: int) -> None:
        del self._hooks[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._hooks)

    def copy(self) -> "HooksOf":
        """Return the same hooks, to which others may be added."""
        made = copy.copy(self)
        made._hooks = OrderedDict(zip(self._hooks, self.values(), strict=True))
        return made

    def __len__(self) -> int:
        return len(self._hooks)

    def values(self) -> Any:
        """Return the hooks."""
        return self._hooks.values()


def _given(hook: Any, module: nn.Module, _: nn.Module, *args: Any) -> Any:
    return hook(module, *args)


def _given_narrow(
    hook: Any, module: nn.Module, dtype: torch.dtype, _: nn.Module, *args: Any
) -> Any:
    """Call a hook with tensors of a dtype; what it leaves as it is stays float32."""
    made: list[tuple[Tensor, Tensor]] = []

    def narrow(each: Any) -> Any:
        if not isinstance(each, Tensor) or each.dtype is not torch.float32:
            return each
        made.append((each, each.to(dtype)))
        return made[-1][1]

    def wide(each: Any) -> Any:
        if not isinstance(each, Tensor) or each.dtype is not dtype:
            return each
        kept = next((states for states, given in made if given is each), None)
        return each.float() if kept is None else kept

    given = tree_map(narrow, args)
    before = [each._version for _, each in made]
    result = hook(module, *given)
    for (states, each), version in zip(made, before, strict=True):
        if each._version != version:  # the hook has written to it
            states.copy_(each)
    return tree_map(wide, result)


def _twin_of(module: nn.Module, changed: dict[str, Any]) -> nn.Module:
    """Return a copy of a module with some attributes changed and its bound methods rebound."""
    twin: nn.Module = object.__new__(changed.get("__class__", type(module)))
    attributes = {**vars(module), **changed}
    attributes.pop("__class__", None)
    for name in HOOKED:
        # Without hooks, twin and module share the empty dict, which torch looks into at each call.
        if name not in changed and attributes[name] and isinstance(attributes[name], dict):
            attributes[name] = HooksOf(module, name)
    for name, value in attributes.items():
        if callable(value) and name != "generate":  # which no forward calls
            attributes[name] = referring(value, {id(module): twin})
    attributes[BEFORE] = dict(attributes)
    object.__setattr__(twin, "__dict__", attributes)
    return twin


def referring(code: Any, instead: Mapping[int, Any]) -> Any:
    """Return code that refers to other objects than a function, or what it wraps, refers to.

    A forward that stands in place of another mostly keeps that one: in a cell of its closure, as
    TRL's does, in a partial or an object, as accelerate's. Returns the code itself if it refers to
    none of the objects.

    Args:
        code: a function, a method, a partial, or an object that is called.
        instead: by the id of an object, the one to refer to.
    """
    known = dict(instead)

    def other(part: Any) -> Any:
        if id(part) not in known:
            known[id(part)] = part  # if it refers to itself
            known[id(part)] = _referring(part, other)
        return known[id(part)]

    return other(code)


def _referring(code: Any, other: Callable[[Any], Any]) -> Any:
    """Return code whose parts are others; the code itself if all are the same."""
    if not callable(code) or isinstance(code, nn.Module | type):
        return code
    if type(code) is MethodType:
        function, owner = other(code.__func__), other(code.__self__)
        is_same = function is code.__func__ and owner is code.__self__
        return code if is_same else MethodType(function, owner)
    if type(code) is partial:
        parts = [code.func, *code.args]
        others = [*map(other, parts)]
        is_same = all(map(is_, parts, others))
        return code if is_same else partial(others[0], *others[1:], **code.keywords)
    if type(code) is FunctionType:
        cells = [*map(partial(_other_cell, other), code.__closure__ or ())]
        if all(map(is_, code.__closure__ or (), cells)):
            return code
        given = code.__globals__, code.__name__, code.__defaults__, tuple(cells)
        made = FunctionType(code.__code__, *given)
        vars(made).update(vars(code))
        made.__kwdefaults__, made.__module__ = code.__kwdefaults__, code.__module__
        return made
    held = getattr(code, "__dict__", {})
    changed = {name: other(part) for name, part in held.items()}
    changed = {name: part for name, part in changed.items() if part is not held[name]}
    return _sharing(code, changed) if changed else code


def _other_cell(other: Callable[[Any], Any], cell: Any) -> Any:
    """Return a cell with another content; the cell itself, which functions share, if it is same."""
    if cell == CellType():
        return cell
    made = other(cell.cell_contents)
    return cell if made is cell.cell_contents else CellType(made)


def _sharing(code: Any, changed: Mapping[str, Any]) -> Any:
    """Return an object that shares all attributes of another but some."""
    kind: Any = type(code)

    def read(self: Any, name: str) -> Any:
        if name in changed:
            return changed[name]
        if name == "__dict__":
            return {**vars(code), **changed}
        value = kind.__getattribute__(code, name)
        is_own = type(value) is MethodType and value.__self__ is code
        return MethodType(value.__func__, self) if is_own else value

    def write(self: Any, name: str, value: Any) -> None:
        setattr(code, name, value)

    members = {"__getattribute__": read, "__setattr__": write, "__module__": kind.__module__}
    return object.__new__(type(kind.__name__, (kind,), members))


def _with_configs(
    model: Model, copies: dict[int, Any], applies: Callable[[nn.Module], bool] = lambda module: True
) -> Model:
    """Return a view in which some modules refer to copies of their configs.

    Args:
        copies: the copies by the id of each original, as `deepcopy` records them.
        applies: returns whether a module refers to copies.
    """

    def change(module: nn.Module) -> dict[str, Any] | None:
        if not applies(module):
            return None
        changed = {
            name: copies[id(value)] for name, value in vars(module).items() if id(value) in copies
        }
        return changed or None

    return viewed(model, change)
