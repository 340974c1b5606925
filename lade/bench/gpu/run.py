"""Run all stages in turn, each with its share of the time.

Next file: `report.py`.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from lade.bench.gpu.acceptance import counts_at
from lade.bench.gpu.bandwidth import measure_bandwidth
from lade.bench.gpu.host import measure_host
from lade.bench.gpu.real import measure_real
from lade.bench.gpu.shapes import DTYPE, KnownModel, Shape, make_model
from lade.bench.gpu.speed import measure_speed
from lade.bench.gpu.stage import NO_MODEL, Stage
from lade.bench.gpu.steps import measure_steps
from lade.bench.prompts import Prompt
from lade.models.loading import LoadedModel
from lade.probing.report import probe

# Shares of the time; compiling and eager decoding take most. Unused time goes to later stages.
_WEIGHTS = {"bandwidth": 1, "host": 1, "model": 1, "steps": 3, "speed": 6, "real": 3}


@dataclass(frozen=True)
class Plan:
    """What to measure, and how."""

    device: torch.device
    shapes: Sequence[Shape]
    minutes: float
    recorded: Sequence[int]  # how many steps accepted 0, 1, 2, … draft tokens
    mat: float  # to adjust them to
    num_nodes: int  # of each tree in whole answers, the root included
    load_real: Callable[[], LoadedModel]
    real_prompts: Sequence[Prompt]
    real_max_new_tokens: int = 128

    def counts_for(self, shape: Shape) -> list[int]:
        """Return how many draft tokens successive steps of a whole answer accept.

        Raises:
            ValueError: the recorded counts cannot be adjusted to the MAT.
        """
        # One token is the prefill's.
        num_steps = max(1, round((shape.max_new_tokens - 1) / self.mat))
        return counts_at(self.recorded, self.mat, self.num_nodes - 1, num_steps)


def run_stages(plan: Plan, stages: list[Stage], say: Callable[[str], None]) -> Iterator[Stage]:
    """Run every stage and yield each when it is done.

    Args:
        plan: what to do.
        stages: receives each stage as it begins, so that an unfinished one is not lost either.
        say: called with what is being done.
    """
    clock = _Clock(plan)

    def begin(name: str, shape: Shape | None = None) -> Stage:
        shape_name = None if shape is None else shape.name
        stages.append(Stage(name, shape_name, clock.end_of(name), say))
        return stages[-1]

    bandwidth = begin("bandwidth")
    yield bandwidth.run(lambda stage: measure_bandwidth(plan.device, stage))
    bytes_per_sec = next((row["bytes_per_sec"] for row in bandwidth.rows), None)
    yield begin("host").run(lambda stage: measure_host(plan.device, stage))
    for shape in plan.shapes:
        yield from _stages_of(plan, shape, bytes_per_sec, begin)
        _free()
    yield begin("real").run(
        lambda stage: measure_real(
            plan.load_real, plan.real_prompts, plan.real_max_new_tokens, stage
        )
    )


def _stages_of(
    plan: Plan,
    shape: Shape,
    bytes_per_sec: float | None,
    begin: Callable[[str, Shape], Stage],
) -> Iterator[Stage]:
    """Run the stages of one shape, whose model is freed after them."""
    made: list[KnownModel] = []

    def make(stage: Stage) -> None:
        start = perf_counter()
        known = make_model(shape, plan.device)
        made.append(known)
        sec = perf_counter() - start
        stage.say(f"{stage.title}: checking how it verifies drafts")
        stage.rows.append(
            {
                "num_parameters": known.model.num_parameters(),
                "dtype": str(DTYPE).removeprefix("torch."),
                "weight_bytes_of_step": known.weight_bytes,
                "cached_bytes_of_token": known.bytes_per_cached_token,
                "making_sec": sec,
                "verification": probe(known.model).verification,
            }
        )

    def with_model(measure: Callable[[KnownModel, Stage], None]) -> Callable[[Stage], None]:
        def work(stage: Stage) -> None:
            if made:
                measure(made[0], stage)
            else:
                stage.left_out["all"] = NO_MODEL

        return work

    yield begin("model", shape).run(make)
    yield begin("steps", shape).run(
        with_model(lambda known, stage: measure_steps(known, shape, bytes_per_sec, stage))
    )
    yield begin("speed", shape).run(
        with_model(
            lambda known, stage: measure_speed(
                known, shape, plan.counts_for(shape), plan.num_nodes, stage
            )
        )
    )


def _free() -> None:
    """Free a model's memory, and that of what was compiled or captured for it."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU


@dataclass
class _Clock:
    """Allots the time to stages, in the order of the plan."""

    plan: Plan
    _start: float = field(default_factory=perf_counter)
    _num_parts: int = 0  # allotted so far

    def end_of(self, name: str) -> float:
        """Return when the stage that begins now must end, by `perf_counter`."""
        per_shape = sum(_WEIGHTS[name] for name in ("model", "steps", "speed"))
        whole = (
            _WEIGHTS["bandwidth"]
            + _WEIGHTS["host"]
            + per_shape * len(self.plan.shapes)
            + _WEIGHTS["real"]
        )
        self._num_parts += _WEIGHTS[name]
        return self._start + 60 * self.plan.minutes * self._num_parts / whole
