"""The command `gpu`: run the stages, and print and save each as soon as it is done."""

from collections.abc import Sequence
from time import perf_counter

import torch
from rich.markup import escape

from benchmarks.gpu.acceptance import MAT
from benchmarks.gpu.report import as_json, compare, table, table_of_answers
from benchmarks.gpu.run import NUM_NODES, STAGES, GpuPlan, run_stages
from benchmarks.gpu.shapes import ON_CPU, SHAPES, Shape
from benchmarks.gpu.stage import Stage
from benchmarks.methods import named
from lade.bench.report import write_json
from lade.cli.loading import console
from lade.cli.results import ResultFiles, print_sheet, say_written
from lade.errors import LadeError


def run(
    shape_names: str,
    stage_names: str | None,
    device_name: str | None,
    minutes: float,
    files: ResultFiles,
) -> None:
    """Run all stages; print and save each as it is done, and save after an interruption.

    Raises:
        ValueError: the machine or the options are unsuitable; nothing was measured.
        LadeError: a stage failed; the others were run.
    """
    shapes = [SHAPES[name] for name in named(shape_names, [*SHAPES])]
    names = [name for name in STAGES if name in named(stage_names, STAGES)]
    device = choose_device(device_name, shapes)
    plan = GpuPlan(device, shapes, minutes, names)
    settings = {
        "device": str(device),
        "shapes": [shape.name for shape in shapes],
        "stages": names,
        "minutes": minutes,
        "mat": round(MAT, 2),
        "num_nodes": NUM_NODES,
    }
    stages: list[Stage] = []
    status = console.status("")
    start = perf_counter()

    def save(is_done: bool) -> None:
        compare(stages)
        if files.json is not None:
            took = {"sec": round(perf_counter() - start, 1), "complete": is_done}
            write_json(files.json, as_json(stages, settings | took))

    is_done, num_shown = False, 0
    try:
        status.start()
        tell = lambda stage: status.update(f"[dim]{escape(stage.doing)}")  # noqa: E731
        for stage in run_stages(plan, stages, tell):
            status.stop()
            save(is_done=False)
            print_sheet(table(stage))
            num_shown += 1
            if stage.traceback:
                console.print(stage.traceback, markup=False, soft_wrap=True)
            status.start()
        is_done = True
    finally:
        status.stop()
        save(is_done)
        for stage in stages[num_shown:]:  # interrupted
            print_sheet(table(stage))
        for shape in shapes:
            if (of_shape := table_of_answers(stages, shape.name)) is not None:
                print_sheet(of_shape)
        if files.json is not None:
            say_written([files.json])
    failed = [f"{stage.title}: {stage.failure}" for stage in stages if stage.failure is not None]
    if failed:
        raise LadeError(f"expected every stage to run, {len(failed)} failed: {'; '.join(failed)}")


def choose_device(name: str | None, shapes: Sequence[Shape]) -> torch.device:
    """Return the device to measure: CUDA, or the CPU if only small shapes are to run.

    Nothing is allocated on it: its memory is for the processes that measure.

    Raises:
        ValueError: there is no such device, or it is unsuitable.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None and num_gpus == 0:
        raise ValueError(
            "expected a CUDA device, got none on this machine; to try the command out without one, "
            "pass --device cpu --shapes tiny"
        )
    try:
        device = torch.device(name or "cuda")
    except RuntimeError as error:
        raise ValueError(f"expected a CUDA device or cpu, got {name!r}") from error
    if device.type == "cuda":
        index = device.index or 0
        if index >= num_gpus:
            raise ValueError(f"expected one of {num_gpus} CUDA devices, got {name!r}")
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise ValueError(f"expected a CUDA device or cpu, got {name!r}")
    if any(shape.name not in ON_CPU for shape in shapes):
        names = " or ".join(ON_CPU)
        raise ValueError(f"expected --shapes {names} with --device cpu: others would take hours")
    return device
