"""Whether a model's forwards draw random numbers."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
)

from lade.attempts import Attempt
from lade.compat import Model, attention_of, device_of_inputs


class _Noticing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that notices when an operation of this thread draws from a generator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            # Attention may draw, but does not if nothing is dropped.
            chance = _argument(func, "dropout_p", args, kwargs)
            self.has_drawn = self.has_drawn or chance is None or chance > 0
        return func(*args, **kwargs)


def _argument(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return an argument of an operation, or its default; None if it has no such argument."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            given = args[place] if place < len(args) else kwargs.get(name)
            return argument.default_value if given is None else given
    return None


def draws(model: Model, run: Callable[[], Any]) -> bool:
    """Return whether a model's forwards draw from torch's generator, as dropout does.

    Only draws of this thread count, and the random state is restored only after such draws. If
    something is compiled, which being observed would disturb, any change of the state counts.

    Args:
        run: runs some of its forwards, and draws nothing else.
    """
    device = device_of_inputs(model)
    before = state_of(device)
    noticing = None if _is_compiled(model) else _Noticing()
    try:
        with Attempt() as attempt, noticing or nullcontext():
            run()
    finally:  # if interrupted while entering or leaving it, torch leaves the mode on
        while noticing is not None and noticing in _get_current_dispatch_mode_stack():
            _pop_mode()
    if attempt.failure is not None:  # the check will report what is wrong
        has_drawn = bool(model.training)
    else:
        is_changed = not is_state(device, before)
        has_drawn = is_changed and (noticing is None or noticing.has_drawn)
    if has_drawn:
        put_back(device, before)
    return has_drawn


def _is_compiled(model: Model) -> bool:
    """Return whether a part of a model is compiled, as flex attention always is."""
    if attention_of(model) not in ("sdpa", "eager", None):
        return True
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def state_of(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators that forwards on a device may draw from."""
    of_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *of_device]


def is_state(device: torch.device, states: Sequence[Tensor]) -> bool:
    """Return whether the generators have these states now."""
    return all(map(torch.equal, states, state_of(device)))


def put_back(device: torch.device, states: Sequence[Tensor]) -> None:
    """Set the generators to earlier states."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
