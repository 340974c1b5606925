"""Schemas compiled in a process of its own, which may take only so much time and memory.

A schema of a few bytes may take minutes or gigabytes, and a thread cannot be stopped. The system
ends the process where one takes too much, and the next schema begins another.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

# Of a schema. With 49,000 tokens, a text of at most 200 characters takes 1.8 s, 300 properties take
# 1.7, and all of it twice as long on a busy machine.
CPU_SEC = 5.0
_MEMORY_BYTES = 2**30  # beyond what the process has from the start
_MAX_CHARS = 2**26  # of a grammar, which the server reads: 300 properties make half of that
_WALL_SEC = 60.0  # a busy machine may take so long for this work
_NICENESS = 5  # the model, which all wait for, goes before


class SchemaError(ValueError):
    """A schema that cannot be compiled, or not in time."""


class CompilerProcess:
    """Compiles one schema after the other, for tokens as xgrammar writes them as JSON.

    Its methods may be called from threads.
    """

    def __init__(self, tokens: str) -> None:
        self._tokens = tokens
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, schema: str) -> str:
        """Return a grammar as JSON.

        Raises:
            SchemaError: the schema is none that xgrammar knows, or takes too long.
        """
        with self._lock:
            process = self._started()
            timer = threading.Timer(_WALL_SEC, process.kill)
            timer.start()
            try:
                answer = _exchanged(process, {"schema": schema})
            except OSError:  # it was ended
                self.close()
                answer = {"error": f"it takes more than {CPU_SEC:g} s to compile"}
            finally:
                timer.cancel()
        if "error" in answer:
            raise SchemaError(answer["error"])
        return answer["grammar"]

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # xgrammar's warnings tell what was asked for
            )
            _exchanged(self._process, {"tokens": self._tokens})
        return self._process


def _exchanged(process: "subprocess.Popen[bytes]", message: dict[str, str]) -> dict[str, str]:
    """Send a line, and return the one that answers it.

    Raises:
        OSError: the process has ended.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line.endswith(b"\n"):
        raise BrokenPipeError("the compiler has ended")
    answer: dict[str, str] = json.loads(line)
    return answer


def _serve() -> None:
    """Answer each line of standard input with one."""
    import xgrammar

    tokens = xgrammar.TokenizerInfo.deserialize_json(json.loads(sys.stdin.readline())["tokens"])
    compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)
    _limit_memory()
    answer: dict[str, str] = {}
    while True:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        if not (line := sys.stdin.readline()):
            return
        _limit_time(CPU_SEC)
        answer = _compiled(compiler, json.loads(line)["schema"])
        _limit_time(0)


def _compiled(compiler: Any, schema: str) -> dict[str, str]:
    """Return the grammar, or what is wrong."""
    try:
        # Without this, a model may write blanks until its answer is full.
        grammar = compiler.compile_json_schema(schema, any_whitespace=False).serialize_json()
    except Exception as raised:  # of its C++ code, or text that it cannot take
        return {"error": str(raised)[:300]}
    if len(grammar) > _MAX_CHARS:
        return {"error": f"its grammar has more than {_MAX_CHARS:,} characters"}
    return {"grammar": grammar}


def _limit_memory() -> None:
    """Have the system refuse memory beyond what there is, and put this process behind others."""
    if sys.platform != "win32":
        import resource

        os.nice(_NICENESS)
        pages = Path("/proc/self/statm")  # of Linux
        if pages.exists():
            most = int(pages.read_text().split()[0]) * resource.getpagesize() + _MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_time(sec: float) -> None:
    """Have the system end this process after so much processor time; 0 is for never."""
    if sys.platform != "win32":
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, sec)


if __name__ == "__main__":
    _serve()
