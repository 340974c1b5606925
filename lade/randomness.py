"""Whether a model's forwards draw random numbers.

Next file: `probing.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lade.internals import Model, device_of_inputs


class _Noticing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices operations of this thread that draw from a generator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            # Attention may draw, and does not where nothing is dropped.
            chance = _argument(func, "dropout_p", args, kwargs)
            self.has_drawn = self.has_drawn or chance is None or chance > 0
        return func(*args, **kwargs)


def _argument(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what an operation was given, or its default; None where it knows no such argument."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            given = args[place] if place < len(args) else kwargs.get(name)
            return argument.default_value if given is None else given
    return None


def draws_random_numbers(model: Model, token_ids: Sequence[int]) -> bool:
    """Tell whether a forward draws from torch's generator, as dropout in training mode does.

    One forward is run. Where it cannot be looked into, a model in training mode is taken to draw,
    another one is not.

    Args:
        model: the target.
        token_ids: a short text.
    """
    device = device_of_inputs(model)
    noticing = _Noticing()
    state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    try:
        with torch.no_grad(), noticing:
            model(input_ids=torch.tensor([[*token_ids]], device=device))
    except Exception:  # what such a mode cannot pass through, or a model that wants more inputs
        return noticing.has_drawn or bool(model.training)
    if noticing.has_drawn:  # by us: only then is the state put back
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)
    return noticing.has_drawn
