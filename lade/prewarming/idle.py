"""Prewarming in idle time: by a thread that gives way to everything else on the machine."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from lade.compat import Model
from lade.errors import MissingExtraError
from lade.openmp import release_workers
from lade.prewarming.run import TableWriter

logger = logging.getLogger(__name__)

#: Of all runs together, after which a table gains too little to be worth the electricity.
MOST_MINUTES = 30
_MOST_ROWS = 256  # texts at once: their keys and values take memory beside a server's
_LOWEST = 19  # priority
_LOOK_SEC = 0.5  # how often it is found out whether there is anything else to do
_NUM_LOOKS = 2  # that must find nothing, before work begins
_OTHERS_CORES = 0.5  # that other processes may keep busy
_SAVE_SEC = 60.0  # of work, after which calls get what was learned


class IdlePrewarming:
    """Has a model write its table while there is nothing else to do, until it is closed.

    The work is done in a thread of the lowest priority (on Linux; elsewhere of the usual one). It
    stops at the end of the forward pass in which something else comes up, also where other
    processes begin to keep the CPU busy, and ends once the table holds `MOST_MINUTES` of work. A
    table takes 64 MB of disk at most.

    Args:
        model: a transformers causal LM on one device, which calls may use meanwhile.
        is_idle: returns whether there is nothing else to do; called in the thread, often.

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
        # Cores that others kept busy of late, and when that was found out, at how many seconds.
        self._others, self._looked, self._busy = 0.0, time.monotonic(), self._sec_of_others()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lade-prewarm", daemon=True)
        self._thread.start()

    @property
    def minutes_left(self) -> float:
        """How long the model would go on writing if there were nothing else to do."""
        return max(self._left_sec - self._writer.made.seconds, 0.0) / 60

    def close(self) -> None:
        """Stop, and keep what was learned; waits for the forward pass in progress."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":  # of this thread, and of those that it starts
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        num_looks = 0
        try:
            while not self._closed.wait(_LOOK_SEC) and self.minutes_left:
                num_looks = num_looks + 1 if self._is_free() else 0
                if num_looks >= _NUM_LOOKS:
                    self._writer.work(self._should_stop)
                    release_workers()
            self._save()
        except Exception:  # the model's own, or a full disk: answers need no table
            logger.warning("prewarming has ended", exc_info=True)

    def _should_stop(self) -> bool:
        """Return whether to stop, after each forward pass; now and then make use of the work."""
        if self._writer.made.seconds >= _SAVE_SEC:
            self._save()
        is_over = self._closed.is_set() or not self.minutes_left
        return is_over or not self._is_free()

    def _save(self) -> None:
        self._left_sec -= self._writer.made.seconds
        self._writer.save()

    def _is_free(self) -> bool:
        """Return whether there is nothing else to do, in this process or in others.

        A thread of the lowest priority that holds the interpreter's lock would hold up all others
        of this process where the CPU is busy.
        """
        now, busy = time.monotonic(), self._sec_of_others()
        if now - self._looked >= _LOOK_SEC:
            self._others = (busy - self._busy) / (now - self._looked)
            self._looked, self._busy = now, busy
        return self._others <= _OTHERS_CORES and self._is_idle()

    def _sec_of_others(self) -> float:
        """Return the seconds of CPU that other processes have had."""
        times, mine = self._cpu_times(), self._process.cpu_times()
        busy = times.user + times.system + getattr(times, "nice", 0.0)
        return float(busy - mine.user - mine.system)
