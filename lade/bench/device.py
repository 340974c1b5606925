"""What benchmarks ask of a device: to finish, and how busy it has been."""

import torch

from lade.attempts import Attempt


def wait_for(device: torch.device) -> None:
    """Wait for a device to finish."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def busy_share(device: torch.device) -> float | None:
    """Return the share of about the last second that a device was busy; None if nothing tells."""
    if device.type == "cuda":
        with Attempt():  # there may be no package nvidia-ml-py, or one that knows no such device
            return torch.cuda.utilization(device) / 100
    return None
