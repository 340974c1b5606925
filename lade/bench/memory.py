"""Peak memory of methods, each run in a fresh process so that no peak hides another.

The headline is the peak of the whole process while it generates, since that is what a machine must
have; the growth over the loaded and warmed-up model is shown beside it. Loading a model may take
more than generating with it and would hide every difference, so the peak is reset after loading
where the system allows it (Linux, CUDA); the peak since the process began is in the JSON. The C
allocator is told to return freed memory at once: by default glibc keeps some of it, or not, by
chance (the same run of plain `generate` peaked at 1.4 or at 2.0 GiB).
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from statistics import median
from typing import Any, NamedTuple

from rich.table import Table

from lade.bench.peak import Peak, Work
from lade.errors import LadeError

_MIB = 2**20
# For glibc; both fixed, so that neither grows with what was freed. Other systems ignore them.
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


class MemoryRun(NamedTuple):
    """One process and its peak memory."""

    method: str
    num_repeat: int
    peak: Peak


class MemorySummary(NamedTuple):
    """Medians of one method over its repeats, in bytes; their ratios are None without plain."""

    peak_bytes: int
    peak_ratio: float | None  # to plain's
    growth_bytes: int
    growth_ratio: float | None
    resident_bytes: int
    life_peak_bytes: int
    num_tokens: int  # emitted in one repeat


def measure_in_process(work: Work, on_batch: Callable[[], None]) -> Peak:
    """Do the work in a fresh process and wait for it; an interruption kills it.

    Raises:
        LadeError: the process failed.
    """
    # It imports what we import, from our search path, and no modules of the working folder.
    search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
        subprocess.Popen(
            [sys.executable, "-P", "-m", "lade.bench.peak"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            env={**os.environ, **_GIVE_BACK, "PYTHONPATH": search_path},
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        message: dict[str, Any] = {}
        try:
            with suppress(BrokenPipeError):  # it failed before reading; reported below
                process.stdin.write(work.as_json() + "\n")
                process.stdin.close()
            for line in process.stdout:
                message = json.loads(line)
                if "batch" in message:
                    on_batch()
        except BaseException:  # above all Ctrl-C: leave no process running
            process.kill()
            raise
        finally:
            process.wait()
        if "peak" in message:
            return Peak(**message["peak"])
        errors.seek(0)
        last_line = (errors.read().strip().splitlines() or [_ending(process.returncode)])[-1]
    raise LadeError(f"measuring {work.method} failed: {message.get('error', last_line)}")


def summarise(runs: Sequence[MemoryRun], method: str) -> MemorySummary:
    """Summarise the repeats of one method and compare them with plain's."""

    def typical(name: str, of: str) -> int:
        return int(median(getattr(run.peak, name) for run in runs if run.method == of))

    def ratio(name: str) -> float | None:
        if not any(run.method == "plain" for run in runs):
            return None
        of_plain = typical(name, "plain")
        return typical(name, method) / of_plain if of_plain > 0 else None

    return MemorySummary(
        peak_bytes=typical("peak_bytes", method),
        peak_ratio=ratio("peak_bytes"),
        growth_bytes=typical("growth_bytes", method),
        growth_ratio=ratio("growth_bytes"),
        resident_bytes=typical("resident_bytes", method),
        life_peak_bytes=typical("life_peak_bytes", method),
        num_tokens=typical("num_tokens", method),
    )


def table(runs: Sequence[MemoryRun], methods: Sequence[str], title: str) -> Table:
    """Return a table of the methods that have run."""
    made = Table(title=title, title_justify="left", caption_justify="left")
    if any(run.peak.includes_loading for run in runs):
        made.caption = "This system cannot forget a peak: that of loading the model is included."
    made.add_column("method")
    # No ratio of the growth: plain's may be a megabyte or two, and a ratio to that is noise.
    for heading in ("peak, MiB", "of plain's", "over loaded model, MiB", "tokens"):
        made.add_column(heading, justify="right")
    for method in methods:
        if any(run.method == method for run in runs):
            summary = summarise(runs, method)
            made.add_row(
                method,
                f"{summary.peak_bytes / _MIB:.0f}",
                "" if summary.peak_ratio is None else f"{summary.peak_ratio:.2f}x",
                f"{summary.growth_bytes / _MIB:.0f}",
                str(summary.num_tokens),
            )
    return made


def as_json(
    runs: Sequence[MemoryRun], methods: Sequence[str], settings: dict[str, Any]
) -> dict[str, Any]:
    """Return all measurements, ready for JSON."""
    from lade.bench.environment import environment

    done = [method for method in methods if any(run.method == method for run in runs)]
    return {
        "environment": environment(),
        "settings": settings,
        "summary": {method: _rounded(summarise(runs, method)) for method in done},
        "runs": [
            {
                "method": run.method,
                "repeat": run.num_repeat,
                **asdict(run.peak),
                "growth_bytes": run.peak.growth_bytes,
            }
            for run in runs
        ],
    }


def _rounded(summary: MemorySummary) -> dict[str, Any]:
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in summary._asdict().items()
    }


def _ending(returncode: int) -> str:
    if returncode < 0:
        return f"the process was ended by signal {-returncode}; there may be too little memory"
    return f"the process ended with status {returncode}"
