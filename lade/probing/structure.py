"""The structure of a model, remembered so that changes are noticed at the next call.

The result of a check is valid for the modules, weights, hooks and settings it was made with.
`Structure` remembers them without holding any weight, and compares them in a fraction of a
millisecond. It ignores the values of weights, and whatever cannot be seen from outside, such as a
forward edited in place: `watch.py` covers that.
"""

import copy
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain, repeat
from operator import contains, getitem, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from lade.compat import Model, is_own_hook

_training = itemgetter("training")
# Methods of the root that are replaced to change what it computes or is given.
_METHODS = ("forward", "prepare_inputs_for_generation", "_prefill", "_sample")
_FLAGS = ("_tp_size", "hf_device_map", "is_quantized")
# A few weights reveal a conversion of all; another dtype mostly means another address as well.
_NUM_DTYPES = 8

_Names = list[str]


class _Parts(NamedTuple):
    """Everything that is compared; lists of modules, weights or buffers in the model's order."""

    children: list[dict[str, Any]]  # of modules that have some
    child_ids: list[int]
    child_types: list[type]
    empty: list[dict[str, Any]]  # dicts of children and weights that are empty
    unhooked: list[dict[int, Any]]  # dicts of hooks that are empty
    attributes: list[dict[str, Any]]  # of each module but the root
    modes: list[dict[str, Any]]  # attributes of modules that may behave differently in training
    training: list[bool]
    forwards: list[bool]  # whether the instance has a forward of its own
    own_forwards: list[tuple[dict[str, Any], int]]  # attributes of those that do, id of the forward
    hooks: list[tuple[dict[int, Any], list[Hashable]]]  # of modules that have some
    weights: tuple[list[dict[str, Any]], _Names]  # holders and names of weights with an address
    weight_types: list[type]
    addresses: list[int]
    others: tuple[list[dict[str, Any]], _Names]  # of weights without one, and of buffers
    other_ids: list[int]
    no_weights: tuple[list[dict[str, Any]], _Names]  # of weights that are None
    some_dtypes: list[torch.dtype]
    class_forwards: list[tuple[Any, Any]]  # each class and its forward
    configs: list[tuple[dict[str, Any], _Names, list[Any]]]  # settings, names and values of each


class Structure:
    """The structure of a model at one point in time.

    Args:
        model: held by weak references, so that replaced weights are freed.
    """

    def __init__(self, model: Model) -> None:
        inner = [*model.modules()][1:]
        self._root: tuple[Any, ...] = ()
        self._parts: _Parts | None = None
        try:
            self._root, self._parts = _root_of(model), _parts_of(model, inner)
        except Exception:  # unusual code, which then always counts as changed
            return
        # The parts hold dicts of the modules: drop them as soon as one of the modules is freed.
        mine = weakref.ref(self)  # no cycle: all of this is freed together with the model

        def forget(_: Any) -> None:
            structure = mine()
            if structure is not None:
                structure._parts = None

        self._watched = [weakref.ref(module, forget) for module in inner]

    def is_of(self, model: Model) -> bool:
        """Return whether a model is unchanged; takes 0.1 ms for 30 layers."""
        parts = self._parts
        try:
            return (
                parts is not None
                and _root_of(model) == self._root
                and vars(model)["_modules"] is parts.children[0]
                and _is_same(parts)
            )
        except Exception:  # something is missing, or can no longer be compared
            return False


def _root_of(model: Model) -> tuple[Any, ...]:
    """Return what is compared of the root module, and of settings shared by all models."""
    return (
        type(model),
        model.training,
        id(model.config),
        *(_method_of(model, name) for name in _METHODS),
        *map(vars(model).get, _FLAGS),
        _hooks_of(torch_module._global_forward_hooks),
        _hooks_of(torch_module._global_forward_pre_hooks),
    )


def _method_of(model: Model, name: str) -> tuple[Any, ...]:
    """Return what identifies a method, without holding the model that it is bound to."""
    method = getattr(model, name, None)
    bound_to = getattr(method, "__self__", None)
    if bound_to is None:
        return (id(method) if name in vars(model) else None,)
    return method.__func__, None if bound_to is model else id(bound_to)  # type: ignore[union-attr]


def _parts_of(model: Model, inner: Sequence[nn.Module]) -> _Parts:
    modules = [model, *inner]
    attributes = [vars(module) for module in inner]
    modes = [vars(module) for module in inner if type(module) not in (nn.Linear, nn.Embedding)]
    children = [module._modules for module in modules if module._modules]
    if not children or children[0] is not model._modules:
        children.insert(0, model._modules)
    of_children = [*chain.from_iterable(map(dict.values, children))]
    of_hooks = [*chain.from_iterable((m._forward_hooks, m._forward_pre_hooks) for m in modules)]
    empty = [part for m in modules for part in (m._modules, m._parameters) if not part]
    # Weights that accelerate loads for each forward are different ones every time.
    lasting = [module for module in modules if not hasattr(module, "_hf_hook")]
    weights = [
        (module._parameters, name, weight)
        for module in lasting
        for name, weight in module._parameters.items()
    ]
    there = [entry for entry in weights if entry[2] is not None]
    addressed = [entry for entry in there if _has_address(entry[2])]
    others = [entry for entry in there if not _has_address(entry[2])]
    others += [
        (module._buffers, name, buffer)
        for module in lasting
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.dim() > 1
    ]
    classes: list[Any] = [*dict.fromkeys(map(type, modules))]
    config = model.config
    configs = {id(each): each for each in (config, config.get_text_config(decoder=True))}
    return _Parts(
        children=children,
        child_ids=[*map(id, of_children)],
        child_types=[*map(type, of_children)],
        empty=empty,
        unhooked=[hooks for hooks in of_hooks if not hooks],
        attributes=attributes,
        modes=modes,
        training=[*map(_training, modes)],
        forwards=[*map(contains, attributes, repeat("forward"))],
        own_forwards=[(each, id(each["forward"])) for each in attributes if "forward" in each],
        hooks=[(hooks, _hooks_of(hooks)) for hooks in of_hooks if hooks],
        weights=_places(addressed),
        weight_types=[type(weight) for *_, weight in addressed],
        addresses=[weight.data_ptr() for *_, weight in addressed],
        others=_places(others),
        other_ids=[id(other) for *_, other in others],
        no_weights=_places(entry for entry in weights if entry[2] is None),
        some_dtypes=_some_dtypes([weight for *_, weight in addressed]),
        class_forwards=[(each, each.forward) for each in classes],
        configs=[_settings_of(vars(each)) for each in configs.values()],
    )


def _settings_of(config: dict[str, Any]) -> tuple[dict[str, Any], _Names, list[Any]]:
    """Return the attributes of a config, and names and copies of those that can be compared.

    Nested configs are left out: comparing them may raise.
    """
    kept = {}
    for name, value in config.items():
        try:
            copied = copy.deepcopy(value)
            if not hasattr(value, "to_dict") and bool(copied == value):
                kept[name] = copied
        except Exception:  # a remote config may hold anything
            continue
    return config, [*kept], [*kept.values()]


def _is_same(parts: _Parts) -> bool:
    of_children = [*chain.from_iterable(map(dict.values, parts.children))]
    if [*map(id, of_children)] != parts.child_ids or any(parts.empty):
        return False
    if any(parts.unhooked) and any(map(_hooks_of, parts.unhooked)):
        return False
    weights = [*map(getitem, *parts.weights)]
    return (
        [*map(type, of_children)] == parts.child_types
        and [*map(_training, parts.modes)] == parts.training
        and [*map(contains, parts.attributes, repeat("forward"))] == parts.forwards
        and [*map(type, weights)] == parts.weight_types
        and [*map(_data_ptr, weights)] == parts.addresses
        and [*map(id, map(getitem, *parts.others))] == parts.other_ids
        and not any(map(getitem, *parts.no_weights))
        and _some_dtypes(weights) == parts.some_dtypes
        and all(id(each["forward"]) == forward for each, forward in parts.own_forwards)
        and all(_hooks_of(hooks) == known for hooks, known in parts.hooks)
        and all(each.forward is forward for each, forward in parts.class_forwards)
        and all([*map(held.get, names)] == values for held, names, values in parts.configs)
    )


_data_ptr: Callable[[Tensor], int] = Tensor.data_ptr


def _has_address(weight: Tensor) -> bool:
    """Return whether a weight has an address; tensors of some classes have none."""
    try:
        return weight.data_ptr() != 0
    except RuntimeError:
        return False


def _places(entries: Iterable[tuple[dict[str, Any], str, Any]]) -> tuple[list[Any], _Names]:
    """Return the dicts that hold values, and the names of the values in them."""
    listed = [*entries]
    return [holder for holder, *_ in listed], [name for _, name, _ in listed]


def _some_dtypes(weights: Sequence[Tensor]) -> list[torch.dtype]:
    return [weight.dtype for weight in weights[:: len(weights) // _NUM_DTYPES or 1]]


def _hooks_of(hooks: dict[int, Any]) -> list[Hashable]:
    """Return what identifies hooks: their code, since PEFT makes new ones for every call."""
    return [_code_of(hook) for hook in [*hooks.values()] if not is_own_hook(hook)]


def _code_of(hook: Any) -> Hashable:
    hook = getattr(hook, "func", hook)  # of a partial
    hook = getattr(hook, "__func__", hook)  # of a bound method
    return getattr(hook, "__code__", None) or (type(hook), id(hook))
