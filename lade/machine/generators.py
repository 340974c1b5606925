"""The states of torch's default random generators, which all calls of a process share."""

from collections.abc import Sequence

import torch
from torch import Tensor

_DEVICES = ("cuda", "xpu")  # with a default generator for each


def random_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators that forwards on a device may draw from.

    The last one is that of the device, if it has a generator.
    """
    states = [torch.get_rng_state()]
    if device.type in _DEVICES:
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def are_random_states(device: torch.device, states: Sequence[Tensor]) -> bool:
    """Return whether the generators have these states now."""
    return all(map(torch.equal, states, random_states(device)))


def put_back(device: torch.device, states: Sequence[Tensor]) -> None:
    """Set the generators to earlier states."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)
