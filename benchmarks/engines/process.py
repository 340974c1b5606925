"""An engine in a process of its own: started, listened to, ended.

Next file: `agreement.py`.
"""

import os
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines.job import EngineJob
from benchmarks.process import ProcessFailedError, told_by
from lade.errors import LadeError

_COMMAND = (sys.executable, "-P", "-m", "benchmarks.engines.worker")

# What vLLM's builds for CPUs ask for; other builds ignore these. Whoever sets them is obeyed.
_CPU_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_OPENMP = "libiomp5.so"  # vLLM warns of large losses where it is not loaded first


def run_job(job: EngineJob, threads: int, command: Sequence[str] = _COMMAND) -> Generator[Any]:
    """Start an engine, yield what its process tells, and end it; also when it is left early.

    Raises:
        LadeError: the process ended before it was done; the message has its last words.
    """
    try:
        yield from told_by(command, job.as_message(), variables=environment_of(os.environ, threads))
    except ProcessFailedError as error:
        raise LadeError(f"vLLM's process {error}") from None


def environment_of(variables: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the environment of an engine's process."""
    environment = {
        **_CPU_SETTINGS,
        **variables,
        # We step the engine ourselves; results must not wait for a server that counts users.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    openmp = Path(sys.prefix) / "lib" / _OPENMP
    if openmp.is_file():
        environment.setdefault("LD_PRELOAD", str(openmp))
    return environment
