"""Which errors a command tells in one line, and which with their traceback."""

import dis
import sys
from dataclasses import dataclass
from types import FrameType, TracebackType

from lade.errors import LadeError

_OURS = ("lade", "ngram_pool", "benchmarks")


@dataclass
class Telling:
    """How a command tells its errors; the object of typer's context."""

    has_tracebacks: bool = False  # of every error, as --debug asks


def line_of(error: Exception) -> str | None:
    """Return what to tell the user of an error; None if only its traceback tells enough."""
    if not _is_for_users(error):
        return None
    # Without a cause, a traceback adds nothing that its reader could use.
    hint = "" if error.__cause__ is None else " (--debug shows the whole error)"
    return f"error: {error}{hint}"


def _is_for_users(error: Exception) -> bool:
    """Return whether an error was written for the user, or tells of a file that the user named.

    Types do not tell: torch and transformers raise ValueError, too. But what our own code says by
    a `raise` statement is a message of ours, whereas what `int` or `zip` raise in it is a fault.
    Of errors of the system, those count that our own code meets, in the standard library at most:
    it opens what users name, while torch and others open files that no user knows.
    """
    if isinstance(error, LadeError):
        return True
    places = _places(error.__traceback__)
    if isinstance(error, OSError):
        while places and _package(places[-1][0]) in sys.stdlib_module_names:
            places.pop()
        return bool(places) and _package(places[-1][0]) in _OURS
    if not (isinstance(error, ValueError | TypeError) and places):
        return False
    frame, instruction = places[-1]
    operation = dis.opname[frame.f_code.co_code[instruction]]
    return _package(frame) in _OURS and operation == "RAISE_VARARGS"


def _places(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Return the frames that an error passed, that which raised it last, and where in each."""
    places = []
    while traceback is not None:
        places.append((traceback.tb_frame, traceback.tb_lasti))
        traceback = traceback.tb_next
    return places


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
