"""The lock of the process for captures of CUDA graphs, and the work that needs it.

While a thread captures, no other thread may draw from the default generator of a CUDA device, or
free the memory that torch keeps there: either spoils the capture or fails. lade does both under
this lock; other code of the process must avoid both.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from typing import Any

import torch
from torch import Tensor

CAPTURING = RLock()

_DEVICES = ("cuda", "xpu")  # with a default generator for each


def apart_from_captures(device: torch.device) -> AbstractContextManager[Any]:
    """Keep captures of other threads waiting during work that would spoil them."""
    return CAPTURING if device.type == "cuda" else nullcontext()


def random_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators that forwards on a device may draw from.

    The last one is that of the device, if it has a generator.
    """
    with apart_from_captures(device):
        states = [torch.get_rng_state()]
        if device.type in _DEVICES:
            states.append(torch.get_device_module(device).get_rng_state(device))
        return states


def are_random_states(device: torch.device, states: Sequence[Tensor]) -> bool:
    """Return whether the generators have these states now."""
    return all(map(torch.equal, states, random_states(device)))


def put_back(device: torch.device, states: Sequence[Tensor]) -> None:
    """Set the generators to earlier states."""
    with apart_from_captures(device):
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.get_device_module(device).set_rng_state(state, device)


def free_unused(device: torch.device) -> None:
    """Give back the memory that torch keeps on a CUDA device but does not use."""
    if device.type == "cuda":
        with CAPTURING:
            torch.cuda.empty_cache()
