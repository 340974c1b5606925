"""`lade chat` as users run it, in a pseudo-terminal."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.lade.apps.chat.conftest import tokenizer_with
from tests.lade.tiny import tiny_model

_WAIT_SEC = 60  # for one thing to appear; most of it is importing torch on a busy machine
# The terminal of a new session, so that Ctrl-C reaches it as it does in a window.
_PROGRAM = (
    "import fcntl, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "from lade.apps.cli import main\n"
    "main()"
)
_ESCAPES = re.compile(r"\x1b\[[?\d;]*[A-Za-z]|\x1b[=>]|\x1b\][^\x07]*\x07")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved tiny model of bytes that would talk for a long time."""
    path = tmp_path_factory.mktemp("talker")
    tokenizer_with().save_pretrained(path)
    model = tiny_model(
        "llama", seed=2, dtype=torch.float32, vocab_size=256, max_position_embeddings=2**16
    )
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    return str(path)


class Window:
    """A program in a pseudo-terminal."""

    def __init__(self, arguments: list[str], home: Path) -> None:
        self.text = ""
        self._at = 0
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {
            **os.environ,
            "TERM": "xterm-256color",
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "XDG_DATA_HOME": str(home / "data"),
            "XDG_CACHE_HOME": str(home / "cache"),
        }
        environment.pop("NO_COLOR", None)
        environment.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            close_fds=True,
        )
        os.close(slave)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, text: str) -> None:
        """Wait until a text appears after what was waited for last."""
        deadline = time.monotonic() + _WAIT_SEC
        while (found := self.text.find(text, self._at)) < 0:
            left = deadline - time.monotonic()
            assert left > 0, f"no {text!r} in {self.text[self._at :][-2000:]!r}"
            assert self._read(left), f"ended without {text!r}: {self.text[self._at :]!r}"
        self._at = found + len(text)

    def _read(self, seconds: float) -> bool:
        """Read what there is, or wait for it; return whether the program can say more."""
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._master, 2**16)
        except OSError:  # the program has ended
            return False
        self.text += _ESCAPES.sub("", data.decode(errors="replace"))
        return bool(data)

    def end(self) -> int:
        """Wait for the program's end, reading on so that it can; return its exit code."""
        deadline = time.monotonic() + _WAIT_SEC
        while self.process.poll() is None and time.monotonic() < deadline:
            if not self._read(0.1):
                break
        return self.process.wait(10)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._master)


@pytest.fixture
def open_window(folder: str, tmp_path: Path) -> Iterator[Callable[..., Window]]:
    """Return a function that begins a chat in a window."""
    opened: list[Window] = []

    def begin(*options: str) -> Window:
        arguments = ["chat", "--model", folder, "--dtype", "float32", "--threads", "1"]
        arguments += ["--temperature", "0"]
        opened.append(Window([*arguments, *options], tmp_path))
        return opened[-1]

    yield begin
    for window in opened:
        window.close()


@pytest.mark.exhaustive
def test_ctrl_c_behind_enter_loses_nothing(open_window: Callable[..., Window]) -> None:
    window = open_window("--max-new-tokens", "20")
    window.wait_for("Ctrl-D leaves")
    window.type("abc\r")
    window.wait_for("20 tokens")
    for i in range(5):
        window.wait_for("\n>")
        window.type(f"\x15question {i}\r")  # in place of one that was taken back
        window.wait_for(f"question {i}")  # the line is being read
        os.kill(window.process.pid, signal.SIGINT)
    window.wait_for("\n>")
    window.type("\x15/temperature\r")
    window.wait_for("greedy")
    window.wait_for("\n>")
    window.type("\x04")
    assert window.end() == 0
    assert "terminate called" not in window.text
