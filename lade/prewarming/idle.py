"""Prewarming in idle time, by a thread of its own."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from lade.compat import Model
from lade.prewarming.run import TableWriter

logger = logging.getLogger(__name__)

#: Minutes of all runs together, after which a table gains too little for the electricity.
MOST_MINUTES = 30
_LOOK_SEC = 0.5  # between checks for other work
_NUM_LOOKS = 2  # checks in a row that must find no other work before prewarming begins
_SAVE_SEC = 60.0  # of work, after which calls get the results


class IdlePrewarming:
    """Lets a model write its table while there is no other work, until it is closed.

    The work runs in a thread. It stops at the end of a forward pass if other work comes up, and
    ends once the table holds `MOST_MINUTES` of work. A table takes at most 64 MB of disk.

    Args:
        model: a transformers causal LM on one device, which calls may use meanwhile.
        is_idle: returns whether there is no other work; called in the thread, often.

    Raises:
        OSError, UnsupportedModelError, UnsupportedOptionError, ValueError: as `lade.prewarm` does.
    """

    def __init__(self, model: Model, is_idle: Callable[[], bool]) -> None:
        self._writer, self._is_idle = TableWriter(model), is_idle
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lade-prewarm", daemon=True)
        self._thread.start()

    @property
    def minutes_left(self) -> float:
        """Minutes of work left, without other work."""
        return max(MOST_MINUTES - (self._writer.saved_sec + self._writer.seconds) / 60, 0.0)

    def close(self) -> None:
        """Stop, and save the results; waits for the forward pass in progress."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        num_looks = 0
        try:
            while not self._closed.wait(_LOOK_SEC) and self.minutes_left:
                num_looks = num_looks + 1 if self._is_idle() else 0
                if num_looks >= _NUM_LOOKS:
                    self._writer.work(self._should_stop)
            self._writer.save()
        except BlockingIOError as error:
            logger.warning("prewarming has ended: %s", error)
        except Exception:  # the model's own, or a full disk: answers need no table
            logger.warning("prewarming has ended", exc_info=True)
        finally:
            with suppress(OSError):
                self._writer.close()

    def _should_stop(self) -> bool:
        """Return whether to stop, after each forward pass; save the results now and then."""
        if self._writer.seconds >= _SAVE_SEC:
            self._writer.save()
        return self._closed.is_set() or not self.minutes_left or not self._is_idle()
