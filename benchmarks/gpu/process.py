"""A stage in a process of its own: a crash becomes its failure.

Next file: `run.py`.
"""

import sys
from collections.abc import Sequence
from contextlib import closing
from time import perf_counter

from benchmarks.gpu.job import GpuJob
from benchmarks.gpu.stage import Stage
from benchmarks.process import ProcessFailedError, last_words, told_by

INTERRUPTED = "it was interrupted"

# The interpreter says where it was when it crashes.
_COMMAND = (sys.executable, "-P", "-X", "faulthandler", "-m", "benchmarks.gpu.work")
_MAX_PRINTED = 6000  # characters of what a crashed process has said


def run_in_process(
    stage: Stage, job: GpuJob, kill_at: float, command: Sequence[str] = _COMMAND
) -> None:
    """Run a stage in a new process; a crash becomes the stage's failure, with its last words.

    Raises:
        KeyboardInterrupt: the process was ended, too; what it had found is in the stage.
    """
    start = perf_counter()
    try:
        with closing(told_by(command, job.as_message(), kill_at=kill_at)) as messages:
            for message in messages:
                stage.hear(message)
    except KeyboardInterrupt:
        stage.left_out["the rest"] = INTERRUPTED
        raise
    except ProcessFailedError as error:
        if stage.failure is None:
            sec = perf_counter() - start
            doing = f"in {stage.doing!r}" if stage.doing else "before it began"
            stage.failure = f"its process {error.how} after {sec:.0f} s, {doing}"
            stage.last_words = last_words(error.said)
            stage.traceback = error.said[-_MAX_PRINTED:]
    finally:
        stage.sec = perf_counter() - start
