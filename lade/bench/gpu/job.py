"""What a process is to measure, in plain values that can be sent as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lade.bench.gpu.shapes import Shape


@dataclass(frozen=True)
class Job:
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

    def as_json(self) -> str:
        """Return this as a line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Job":
        """Return the job that `as_json` wrote."""
        values = json.loads(line)
        shape = values["shape"]
        return cls(**{**values, "shape": None if shape is None else Shape(**shape)})
