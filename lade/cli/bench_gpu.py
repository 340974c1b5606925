"""`lade bench gpu`: run the stages, and print and save each as soon as it is done."""

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from lade.cli.bench import check_writable, print_sheet, say_written
from lade.cli.demo_prompts import DEMO_PROMPTS
from lade.cli.loading import console, load_with_progress
from lade.errors import LadeError
from lade.models.loading import LoadedModel

if TYPE_CHECKING:
    import torch

    from lade.bench.gpu.shapes import Shape
    from lade.bench.gpu.stage import Stage


def run(
    shape_names: str,
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
    from lade.bench.gpu.report import as_json, table
    from lade.bench.gpu.run import Plan, run_stages
    from lade.bench.prompts import Prompt
    from lade.bench.report import prompts_fingerprint, write_json

    shapes = choose_shapes(shape_names)
    device = choose_device(device_name, shapes)
    check_writable(json_path)
    recorded = RECORDED if traces_path is None else recorded_in(traces_path, num_nodes - 1)
    status = console.status("")

    def load_real() -> LoadedModel:
        status.stop()  # only one live display at a time on a terminal
        try:
            return load_with_progress(None, str(device), None, None)
        finally:
            status.start()

    prompts = [Prompt(title, title, text) for title, text in DEMO_PROMPTS]
    plan = Plan(
        device=device,
        shapes=shapes,
        minutes=minutes,
        recorded=recorded,
        mat=mat,
        num_nodes=num_nodes,
        load_real=load_real,
        real_prompts=prompts,
    )
    for shape in shapes:  # refuse an unreachable MAT before any work is done
        plan.counts_for(shape)
    settings = {
        "device": device.type,
        "shapes": [shape.name for shape in shapes],
        "minutes": minutes,
        "mat": mat,
        "num_nodes": num_nodes,
        "traces": None if traces_path is None else prompts_fingerprint(traces_path),
        "recorded_steps_by_accepted_tokens": list(recorded),
    }
    stages: list[Stage] = []
    start = perf_counter()

    def save(is_done: bool) -> None:
        if json_path is not None:
            took: dict[str, Any] = {"sec": round(perf_counter() - start, 1), "complete": is_done}
            write_json(json_path, as_json(stages, settings | took))

    is_done = False
    try:
        status.start()
        for stage in run_stages(plan, stages, lambda what: status.update(f"[dim]{escape(what)}")):
            status.stop()
            print_sheet(table(stage))
            if stage.traceback:
                console.print(stage.traceback, markup=False, soft_wrap=True)
            save(is_done=False)
            status.start()
        is_done = True
    finally:
        status.stop()
        save(is_done)
        if json_path is not None:
            say_written([json_path])
    failed = [f"{stage.title}: {stage.failure}" for stage in stages if stage.failure is not None]
    if failed:
        raise LadeError(f"expected every stage to run, {len(failed)} failed: {'; '.join(failed)}")


def choose_shapes(text: str) -> "list[Shape]":
    """Return the shapes in a comma-separated list.

    Raises:
        ValueError: a shape is unknown or named twice, or there is none.
    """
    from lade.bench.gpu.shapes import SHAPES

    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names) or not set(names) <= set(SHAPES):
        raise ValueError(
            f"expected --shapes to be different ones of {', '.join(SHAPES)}, got {text!r}"
        )
    return [SHAPES[name] for name in names]


def choose_device(name: str | None, shapes: "Sequence[Shape]") -> "torch.device":
    """Return the device to measure: CUDA, or the CPU if only the tiny shape is to run.

    Raises:
        ValueError: there is no such device, or it is unsuitable.
    """
    from lade.models.loading import device_of

    device: torch.device = device_of(name)
    if device.type == "cuda":
        return device
    if name is None:
        raise ValueError(
            "expected a CUDA device, got none on this machine; to try the command out without one, "
            "pass --device cpu --shapes tiny"
        )
    if device.type != "cpu":
        raise ValueError(f"expected a CUDA device or cpu, got {name!r}")
    if any(shape.name != "tiny" for shape in shapes):
        raise ValueError("expected --shapes tiny with --device cpu: real shapes would take hours")
    return device
