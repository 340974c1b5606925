"""A process that is sent a job and tells what it finds, line by line, as JSON.

It writes `DONE` last, when it has ended in order; whatever else ends it is a failure. It leads a
group of its own, so that its children end with it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from threading import Thread, Timer
from time import perf_counter
from typing import Any

#: The last line of a process that has ended in order.
DONE = {"done": True}

_GRACE_SEC = 20.0  # for a process to end by itself, once it is done or interrupted
_NUM_LAST_WORDS = 6
_MAX_LENGTH = 300  # of each of these lines


class ProcessFailedError(Exception):
    """A process ended before it was done.

    Attributes:
        how: it ended.
        said: all that it wrote to standard error.
    """

    def __init__(self, how: str, said: str) -> None:
        super().__init__(f"{how}: {' / '.join(last_words(said))}")
        self.how, self.said = how, said


def told_by(
    command: Sequence[str],
    job: Mapping[str, Any],
    *,
    kill_at: float = float("inf"),
    variables: Mapping[str, str] | None = None,
) -> Generator[Any]:
    """Run a process and yield what it tells; it ends with this, also when that is left early.

    Raises:
        ProcessFailedError: it ended before it was done.
    """
    # It imports what we import, from our search path, and no modules of the working folder.
    search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            env={**(os.environ if variables is None else variables), "PYTHONPATH": search_path},
            start_new_session=True,  # to be ended together with its own children
        )
        assert process.stdin is not None
        assert process.stdout is not None
        killed: list[bool] = []
        timer = Timer(min(max(0.0, kill_at - perf_counter()), 1e6), _kill, (process, killed))
        timer.daemon = True
        timer.start()
        # Children may hold the pipe when it has ended itself.
        Thread(target=_kill_rest, args=(process,), daemon=True).start()
        is_done = False
        try:
            with suppress(BrokenPipeError):  # it has crashed already, which is told below
                process.stdin.write(json.dumps(job) + "\n")
                process.stdin.flush()
            for line in process.stdout:
                if line.endswith("\n"):  # the last one of a process that is killed may be cut short
                    message = json.loads(line)
                    is_done = is_done or message == DONE
                    if is_done:
                        break
                    yield message
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SEC)
        except (KeyboardInterrupt, GeneratorExit):
            _signal(process, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SEC)
            raise
        finally:
            timer.cancel()
            code = process.poll()  # by itself; that it idles when it is done is no failure
            _signal(process, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(BrokenPipeError):
                    pipe.close()
        if not is_done or (code and not killed):
            errors.seek(0)
            raise ProcessFailedError(_how(process.returncode, bool(killed)), errors.read())


def end_with_parent() -> None:
    """Have this process end, with its children, once standard input is closed."""

    def wait() -> None:
        # Without Python's buffer, whose lock the end of the interpreter would wait for.
        while os.read(0, 1):
            pass
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(130)

    Thread(target=wait, daemon=True).start()


def _kill(process: subprocess.Popen[str], killed: list[bool]) -> None:
    killed.append(True)
    _signal(process, signal.SIGKILL)


def _kill_rest(process: subprocess.Popen[str]) -> None:
    process.wait()
    _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # all have ended
        os.killpg(process.pid, number)


def _how(code: int, was_killed: bool) -> str:
    if was_killed:
        return "was killed past its time"
    if code < 0:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with status {code}" if code else "ended too early"


def last_words(said: str) -> list[str]:
    """Return the lines that tell of a crash, without folders: results are published.

    That is what Python says of a fatal error and where it was, else the last lines.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Extension modules:")]
    fatal = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]
    told = lines[fatal[-1] :][:_NUM_LAST_WORDS] if fatal else lines[-_NUM_LAST_WORDS:]
    folders = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[/\\][\w.+@~-]+)*[/\\](?=[\w.])")
    return [folders.sub("", line)[:_MAX_LENGTH] for line in told]
