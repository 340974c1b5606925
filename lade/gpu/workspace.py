"""`Workspace`: memory that steps of fixed shape keep between calls, and steps recorded on it."""

from collections.abc import Hashable
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lade.gpu.graphs import Graphs
from lade.machine.transfer import Launched
from lade.targets.kv_cache import FIRST_NUM_SLOTS, TreeCache

# Largest total of workspaces kept between calls: a share of a CUDA device's memory, or bytes
# elsewhere.
_MOST_KEPT_SHARE = 1 / 8
_MOST_KEPT_BYTES = 2**30
_MOST_KEPT = 4  # workspaces; batch sizes that take turns have one each
# Share of a CUDA device's free memory that may be taken at once for texts yet to come.
_SPARE_SHARE = 1 / 10


def slots_for(num_slots: int) -> int:
    """Round up to a size that attention runs over: by a quarter at most, to 256 at least."""
    step = 1 << max(0, num_slots.bit_length() - 3)
    return max(FIRST_NUM_SLOTS, -(-num_slots // step) * step)


def spare_bytes(device: torch.device) -> int:
    """Return how many bytes may be used for more slots than a call needs."""
    if device.type != "cuda":
        return 0  # nothing is recorded there, so memory may move
    return int(_SPARE_SHARE * torch.cuda.mem_get_info(device)[0])


class StepShape(NamedTuple):
    """Everything that decides which operations a step launches, the contents of inputs aside."""

    width: int
    num_shown: tuple[int, ...]  # slots shown to the layers of each window
    position_axes: tuple[int, ...]
    token_types: tuple[str, ...]
    attention: str | None


class StaticInputs:
    """The buffer that brings a step's trees to the device: one copy, to a fixed address."""

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        self.shape, width = shape, shape.width
        shapes: dict[str, tuple[int, ...]] = {
            "token_ids": (1, width),
            "depths": (1, width),
            "ancestors": (1, width, width),
            "num_cached": (1,),
            "first_slots": (len(shape.num_shown),),
            "position_offsets": (*shape.position_axes, 1),
            "num_padding": (1,),
            "token_types": (1,),
        }
        sizes = [int(np.prod(size)) for size in shapes.values()]
        on_host = torch.zeros(
            sum(sizes), dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda"
        )
        self._on_host = on_host
        self._sent: Launched | None = None  # the last copy
        with torch.inference_mode(False):
            self._on_device = torch.zeros_like(on_host, device=device)
        self.alone = np.eye(width, dtype=np.int32)  # ancestors of nodes that see only themselves
        self._shapes, self._sizes = shapes, sizes
        self._host: dict[str, NDArray[np.int32]] = {
            name: part.numpy().reshape(size)
            for (name, size), part in zip(shapes.items(), torch.split(on_host, sizes), strict=True)
        }

    @property
    def host(self) -> dict[str, NDArray[np.int32]]:
        """The host arrays to write to, after a wait until their last contents were copied."""
        if self._sent is not None:
            self._sent.wait()
        return self._host

    def on_device(self) -> dict[str, Tensor]:
        """Return the sent arrays as int64; one kernel widens them."""
        parts = torch.split(self._on_device.long(), self._sizes)
        return {
            name: part.view(size)
            for (name, size), part in zip(self._shapes.items(), parts, strict=True)
        }

    def send(self) -> None:
        """Copy everything to the device; the host does not wait."""
        self._on_device.copy_(self._on_host, non_blocking=True)
        self._sent = Launched(self._on_device)


class Workspace:
    """Memory for keys and values, and the steps recorded on it.

    Attributes:
        key: two calls may use the same workspace if their keys are equal.
        cache: keys and values.
        graphs: the recorded steps; None if steps are not recorded.
        dependencies: from `dependencies_of`, when steps were recorded.
        addresses: of keys and values when steps were recorded.
    """

    def __init__(self, key: Hashable, cache: TreeCache) -> None:
        self.key = key
        self.cache = cache
        self.graphs: Graphs | None = None
        self.dependencies: tuple[Hashable, ...] = ()
        self.addresses: tuple[int, ...] = ()
        self._inputs: dict[StepShape, StaticInputs] = {}

    def inputs(self, shape: StepShape, device: torch.device) -> StaticInputs:
        """Return the input buffers of a shape, made at its first use."""
        if shape not in self._inputs:
            self._inputs[shape] = StaticInputs(shape, device)
        return self._inputs[shape]


class WorkspaceStore:
    """The workspaces of a model between calls, each for one call at a time.

    A copy of the model starts with an empty store: recordings belong to the weights they read.
    """

    def __init__(self) -> None:
        self._kept: list[Workspace] = []  # the last used is at the end
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as an empty store."""
        return WorkspaceStore, ()

    def take(self, key: Hashable, num_slots: int) -> Workspace | None:
        """Hand over a kept workspace that fits, or None; drop smaller ones."""
        with self._lock:
            for kept in [each for each in self._kept if each.key == key]:
                # A smaller workspace would be replaced by the next one, and never be used again.
                self._kept.remove(kept)
                if kept.cache.capacity >= num_slots:
                    return kept
        return None

    def put_back(self, workspace: Workspace) -> None:
        """Keep a workspace for the next call; drop the least recently used beyond the limits."""
        most = _most_kept(workspace.cache)
        if workspace.cache.num_bytes > most:
            return
        workspace.cache.reset()
        with self._lock:
            newest = [*self._kept, workspace][-_MOST_KEPT:]
            while sum(each.cache.num_bytes for each in newest) > most:
                del newest[0]
            self._kept = newest

    def clear(self) -> None:
        """Drop the workspaces."""
        self._kept = []


def _most_kept(cache: TreeCache) -> int:
    """Return how many bytes may be kept on the device of a cache."""
    device = cache.device
    if device is None or device.type != "cuda":
        return _MOST_KEPT_BYTES
    return int(_MOST_KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory)
