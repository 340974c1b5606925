"""User code in a call, whose effects no proof would notice.

A proof compares steps with the model (`proof.py`), but not prompts, and not the work of `generate`
between forward passes. If user code runs in forwards, prompts run in the shape that `generate`
gives them, and no prefix is kept. If user code is a part of the loop, lade falls back to standard
decoding.

No package is known by name. Classes of installed packages, and classes that come with a checkpoint,
count as the model's code. Hooks, patched functions, and classes of code that is not installed, such
as a notebook's, count as user code.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from importlib.metadata import packages_distributions
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import (
    PreTrainedModel,
    activations,
    cache_utils,
    masking_utils,
    modeling_rope_utils,
)
from transformers.integrations import sdpa_attention
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from lade.compat import Model, attention_of, experts_of, hooks_of
from lade.compat.view import wraps_own_forward

# Packages whose code belongs in every forward, code that comes with checkpoints included.
_HOME = {"torch", "transformers", TRANSFORMERS_DYNAMIC_MODULE_NAME, "lade"}
# Where most packages are installed.
_SITES = tuple(
    os.path.dirname(os.path.dirname(str(each.__file__))) + os.sep for each in (torch, transformers)
)
# If user code replaces one of these, `generate` runs another loop than lade's: methods of a model,
# functions of torch, and all of caches, since lade has its own caches and rolls them back.
_OF_LOOP = (
    "_prefill",
    "_sample",
    "_update_model_kwargs_for_generation",
    "prepare_inputs_for_generation",
)
_CHOOSING = {(functional, "softmax"), (torch, "multinomial"), (torch, "argmax")}
_CACHES, _MASKS = "transformers.cache_utils", "transformers.masking_utils"

_MISSING = object()

AROUND = "a hook of the model"  # called around the model's forward, and so around lade's


class Slot(NamedTuple):
    """A name in a module or class, and the function under it."""

    holder: Any  # a module or a class
    name: str
    function: Any

    @property
    def path(self) -> str:
        """The full name of the function."""
        names = ("__module__", "__qualname__") if isinstance(self.holder, type) else ("__name__",)
        return ".".join([*(getattr(self.holder, name) for name in names), self.name])


class Slots:
    """A snapshot of the functions in some modules and classes.

    Args:
        holders: modules and classes.
        is_looked_at: returns whether to include a value; by default, all callables are included.
    """

    def __init__(
        self, holders: Iterable[Any], is_looked_at: Callable[[Any], bool] | None = None
    ) -> None:
        #: Modules and classes, with the functions in each, and how many names it has.
        self._held: list[tuple[Any, dict[str, Any], int]] = []
        is_one = is_looked_at or _is_function
        for holder in dict.fromkeys(holders):
            held = [*vars(holder).items()]
            if functions := {name: each for name, each in held if is_one(each)}:
                self._held.append((holder, functions, len(held)))

    def are_same(self) -> bool:
        """Return whether each name still has the same function, and no class has more names."""
        return all(
            functions.items() <= vars(holder).items()
            and (not isinstance(holder, type) or len(vars(holder)) == num_names)
            for holder, functions, num_names in self._held
        )

    def __iter__(self) -> Iterator[Slot]:
        """Iterate over the functions there now, new names of classes included."""
        for holder, functions, _ in self._held:
            held = vars(holder)
            more = [each for each in held if each not in functions and isinstance(holder, type)]
            for name in (*functions, *more):
                function = held.get(name, _MISSING)
                if name in functions or _is_function(function):
                    yield Slot(holder, name, function)


def _is_function(value: Any) -> bool:
    return callable(value) or isinstance(value, property | staticmethod | classmethod)


def user_code_of(model: Model, functions: Slots, *, besides_hooks: bool = False) -> str | None:
    """Return the name of user code that runs in a model's forwards, or None.

    Args:
        functions: from `functions_of`.
        besides_hooks: whether to ignore hooks, and a forward that wraps the model's own.
    """
    ignored = {"generate"}  # which no forward calls, and `lade.wrap` replaces
    if besides_hooks and wraps_own_forward(model):
        ignored.add("forward")
    for name, module in model.named_modules():
        where = name or "the model"
        if name and not besides_hooks and any(map(is_users, hooks_of(module))):
            return f"a hook of {where}"
        home = _home_of(module)
        for attribute, value in [*vars(module).items()]:
            is_ignored = attribute in ignored and module is model
            if not is_ignored and is_code(value) and is_users(value, home):
                return f"{attribute} of {where}"
        classes = (type(each) for each in module._parameters.values() if each is not None)
        if not all(map(_is_installed, classes)):
            return f"weights of {where}"
        if not _is_installed(type(module)):
            return f"the class {type(module).__name__}"
    for slot in functions:
        if _is_exchanged(slot):
            return f"the function {slot.path}"
    for what, functions_in_use in registered_of(model).items():
        if any(map(is_users, functions_in_use)):
            return f"its {what}"
    if has_user_masks(model):
        return "its masks"
    return AROUND if not besides_hooks and any(map(is_users, hooks_of(model))) else None


def registered_of(model: Model) -> dict[str, list[Any]]:
    """Return the functions that a model's forwards find by name in transformers' interfaces."""
    attention, experts = attention_of(model), sorted(filter(None, experts_of(model)))
    found = {
        "attention": [ALL_ATTENTION_FUNCTIONS.get(attention)],
        "experts": [ALL_EXPERTS_FUNCTIONS.get(each) for each in experts],
        "masks": [ALL_MASK_ATTENTION_FUNCTIONS.get(attention)],
    }
    return {what: [each for each in of if each is not None] for what, of in found.items()}


def functions_of(classes: Iterable[type]) -> Slots:
    """Return the methods of modules' classes, and the functions in the files of these classes."""
    holders = *_bases_of(classes), *files_of(classes)
    return Slots(holders, lambda each: isinstance(plain_of(each), FunctionType))


def files_of(classes: Iterable[type]) -> set[ModuleType]:
    """Return the modules that define classes and their bases, without torch's."""
    bases = _bases_of(classes)
    files = {inspect.getmodule(each) for each in bases if _package(each.__module__) != "torch"}
    return {each for each in files if each is not None}


def _bases_of(classes: Iterable[type]) -> set[type]:
    bases = {base for each in classes for base in each.__mro__}
    return bases - ({*PreTrainedModel.__mro__} - {nn.Module})


def user_code_around() -> str | None:
    """Return the name of user code that runs in every forward at present, or None."""
    for slot in _REPLACED.exchanged():
        return f"the patched {slot.path}"
    if any(map(is_users, hooks_of_all())):
        return "a hook of all modules"
    modes = (_get_current_function_mode_stack, _get_current_dispatch_mode_stack)
    for mode in (each for stack in modes for each in stack()):
        if is_users(type(mode)):
            return f"the mode {type(mode).__name__}"
    return None


def user_loop_of(model: Model) -> str | None:
    """Return why user code makes the loop of `generate` differ from lade's, or None."""
    for name in _OF_LOOP:
        # `generate` asks the class alone for `_sample`.
        on_instance = vars(model) if name != "_sample" else {}
        method = plain_of(on_instance.get(name, getattr(type(model), name, None)))
        # A user's class may have inherited it.
        is_installed = isinstance(method, FunctionType) and _is_installed(method)
        if method is not None and is_users(method) and not is_installed:
            return f"its {name} is your own code"
    for slot in _REPLACED.exchanged():
        if (slot.holder, slot.name) in _CHOOSING or slot.path.startswith(_CACHES):
            return f"{slot.path} is patched"
    return None


def has_user_masks(model: Model) -> bool:
    """Return whether user code makes the masks that attention gets."""
    name = attention_of(model)
    make = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    usual = _USUAL_MASKS.get(name, make)
    is_patched_there = any(slot.path.startswith(_MASKS) for slot in _REPLACED.exchanged())
    return is_patched_there or make is not usual or (make is not None and is_users(make))


def has_user_experts(model: Model) -> bool:
    """Return whether user code, under a name of transformers' experts interface, runs experts."""
    return any(map(is_users, registered_of(model)["experts"]))


def is_patched(name: str) -> bool:
    """Return whether a function of `torch.nn.functional` was replaced."""
    return any(slot[:2] == (functional, name) for slot in _REPLACED.exchanged())


def hooks_of_all() -> list[Any]:
    """Return the hooks of any module's forward."""
    hooks: Any = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    return [hook for each in hooks for hook in each.values()]


def around_now() -> tuple[Any, ...]:
    """Return what surrounds every forward at present: replaced functions and global hooks."""
    return _REPLACED.exchanged(), tuple(hooks_of_all())


def is_code(value: Any) -> bool:
    """Return whether an attribute is callable, but no module, tensor or class."""
    return callable(value) and not isinstance(value, nn.Module | Tensor | type)


def is_users(code: Any, home: str = "", depth: int = 4) -> bool:
    """Return whether a callable, or a function that it wraps, is user code.

    Args:
        code: the callable.
        home: the package of its surroundings, whose functions are expected there.
        depth: how many wrappers to look into.
    """
    code = plain_of(code)
    inside = [getattr(code, "__wrapped__", None)]
    if isinstance(code, partial):
        # accelerate replaces a forward by a partial of its own function and that forward.
        inside = [code.func, *code.args]
    if depth and any(is_code(each) and is_users(each, home, depth - 1) for each in inside):
        return True
    if isinstance(code, partial):
        return False
    # Compiled code without a module is Python's or torch's.
    package = _package(_module_of(code) or "builtins")
    return package not in _HOME and package not in sys.stdlib_module_names and package != home


def _is_exchanged(slot: Slot) -> bool:
    """Return whether user code replaces a function of a class, or of the class's file."""
    function, holder = plain_of(slot.function), slot.holder
    home = holder.__module__ if isinstance(holder, type) else holder.__name__
    if not isinstance(function, FunctionType) or not is_users(function, _package(home)):
        return False
    # A file may import functions of other packages under their own names.
    is_imported = not isinstance(holder, type) and function.__name__ == slot.name
    return not (is_imported and _is_installed(function))


def _home_of(module: nn.Module) -> str:
    """Return the package whose functions are expected in a module's attributes.

    It is the package of the module's class. If installed objects of one package wrap the forward,
    as accelerate's do for offloaded weights, it is theirs.
    """
    hook = getattr(module, "_hf_hook", None)
    hooks = [type(each) for each in (hook, *getattr(hook, "hooks", ())) if each is not None]
    packages = {_package(each.__module__) for each in hooks}
    if len(packages) == 1 and all(map(_is_installed, hooks)):
        return packages.pop()
    return _package(type(module).__module__)


def _is_installed(code: Any) -> bool:
    """Return whether a class or function comes from an installed package or a checkpoint."""
    name = _module_of(code) or "builtins"
    if _package(name) in _HOME or _package(name) in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or file.startswith(_SITES):
        return file is not None
    return _package(name) in _installed_elsewhere()


@cache
def _installed_elsewhere() -> frozenset[str]:
    """Return all installed packages, in any folder; takes a fraction of a second."""
    return frozenset(packages_distributions())


def _module_of(code: Any) -> str | None:
    """Return the name of the module that defines a class or a function's code."""
    if isinstance(code, FunctionType):  # `functools.wraps` copies the other names
        name = code.__globals__.get("__name__")
    else:
        is_named = isinstance(code, type | BuiltinFunctionType)
        name = getattr(code if is_named else type(code), "__module__", None)
    return None if name is None else str(name)


def _package(name: str) -> str:
    return name.partition(".")[0]


def plain_of(value: Any) -> Any:
    """Return the function in a property or a method, else the value itself."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, MethodType | staticmethod | classmethod) else value


class _Replaceable:
    """The functions of torch and transformers that lade replaces, as they were at first."""

    def __init__(self) -> None:
        overridable = {
            id(each)
            for functions in torch.overrides.get_overridable_functions().values()
            for each in functions
        }
        files = cache_utils, masking_utils, sdpa_attention, activations, modeling_rope_utils
        classes = (
            each
            for file in (cache_utils, activations)
            for each in vars(file).values()
            if isinstance(each, type) and each.__module__ == file.__name__
        )
        self._slots = (
            Slots((torch, functional), lambda each: id(each) in overridable),
            Slots((torch.Tensor, *files, *classes)),
        )
        of_layers = getattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", {})
        of_masks = getattr(masking_utils, "LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING", {})
        tables = (cache_utils, of_layers), (masking_utils, of_masks)
        self._tables = [(file, table, {**table}) for file, table in tables]
        self._usual = {  # a function that was the user's before counts as replaced
            (id(slot.holder), slot.name): _MISSING if is_users(slot.function) else slot.function
            for slot in chain(*self._slots)
        }
        self._is_usual = _MISSING not in self._usual.values()

    def exchanged(self) -> tuple[Slot, ...]:
        """Return the functions that were replaced."""
        replaced: tuple[Slot, ...] = ()
        if not (self._is_usual and all(each.are_same() for each in self._slots)):
            replaced = tuple(
                slot
                for slot in chain(*self._slots)
                if self._usual.get((id(slot.holder), slot.name)) is not slot.function
            )
        # Models of transformers may add their own entries.
        return replaced + tuple(
            Slot(file, kind, made)
            for file, table, usual in self._tables
            for kind, made in table.items()
            if usual.get(kind, made) is not made or is_users(made)
        )


_REPLACED = _Replaceable()
_USUAL_MASKS = {**ALL_MASK_ATTENTION_FUNCTIONS}
