"""`DevicePolicy`: differences for devices that run asynchronously to the host."""

import torch

from lade.gpu.graphs import CudaRecorder


class DevicePolicy:
    """How a call uses its device; tests substitute it to run every path on a CPU."""

    def overlaps(self, device: torch.device) -> bool:
        """Return whether the device runs asynchronously, so that reading a result waits for it."""
        return device.type != "cpu"

    def can_record(self, device: torch.device) -> bool:
        """Return whether steps can be recorded and replayed."""
        return device.type == "cuda"

    def recorder(self, device: torch.device) -> CudaRecorder:
        """Return a recorder of steps, for a device that can record."""
        return CudaRecorder(device)
