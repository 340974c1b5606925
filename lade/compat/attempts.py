"""Running user code, such as a model, where an error is an answer."""

from types import TracebackType
from typing import Any

import torch

from lade.errors import in_one_line


class Attempt:
    """A `with` block that may fail in any way; its error is kept as the reason.

    Interrupts are raised, and so is a lack of memory: it says nothing about the code that ran, and
    must never be kept as a verdict.

    Args:
        passed: further errors that are raised.
        even_memory: whether a lack of memory is kept, too, as no verdict follows from it.
    """

    def __init__(self, *passed: type[Exception], even_memory: bool = False) -> None:
        #: The block's error in one line; None if the block succeeded.
        self.failure: str | None = None
        self._passed: tuple[Any, ...] = passed if even_memory else (*passed, torch.OutOfMemoryError)

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, self._passed):
            return False
        self.failure = in_one_line(error)
        return True
