"""The command line. `app.py` defines the commands, `options.py` their common options.

The implementations are in other modules, imported with their heavy dependencies only when a command
runs.
"""

import os
import signal
import sys
import warnings
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from lade.errors import LadeError, MissingExtraError

_INTERRUPTED = 130  # exit code after Ctrl-C, as in shells
_PACKAGE = Path(__file__).parents[2]


def main() -> None:
    """Run the command line; errors meant for the user print one line, others their traceback."""
    _leave_at_the_second_interrupt()
    _open_streams()
    replacing(sys.stdout)
    _show_warnings_as_notes()
    asked: dict[str, bool] = {}  # by typer: whether errors are to have their traceback
    try:
        try:
            from lade.apps.cli.app import app
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or "typer", "cli") from None
        app(obj=asked, prog_name="lade")
    except Exception as error:  # shown in one line where it is meant for the user
        line = None if asked.get("debug") else line_of(error)
        if line is None:
            raise
        print(line, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        _say_stopped()
        sys.exit(_INTERRUPTED)
    except SystemExit as end:
        if end.code == _INTERRUPTED:  # typer caught the interrupt
            _say_stopped()
        raise


def replacing(stream: TextIO) -> TextIO:
    """Have a stream write "?" for characters that its encoding lacks; return it."""
    if isinstance(stream, TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="replace")
    return stream


def line_of(error: Exception) -> str | None:
    """Return the one line that a user reads of an error; None to show its traceback.

    One line is enough for lade's errors, whose messages are written for users, and for errors of
    the system, such as a missing file. All other errors are faults of lade.
    """
    from ngram_pool import PoolFileError  # the pool knows nothing of lade's errors

    if not isinstance(error, LadeError | OSError | PoolFileError):
        return None
    # Without a cause, a traceback adds nothing that its reader could use.
    hint = "" if error.__cause__ is None else " (lade --debug … shows the whole error)"
    return f"error: {error}{hint}"


def _open_streams() -> None:
    """Open the standard streams that are closed, so that no other file gets their numbers."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _say_stopped() -> None:
    # Terminals echo ^C on the cursor's line.
    print("\nstopped" if sys.stderr.isatty() else "stopped", file=sys.stderr)


def _leave_at_the_second_interrupt() -> None:
    """Let the first Ctrl-C end a command in order, results written, and the second at once."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if it is ignored
        signal.signal(signal.SIGINT, interrupt)


def _show_warnings_as_notes() -> None:
    """Print each of lade's own warnings once, on one line, without its source location."""
    shown: set[str] = set()
    usual = warnings.formatwarning

    def as_note(message: Any, category: Any, filename: str, *where: Any) -> str:
        is_ours = category.__module__ == "lade.errors" or _PACKAGE in Path(filename).parents
        if not is_ours:
            return usual(message, category, filename, *where)
        is_new = str(message) not in shown
        shown.add(str(message))
        return f"note: {message}\n" * is_new

    warnings.formatwarning = as_note  # type: ignore[assignment]
