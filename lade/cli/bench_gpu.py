"""`lade bench gpu`: run the stages, and print and save each as soon as it is done."""

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from lade.cli.bench import check_writable, print_sheet, say_written
from lade.cli.loading import console
from lade.errors import LadeError

if TYPE_CHECKING:
    import torch

    from lade.bench.gpu.shapes import Shape
    from lade.bench.gpu.stage import Stage


def run(
    shape_names: str,
    stage_names: str | None,
    device_name: str | None,
    minutes: float,
    mat: float,
    num_nodes: int,
    traces_path: Path | None,
    json_path: Path | None,
) -> None:
    """Run all stages; print and save each as it is done, and save after an interruption.

    Raises:
        ValueError: the machine or the options are unsuitable; nothing was measured.
        LadeError: a stage failed; the others were run.
    """
    from lade.bench.gpu.acceptance import RECORDED, recorded_in
    from lade.bench.gpu.report import as_json, compare, table, table_of_answers
    from lade.bench.gpu.run import Plan, run_stages
    from lade.bench.report import prompts_fingerprint, write_json

    shapes, names = choose_shapes(shape_names), choose_stages(stage_names)
    device = choose_device(device_name, shapes)
    check_writable(json_path)
    recorded = RECORDED if traces_path is None else recorded_in(traces_path, num_nodes - 1)
    plan = Plan(device, shapes, minutes, recorded, mat, num_nodes, names)
    for shape in shapes:  # refuse an unreachable MAT before any work is done
        plan.counts_for(shape)
    settings = {
        "device": str(device),
        "shapes": [shape.name for shape in shapes],
        "stages": list(names),
        "minutes": minutes,
        "mat": mat,
        "num_nodes": num_nodes,
        "traces": None if traces_path is None else prompts_fingerprint(traces_path),
        "recorded_steps_by_accepted_tokens": list(recorded),
    }
    stages: list[Stage] = []
    status = console.status("")
    start = perf_counter()

    def save(is_done: bool) -> None:
        compare(stages)
        if json_path is not None:
            took: dict[str, Any] = {"sec": round(perf_counter() - start, 1), "complete": is_done}
            write_json(json_path, as_json(stages, settings | took))

    is_done, num_shown = False, 0
    try:
        status.start()
        for stage in run_stages(plan, stages, lambda stage: status.update(_dim(stage.doing))):
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
            of_shape = table_of_answers(stages, shape.name)
            if of_shape is not None:
                print_sheet(of_shape)
        if json_path is not None:
            say_written([json_path])
    failed = [f"{stage.title}: {stage.failure}" for stage in stages if stage.failure is not None]
    if failed:
        raise LadeError(f"expected every stage to run, {len(failed)} failed: {'; '.join(failed)}")


def _dim(text: str) -> str:
    return f"[dim]{escape(text)}"


def choose_stages(text: str | None) -> Sequence[str]:
    """Return the stages in a comma-separated list, in the order they run; None for all.

    Raises:
        ValueError: a stage is unknown or named twice, or there is none.
    """
    from lade.bench.gpu.run import STAGES

    if text is None:
        return STAGES
    names = _names_in(text, "--stages", STAGES)
    return [name for name in STAGES if name in names]


def choose_shapes(text: str) -> "list[Shape]":
    """Return the shapes in a comma-separated list.

    Raises:
        ValueError: a shape is unknown or named twice, or there is none.
    """
    from lade.bench.gpu.shapes import SHAPES

    return [SHAPES[name] for name in _names_in(text, "--shapes", [*SHAPES])]


def _names_in(text: str, option: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names) or not set(names) <= set(known):
        raise ValueError(
            f"expected {option} to be different ones of {', '.join(known)}, got {text!r}"
        )
    return names


def choose_device(name: str | None, shapes: "Sequence[Shape]") -> "torch.device":
    """Return the device to measure: CUDA, or the CPU if only the tiny shape is to run.

    Nothing is allocated on it: its memory is for the processes that measure.

    Raises:
        ValueError: there is no such device, or it is unsuitable.
    """
    import torch

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
    if any(shape.name != "tiny" for shape in shapes):
        raise ValueError("expected --shapes tiny with --device cpu: real shapes would take hours")
    return device
