"""Process that runs one stage: `python -m benchmarks.gpu.work`.

It reads a `GpuJob` as JSON from standard input and writes a line of JSON to standard output
whenever something is begun or found, so that whatever ends it, what it found is known. An error on
a GPU leaves a process unable to use it, hence one process for each stage. Next file: `process.py`,
which starts such processes.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks.process import DONE, end_with_parent

if TYPE_CHECKING:
    from benchmarks.gpu.job import GpuJob
    from benchmarks.gpu.shapes import KnownModel
    from benchmarks.gpu.stage import Stage

_INTERRUPTED = 130  # as in shells
_PACKAGE = Path(__file__).parents[2]


def main() -> None:
    """Do the job described on standard input."""
    start = perf_counter()
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not come between the lines
    line = sys.stdin.readline()
    end_with_parent()
    # Only now, as it takes seconds.
    from benchmarks.gpu.job import GpuJob
    from benchmarks.gpu.stage import Stage

    def tell(stage: Stage) -> None:
        print(json.dumps(stage.as_message()), file=channel, flush=True)

    job = GpuJob.from_message(json.loads(line))
    stage = Stage(job.stage, job.shape_name, start + job.sec, tell)
    _note_warnings(stage)
    try:
        stage.run(lambda stage: work(job, stage))
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    print(json.dumps(DONE), file=channel, flush=True)


def work(job: "GpuJob", stage: "Stage") -> None:
    """Run the stage of a job."""
    import torch

    device = torch.device(job.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if job.stage == "bandwidth":
        from benchmarks.gpu.bandwidth import measure_bandwidth

        measure_bandwidth(device, stage)
    elif job.stage == "attention":
        from benchmarks.gpu.attention import measure_attention

        measure_attention(device, stage)
    elif job.stage == "host":
        from benchmarks.gpu.host import measure_host

        measure_host(device, stage)
    else:
        _measure_shape(job, device, stage)


def _measure_shape(job: "GpuJob", device: Any, stage: "Stage") -> None:
    """Run a stage that needs a model of the job's shape."""
    from benchmarks.gpu.answers import (
        BATCH_SIZES,
        SAMPLED,
        Replayed,
        measure_answers,
        measure_side_by_side,
    )
    from benchmarks.gpu.shapes import DTYPE, make_model
    from benchmarks.gpu.steps import measure_steps

    shape = job.shape
    assert shape is not None

    def make() -> "KnownModel":
        stage.say(f"{stage.title}: making the model")
        start = perf_counter()
        known = make_model(shape, device)
        stage.model = {
            "num_parameters": known.model.num_parameters(),
            "dtype": str(DTYPE).removeprefix("torch."),
            "weight_bytes_of_step": known.weight_bytes,
            "cached_bytes_of_token": known.bytes_per_cached_token,
            "making_sec": perf_counter() - start,
        }
        return known

    replayed = Replayed(job.counts, job.num_nodes)
    if job.stage == "steps":
        measure_steps(make(), shape, job.bytes_per_sec, stage)
    elif job.stage == "sampled":
        measure_side_by_side(make(), shape, replayed, stage, SAMPLED)
    elif job.stage == "batches":
        measure_side_by_side(make(), shape, replayed, stage, nums_rows=BATCH_SIZES)
    else:
        measure_answers(make(), shape, job.stage, replayed, stage)


def _note_warnings(stage: "Stage") -> None:
    """Have the stage note each of lade's own warnings; others are printed."""
    usual: Any = warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, *more: Any, **named: Any
    ) -> None:
        is_ours = category.__module__ == "lade.errors" or _PACKAGE in Path(filename).parents
        if not is_ours:
            usual(message, category, filename, *more, **named)
        elif str(message) not in stage.warnings:
            stage.warnings.append(str(message))

    warnings.showwarning = show


if __name__ == "__main__":
    main()
