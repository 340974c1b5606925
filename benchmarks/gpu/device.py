"""How much of a device's memory torch has taken."""

import torch

from lade.captures import free_unused


def forget_peak(device: torch.device) -> None:
    """Give back unused memory, so that `peak_bytes` tells of what comes."""
    if device.type == "cuda":
        free_unused(device)
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Return the most bytes that torch has held since, weights and recordings included.

    On a CPU that is not counted: None.
    """
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
