"""The structure of a model, remembered so that changes are noticed at the next call.

The result of a check is valid for the modules, weights, hooks, functions and settings it was made
with. `Structure` remembers them without holding any weight, and compares them in a fraction of a
millisecond. Values of weights and of plain attributes are no part of it (`values.py`), nor is what
code of the user's own does (`own_code.py`); a spot check covers both.
"""

import copy
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from operator import getitem, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lade.attempts import Attempt
from lade.compat import Model, attention_of, compiled_part_of, is_own_hook
from lade.probing.own_code import (
    METHODS,
    Place,
    is_code,
    is_own_callback,
    own_code_of,
    places_of,
)

_training = itemgetter("training")
_FLAGS = ("_tp_size", "hf_device_map", "is_quantized")
# A few weights reveal a conversion of all; another dtype mostly means another address as well.
_NUM_DTYPES = 8

_PLAIN_FORMATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}

#: Attributes of a model that say nothing of its forwards.
UNRELATED = {"generate", "_lade_profiles", "_compiled_call"}


class _Look(NamedTuple):
    """What a part of a model tells at present, and what it told at first."""

    now: Callable[[], Any]
    first: Any

    @classmethod
    def at(cls, now: Callable[[], Any]) -> "_Look":
        """Return a first look."""
        return cls(now, now())


class _Parts(NamedTuple):
    """Everything that is compared besides the root; it has dicts of modules, but no module."""

    children: dict[str, Any]  # of the root
    modes: _Look  # whether modules that may behave differently in training are in training
    looks: list[_Look]
    attributes: list[dict[str, Any]]  # of the modules but the root


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
        #: The least precise format that weights of layers have.
        self.coarsest: torch.dtype = _coarsest_of(model)
        #: Which part of it is compiled by torch, or None.
        self.compiled: str | None = compiled_part_of(model)
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
                and vars(model)["_modules"] is parts.children
                and all(look.now() == look.first for look in (parts.modes, *parts.looks))
            )
        return False  # something is missing, or can no longer be compared

    def attributes_of(self, model: Model) -> list[Any]:
        """Return the attributes of all modules, which are not copied; takes 0.1 ms for 30 layers.

        Args:
            model: that this is the structure of.
        """
        if self._parts is None:
            held = [vars(module) for module in [*model.modules()][1:]]
        else:
            held = self._parts.attributes
        return [*vars(model).values(), *chain.from_iterable(map(dict.values, held))]

    def is_in_same_mode(self, model: Model) -> bool:
        """Return whether no module was put into training or out of it; takes 6 µs for 30 layers.

        Where the structure was not understood, or has changed, there is nothing to compare.
        """
        parts = self._parts
        return parts is None or (
            model.training == self._root[1] and parts.modes.now() == parts.modes.first
        )


def _coarsest_of(model: Model) -> torch.dtype:
    """Return the least precise format of weights; of quantized ones, the format says nothing."""
    dtypes = {weight.dtype for weight in model.parameters()} & _PLAIN_FORMATS
    coarsest: torch.dtype = max(dtypes or {model.dtype}, key=lambda each: torch.finfo(each).eps)
    return coarsest


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
    empty = [part for m in modules for part in (m._modules, m._parameters) if not part]
    hooks = [*chain.from_iterable((m._forward_hooks, m._forward_pre_hooks) for m in modules)]
    # Weights that accelerate loads for each forward are different ones every time.
    lasting = [module for module in modules if not hasattr(module, "_hf_hook")]
    weights = [
        Place(module._parameters, name, weight)
        for module in lasting
        for name, weight in module._parameters.items()
    ]
    addressed = [place for place in weights if _has_address(place.value)]
    others = [place for place in weights if not _has_address(place.value)]
    others += [
        Place(module._buffers, name, buffer)
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
        model._modules,
        _Look.at(lambda: [*map(_training, modes)]),
        [
            _Look.at(lambda: _kinds_in(children)),
            _Look(lambda: any(empty), False),
            _Look.at(lambda: _all_hooks_of(hooks)),
            _Look.at(_weights_at(addressed)),
            _Look(_are_at(others), True),
            _Look(_are_at([*places, *code]), True),
            # So that a callable which is put in is noticed.
            _Look.at(lambda: _num_callables(attributes)),
            *(_look_at_settings(vars(each)) for each in configs.values()),
        ],
        attributes,
    )


def _kinds_in(children: Sequence[dict[str, Any]]) -> tuple[list[int], list[type]]:
    """Return which modules there are, and their classes."""
    found = [*chain.from_iterable(map(dict.values, children))]
    return [*map(id, found)], [*map(type, found)]


def _weights_at(places: Sequence[Place]) -> Callable[[], Any]:
    """Return a function that tells classes, addresses and some types of weights with an address."""
    holders, names = [each.holder for each in places], [each.name for each in places]

    def now() -> Any:
        weights = [*map(getitem, holders, names)]
        some = weights[:: len(weights) // _NUM_DTYPES or 1]
        return (
            [*map(type, weights)],
            [*map(Tensor.data_ptr, weights)],
            [weight.dtype for weight in some],
        )

    return now


def _are_at(places: Sequence[Place]) -> Callable[[], bool]:
    """Return a function that tells whether objects are where they were; raises if a place is gone.

    None of them is kept alive, and none is taken for a later one.
    """
    holders, names = [each.holder for each in places], [each.name for each in places]
    refs = [_ref_to(each.value) for each in places]
    return lambda: all(map(is_, map(getitem, holders, names), (ref() for ref in refs)))


def _look_at_settings(config: dict[str, Any]) -> _Look:
    """Look at the attributes of a config that can be compared, and keep copies of them.

    Nested configs are left out: comparing them may raise.
    """
    kept = {}
    for name, value in config.items():
        with Attempt():  # a remote config may hold anything
            copied = copy.deepcopy(value)
            if not hasattr(value, "to_dict") and bool(copied == value):
                kept[name] = copied
    return _Look(lambda: [*map(config.get, kept)], [*kept.values()])


def _num_callables(attributes: Iterable[dict[str, Any]]) -> int:
    return sum(map(callable, chain.from_iterable(map(dict.values, attributes))))


def _has_address(weight: Tensor | None) -> bool:
    """Return whether there is a weight with an address; tensors of some classes have none."""
    try:
        return weight is not None and weight.data_ptr() != 0
    except RuntimeError:
        return False


def _all_hooks_of(hooks: Sequence[dict[int, Any]]) -> list[tuple[int, Hashable]]:
    """Return what identifies the hooks of all modules, and where they are."""
    filled = [(place, each) for place, each in enumerate(hooks) if each]
    return [(place, code) for place, each in filled for code in _hooks_of(each)]


def _hooks_of(hooks: dict[int, Any]) -> list[Hashable]:
    """Return what identifies hooks: their code, since PEFT makes new ones for every call.

    What else they hold is looked at anew in every call. Equal ones that are not the user's count
    once: transformers adds one each time that gradient checkpointing is enabled.
    """
    found = [hook for hook in [*hooks.values()] if not is_own_hook(hook)]
    own = [_code_of(hook) for hook in found if is_own_callback(hook)]
    return [*dict.fromkeys(_code_of(hook) for hook in found if not is_own_callback(hook)), *own]


def _code_of(hook: Any) -> Hashable:
    hook = getattr(hook, "func", hook)  # of a partial
    hook = getattr(hook, "__func__", hook)  # of a bound method
    code: Any = getattr(hook, "__code__", None) or type(hook)
    return code  # type: ignore[no-any-return]
