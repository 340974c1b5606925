"""Run all stages in turn, each in a process of its own and with its share of the time.

Next file: `report.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from benchmarks.gpu.acceptance import counts_for
from benchmarks.gpu.job import GpuJob
from benchmarks.gpu.process import run_in_process
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.stage import NO_TIME, Stage

#: By name, in the order they run: what cannot fail and what matters most comes first. Those in a
#: group of their own run for each shape before the next group does.
GROUPS: tuple[tuple[str, ...], ...] = (
    ("bandwidth", "attention", "host"),
    ("plain", "installed", "steps", "graphs"),
    ("static",),
    ("eager", "sampled", "batches"),
    ("compiled",),
)
STAGES = tuple(name for group in GROUPS for name in group)
_WITHOUT_SHAPE = GROUPS[0]

# Seconds that a stage may take, its start of some ten included. None has run on a GPU yet.
# What it leaves is for later ones; if there is more time than all may take, each gets more.
_NEEDED_SEC: Mapping[str, float] = {
    "bandwidth": 20,
    "attention": 30,
    "host": 45,  # compiles the pool's kernels where nobody has
    "plain": 35,
    "installed": 50,
    "steps": 75,
    "graphs": 60,
    "static": 110,
    "eager": 35,
    "sampled": 45,
    "batches": 100,
    "compiled": 150,
}
NUM_NODES = 32  # of each tree in whole answers, the root included
_LEAST_SEC = 10.0  # not worth a start
_GRACE_SEC = 12.0  # past its time, until a process is killed


@dataclass(frozen=True)
class GpuPlan:
    """What to measure, and how."""

    device: torch.device
    shapes: Sequence[Shape]
    minutes: float
    names: Sequence[str] = STAGES  # of stages to run

    def in_order(self) -> list[tuple[str, Shape | None]]:
        """Return all stages with their shapes, in the order they run."""
        return [
            (name, shape)
            for group in GROUPS
            for shape in ([None] if group[0] in _WITHOUT_SHAPE else self.shapes)
            for name in group
            if name in self.names
        ]


def run_stages(
    plan: GpuPlan,
    stages: list[Stage],
    tell: Callable[[Stage], None],
) -> Iterator[Stage]:
    """Run every stage and yield each when it is done."""
    bytes_per_sec: float | None = None
    clock = _Clock(plan, perf_counter())
    for name, shape in plan.in_order():
        sec = clock.next_share()
        stage = Stage(name, None if shape is None else shape.name, perf_counter() + sec, tell)
        stages.append(stage)
        stage.say(stage.title)
        if sec < _LEAST_SEC:
            stage.leave_out("all", NO_TIME)
        else:
            job = GpuJob(
                stage=name,
                device=str(plan.device),
                sec=sec,
                shape=shape,
                counts=[] if shape is None else counts_for(shape.max_new_tokens),
                num_nodes=NUM_NODES,
                bytes_per_sec=bytes_per_sec,
            )
            run_in_process(stage, job, stage.ends_at + _GRACE_SEC)
        if name == "bandwidth":
            bytes_per_sec = next((row["bytes_per_sec"] for row in stage.rows), None)
        yield stage


@dataclass
class _Clock:
    """Allots the time to stages, in the order of the plan."""

    plan: GpuPlan
    start: float  # by `perf_counter`
    _num_begun: int = 0

    def next_share(self) -> float:
        """Return how many seconds the next stage has."""
        left = self.start + 60 * self.plan.minutes - perf_counter()
        needed = [_NEEDED_SEC[name] for name, _ in self.plan.in_order()][self._num_begun :]
        self._num_begun += 1
        return max(0.0, min(left, needed[0] * max(1.0, left / sum(needed))))
