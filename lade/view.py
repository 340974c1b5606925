"""Views of a model: other modules in a few places, the same weights, hooks and leaves.

What one call wants of a model, another attention or a look at hidden states, must not be seen by
other calls, other threads or the user. So nothing of the model is switched: a view is a model of
its own, made for the call in a fraction of a millisecond, of copies of those modules alone that
have to be different.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_not
from types import MethodType
from typing import Any

from torch import nn

from lade.compat import Model

_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)

#: Returns which attributes of a module to change; None to leave it as it is.
Change = Callable[[nn.Module], dict[str, Any] | None]


def with_attention(model: Model, attention: str) -> Model:
    """Return a model whose text part attends by another implementation.

    That is found where transformers looks for it, in the configs that modules refer to. A module
    without submodules, as one that only makes rotary angles, is left as it is: it does not attend.
    """
    config = model.config
    text = config.get_text_config(decoder=True)
    copies: dict[int, Any] = {}
    _copy_config(config, copies)
    if id(text) not in copies:  # made for this very question
        _copy_config(text, copies)
    copies[id(text)]._attn_implementation = attention

    def change(module: nn.Module) -> dict[str, Any] | None:
        if not module._modules:
            return None
        changed = {
            name: copies[id(value)] for name, value in vars(module).items() if id(value) in copies
        }
        return changed or None

    return _viewed(model, change)


def in_evaluation(model: Model) -> Model:
    """Return a model none of whose modules is in training mode."""
    return _viewed(model, lambda module: {"training": False} if module.training else None)


def with_own_hooks(model: Model, modules: Sequence[nn.Module]) -> Model:
    """Return a model in which some modules have hooks of their own, besides those of the model's.

    What is registered on these modules of the view is called by the view alone.
    """
    changed = set(map(id, modules))

    def change(module: nn.Module) -> dict[str, Any] | None:
        if id(module) not in changed:
            return None
        return {name: copy.copy(vars(module)[name]) for name in _HOOKS}

    return _viewed(model, change)


def counterpart(view: Model, model: Model, module: nn.Module) -> nn.Module:
    """Return what stands in a view for a module of the model."""
    return next(mine for mine, theirs in _pairs(view, model) if theirs is module)


def keep_attributes(view: Model, model: Model) -> None:
    """Let a model remember what its forwards would have noted in it, had they not run in a view.

    Some models note how positions were counted in a prompt, transformers that it gathers outputs.
    """
    for mine, theirs in _pairs(view, model):
        before = vars(mine)[_BEFORE]
        for name, value in vars(mine).items():
            if name != _BEFORE and before.get(name) is not value:
                vars(theirs)[name] = value


_BEFORE = "_lade_before"  # all attributes of a module of a view as they were made


def _viewed(model: Model, change: Change) -> Model:
    return _view_of(model, change, {}, is_root=True)


def _view_of(
    module: nn.Module, change: Change, made: dict[int, nn.Module], is_root: bool = False
) -> nn.Module:
    """Return a module in which something is changed, or the module itself where nothing is.

    Args:
        module: of the model.
        change: what.
        made: those that were asked about before, by the module that they stand for.
        is_root: whether it is another module in any case.
    """
    changed, children = change(module), module._modules
    if changed is None and not children and not is_root:
        return module
    if id(module) not in made:
        made[id(module)] = module  # for modules that contain themselves
        viewed = {name: child and _view_of(child, change, made) for name, child in children.items()}
        if changed or is_root or any(map(is_not, viewed.values(), children.values())):
            made[id(module)] = _twin_of(module, {**(changed or {}), "_modules": viewed})
    return made[id(module)]


def _twin_of(module: nn.Module, changed: dict[str, Any]) -> nn.Module:
    """Return a module with the same attributes, but for those changed and methods bound to it."""
    twin = object.__new__(type(module))
    attributes = {**vars(module), **changed}
    for name, value in attributes.items():
        if type(value) is MethodType and value.__self__ is module:
            attributes[name] = MethodType(value.__func__, twin)
        elif type(value) is partial and any(part is module for part in value.args):
            # As accelerate has it, in the place of the forward.
            args = [twin if part is module else part for part in value.args]
            attributes[name] = partial(value.func, *args, **value.keywords)
    attributes[_BEFORE] = dict(attributes)
    object.__setattr__(twin, "__dict__", attributes)
    return twin


def _pairs(view: nn.Module, model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Return the modules of a view that are not the model's own, each with the model's."""
    pairs, left = [], [(view, model)]
    while left:
        mine, theirs = left.pop()
        if mine is theirs:
            continue
        pairs.append((mine, theirs))
        for name, child in mine._modules.items():
            other = theirs._modules.get(name)
            if child is not None and other is not None:
                left.append((child, other))
    return pairs


def _copy_config(config: Any, copies: dict[int, Any]) -> Any:
    """Copy a config and those of its parts."""
    copied = copies[id(config)] = copy.copy(config)
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None and not isinstance(part, dict):
            setattr(copied, name, copies.get(id(part)) or _copy_config(part, copies))
    return copied
