"""Which errors a command tells in one line, and which with their traceback."""

from dataclasses import dataclass

from lade.errors import LadeError


@dataclass
class Telling:
    """How a command tells its errors; the object of typer's context."""

    has_tracebacks: bool = False  # of every error, as --debug asks


def line_of(error: Exception) -> str | None:
    """Return what to tell the user of an error; None if only its traceback tells enough.

    Told are our own errors, which are written for users, and those of the system, such as a file
    that is not there. All others are faults.
    """
    if not isinstance(error, LadeError | OSError) and not _is_of_a_pool(error):
        return None
    # Without a cause, a traceback adds nothing that its reader could use.
    hint = "" if error.__cause__ is None else " (--debug shows the whole error)"
    return f"error: {error}{hint}"


def _is_of_a_pool(error: Exception) -> bool:
    """Return whether the pool refuses a file; it knows nothing of lade's errors."""
    from ngram_pool import PoolFileError

    return isinstance(error, PoolFileError)
