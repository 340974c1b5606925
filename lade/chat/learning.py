"""Learning while the user reads and types, as `lade.prewarm` does: what the model finds likely."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lade.attempts import Attempt
from lade.prewarming.run import PrewarmProgress, prewarm

# As a share of the last answer's time, and at least; a table takes time to read and write.
_SHARE, _LEAST_SEC = 0.05, 2.0
# Until it is known behind which token single ones are best run, without which a table hardly grows.
_FIRST_SEC = 10.0


class _Enough(Exception):  # noqa: N818 - it ends a run and is no error
    """The user has asked something."""


class IdleLearner:
    """Adds to a model's table in the pauses of a chat; nothing of any question or answer.

    A failure is told once, and ends the learning.
    """

    def __init__(self, model: Any, tell: Callable[[str], None]) -> None:
        self._model = model
        self._tell = tell
        self._failure: str | None = None
        self._is_over = False
        self._has_prefix = False

    @contextmanager
    def pause(self, answer_sec: float) -> Iterator[None]:
        """Learn while the block runs, for a time that is bounded by that of the last answer."""
        if self._is_over or answer_sec <= 0:
            yield
            return
        enough = threading.Event()
        seconds = max(_LEAST_SEC if self._has_prefix else _FIRST_SEC, _SHARE * answer_sec)
        # No daemon: one that is in torch as Python ends would abort the process.
        worker = threading.Thread(target=self._learn, args=(seconds, enough))
        try:
            try:
                worker.start()
            except RuntimeError as error:  # there are too many threads
                self._failure = str(error)
            yield
        finally:
            enough.set()
            if worker.ident is not None:
                worker.join()
            if self._failure is not None and not self._is_over:
                self._is_over = True
                self._tell(f"nothing more is learned: {self._failure}")

    def _learn(self, seconds: float, enough: threading.Event) -> None:
        def go_on(progress: PrewarmProgress) -> None:
            self._has_prefix = progress.made.has_prefix
            if enough.is_set():
                raise _Enough

        # No call fails because of what this raises.
        with suppress(_Enough), Attempt(_Enough, even_memory=True) as attempt:
            self._has_prefix = prewarm(self._model, seconds, progress=go_on).has_prefix
        self._failure = attempt.failure
