"""What a process is to measure, in plain values that can be sent as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu.shapes import Shape


@dataclass(frozen=True)
class GpuJob:
    """One stage."""

    stage: str
    device: str
    sec: float  # no part of the stage begins later
    shape: Shape | None = None
    counts: Sequence[int] = ()  # how many draft tokens successive steps of lade accept
    num_nodes: int = 1  # of each tree in whole answers, the root included
    bytes_per_sec: float | None = None  # the device's copy bandwidth, if known

    @property
    def shape_name(self) -> str | None:
        """The name of the shape, if there is one."""
        return None if self.shape is None else self.shape.name

    def as_message(self) -> dict[str, Any]:
        """Return this ready for JSON."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> "GpuJob":
        """Return the job of `as_message`."""
        shape = message["shape"]
        return cls(**{**message, "shape": None if shape is None else Shape(**shape)})
