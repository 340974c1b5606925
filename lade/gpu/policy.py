"""What is done differently on a device that computes while the host goes on."""

import torch

from lade.config import Execution
from lade.gpu.graphs import CudaRecorder, Recorder


class DevicePolicy:
    """How a call makes use of its device; tests have others, to run all of it on a CPU."""

    def overlaps(self, device: torch.device) -> bool:
        """Tell whether the host goes on while the device computes, and waits to see a result."""
        return device.type != "cpu"

    def execution(self, device: torch.device) -> Execution:
        """Return how trees are executed where nothing else is asked for."""
        return "graphs" if device.type == "cuda" else "eager"

    def can_record(self, device: torch.device) -> bool:
        """Tell whether steps can be recorded and replayed."""
        return device.type == "cuda"

    def recorder(self, device: torch.device) -> Recorder:
        """Return what records steps on a device that can."""
        return CudaRecorder(device)
