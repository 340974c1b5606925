"""Which code of the user's own runs in a model's forwards, and what can be seen of its state.

Layers of torch, transformers and the packages below treat each token by itself, whatever the values
of their weights and attributes are: what a check finds of them holds. A hook, a class or a patched
function of the user's may do anything, and do it differently tomorrow. Here it is told apart.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lade.compat import Model, attention_of

# Packages whose code in a forward is not the user's: nothing that it keeps says how a token is
# treated beside others. Whatever is missing here is only checked more often.
_PACKAGES = {
    *("builtins", "functools", "contextlib", "operator"),
    *("torch", "transformers", "peft", "accelerate", "lade"),
    *("bitsandbytes", "torchao", "optimum", "gptqmodel", "hqq", "compressed_tensors", "awq"),
    *("flash_attn", "triton", "fbgemm_gpu", "auto_round", "aqlm", "spqr_quant", "vptq", "tqdm"),
}
# Methods of the root that are replaced to change what it computes or is given.
_OF_LOOP = ("_prefill", "_sample", "_update_model_kwargs_for_generation")
METHODS = ("forward", "prepare_inputs_for_generation", *_OF_LOOP)
# Functions of torch that lade calls or has a product or attention of its own for, and those by
# which `generate` chooses tokens, which lade chooses otherwise.
_FUNCTIONS = ((functional, "linear"), (functional, "scaled_dot_product_attention"))
_CHOOSING = ((functional, "softmax"), (torch, "multinomial"), (torch, "argmax"))
# Of `nn.Module`, what every call runs; of transformers' own base classes, the methods above.
_OF_MODULES = ("__call__", "_call_impl", "_wrapped_call_impl")
_GENERATION = "transformers.generation."
#: Types of values that are compared by value.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_DESCRIPTORS = (FunctionType, staticmethod, classmethod, property)


class Place(NamedTuple):
    """Where code is looked up when it runs, and what was found there."""

    holder: Mapping[str, Any]  # the attributes of a class, or the globals of a module
    name: str
    value: Any


def places_of(classes: Iterable[type]) -> list[Place]:
    """Return where the code of modules' classes is looked up: their methods, and what these call.

    Functions that are called by name are followed within the file of the class.
    """
    found: dict[tuple[int, str], Place] = {}
    bases = dict.fromkeys(base for each in classes for base in each.__mro__)
    left = [
        Place(vars(base), name, value)
        for base in bases
        if not issubclass(PreTrainedModel, base) and not base.__module__.startswith(_GENERATION)
        for name, value in vars(base).items()
        if isinstance(value, _DESCRIPTORS)
    ]
    left += [Place(vars(nn.Module), name, vars(nn.Module)[name]) for name in _OF_MODULES]
    seen: set[int] = set()  # codes
    while left:
        place = left.pop()
        key = id(place.holder), place.name
        if key in found:
            continue
        found[key] = place
        for function in _functions_in(place.value):
            if id(function.__code__) in seen:
                continue
            seen.add(id(function.__code__))
            names = function.__globals__
            is_here = type(place.holder) is not dict or place.holder is names
            for name in _names_in(function.__code__) if is_here else ():
                if isinstance(names.get(name), FunctionType):
                    left.append(Place(names, name, names[name]))
    return [*found.values()]


def own_code_of(model: Model, places: Iterable[Place]) -> str | None:
    """Return what of the user's own code runs in a model's forwards, or None."""
    for name, module in model.named_modules():
        if any(map(is_own, _hooks_of(module))):
            return f"a hook of {name or 'the model'}"
        if is_own(type(module)):
            return f"the class {type(module).__name__}"
        for attribute, value in [*vars(module).items()]:
            if is_code(value) and is_own(value) and not getattr(value, "is_lades", False):
                return f"{attribute} of {name or 'the model'}"
        for weight in [*module._parameters.values(), *module._buffers.values()]:
            if weight is not None and is_own(type(weight)):
                return f"weights of the class {type(weight).__name__}"
    for place in places:
        if any(map(is_own, _functions_in(place.value))):
            return f"the function {place.name}"
    for method in METHODS:
        if is_own(getattr(type(model), method, None)):
            return f"its method {method}"
    attention = ALL_ATTENTION_FUNCTIONS.get(attention_of(model))
    return "its attention" if attention is not None and is_own(attention) else None


def is_patched(name: str) -> bool:
    """Return whether a function of `torch.nn.functional` that is not Python is another one now."""
    return getattr(functional, name) is not getattr(torch._C._nn, name)


def functions_at_present() -> tuple[Any, ...]:
    """Return those functions of torch that forwards call and somebody may patch."""
    return tuple(getattr(module, name) for module, name in _FUNCTIONS)


def own_loop_of(model: Model) -> str | None:
    """Return what of the user's own makes `generate` another loop than lade's, or None."""
    for name in _OF_LOOP:
        if _is_own_method(model, name):
            return f"its {name} is code of one's own"
    for module, name in _CHOOSING:
        function = getattr(module, name)  # another of torch's has another name
        if is_own(function) or getattr(function, "__name__", None) != name:
            return f"{module.__name__}.{name} is patched"
    return None


def has_own_inputs(model: Model) -> bool:
    """Return whether the user's own code prepares the inputs of forwards."""
    return _is_own_method(model, "prepare_inputs_for_generation")


def _is_own_method(model: Model, name: str) -> bool:
    """Return whether a method is the user's; a class of theirs may have inherited it."""
    own = vars(model) if name != "_sample" else {}  # which `generate` asks of the class alone
    method = own.get(name, getattr(type(model), name, None))
    return method is not None and is_own(getattr(method, "__func__", method))


def own_code_around() -> str | None:
    """Return what of the user's own code runs in every forward at present, or None."""
    for module, name in _FUNCTIONS:
        if is_patched(name):
            return f"the patched {module.__name__}.{name}"
    if any(map(is_own, _hooks_of_all())):
        return "a hook of all modules"
    modes = (_get_current_function_mode_stack, _get_current_dispatch_mode_stack)
    for mode in (each for stack in modes for each in stack()):
        if is_own(type(mode)):
            return f"the mode {type(mode).__name__}"
    return None


def _hooks_of(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _hooks_of_all() -> list[Any]:
    """Return the hooks that torch calls for every module."""
    hooks = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    return [hook for each in hooks for hook in each.values()]


def is_own_callback(callback: Any) -> bool:
    """Return whether code of the user's runs when a callback of a call is called."""
    if callback is None:
        return False
    held = [each for each in getattr(callback, "__dict__", {}).values() if is_code(each)]
    return any(map(is_own, [callback if is_code(callback) else type(callback), *held]))


def is_code(value: Any) -> bool:
    """Return whether an attribute is a function or another callable that is no module."""
    return isinstance(value, FunctionType | MethodType | BuiltinFunctionType | partial) or (
        callable(value) and not isinstance(value, nn.Module | Tensor | type)
    )


def is_own(code: Any) -> bool:
    """Return whether a callable, or anything that it calls as far as that shows, is the user's."""
    return any(_root_of(part) not in _PACKAGES for part in _parts_of(code, set()))


def _root_of(part: Any) -> str:
    if isinstance(part, FunctionType):  # `functools.wraps` copies the other names
        name = part.__globals__.get("__name__")
    else:
        name = getattr(part, "__module__", None)
    # What is compiled and belongs to nobody is Python's or torch's.
    return str(name or "builtins").partition(".")[0]


def _parts_of(code: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the functions and classes that a callable consists of: decorated, bound, partial."""
    if id(code) in seen:
        return
    seen.add(id(code))
    if isinstance(code, partial):
        inside = [code.func, *code.args, *code.keywords.values()]
    elif isinstance(code, MethodType):
        inside = [code.__func__, code.__self__]
    elif isinstance(code, FunctionType):
        yield code
        inside = [*_cells_of(code), vars(code).get("__wrapped__")]
    elif isinstance(code, type):
        yield code
        return
    else:
        if not isinstance(code, BuiltinFunctionType):
            yield type(code)
        inside = []
    for each in inside:
        if is_code(each):
            yield from _parts_of(each, seen)
        elif isinstance(each, nn.Module) and isinstance(code, MethodType):
            yield type(each)


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield the functions that an attribute of a class consists of."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)  # of a static or class method
    if isinstance(value, FunctionType):
        for part in _parts_of(value, set()):
            if isinstance(part, FunctionType):
                yield part


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _cells_of(function: FunctionType) -> list[Any]:
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # still empty
            continue
    return cells


# --- state ------------------------------------------------------------------------------------

_MAX_DEPTH = 6
_MAX_VALUES = 16  # of each tensor


def state_of(model: Model) -> Hashable:
    """Return what differs once the state of the user's own code has visibly changed.

    That is what hooks, patched functions and modules of the user's hold: closures, defaults,
    arguments of partials, attributes, weights, and the globals that they name.
    """
    seen: set[int] = set()
    parts: list[Hashable] = [_state_in(hook, seen, 0) for hook in filter(is_own, _hooks_of_all())]
    for module in model.modules():
        codes = [*_hooks_of(module), *filter(is_code, vars(module).values())]
        parts += [_state_in(each, seen, 0) for each in codes if is_own(each)]
        if is_own(type(module)):
            held = {**vars(module), **module._parameters, **module._buffers}
            parts.append(_state_in(held, seen, 0))
    return tuple(parts)


def state_of_partials(hooks: Iterable[Any]) -> Hashable:
    """Return the arguments of hooks that are partials, as PEFT's are: whose adapter a row has."""
    found = [(*hook.args, *hook.keywords.values()) for hook in hooks if isinstance(hook, partial)]
    return tuple(_state_in([*each], set(), 0) for each in found)


def _state_in(value: Any, seen: set[int], depth: int) -> Hashable:
    if isinstance(value, PLAIN):
        return type(value), repr(value)
    if isinstance(value, Tensor):
        return _state_of_tensor(value)
    if id(value) in seen or depth > _MAX_DEPTH:
        return None
    seen.add(id(value))
    inside: list[Any]
    name: Any = type(value)
    if isinstance(value, dict):
        inside = [part for item in value.items() for part in item]
    elif isinstance(value, list | tuple | set | frozenset):
        inside = [*value]
    elif isinstance(value, partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType):
        inside = [value.__func__, value.__self__]
    elif isinstance(value, FunctionType):
        name = value.__code__
        used = {each: value.__globals__.get(each) for each in _names_in(value.__code__)}
        inside = [
            *_cells_of(value),
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
            *vars(value).values(),
            # Of globals, functions and classes are code, and modules are others' state.
            *(each for each in used.values() if isinstance(each, (*PLAIN, Tensor, dict, list))),
        ]
    elif isinstance(value, nn.Module):
        if not is_own(type(value)):
            return None
        inside = [{**vars(value), **value._parameters, **value._buffers}]
    elif isinstance(value, type) or not hasattr(value, "__dict__"):
        return None
    else:
        inside = [vars(value)] if is_own(type(value)) else []
    return name, tuple(_state_in(each, seen, depth + 1) for each in inside)


def _state_of_tensor(value: Tensor) -> Hashable:
    plain = value.detach()
    writes = None if value.is_inference() else value._version
    if plain.is_meta or plain.is_quantized or plain.layout != torch.strided or not plain.numel():
        return writes, tuple(plain.shape)
    flat = plain.reshape(-1) if plain.numel() <= _MAX_VALUES else plain[(0,) * (plain.dim() - 1)]
    return writes, tuple(plain.shape), str(plain.dtype), repr(flat[:_MAX_VALUES].tolist())
