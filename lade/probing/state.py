"""`ModelState`: a snapshot of a model that shows whether the model has changed, once per call.

A verdict holds for the model that was checked. A compiled forward replaces all modules with their
parameters, each attribute that a watched forward has read, the config, and the functions of torch
and transformers that forwards call. So the snapshot includes all of these. If one differs, the
model is read and checked again.
"""

import copy
import sys
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig

from lade.compat import Model, attention_of, compiled_part_of, device_of_inputs, hooks_of
from lade.compat.attempts import Attempt
from lade.compat.view import BEFORE, apart
from lade.probing.user_code import (
    around_now,
    files_of,
    functions_of,
    is_code,
    plain_of,
    registered_of,
)

_of_children, _of_parameters = attrgetter("_modules"), attrgetter("_parameters")
_of_buffers, _of_mode = attrgetter("_buffers"), attrgetter("training")
_of_hooks = attrgetter("_forward_hooks", "_forward_pre_hooks")
# Attributes that do not affect forwards, or are compared separately.
_UNRELATED = (vars(nn.Module()).keys() | {BEFORE, "__dict__", "__class__"}) - {"training"}
_UNRELATED_OF_MODEL = {"generate", "_lade_profiles", "_compiled_call"}
_PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device}
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_CHANGING = (Tensor, np.ndarray, dict, list, set, tuple)  # that change in place, or may hold such
_WATCHED_APART = (nn.Module, type, ModuleType, PreTrainedConfig)
_BAGS = (SimpleNamespace, Namespace)  # objects of Python's own that may hold a model's numbers
_FEW_TOKENS = 64  # in a vocabulary
_MOST_COMPARED = 2**12  # numbers of a tensor; a larger one is compared by its count of writes


class ModelState:
    """A snapshot of a model.

    Attributes:
        functions: the methods of the model's classes, and the functions of their files.
        compiled: the part of the model that `torch.compile` was applied to, or None.
        settings: the attributes that forwards read; None until a forward was watched.
        autocast: the dtype of an autocast that the forward itself enters, as trainers have it do.
    """

    def __init__(self, model: Model) -> None:
        # First, because transformers changes a class when it is asked for these.
        self._around = _around(model)
        self._modules = _Modules(model)
        classes = {*map(type, model.modules())}
        self.functions = functions_of(classes)
        self._configs = _Values((each, vars(each).keys()) for each in _configs_of(model))
        self._files = _files_values(classes)
        self._hooks = _hooks_in(self._modules.now())
        self.compiled = compiled_part_of(model)
        self.settings: ReadAttributes | None = None
        self.autocast: torch.dtype | None = None

    def holds(self, model: Model) -> bool:
        """Return whether the model is unchanged; takes half a millisecond for 30 layers."""
        modules, settings = self._modules.now(), self.settings
        return (
            self._modules.are_same(modules)
            and self._around == _around(model)
            and self._hooks == _hooks_in(modules)
            and self._configs.are_same()
            and self._files.are_same()
            and self.functions.are_same()
            and (self._is_nearly_same(model) if settings is None else settings.are_same())
        )

    @torch.no_grad()
    def watch(self, model: Model) -> Model:
        """Record the attributes that two forwards read; return the view that they ran in.

        Raises:
            Exception: of the model; then all numbers count as read.
        """
        view = apart(model)
        view.generation_config = GenerationConfig()  # none of the model's own options
        ids = torch.tensor(
            [check_tokens(model)[:2]], dtype=torch.int64, device=device_of_inputs(model)
        )
        reads = None
        try:
            with watched(view) as noted:
                GenerationMixin.generate(view, input_ids=ids, max_new_tokens=2, do_sample=False)
            reads, self.autocast = noted, noted.autocast
        finally:
            self.settings = ReadAttributes(model, view, reads)
        return view

    def settings_hold(self) -> bool:
        """Return whether the attributes that forwards read are known and unchanged."""
        return self.settings is not None and self.settings.are_same()

    def _is_nearly_same(self, model: Model) -> bool:
        """Return whether no attribute was added or removed, before forwards were watched."""
        return self._modules.have_as_many() and self.compiled == compiled_part_of(model)


class _Modules:
    """The modules of a model, held weakly: their classes, modes, and slots of tensors."""

    def __init__(self, model: Model) -> None:
        modules = [*model.modules()]
        self._refs = [*map(ref, modules)]
        numbers = {id(module): number for number, module in enumerate(modules)}
        children = [child for module in modules for child in module._modules.values()]
        self._children = [numbers.get(id(child), -1) for child in children]  # -1: none
        self._kinds, self._sizes = _kinds_of(modules), self._num_attributes(modules)

    def now(self) -> list[Any]:
        """Return the modules, None for freed ones."""
        return [reference() for reference in self._refs]

    def are_same(self, modules: list[Any]) -> bool:
        """Return whether the modules, their children and their kinds are unchanged."""
        if None in modules:
            return False
        children = [*chain.from_iterable([each.values() for each in map(_of_children, modules)])]
        before = map([*modules, None].__getitem__, self._children)
        is_same = len(children) == len(self._children) and all(map(is_, children, before))
        return is_same and self._kinds == _kinds_of(modules)

    def have_as_many(self) -> bool:
        """Return whether the modules have as many attributes as before."""
        return self._sizes == self._num_attributes(self.now())

    def _num_attributes(self, modules: list[Any]) -> list[Any]:
        names = frozenset(vars(modules[0]).keys() - _UNRELATED_OF_MODEL)
        return [names, *(len(vars(module)) for module in modules[1:])]


def _kinds_of(modules: list[Any]) -> list[Any]:
    """Return the classes and modes of modules, and the class of each parameter and buffer."""
    slots = chain(map(_of_parameters, modules), map(_of_buffers, modules))
    tensors = chain.from_iterable([each.values() for each in slots])
    return [[*map(type, modules)], [*map(_of_mode, modules)], [*map(type, tensors)]]


class _Values:
    """Attributes: numbers compared by value, also those in objects; tensors by content.

    Args:
        owners: objects, held weakly, each with the names of its attributes.
        changed: by owner's id and name, the parts of an attribute that forwards change; they are
            left out, as they always differ.
    """

    def __init__(
        self,
        owners: Iterable[tuple[Any, Collection[str]]],
        changed: "Mapping[tuple[int, str], set[_Path]] | None" = None,
    ) -> None:
        self._fixed: list[tuple[Any, dict[str, Any]]] = []
        self._inside: list[tuple[Any, str, set[_Path]]] = []
        for owner, names in owners:
            reference, held = ref(owner), vars(owner)
            plain = {name: copy.deepcopy(held[name]) for name in names if _is_plain(held[name])}
            inside = [name for name in names if name not in plain and _may_change(held[name])]
            others = {name: held[name] for name in names if name not in {*plain, *inside}}
            self._fixed.append((reference, plain | others))
            for name in inside:
                left_out = (changed or {}).get((id(owner), name), set[_Path]())
                self._inside.append((reference, name, left_out))
        self._before = self._seen()

    def are_same(self) -> bool:
        """Return whether all are unchanged; False if one cannot be compared."""
        with Attempt():  # an attribute may be gone, or fail in comparisons
            fixed = (held.items() <= vars(owner()).items() for owner, held in self._fixed)
            return all(fixed) and self._before == self._seen()
        return False

    def _seen(self) -> list[Any]:
        return [
            _leaves(vars(reference())[name], changed) for reference, name, changed in self._inside
        ]


class ReadAttributes:
    """The attributes and buffers of modules that forwards read.

    Args:
        model: the model.
        view: a view of the model from `apart`, which shares no module with it.
        reads: from `watched`, with forwards of the view; None counts all numbers as read.

    Attributes:
        sees_ahead: whether some attention lets tokens see later ones if it gets no mask.
    """

    def __init__(self, model: Model, view: Model, reads: "Reads | None") -> None:
        values, self._buffers, self._missing = [], list[tuple[Any, str]](), []
        of_classes: dict[Any, set[str]] = {}
        changed: dict[tuple[int, str], set[_Path]] = {}
        self.sees_ahead = False
        for module, twin in zip(model.modules(), view.modules(), strict=True):
            held = vars(module)
            numbers = {name for name, each in held.items() if _is_plain(each)}
            names = numbers if reads is None else reads.of(twin)
            names = names - _UNRELATED - (_UNRELATED_OF_MODEL if module is model else set())
            present = [name for name in names if name in held]
            elsewhere = held["_modules"].keys() | held["_parameters"].keys()
            buffers = [name for name in names if name in held["_buffers"]]
            self._buffers += [(ref(module), name) for name in buffers]
            missing = names.difference(present, elsewhere, buffers)
            self.sees_ahead |= "is_causal" in names and not getattr(module, "is_causal", True)
            if missing:
                self._missing.append((ref(module), frozenset(missing)))
            if present:
                values.append((module, present))
            owners = dict.fromkeys(present, (module, twin))
            for name in missing:
                if (holder := _holder_of(type(module), name)) is not None:
                    of_classes.setdefault(holder, set()).add(name)
                    owners[name] = holder, holder
            if reads is not None:
                for name, (owner, ran) in owners.items():
                    if (found := reads.changed(twin, name, vars(ran).get(name))) is not None:
                        changed.setdefault((id(owner), name), found)
        self._values = _Values([*values, *of_classes.items()], changed)
        self._seen = self._buffers_now()

    def are_same(self) -> bool:
        """Return whether all are unchanged."""
        return (
            self._values.are_same()
            and all(names.isdisjoint(vars(module())) for module, names in self._missing)
            and self._seen == self._buffers_now()
        )

    def _buffers_now(self) -> list[Any]:
        return [_leaves(module()._buffers.get(name)) for module, name in self._buffers]


class Reads:
    """The names of attributes that forwards have read and written, by module."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self.is_on = False
        self.autocast: torch.dtype | None = None
        self._read: dict[int, set[str]] = {}
        self._written: dict[int, set[str]] = {}
        self._before: dict[tuple[int, str], _Leaves] = {}

    def note(self, module: nn.Module, name: str, value: Any = None, *, writes: bool) -> None:
        """Record a name, and what it holds when it is first read."""
        names = (self._written if writes else self._read).setdefault(id(module), set())
        if not self.is_on or name in names:
            return
        names.add(name)
        kind = self._device_type
        if torch.is_autocast_enabled(kind):
            self.autocast = torch.get_autocast_dtype(kind)
        if name not in _UNRELATED and _may_change(value):
            self._before[id(module), name] = _leaves(value)

    def changed(self, module: nn.Module, name: str, value: Any) -> "set[_Path] | None":
        """Return the parts of an attribute that differ from when it was first read.

        Args:
            module: the module that was watched, not the model's, whose objects are others.
            name: of the attribute.
            value: what it holds now; numbers have no parts, and give None.
        """
        first = self._before.get((id(module), name))
        if first is None:
            return None
        now = _leaves(value)
        return {path for path in first | now if first.get(path) != now.get(path)}

    def of(self, module: nn.Module) -> set[str]:
        """Return the names that forwards read and do not write: written ones always change."""
        return self._read.get(id(module), set()) - self._written.get(id(module), set())


@contextmanager
def watched(view: Model) -> Iterator[Reads]:
    """Record the attributes that forwards of a view read; it must share no module."""
    reads, modules = Reads(device_of_inputs(view).type), [*view.modules()]
    before, classes = [*map(type, modules)], dict[type, type]()
    buffers = [{**module._buffers} for module in modules]
    begin = view.register_forward_pre_hook(lambda *_: setattr(reads, "is_on", True))
    end = view.register_forward_hook(lambda *_: setattr(reads, "is_on", False), always_call=True)
    try:
        for module, kind in zip(modules, before, strict=True):
            if kind not in classes:
                classes[kind] = _noting(kind, reads)
            module.__class__ = classes[kind]
        yield reads
    finally:
        begin.remove()
        end.remove()
        reads.is_on = True
        for module, kind, held in zip(modules, before, buffers, strict=True):
            module.__class__ = kind
            for name in {*held, *module._buffers}:  # some are stored without `__setattr__`
                if held.get(name) is not module._buffers.get(name):
                    reads.note(module, name, writes=True)


def _noting(kind: Any, reads: Reads) -> type:
    """Return a subclass that records the attributes read and written of its objects."""

    def read(self: Any, name: str) -> Any:
        value = None
        try:
            value = kind.__getattribute__(self, name)
        finally:  # a name that is missing counts as read
            reads.note(self, name, value, writes=False)
        return value

    def write(self: Any, name: str, value: Any) -> None:
        reads.note(self, name, writes=True)
        kind.__setattr__(self, name, value)

    # transformers looks classes up by their names.
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**names, "__getattribute__": read, "__setattr__": write})


def _configs_of(model: Model) -> list[Any]:
    """Return the configs that modules refer to, nested ones included."""
    found: dict[int, Any] = {}
    left = [model.config, model.config.get_text_config(decoder=True)]
    left += [vars(module).get("config") for module in model.modules()]
    while left:
        config = left.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            left += vars(config).values()
    return [*found.values()]


def _around(model: Model) -> tuple[Any, ...]:
    """Return the surroundings of a model's forwards: device, dtypes, attention, replacements."""
    kind, attention = device_of_inputs(model).type, attention_of(model)
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    functions, hooks = around_now()
    return (
        *(str(model.device), model.dtype, autocast, attention, functions, registered_of(model)),
        *map(_code_of, hooks),
        # `generate` calls some methods of a model; PEFT exchanges one of them for each call.
        *(
            (name, plain_of(each))
            for name, each in vars(model).items()
            if is_code(each) and not getattr(each, "is_lades", False)
        ),
    )


def _hooks_in(modules: list[Any]) -> list[tuple[int, Any]]:
    """Return the code of all hooks that may do something, with their modules' numbers."""
    return [
        (number, _code_of(hook))
        for number, held in enumerate(map(_of_hooks, modules))
        if any(held)
        for hook in hooks_of(modules[number])
    ]


def _code_of(hook: Any) -> Any:
    """Return what identifies a hook: its code, since PEFT makes new hooks for every call."""
    hook = getattr(hook, "func", hook)  # of a partial
    hook = getattr(hook, "__func__", hook)  # of a bound method
    return getattr(hook, "__code__", None) or type(hook)


def _is_plain(value: Any) -> bool:
    """Return whether a value consists of numbers and text, such as PEFT's active adapters."""
    if type(value) is dict:
        value = [*value, *value.values()]
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or isinstance(value, np.generic)


_Path = tuple[Any, ...]
_Leaves = dict[_Path, Any]


def _seen(tensor: Tensor) -> Any:
    """Return a value that differs once a tensor has changed."""
    version = -1 if tensor.is_inference() else tensor._version
    is_small = type(tensor) in _TENSORS and tensor.numel() <= _MOST_COMPARED and tensor.is_cpu
    held: Any = _Same(tensor), version
    if is_small and tensor.layout is torch.strided and not tensor.is_quantized:
        numbers = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        held = numbers.view(torch.uint8).numpy().tobytes()  # a NaN equals itself there
    return tensor.dtype, tuple(tensor.shape), held


def _leaves(value: Any, skipped: Collection[_Path] = (), depth: int = 4) -> _Leaves:
    """Return what differs once a value has changed, by the path to each of its parts.

    Args:
        value: a tensor, an array, an object, or a container of these.
        skipped: paths of parts to leave out.
        depth: how many containers to look into.
    """
    found: _Leaves = {}
    left: list[tuple[_Path, Any]] = [((), value)]
    while left:
        path, each = left.pop()
        if path in skipped:
            continue
        if isinstance(each, Tensor):
            found[path] = _seen(each)
        elif isinstance(each, np.ndarray):
            is_small = each.size <= _MOST_COMPARED and not each.dtype.hasobject
            held = each.tobytes() if is_small else _Same(each)
            found[path] = each.dtype.str, each.shape, held
        elif _is_plain(each):
            found[path] = copy.deepcopy(each)
        else:
            parts = _parts_of(each) if len(path) < depth else {}
            is_container = bool(parts) and isinstance(each, _CHANGING)
            found[path] = (type(each), len(parts)) if is_container else _Same(each)
            left += [((*path, name), part) for name, part in parts.items()]
    return found


def _parts_of(value: Any) -> dict[Any, Any]:
    """Return what a container or an object holds, or a function refers to, by name or number."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple):
        return {**dict(enumerate(value)), **getattr(value, "__dict__", {})}
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        defaults = dict(enumerate(value.__defaults__ or ())) | (value.__kwdefaults__ or {})
        return {name: each.cell_contents for name, each in cells if each != CellType()} | defaults
    if isinstance(value, MethodType):
        return {"__self__": value.__self__, "__func__": value.__func__}
    if isinstance(value, partial):
        return {"func": value.func, **dict(enumerate(value.args)), **value.keywords}
    home = type(value).__module__.partition(".")[0]
    is_library = home == "torch" or home in sys.stdlib_module_names
    if isinstance(value, _WATCHED_APART) or (is_library and not isinstance(value, _BAGS)):
        return {}
    slots = [vars(each).get("__slots__", ()) for each in type(value).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    held = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {**held, **getattr(value, "__dict__", {})}


def _may_change(value: Any) -> bool:
    """Return whether a value may change and stay the same object."""
    is_one = type(value) in _PLAIN or isinstance(value, _WATCHED_APART)
    return not is_one and (isinstance(value, _CHANGING) or bool(_parts_of(value)))


def _holder_of(kind: type, name: str) -> type | None:
    """Return the class whose attribute, other than a method, objects of a class have."""
    holder = next((each for each in kind.__mro__ if name in vars(each)), None)
    if holder is None or hasattr(vars(holder)[name], "__get__"):  # functions are watched apart
        return None
    return holder


def _files_values(classes: Iterable[type]) -> _Values:
    """Return the numbers, and the objects with numbers, that the files of classes define."""

    def of_file(file: ModuleType) -> list[str]:
        held = [(name, each) for name, each in vars(file).items() if not name.startswith("__")]
        return [
            name
            for name, each in held
            # Containers may be caches; functions are watched apart.
            if type(each) in _PLAIN
            or (not isinstance(each, _CHANGING) and not callable(each) and _parts_of(each))
        ]

    return _Values((file, of_file(file)) for file in files_of(classes))


class _Same:
    """A weak reference that is equal to others of the same living object."""

    def __init__(self, value: Any) -> None:
        try:
            self._get: Any = ref(value)
        except TypeError:
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._get() is not None and self._get() is other._get()

    __hash__ = None  # type: ignore[assignment]


def check_tokens(model: Model) -> list[int]:
    """Return 16 token ids, all different in the vocabulary of any real model."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    # Avoids special tokens, which have a meaning in some models: images, padding.
    first = min(1000, vocab_size // 4)
    # Where there are few, no two in a row are the same: attention to one token is blind.
    num = vocab_size // 2 if vocab_size >= _FEW_TOKENS else vocab_size - first
    return [first + (7919 * (i + 1)) % num for i in range(16)]
