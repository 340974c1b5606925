"""What benchmarks ask of a device: to finish."""

import torch


def wait_for(device: torch.device) -> None:
    """Wait for a device to finish."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
