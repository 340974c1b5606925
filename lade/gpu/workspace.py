"""What outlives a call of steps of fixed shape: memory, and the steps recorded on it."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lade.gpu.graphs import Graphs
from lade.targets.kv_cache import TreeCache
from lade.targets.kv_memory import LayerKind

_LEAST_SLOTS = 256
# A larger workspace is not kept between calls: so much of a CUDA device's memory, or of another's.
_MOST_KEPT_SHARE = 1 / 8
_MOST_KEPT_BYTES = 2**30


def slots_for(num_slots: int) -> int:
    """Return the next of the sizes that attention runs over: at most a quarter more."""
    step = 1 << max(0, num_slots.bit_length() - 3)
    return max(_LEAST_SLOTS, -(-num_slots // step) * step)


class Shape(NamedTuple):
    """All that decides what a step tells the device, but for what its inputs hold."""

    rows: int
    width: int
    num_shown: tuple[int, ...]  # slots of the layers with each window
    is_padded: bool
    position_axes: tuple[int, ...]
    token_types: tuple[str, ...]
    attention: str | None


class StaticInputs:
    """What a step tells the device about its trees: one copy, to an address that never changes."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        rows, width = shape.rows, shape.width
        shapes: dict[str, tuple[int, ...]] = {
            "token_ids": (rows, width),
            "depths": (rows, width),
            "ancestors": (rows, width, width),
            "num_cached": (rows,),
            "first_slots": (len(shape.num_shown),),
            "position_offsets": (*shape.position_axes, rows),
            "num_padding": (rows,),
            "token_types": (rows,),
        }
        sizes = [int(np.prod(size)) for size in shapes.values()]
        on_host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._on_host = on_host
        self._is_sent: Any = None  # on CUDA, what tells when the copy is done
        with torch.inference_mode(False):
            self._on_device = torch.zeros_like(on_host, device=device)
        self.alone = np.eye(width, dtype=np.int32)  # ancestors of nodes that see no other
        parts = zip(
            shapes, torch.split(on_host, sizes), torch.split(self._on_device, sizes), strict=True
        )
        self._host: dict[str, NDArray[np.int32]] = {}
        self.device: dict[str, Tensor] = {}
        for name, mine, theirs in parts:
            self._host[name] = mine.numpy().reshape(shapes[name])
            self.device[name] = theirs.view(shapes[name])

    @property
    def host(self) -> dict[str, NDArray[np.int32]]:
        """What to write to, once what was written before has been copied."""
        if self._is_sent is not None:
            self._is_sent.synchronize()
        return self._host

    def send(self) -> None:
        """Copy all to the device; the host does not wait."""
        self._on_device.copy_(self._on_host, non_blocking=True)
        if self._on_device.is_cuda:
            self._is_sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._is_sent.record(torch.cuda.current_stream(self._on_device.device))


class WorkspaceKey(NamedTuple):
    """What two calls must have in common to use the same workspace."""

    num_rows: int
    kinds: tuple[LayerKind, ...]
    dependencies: tuple[Hashable, ...]  # that decide the dtype of keys, and the order of work
    variant: Hashable  # of recordings: what is recorded, and how far it is trusted


class Workspace:
    """Memory for keys and values, and the steps recorded on it.

    Attributes:
        cache: of as many rows as its first call had.
        graphs: the recorded steps; None where nothing is recorded.
        dependencies: what recordings depend on besides.
    """

    def __init__(self, fit: WorkspaceKey, cache: TreeCache) -> None:
        self.fit = fit
        self.cache = cache
        self.graphs: Graphs | None = None
        self.dependencies: tuple[Hashable, ...] = ()
        self._inputs: dict[tuple[Any, ...], StaticInputs] = {}
        self._visible: Tensor | None = None
        self._addresses: tuple[int, ...] = ()

    def inputs(self, shape: Shape, device: torch.device) -> StaticInputs:
        """Return the buffers of a shape."""
        key = (shape.rows, shape.width, shape.position_axes)
        if key not in self._inputs:
            self._inputs[key] = StaticInputs(shape, device)
        return self._inputs[key]

    def show(self, padding: Tensor) -> None:
        """Tell which slots of the prompts are not padding, bool [rows, num_slots]."""
        rows, num_slots = padding.shape
        known = self._visible
        if known is None or known.shape[0] < rows or known.shape[1] <= num_slots:
            with torch.inference_mode(False):
                known = padding.new_empty((self.fit.num_rows, slots_for(num_slots + 1)))
            self._visible = known
            self.forget_recordings()
        known.fill_(True)
        known[:rows, :num_slots] = padding

    def visible(self, rows: int, slots: Tensor) -> Tensor:
        """Return which slots are not padding, bool [rows, num_slots].

        Args:
            rows: how many there are now.
            slots: int64 [num_slots]; beyond the prompt there is no padding.
        """
        assert self._visible is not None
        return self._visible[:rows, slots.clamp(max=self._visible.shape[1] - 1)]

    def notice_moves(self) -> None:
        """Drop what was recorded where keys and values have moved since."""
        addresses = self.cache.addresses
        if addresses != self._addresses:
            self._addresses = addresses
            self.forget_recordings()

    def forget_recordings(self) -> None:
        """Drop what was recorded."""
        if self.graphs is not None:
            self.graphs.forget()


class WorkspaceStore:
    """Keeps the workspace of a model between calls: at most one, for one call at a time.

    A copy of the model begins with an empty one: recordings belong to the weights that they read.

    Attributes:
        compiled: what `torch.compile` made of the model, by the attention that steps take.
    """

    def __init__(self) -> None:
        self.compiled: dict[str | None, Any] = {}
        self._kept: list[Workspace] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle nothing."""
        return WorkspaceStore, ()

    def take(self, fit: WorkspaceKey, num_slots: int) -> Workspace | None:
        """Return the workspace kept, if it fits and has room; it is the caller's then."""
        try:
            kept = self._kept.pop()
        except IndexError:
            return None
        return kept if kept.fit == fit and kept.cache.room >= num_slots else None

    def put_back(self, workspace: Workspace) -> None:
        """Keep a workspace for the next call."""
        if not self._kept and workspace.cache.num_bytes <= _most_kept(workspace.cache):
            workspace.cache.reset()
            self._kept.append(workspace)

    def clear(self) -> None:
        """Let go of what is kept."""
        self._kept.clear()
        self.compiled = {}

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._kept)


def _most_kept(cache: TreeCache) -> int:
    """Return how many bytes may be kept where a cache lies."""
    device = cache.device
    if device is None or device.type != "cuda":
        return _MOST_KEPT_BYTES
    return int(_MOST_KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory)
