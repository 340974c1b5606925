"""`alone`: a function in a process of its own, whose memory and whose crash touch nothing else."""

from collections.abc import Callable
from multiprocessing import get_context
from typing import Any, TypeVar

from lade.errors import LadeError, in_one_line

T = TypeVar("T")


def alone(function: Callable[..., T], *args: Any, timeout: float | None = None) -> T:
    """Return what a function of a module returns in a new process, which ends with this.

    Raises:
        LadeError: it failed, crashed, or took longer than it may; the message says which.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            raise LadeError(f"{function.__name__} took more than {timeout:.0f} s")
        is_done, found = receiver.recv()
    except EOFError:
        process.join()
        raise LadeError(f"{function.__name__} ended with status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if not is_done:
        raise LadeError(found)
    result: T = found
    return result


def _answer(sender: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        sender.send((True, function(*args)))
    except Exception as error:  # raised where the result is waited for
        sender.send((False, in_one_line(error)))
