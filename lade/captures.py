"""The lock that captures of CUDA graphs hold, for all of the process.

While a thread captures, no other may draw from the default generator of a CUDA device or free the
memory that torch keeps there: either spoils the capture or fails. lade does both under this lock;
other code of the process has to avoid it.
"""

from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from typing import Any

import torch

CAPTURING = RLock()


def apart_from_captures(device: torch.device) -> AbstractContextManager[Any]:
    """Keep captures of other threads waiting while something is done that would spoil them."""
    return CAPTURING if device.type == "cuda" else nullcontext()


def free_unused(device: torch.device) -> None:
    """Give back the memory that torch keeps on a CUDA device but does not use."""
    if device.type == "cuda":
        with CAPTURING:
            torch.cuda.empty_cache()
