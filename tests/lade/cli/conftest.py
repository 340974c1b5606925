"""The whole command, as a shell starts it, in this process."""

import signal
import sys
import warnings
from collections.abc import Callable

import pytest

import lade.cli

Told = tuple[int, str]


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Told]:
    """Return a function that runs `lade` and returns its exit code and what it said as an error."""

    def run(*arguments: str) -> Told:
        monkeypatch.setattr(sys, "argv", ["lade", *arguments])
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        handler = signal.getsignal(signal.SIGINT)
        try:
            lade.cli.main()
        except SystemExit as end:
            return int(end.code or 0), capsys.readouterr().err
        finally:
            signal.signal(signal.SIGINT, handler)
        raise AssertionError("a command ends by leaving the process")

    return run
