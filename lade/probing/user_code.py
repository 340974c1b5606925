"""Which code of the user's takes part in a call, where no proof would notice what it does.

A proof holds steps against the model (`proof.py`), not prompts, and not what `generate` does
between forwards. Where code of the user's runs in forwards, prompts are run in the shape that
`generate` gives them, and nothing is kept of them; where it is a part of the loop, decoding is
plain.

Nothing is known of packages. The classes of installed packages, and those that come with a
checkpoint, are the model's own code. The user's are hooks, functions that were put in the place of
others, and classes of code that is not installed, such as a notebook's.
"""

import inspect
import os
import sys
from collections.abc import Iterable
from functools import cache, partial
from importlib.metadata import packages_distributions
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from lade.compat import Model, attention_of
from lade.probing.slots import Replaced, Slot, Slots

# At home in every forward: code that comes with checkpoints is transformers' in this respect.
_HOME = {"torch", "transformers", TRANSFORMERS_DYNAMIC_MODULE_NAME, "lade"}
# Where most packages are installed.
_SITES = tuple(
    os.path.dirname(os.path.dirname(str(each.__file__))) + os.sep for each in (torch, transformers)
)
# What makes `generate` another loop than lade's: methods of a model, functions of torch, and all
# that caches do, as lade has caches of its own and goes back in them.
_OF_LOOP = ("_prefill", "_sample", "_update_model_kwargs_for_generation")
_CHOOSING = {(functional, "softmax"), (torch, "multinomial"), (torch, "argmax")}
_CACHES, _MASKS = "transformers.cache_utils", "transformers.masking_utils"

AROUND = "a hook of the model"  # which is called around its forward, whatever that is


def user_code_of(model: Model, functions: Slots, *, besides_hooks: bool = False) -> str | None:
    """Return what of the user's code runs in a model's forwards, or None.

    Args:
        functions: of `functions_of`.
        besides_hooks: whether to pass over hooks.
    """
    for name, module in model.named_modules():
        where = name or "the model"
        if name and not besides_hooks and any(map(is_users, hooks_of(module))):
            return f"a hook of {where}"
        home = _home_of(module)
        for attribute, value in [*vars(module).items()]:
            # No forward calls `generate`, which `lade.wrap` replaces, too.
            if attribute != "generate" and is_code(value) and is_users(value, home):
                return f"{attribute} of {where}"
        classes = (type(each) for each in module._parameters.values() if each is not None)
        if not all(map(_is_installed, classes)):
            return f"weights of {where}"
        if not _is_installed(type(module)):
            return f"the class {type(module).__name__}"
    for slot in functions:
        if _is_exchanged(slot):
            return f"the function {slot.path}"
    attention = ALL_ATTENTION_FUNCTIONS.get(attention_of(model))
    if attention is not None and is_users(attention):
        return "its attention"
    if has_user_masks(model):
        return "its masks"
    return AROUND if not besides_hooks and any(map(is_users, hooks_of(model))) else None


def functions_of(classes: Iterable[type]) -> Slots:
    """Return the methods of modules' classes, and the functions of the files that these are in."""
    bases = {base for each in classes for base in each.__mro__}
    bases -= {*PreTrainedModel.__mro__} - {nn.Module}
    files = {inspect.getmodule(each) for each in bases if _package(each.__module__) != "torch"}
    return Slots((*bases, *(files - {None})), lambda each: isinstance(_plain(each), FunctionType))


def user_code_around() -> str | None:
    """Return what of the user's code runs in every forward at present, or None."""
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
    """Return what of the user's makes `generate` another loop than lade's, or None."""
    for name in _OF_LOOP:
        if _is_user_method(model, name):
            return f"its {name} is your own code"
    for slot in _REPLACED.exchanged():
        if (slot.holder, slot.name) in _CHOOSING or slot.path.startswith(_CACHES):
            return f"{slot.path} is patched"
    return None


def has_user_masks(model: Model) -> bool:
    """Return whether the user's code makes the masks that attention gets."""
    name = attention_of(model)
    make = AttentionMaskInterface().get(name)
    usual = _USUAL_MASKS.get(name, make)
    is_patched_there = any(slot.path.startswith(_MASKS) for slot in _REPLACED.exchanged())
    return is_patched_there or make is not usual or (make is not None and is_users(make))


def has_user_inputs(model: Model) -> bool:
    """Return whether the user's code prepares the inputs of forwards."""
    return _is_user_method(model, "prepare_inputs_for_generation")


def _is_user_method(model: Model, name: str) -> bool:
    """Return whether a method is the user's; a class of theirs may have inherited it."""
    own = vars(model) if name != "_sample" else {}  # which `generate` asks of the class alone
    method = _plain(own.get(name, getattr(type(model), name, None)))
    if method is None or not is_users(method):
        return False
    return not (isinstance(method, FunctionType) and _is_installed(method))


def is_patched(name: str) -> bool:
    """Return whether a function of `torch.nn.functional` is another one now."""
    return any(slot[:2] == (functional, name) for slot in _REPLACED.exchanged())


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks of a module's forward."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def hooks_of_all() -> list[Any]:
    """Return the hooks of any module's forward."""
    hooks: Any = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    return [hook for each in hooks for hook in each.values()]


def around_now() -> tuple[Any, ...]:
    """Return what surrounds every forward at present: exchanged functions, and hooks of all."""
    return _REPLACED.exchanged(), tuple(hooks_of_all())


def is_code(value: Any) -> bool:
    """Return whether an attribute is a function or another callable that is no module."""
    return callable(value) and not isinstance(value, nn.Module | Tensor | type)


def is_users(code: Any, home: str = "", depth: int = 4) -> bool:
    """Return whether a callable is the user's: the function, or one that it is made of.

    Args:
        code: the callable.
        home: the package that it stands in, whose functions are no one else's there.
        depth: how many wrappers to look into.
    """
    code = _plain(code)
    inside = [getattr(code, "__wrapped__", None)]
    if isinstance(code, partial):
        # accelerate puts a partial of its own function and the forward before in place of that.
        inside = [code.func, *code.args]
    if depth and any(is_code(each) and is_users(each, home, depth - 1) for each in inside):
        return True
    if isinstance(code, partial):
        return False
    # What is compiled and belongs to nobody is Python's or torch's.
    package = _package(_module_of(code) or "builtins")
    return package not in _HOME and package not in sys.stdlib_module_names and package != home


def _is_exchanged(slot: Slot) -> bool:
    """Return whether a function of a class, or of its file, was put in the place of another."""
    function, holder = _plain(slot.function), slot.holder
    home = holder.__module__ if isinstance(holder, type) else holder.__name__
    if not isinstance(function, FunctionType) or not is_users(function, _package(home)):
        return False
    # A file may import functions of other packages, which have their names there.
    is_imported = not isinstance(holder, type) and function.__name__ == slot.name
    return not (is_imported and _is_installed(function))


def _home_of(module: nn.Module) -> str:
    """Return the package whose functions are at home in a module's attributes.

    That is its class's; or that of the objects that wrap its forward, as accelerate's do where
    weights are brought from elsewhere, unless one of them is the user's.
    """
    hook = getattr(module, "_hf_hook", None)
    hooks = [type(each) for each in (hook, *getattr(hook, "hooks", ())) if each is not None]
    packages = {_package(each.__module__) for each in hooks}
    if len(packages) == 1 and all(map(_is_installed, hooks)):
        return packages.pop()
    return _package(type(module).__module__)


def _is_installed(code: Any) -> bool:
    """Return whether a class or function is of an installed package, or of a checkpoint."""
    name = _module_of(code) or "builtins"
    if _package(name) in _HOME or _package(name) in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or file.startswith(_SITES):
        return file is not None
    return _package(name) in _installed_elsewhere()


@cache
def _installed_elsewhere() -> frozenset[str]:
    """Return all packages that are installed, in whatever folder; takes a fraction of a second."""
    return frozenset(packages_distributions())


def _module_of(code: Any) -> str | None:
    """Return the name of the module that a class, or a function's code, is of."""
    if isinstance(code, FunctionType):  # `functools.wraps` copies the other names
        name = code.__globals__.get("__name__")
    else:
        is_named = isinstance(code, type | BuiltinFunctionType)
        name = getattr(code if is_named else type(code), "__module__", None)
    return None if name is None else str(name)


def _package(name: str) -> str:
    return name.partition(".")[0]


def _plain(value: Any) -> Any:
    """Return the function in a property or a method, else the value itself."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, MethodType | staticmethod | classmethod) else value


_REPLACED = Replaced(is_users)
_USUAL_MASKS = {**AttentionMaskInterface()}
