"""Peak memory of methods, each run in a fresh process so that no peak hides another.

The headline is the peak of the whole process while it generates, since that is what a machine must
have; the growth over the loaded and warmed-up model is shown beside it. Loading a model may take
more than generating with it and would hide every difference, so the peak is reset after loading
where the system allows it (Linux, CUDA). The C allocator is told to return freed memory at once: by
default glibc keeps some of it, or not, by chance (the same run of plain `generate` peaked at 1.4 or
at 2.0 GiB).

A process is `python -m benchmarks.memory`, with a `Work` as JSON on its standard input. When it
measures a baseline it imports neither numba nor the pool: their memory counts against lade alone.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.settings import BenchSettings
from lade.errors import LadeError

if TYPE_CHECKING:
    from lade.bench.tables import Sheet
    from lade.cli.bench import Chosen
    from lade.cli.results import ResultFiles

_MIB = 2**20
# For glibc; both fixed, so that neither grows with what was freed. Other systems ignore them.
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


@dataclass(frozen=True)
class Work:
    """What to generate, in plain values that can be sent as JSON."""

    method: str
    model: str | None  # as for `lade.models.load`
    device: str
    dtype: str
    threads: int | None  # None: torch decides
    texts: Sequence[str]  # prompts
    settings: BenchSettings


class Peak(NamedTuple):
    """Memory of a process, in bytes.

    On a CPU, it is all resident memory of the process: weights, interpreter, libraries and what
    they allocated. On a GPU, it is what torch has allocated there.
    """

    method: str
    peak_bytes: int  # while answering the prompts, weights and all included
    growth_bytes: int  # of that, over the model loaded and warmed up on one short sequence
    life_peak_bytes: int  # since the process began: loading may need more than generating
    includes_loading: bool  # whether `peak_bytes` includes loading, as the peak could not be reset
    num_tokens: int  # emitted
    threads: int


def measure_in_process(work: Work) -> Peak:
    """Do the work in a fresh process and wait for it; an interruption kills it.

    Raises:
        LadeError: the process failed.
    """
    # It imports what we import, from our search path, and no modules of the working folder.
    search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory"],
        input=json.dumps(asdict(work)),
        capture_output=True,
        text=True,
        env={**os.environ, **_GIVE_BACK, "PYTHONPATH": search_path},
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        raise LadeError(f"measuring {work.method} failed: {lines[-1]}")
    return Peak(**json.loads(done.stdout.splitlines()[-1]))


def measure(work: Work) -> Peak:
    """Load the model, warm up, answer all prompts and return the peak memory."""
    import torch
    from transformers.utils import logging

    from benchmarks.batches import encode_batch, find_pad_token_id, in_batches, warm_up
    from lade.bench.baselines import BASELINES, Given
    from lade.models.loading import load

    logging.disable_progress_bar()
    if work.threads is not None:
        torch.set_num_threads(work.threads)
    loaded = load(work.model, device=work.device, dtype=work.dtype)
    memory = _Memory(loaded.model.device)
    if (info := BASELINES.get(work.method)) is None:
        from benchmarks.methods import METHODS

        info = METHODS[work.method]
    # With one row: what larger batches need on top must not be allocated before measuring begins.
    one_row = replace(work.settings, batch_size=1, num_return_sequences=1)
    warm_up(loaded, info.make(Given()), one_row)
    gc.collect()
    life_peak = memory.peak()
    forgot = memory.forget_peak()
    resident = memory.now()
    pad_token_id = find_pad_token_id(loaded)
    options = work.settings.options(pad_token_id)
    method = info.make(Given())
    num_tokens = 0
    for number, texts in enumerate(in_batches(work.texts, work.settings.batch_size)):
        inputs = encode_batch(loaded, texts, pad_token_id)
        torch.manual_seed(work.settings.seed + number)
        num_tokens += method(loaded.model, inputs, options).num_tokens
    peak = memory.peak()
    return Peak(
        work.method,
        peak_bytes=peak,
        growth_bytes=peak - resident,
        life_peak_bytes=max(life_peak, peak),
        includes_loading=not forgot,
        num_tokens=num_tokens,
        threads=torch.get_num_threads(),
    )


class _Memory:
    """Peak and current memory on one device."""

    def __init__(self, device: Any) -> None:
        import torch

        self._device = device
        self._cuda = torch.cuda if device.type == "cuda" else None

    def now(self) -> int:
        """Return the bytes held now."""
        return _resident("VmRSS") if self._cuda is None else self._cuda.memory_allocated()

    def peak(self) -> int:
        """Return the most bytes held at once since the process began or the peak was reset."""
        return _resident("VmHWM") if self._cuda is None else self._cuda.max_memory_allocated()

    def forget_peak(self) -> bool:
        """Reset the peak to what is held now; return False if the system cannot."""
        if self._cuda is not None:
            self._cuda.reset_peak_memory_stats()
            return True
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        except OSError:
            return False
        return True


def _resident(field: str) -> int:
    """Return resident memory of this process in bytes: current (VmRSS) or peak (VmHWM).

    Linux counts both for this program alone. `getrusage` does not: its peak starts at that of the
    process that started this one. On other systems, it is all there is, for both.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# --- the command ----------------------------------------------------------------------------


def summarise(peaks: Sequence[Peak], method: str) -> dict[str, Any]:
    """Return the medians of one method over its repeats, and its peak over plain's."""

    def typical(name: str, of: str) -> int:
        return int(median(getattr(peak, name) for peak in peaks if peak.method == of))

    names = ("peak_bytes", "growth_bytes", "life_peak_bytes", "num_tokens")
    summary: dict[str, Any] = {name: typical(name, method) for name in names}
    has_plain = any(peak.method == "plain" for peak in peaks)
    ratio = round(summary["peak_bytes"] / typical("peak_bytes", "plain"), 4) if has_plain else None
    return {**summary, "peak_ratio": ratio}


def table(summaries: dict[str, dict[str, Any]], title: str, caption: str | None) -> "Sheet":
    """Return a table of the methods that have run."""
    from lade.bench.report import speedup_text
    from lade.bench.tables import Sheet

    # No ratio of the growth: plain's may be a megabyte or two, and a ratio to that is noise.
    headings = ("method", "peak, MiB", "of plain's", "over loaded model, MiB", "tokens")
    rows = [
        (
            method,
            f"{each['peak_bytes'] / _MIB:.0f}",
            speedup_text(each["peak_ratio"]),
            f"{each['growth_bytes'] / _MIB:.0f}",
            str(each["num_tokens"]),
        )
        for method, each in summaries.items()
    ]
    return Sheet(title, headings, 1, [rows], caption)


def run(
    work: Work, chosen: "Chosen", methods: Sequence[str], num_repeats: int, files: "ResultFiles"
) -> None:
    """Measure methods in turn; print and write the results, even after an interruption."""
    from lade.bench.environment import environment
    from lade.cli.results import keeping, progress_bar
    from lade.models.embedded import DEFAULT_MODEL

    peaks: list[Peak] = []
    with keeping(peaks) as stopped, progress_bar() as bars:
        task = bars.add_task("", total=len(methods) * num_repeats)
        for num_repeat in range(num_repeats):
            first = num_repeat % len(methods)
            for name in (*methods[first:], *methods[:first]):
                bars.update(task, description=f"{name}, repeat {num_repeat + 1}")
                peaks.append(measure_in_process(replace(work, method=name)))
                bars.advance(task)
    title = f"Peak memory of a process on {work.device} in {work.dtype}, {work.settings.describe()}"
    caption = "This system cannot forget a peak: that of loading the model is included."
    done = {peak.method for peak in peaks}
    summaries = {name: summarise(peaks, name) for name in methods if name in done}
    stopped.tell(f"stopped after {len(peaks)} of {len(methods) * num_repeats} processes")
    settings = {
        "model": Path(work.model or DEFAULT_MODEL).name,
        "dtype": work.dtype,
        "device": work.device,
        "threads": peaks[0].threads,
        **asdict(work.settings),
        "prompts": chosen.described,
        "repeats": num_repeats,
        "interrupted": stopped.by is not None,
    }
    content = {"environment": environment(), "settings": settings, "summary": summaries}
    sheet = table(summaries, title, caption if peaks[0].includes_loading else None)
    files.show({**content, "runs": [peak._asdict() for peak in peaks]}, sheet)
    stopped.pass_on()


if __name__ == "__main__":
    values = json.loads(sys.stdin.read())
    asked = Work(**{**values, "settings": BenchSettings(**values["settings"])})
    print(json.dumps(measure(asked)._asdict()))
