"""An engine in a process of its own: started, listened to, ended.

Next file: `agreement.py`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from lade.bench.engines.job import Job
from lade.errors import LadeError

_COMMAND = (sys.executable, "-P", "-m", "lade.bench.engines.worker")
_GRACE_SEC = 20.0  # for a process to end by itself, once it is done
_NUM_LAST_WORDS = 3
_MAX_LENGTH = 300  # of each of these lines

# What vLLM's builds for CPUs ask for; other builds ignore these. Whoever sets them is obeyed.
_CPU_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_OPENMP = "libiomp5.so"  # vLLM warns of large losses where it is not loaded first


def run_job(
    job: Job, threads: int, command: Sequence[str] = _COMMAND
) -> Iterator[Mapping[str, Any]]:
    """Start an engine, yield what its process tells, and end it; also when it is left early.

    Args:
        job: what it is to do.
        threads: of a CPU.
        command: of a process that tells what `worker.py` tells.

    Raises:
        LadeError: the process ended before it was done; the message has its last words.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            encoding="utf-8",
            env=environment_of(os.environ, threads),
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # it has crashed already, which is told below
                process.stdin.write(json.dumps(job.as_message()) + "\n")
                process.stdin.flush()
            for line in process.stdout:
                message = json.loads(line)
                if message == {"done": True}:
                    break
                yield message
            else:
                raise LadeError(
                    f"vLLM's process ended with status {process.wait()}: {_last_words(said)}"
                )
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SEC)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()


def environment_of(variables: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the environment of an engine's process."""
    environment = {
        **_CPU_SETTINGS,
        **variables,
        # We step the engine ourselves; results must not wait for a server that counts users.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(threads),
        # It imports what we import, from our search path, and no modules of the working folder.
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    openmp = Path(sys.prefix) / "lib" / _OPENMP
    if openmp.is_file():
        environment.setdefault("LD_PRELOAD", str(openmp))
    return environment


def _last_words(said: IO[str]) -> str:
    """Return the last lines that a process wrote."""
    said.seek(0)
    lines = [line.strip() for line in said.read().splitlines() if line.strip()]
    return " / ".join(line[-_MAX_LENGTH:] for line in lines[-_NUM_LAST_WORDS:])
