"""Running code that is not ours, such as a user's model, where what it raises is an answer."""

from types import TracebackType
from typing import Any

import torch

from lade.errors import in_one_line


class Attempt:
    """A `with` block that may fail in any way; what it raises is kept as the reason.

    Interrupts pass, and so does a lack of memory: it tells nothing of the code that was run, and
    must never be kept as a verdict on it.

    Args:
        passed: errors that pass, too.
        even_memory: whether a lack of memory is kept as well, where nothing is concluded from it.
    """

    def __init__(self, *passed: type[Exception], even_memory: bool = False) -> None:
        #: What the block raised, in one line; None if it came to its end.
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
