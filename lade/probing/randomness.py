"""Whether a model's forwards draw random numbers."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lade.compat import Model, device_of_inputs

_NUM_RUNS = 3  # of which each left another state, where other threads may draw, too


def draws(model: Model, run: Callable[[], object]) -> bool:
    """Return whether a model's forwards draw from torch's generator, as dropout does.

    Args:
        run: runs some of its forwards, and draws nothing else.
    """
    device = device_of_inputs(model)
    for _ in range(_NUM_RUNS):
        before = state_of(device)
        run()
        if is_state(device, before):
            return False
    return True


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
