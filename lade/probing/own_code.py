"""Which code of the user's own takes part in a call, where no proof would notice what it does.

A proof holds steps against the model (`proof.py`), not prompts, and not what `generate` does
between forwards. Where code of the user's own runs in forwards, prompts are run in the
shape that `generate` gives them, and nothing is kept of them; where it is a part of the loop,
decoding is plain.
"""

import inspect
import sys
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lade.compat import Model, attention_of

# Packages whose code in a forward is not the user's. What is missing here costs a little speed.
_PACKAGES = {
    *("torch", "transformers", "peft", "accelerate", "lade", "numpy", "safetensors", "einops"),
    *("torchvision", "torchaudio", "huggingface_hub", "tokenizers", "kernels", "packaging"),
    *("bitsandbytes", "torchao", "optimum", "gptqmodel", "hqq", "compressed_tensors", "awq"),
    *("flash_attn", "triton", "fbgemm_gpu", "auto_round", "aqlm", "spqr_quant", "vptq", "tqdm"),
}
# What makes `generate` another loop than lade's: methods of a model, and functions of torch.
_OF_LOOP = ("_prefill", "_sample", "_update_model_kwargs_for_generation")
_CHOOSING = ((functional, "softmax"), (torch, "multinomial"), (torch, "argmax"))
# Functions of torch that lade calls, or has a product or attention of its own for.
_FUNCTIONS = ((functional, "linear"), (functional, "scaled_dot_product_attention"))


AROUND = "a hook of the model"  # which is called around its forward, whatever that is


def own_code_of(model: Model, *, besides_hooks: bool = False) -> str | None:
    """Return what of the user's own code runs in a model's forwards, or None."""
    for name, module in model.named_modules():
        where = name or "the model"
        if name and not besides_hooks and any(map(is_own, hooks_of(module))):
            return f"a hook of {where}"
        for attribute, value in [*vars(module).items()]:
            # No forward calls `generate`, which `lade.wrap` replaces, too.
            if attribute != "generate" and is_code(value) and is_own(value):
                return f"{attribute} of {where}"
        if any(is_own(type(each)) for each in module._parameters.values() if each is not None):
            return f"weights of {where}"
    for function in code_of({type(module) for module in model.modules()}):
        if is_own(function):
            return f"the function {function.__qualname__}"
    attention = ALL_ATTENTION_FUNCTIONS.get(attention_of(model))
    if attention is not None and is_own(attention):
        return "its attention"
    return AROUND if not besides_hooks and any(map(is_own, hooks_of(model))) else None


def code_of(classes: set[type]) -> Iterator[FunctionType]:
    """Yield the methods of modules' classes, and the functions of the files that these are in."""
    bases = {base for each in classes for base in each.__mro__}
    bases -= {*PreTrainedModel.__mro__}
    files = [inspect.getmodule(base) for base in bases if not base.__module__.startswith("torch.")]
    for holder in (nn.Module, *bases, *files):
        for value in [*vars(holder).values()] if holder is not None else ():
            value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(value, FunctionType):
                yield value


def own_code_around() -> str | None:
    """Return what of the user's own code runs in every forward at present, or None."""
    for module, name in _FUNCTIONS:
        if is_patched(name):
            return f"the patched {module.__name__}.{name}"
    if any(map(is_own, hooks_of_all())):
        return "a hook of all modules"
    modes = (_get_current_function_mode_stack, _get_current_dispatch_mode_stack)
    for mode in (each for stack in modes for each in stack()):
        if is_own(type(mode)):
            return f"the mode {type(mode).__name__}"
    return None


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


def is_patched(name: str) -> bool:
    """Return whether a function of `torch.nn.functional` that is not Python is another one now."""
    return getattr(functional, name) is not getattr(torch._C._nn, name)


def functions_at_present() -> tuple[Any, ...]:
    """Return those functions of torch that forwards call and somebody may patch."""
    return tuple(getattr(module, name) for module, name in _FUNCTIONS)


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks of a module's forward."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def hooks_of_all() -> list[Any]:
    """Return the hooks of any module's forward."""
    hooks: Any = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    return [hook for each in hooks for hook in each.values()]


def is_code(value: Any) -> bool:
    """Return whether an attribute is a function or another callable that is no module."""
    return callable(value) and not isinstance(value, nn.Module | Tensor | type)


def is_own(code: Any, depth: int = 4) -> bool:
    """Return whether a callable is the user's: the function, or one that it is made of."""
    inside = [getattr(code, "__wrapped__", None)]
    if isinstance(code, partial):
        # accelerate puts a partial of its own function and the forward before in place of that.
        inside = [code.func, *code.args]
    elif isinstance(code, MethodType):
        inside = [code.__func__]
    if depth and any(is_code(each) and is_own(each, depth - 1) for each in inside):
        return True
    if isinstance(code, partial | MethodType):
        return False
    if isinstance(code, FunctionType):  # `functools.wraps` copies the other names
        name = code.__globals__.get("__name__")
    else:
        is_named = isinstance(code, type | BuiltinFunctionType)
        name = getattr(code if is_named else type(code), "__module__", None)
    # What is compiled and belongs to nobody is Python's or torch's.
    package = str(name or "builtins").partition(".")[0]
    return package not in _PACKAGES and package not in sys.stdlib_module_names
