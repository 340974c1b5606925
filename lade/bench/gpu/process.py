"""A stage in a process of its own: started, listened to, ended in time, its crash told.

Next file: `run.py`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter
from typing import IO

from lade.bench.gpu.job import Job
from lade.bench.gpu.stage import Stage
from lade.bench.gpu.work import DONE

INTERRUPTED = "it was interrupted"

# The interpreter says where it was when it crashes.
_COMMAND = (sys.executable, "-P", "-X", "faulthandler", "-m", "lade.bench.gpu.work")
_POLL_SEC = 0.2
_GRACE_SEC = 5.0  # for a process to end by itself, once it is done or interrupted
_MAX_DYING_SEC = 20.0  # a process that waits for its driver may never end
_NUM_LAST_WORDS = 6
_MAX_LENGTH = 300  # of each of these lines
_MAX_PRINTED = 6000  # characters of what a crashed process has said


def run_in_process(
    stage: Stage, job: Job, kill_at: float, command: Sequence[str] = _COMMAND
) -> None:
    """Run a stage in a new process; a crash becomes the stage's failure, with its last words.

    Args:
        stage: receives what the process finds, as it is found.
        job: what the process is to do.
        kill_at: when the process is killed if it has not ended, by `perf_counter`.
        command: of the process, which takes a `Job` and tells what `work.py` tells.

    Raises:
        KeyboardInterrupt: the process was ended, too; what it had found is in the stage.
    """
    start = perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        child = _Child(command, errors)
        try:
            child.send(job.as_json())
            child.listen(stage, kill_at)
        except KeyboardInterrupt:
            child.interrupt(stage)
            stage.left_out["the rest"] = INTERRUPTED
            raise
        finally:
            was_killed = child.end()
            stage.sec = perf_counter() - start
        failure = child.failure(was_killed)
        if failure is not None and stage.failure is None:
            doing = f"in {stage.doing!r}" if stage.doing else "before it began"
            stage.failure = f"its process {failure} after {stage.sec:.0f} s, {doing}"
            errors.seek(0)
            said = errors.read()
            stage.last_words, stage.traceback = last_words(said), said[-_MAX_PRINTED:]


class _Child:
    """A process, and what it tells."""

    def __init__(self, command: Sequence[str], errors: IO[str]) -> None:
        # It imports what we import, from our search path, and no modules of the working folder.
        search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": search_path},
            start_new_session=True,  # to be ended together with its own children
        )
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        self._is_done = False

    def send(self, line: str) -> None:
        """Send a line; the process ends once we close the pipe, or end ourselves."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has crashed already, which is told later
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def listen(self, stage: Stage, kill_at: float) -> None:
        """Take over what the process tells until it ends, or must be ended."""
        while self._process.poll() is None and perf_counter() < kill_at:
            with suppress(Empty):
                self._hear(stage, self._lines.get(timeout=_POLL_SEC))
            if self._is_done:
                kill_at = min(kill_at, perf_counter() + _GRACE_SEC)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_GRACE_SEC)
        if self._process.poll() is not None:
            self._hear_rest(stage)

    def interrupt(self, stage: Stage) -> None:
        """Interrupt the process, and take over what it tells as it ends."""
        self._signal("SIGINT")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_SEC)
        self._hear_rest(stage)

    def end(self) -> bool:
        """End the process and its children; return whether it had to be killed."""
        was_killed = self._process.poll() is None
        self._signal("SIGKILL")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_MAX_DYING_SEC)
        self._reader.join(_POLL_SEC)
        for pipe in (self._process.stdin, self._process.stdout):
            # A reader that still waits has the pipe of a process that cannot be ended.
            if pipe is not None and not self._reader.is_alive():
                with suppress(BrokenPipeError):
                    pipe.close()
        return was_killed

    def failure(self, was_killed: bool) -> str | None:
        """Return how the process failed, or None; that it idles when done is no failure."""
        if was_killed:
            return None if self._is_done else "was killed past its time"
        code = self._process.returncode
        if code < 0:
            return f"was ended by signal {-code} ({_name_of(-code)})"
        if code > 0:
            return f"ended with status {code}"
        return None if self._is_done else "ended too early"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):  # the last one of a process that is killed may be cut short
                self._lines.put(line)

    def _hear(self, stage: Stage, line: str) -> None:
        message = json.loads(line)
        if message == DONE:
            self._is_done = True
        else:
            stage.hear(message)

    def _hear_rest(self, stage: Stage) -> None:
        self._signal("SIGKILL")  # its children may hold the pipe
        self._reader.join(_GRACE_SEC)
        while not self._lines.empty():
            self._hear(stage, self._lines.get())

    def _signal(self, name: str) -> None:
        """Send a signal to the process and its children; elsewhere than on POSIX, end it."""
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):  # all have ended
                os.killpg(self._process.pid, getattr(signal, name))
        else:
            self._process.kill()


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def last_words(said: str) -> list[str]:
    """Return the lines that tell of a crash, without folders: results are published.

    That is what Python says of a fatal error and where it was, else the last lines.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Extension modules:")]
    fatal = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]
    told = lines[fatal[-1] :][:_NUM_LAST_WORDS] if fatal else lines[-_NUM_LAST_WORDS:]
    return [_without_folders(line)[:_MAX_LENGTH] for line in told]


def _without_folders(line: str) -> str:
    return re.sub(r"(?<![\w.])(?:[A-Za-z]:)?(?:[/\\][\w.+@~-]+)*[/\\](?=[\w.])", "", line)
