"""The structure of a model, remembered so that changes are noticed at the next call.

The result of a check is valid for the modules, weights, hooks, functions and settings it was made
with. `Structure` remembers them without holding any weight, and compares them in a fraction of a
millisecond. Values of weights and of plain attributes are no part of it (`values.py`), nor is what
code of the user's own does (`own_code.py`); a spot check covers both.
"""

import copy
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from operator import getitem, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lade.attempts import Attempt
from lade.compat import Model, attention_of, is_own_hook
from lade.probing.own_code import METHODS, Place, is_code, own_code_of, places_of

_training = itemgetter("training")
_FLAGS = ("_tp_size", "hf_device_map", "is_quantized")
# A few weights reveal a conversion of all; another dtype mostly means another address as well.
_NUM_DTYPES = 8

#: Attributes of a model that say nothing of its forwards.
UNRELATED = {"generate", "_lade_profiles", "_compiled_call"}

_Names = list[str]


class _Found(NamedTuple):
    """Objects, by where they were found; none is kept alive, and none is taken for a later one."""

    holders: list[Mapping[str, Any]]
    names: _Names
    refs: list[Callable[[], Any]]  # return the object, or None once it is gone

    @classmethod
    def of(cls, places: Iterable[Place]) -> "_Found":
        """Return what was found at some places."""
        listed = [*places]
        refs = [_ref_to(value) for *_, value in listed]
        return cls([each.holder for each in listed], [each.name for each in listed], refs)

    def is_there(self) -> bool:
        """Return whether all of them are where they were; raises if a place is gone."""
        values = map(getitem, self.holders, self.names)
        return all(map(is_, values, (ref() for ref in self.refs)))


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
    num_callables: int  # among these attributes, so that one which is put in is noticed
    code: _Found  # functions of the classes, and those that are attributes of modules
    hooks: list[tuple[dict[int, Any], list[Hashable]]]  # of modules that have some
    weights: tuple[list[dict[str, Any]], _Names]  # holders and names of weights with an address
    weight_types: list[type]
    addresses: list[int]
    others: _Found  # weights without one, and buffers
    no_weights: tuple[list[dict[str, Any]], _Names]  # of weights that are None
    some_dtypes: list[torch.dtype]
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
        #: What of the user's own code runs in the model's forwards, or None.
        self.own_code: str | None = "code that cannot be looked at"
        with Attempt() as attempt:
            places = places_of(dict.fromkeys(map(type, model.modules())))
            self._root, self._parts = _root_of(model), _parts_of(model, inner, places)
            self.own_code = own_code_of(model, places)
        if attempt.failure is not None:  # unusual code, which then always counts as changed
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
        with Attempt():
            return (
                parts is not None
                and _root_of(model) == self._root
                and vars(model)["_modules"] is parts.children[0]
                and _is_same(parts)
            )
        return False  # something is missing, or can no longer be compared

    def is_in_same_mode(self, model: Model) -> bool:
        """Return whether no module was put into training or out of it; takes 6 µs for 30 layers.

        Where the structure was not understood, or has changed, there is nothing to compare.
        """
        parts = self._parts
        return parts is None or (
            model.training == self._root[1] and [*map(_training, parts.modes)] == parts.training
        )


def _root_of(model: Model) -> tuple[Any, ...]:
    """Return what is compared of the root module, and of settings shared by all models."""
    return (
        type(model),
        model.training,
        _Same(model.config),
        *(_method_of(model, name) for name in METHODS),
        *map(vars(model).get, _FLAGS),
        _num_callables([{k: v for k, v in vars(model).items() if k not in UNRELATED}]),
        ALL_ATTENTION_FUNCTIONS.get(attention_of(model)),
        _hooks_of(torch_module._global_forward_hooks),
        _hooks_of(torch_module._global_forward_pre_hooks),
    )


def _method_of(model: Model, name: str) -> tuple[Any, ...]:
    """Return what identifies a method, without holding the model that it is bound to."""
    method = getattr(model, name, None)
    bound_to = getattr(method, "__self__", None)
    if bound_to is None:
        return (_Same(method) if name in vars(model) else None,)
    return method.__func__, None if bound_to is model else _Same(bound_to)  # type: ignore[union-attr]


class _Same:
    """An object that is equal to itself alone, and kept alive only if it allows nothing else."""

    def __init__(self, value: Any) -> None:
        self._ref = _ref_to(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._ref() is not None and self._ref() is other._ref()

    __hash__ = None  # type: ignore[assignment]  # it changes as the object goes


def _ref_to(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _parts_of(model: Model, inner: Sequence[nn.Module], places: Sequence[Place]) -> _Parts:
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
    code = [
        Place(vars(module), name, value)
        for module in modules
        for name, value in vars(module).items()
        if is_code(value) and name not in UNRELATED
    ]
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
        num_callables=_num_callables(attributes),
        code=_Found.of([*places, *code]),
        hooks=[(hooks, _hooks_of(hooks)) for hooks in of_hooks if hooks],
        weights=_places(addressed),
        weight_types=[type(weight) for *_, weight in addressed],
        addresses=[weight.data_ptr() for *_, weight in addressed],
        others=_Found.of(Place(*other) for other in others),
        no_weights=_places(entry for entry in weights if entry[2] is None),
        some_dtypes=_some_dtypes([weight for *_, weight in addressed]),
        configs=[_settings_of(vars(each)) for each in configs.values()],
    )


def _settings_of(config: dict[str, Any]) -> tuple[dict[str, Any], _Names, list[Any]]:
    """Return the attributes of a config, and names and copies of those that can be compared.

    Nested configs are left out: comparing them may raise.
    """
    kept = {}
    for name, value in config.items():
        with Attempt():  # a remote config may hold anything
            copied = copy.deepcopy(value)
            if not hasattr(value, "to_dict") and bool(copied == value):
                kept[name] = copied
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
        and [*map(type, weights)] == parts.weight_types
        and [*map(_data_ptr, weights)] == parts.addresses
        and parts.others.is_there()
        and not any(map(getitem, *parts.no_weights))
        and _some_dtypes(weights) == parts.some_dtypes
        and parts.code.is_there()
        and _num_callables(parts.attributes) == parts.num_callables
        and all(_hooks_of(hooks) == known for hooks, known in parts.hooks)
        and all([*map(held.get, names)] == values for held, names, values in parts.configs)
    )


def _num_callables(attributes: Iterable[dict[str, Any]]) -> int:
    return sum(map(callable, chain.from_iterable(map(dict.values, attributes))))


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
    """Return what identifies hooks: their code, since PEFT makes new ones for every call.

    What else they hold is looked at anew in every call.
    """
    return [_code_of(hook) for hook in [*hooks.values()] if not is_own_hook(hook)]


def _code_of(hook: Any) -> Hashable:
    hook = getattr(hook, "func", hook)  # of a partial
    hook = getattr(hook, "__func__", hook)  # of a bound method
    code: Any = getattr(hook, "__code__", None) or type(hook)
    return code  # type: ignore[no-any-return]
