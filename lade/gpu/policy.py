"""What is done differently on a device that runs asynchronously to the host."""

import torch

from lade.config import Execution
from lade.gpu.graphs import CudaRecorder, Recorder


class DevicePolicy:
    """How a call uses its device; tests substitute it to run every path on a CPU."""

    def overlaps(self, device: torch.device) -> bool:
        """Return whether the device runs asynchronously, so that reading a result waits for it."""
        return device.type != "cpu"

    def execution(self, device: torch.device) -> Execution:
        """Return the default execution of trees.

        Graphs and Triton kernels are to be asked for until a run on a GPU has shown them right.
        """
        return "eager"

    def can_record(self, device: torch.device) -> bool:
        """Return whether steps can be recorded and replayed."""
        return device.type == "cuda"

    def recorder(self, device: torch.device) -> Recorder:
        """Return a recorder of steps, for a device that can record."""
        return CudaRecorder(device)
