"""Prewarming in idle time, by a thread that yields to all other work on the machine."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from lade.compat import Model
from lade.errors import MissingExtraError
from lade.prewarming.run import TableWriter

logger = logging.getLogger(__name__)

#: Minutes of all runs together, after which a table gains too little for the electricity.
MOST_MINUTES = 30
_MOST_ROWS = 256  # texts at once: their KV cache takes memory beside a server's
_LOWEST = 19  # priority
_LOOK_SEC = 0.5  # between checks for other work
_NUM_LOOKS = 2  # checks in a row that must find no other work before prewarming begins
_FREE_CORES = 0.5  # cores that other processes must leave free
_TOLD_SEC = 60.0  # of waiting for other processes, before the log says so
_SAVE_SEC = 60.0  # of work, after which calls get the results


class IdlePrewarming:
    """Lets a model write its table while there is no other work, until it is closed.

    The work runs in a thread of the lowest priority (on Linux; elsewhere of the usual one). It
    stops at the end of a forward pass if other work comes up, or other processes keep all cores
    busy, which the log tells once.
    It ends once the table holds `MOST_MINUTES` of work. A table takes at most 64 MB of disk.

    Args:
        model: a transformers causal LM on one device, which calls may use meanwhile.
        is_idle: returns whether there is no other work; called in the thread, often.

    Raises:
        MissingExtraError: psutil is not installed.
        OSError, UnsupportedModelError, UnsupportedOptionError, ValueError: as `lade.prewarm` does.
    """

    def __init__(self, model: Model, is_idle: Callable[[], bool]) -> None:
        try:
            import psutil
        except ModuleNotFoundError:
            raise MissingExtraError("psutil", "cli") from None
        self._process, self._cpu_times = psutil.Process(), psutil.cpu_times
        self._writer, self._is_idle = TableWriter(model, most_rows=_MOST_ROWS), is_idle
        self._left_sec = 60 * MOST_MINUTES - self._writer.saved_sec
        # Cores that other processes keep busy; when that was measured, and their CPU time then.
        self._others, self._looked, self._busy = 0.0, time.monotonic(), self._sec_of_others()
        self._found_free, self._has_told = self._looked, False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lade-prewarm", daemon=True)
        self._thread.start()

    @property
    def minutes_left(self) -> float:
        """Minutes of work left, without other work."""
        return max(self._left_sec - self._writer.seconds, 0.0) / 60

    def close(self) -> None:
        """Stop, and save the results; waits for the forward pass in progress."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":  # for this thread, and threads that it starts
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        num_looks = 0
        try:
            while not self._closed.wait(_LOOK_SEC) and self.minutes_left:
                num_looks = num_looks + 1 if self._is_free() else 0
                if num_looks >= _NUM_LOOKS:
                    self._writer.work(self._should_stop)
            self._save()
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
            self._save()
        is_over = self._closed.is_set() or not self.minutes_left
        return is_over or not self._is_free()

    def _save(self) -> None:
        self._left_sec -= self._writer.seconds
        self._writer.save()

    def _is_free(self) -> bool:
        """Return whether there is no other work, in this process or in others.

        On a busy CPU, a thread of the lowest priority that holds the interpreter's lock would delay
        all other threads of this process.
        """
        now, busy, cores = time.monotonic(), self._sec_of_others(), os.cpu_count() or 1
        if now - self._looked >= _LOOK_SEC:
            self._others = (busy - self._busy) / (now - self._looked)
            self._looked, self._busy = now, busy
        if self._others <= cores - _FREE_CORES:
            self._found_free = now
            return self._is_idle()
        if now - self._found_free > _TOLD_SEC and not self._has_told:
            self._has_told = True
            told = "prewarming waits for other programs, which keep %.1f of %d cores busy"
            logger.warning(told, self._others, cores)
        return False

    def _sec_of_others(self) -> float:
        """Return the CPU seconds of all other processes."""
        times, mine = self._cpu_times(), self._process.cpu_times()
        busy = times.user + times.system + getattr(times, "nice", 0.0)
        return float(busy - mine.user - mine.system)
