"""What a model is made of, remembered so that a change of it is seen at the next call.

What a check of a model found holds for the modules, weights, hooks and settings that it was made
with. `Structure` remembers them without holding any weight, and compares them in a fraction of a
millisecond. Values of weights are left out, and so is what nobody can see from outside, as the
code of a forward that was edited in place: `watch.py` is for that.
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
# Of the root, instance attributes that are exchanged to change what it computes or is handed.
_METHODS = ("forward", "prepare_inputs_for_generation", "_prefill", "_sample")
_FLAGS = ("_tp_size", "hf_device_map", "is_quantized")
# A few weights tell of a conversion of all; another dtype mostly comes with another address, too.
_NUM_DTYPES = 8

_Names = list[str]


class _Parts(NamedTuple):
    """All that is compared; lists run over modules, weights or buffers in the model's order."""

    children: list[dict[str, Any]]  # of modules that have some
    child_ids: list[int]
    child_types: list[type]
    empty: list[dict[str, Any]]  # of children and weights, where there are none
    unhooked: list[dict[int, Any]]  # of hooks, where there are none
    attributes: list[dict[str, Any]]  # of each module but the root
    modes: list[dict[str, Any]]  # of those that may do something else in training
    training: list[bool]
    forwards: list[bool]  # whether the instance has a forward of its own
    own_forwards: list[tuple[dict[str, Any], int]]  # those that do
    hooks: list[tuple[dict[int, Any], list[Hashable]]]  # of modules that have some
    weights: tuple[list[dict[str, Any]], _Names]  # where those are found that tell where they lie
    weight_types: list[type]
    addresses: list[int]
    others: tuple[list[dict[str, Any]], _Names]  # weights that do not, and buffers like weights
    other_ids: list[int]
    no_weights: tuple[list[dict[str, Any]], _Names]  # where there might be one
    some_dtypes: list[torch.dtype]
    class_forwards: list[tuple[Any, Any]]  # by class
    configs: list[tuple[dict[str, Any], _Names, list[Any]]]  # settings, names and values of each


class Structure:
    """What a model was made of when this was made.

    Args:
        model: remembered by weak references, so that weights exchanged since are let go.
    """

    def __init__(self, model: Model) -> None:
        inner = [*model.modules()][1:]
        self._root: tuple[Any, ...] = ()
        self._parts: _Parts | None = None
        try:
            self._root, self._parts = _root_of(model), _parts_of(model, inner)
        except Exception:  # of code like no other: it never is what it was
            return
        # What is compared holds dicts of the modules: with the first of these that goes, let go.
        mine = weakref.ref(self)  # no cycle: with the model, all of this goes at once

        def forget(_: Any) -> None:
            structure = mine()
            if structure is not None:
                structure._parts = None

        self._watched = [weakref.ref(module, forget) for module in inner]

    def is_of(self, model: Model) -> bool:
        """Tell whether a model still is what it was; costs 0.1 ms for 30 layers."""
        parts = self._parts
        try:
            return (
                parts is not None
                and _root_of(model) == self._root
                and vars(model)["_modules"] is parts.children[0]
                and _is_same(parts)
            )
        except Exception:  # something is not even there, or cannot be compared any more
            return False


def _root_of(model: Model) -> tuple[Any, ...]:
    """Return what is compared of the model itself, and of what holds for all models."""
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
    """Return what tells a method apart, without holding the model that it is bound to."""
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
    # Weights that accelerate brings in for a forward are others at each.
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

    Configs of other parts cannot: to compare them may raise.
    """
    kept = {}
    for name, value in config.items():
        try:
            copied = copy.deepcopy(value)
            if not hasattr(value, "to_dict") and bool(copied == value):
                kept[name] = copied
        except Exception:  # whatever a remote config holds
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
    """Tell whether a weight tells where it lies, as tensors of some classes do not."""
    try:
        return weight.data_ptr() != 0
    except RuntimeError:
        return False


def _places(entries: Iterable[tuple[dict[str, Any], str, Any]]) -> tuple[list[Any], _Names]:
    """Return the dicts and the names under which values are found in them."""
    listed = [*entries]
    return [holder for holder, *_ in listed], [name for _, name, _ in listed]


def _some_dtypes(weights: Sequence[Tensor]) -> list[torch.dtype]:
    return [weight.dtype for weight in weights[:: len(weights) // _NUM_DTYPES or 1]]


def _hooks_of(hooks: dict[int, Any]) -> list[Hashable]:
    """Return what tells hooks apart, by their code: PEFT makes them anew for every call."""
    return [_code_of(hook) for hook in [*hooks.values()] if not is_own_hook(hook)]


def _code_of(hook: Any) -> Hashable:
    hook = getattr(hook, "func", hook)  # of a partial
    hook = getattr(hook, "__func__", hook)  # of a bound method
    return getattr(hook, "__code__", None) or (type(hook), id(hook))
