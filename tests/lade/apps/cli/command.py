"""`lade` as a shell starts it, in this process."""

import io
import signal
import sys
import warnings
from typing import Any, NamedTuple

import pytest

import lade.apps.cli

SHORT = ("--dtype", "float32", "--max-new-tokens", "12")


class Done(NamedTuple):
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def error_line(self) -> str:
        """The one line of its error."""
        assert self.code == 1, self.out + self.err
        (line,) = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert "Traceback" not in self.err
        return line


class _Terminal(io.StringIO):
    """Standard input where somebody types, who is heard elsewhere."""

    def isatty(self) -> bool:
        return True


def run(
    *arguments: object,
    given: str | bytes = b"",
    screen: io.StringIO | None = None,
    columns: int = 150,
    encoding: str = "utf-8",
    **env: str,
) -> Done:
    """Run `lade` with some arguments.

    Args:
        given: standard input.
        screen: of a terminal, in place of standard input and output.
        columns: of the window.
        encoding: of standard output and error.
        env: environment variables.
    """
    streams: list[Any] = [
        io.TextIOWrapper(io.BytesIO(), encoding, errors)
        for errors in ("strict", "backslashreplace")
    ]
    data = given.encode() if isinstance(given, str) else given
    handler = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lade", *map(str, arguments)])
        for name, stream in zip(("stdout", "stderr"), streams, strict=True):
            patch.setattr(sys, name, stream)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
        if screen is not None:
            patch.setattr(sys, "stdin", _Terminal())
            patch.setattr(sys, "stdout", screen)
        patch.setattr(warnings, "formatwarning", warnings.formatwarning)
        for name, value in {"COLUMNS": str(columns), **env}.items():
            patch.setenv(name, value)
        try:
            lade.apps.cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            signal.signal(signal.SIGINT, handler)
    for stream in streams:
        stream.flush()
    return Done(code, *(stream.buffer.getvalue().decode(encoding) for stream in streams))
