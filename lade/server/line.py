"""The line before something scarce: some are served, others wait, and keys take turns."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lade.server.errors import ApiError

_SHORTEST_RETRY_SEC = 1
_LONGEST_RETRY_SEC = 60


class Line:
    """Whose turn it is. All methods are called in the event loop.

    Whose key is served least is next, and among equals the one that was served longest ago: one
    that asks for much delays others by what is under way, and no more.

    Args:
        max_waiting: of one key, beyond which it may not join.
        num_places: how many are served at once.
        max_places: how many of one key; None for as many.
    """

    def __init__(
        self, max_waiting: int, num_places: int = 1, max_places: int | None = None
    ) -> None:
        self._max_waiting = max_waiting
        self._num_places = num_places
        self._max_places = num_places if max_places is None else max_places
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by key, in order of turns
        self._running: Counter[str] = Counter()
        self._refusal: ApiError | None = None
        self._turn_sec = 1.0  # a moving average of how long a turn takes
        self._since = 0.0

    @property
    def num_waiting(self) -> int:
        """Those whose turn has not come."""
        return sum(map(len, self._waiting.values()))

    @property
    def num_running(self) -> int:
        """Those whose turn it is."""
        return self._running.total()

    async def enter(self, key: str = "") -> None:
        """Wait for one's turn; whoever returns from this has to `leave`.

        Raises:
            ApiError: too many of this key wait, or nobody is let in any more.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._is_free(key) and key not in self._waiting:
            self._take(key)
            return
        waiting = self._waiting.setdefault(key, deque())
        if len(waiting) >= self._max_waiting:
            if not waiting:
                del self._waiting[key]
            expected = self._turn_sec * (1 + self.num_waiting) / 2
            raise ApiError(
                429,
                f"{len(waiting)} requests are waiting already; try again later",
                code="queue_full",
                retry_after=round(min(max(expected, _SHORTEST_RETRY_SEC), _LONGEST_RETRY_SEC)),
            )
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came at the same moment
                self.leave(key)
            raise
        finally:
            if turn in waiting:
                waiting.remove(turn)
                if not waiting and self._waiting.get(key) is waiting:
                    del self._waiting[key]

    def leave(self, key: str = "") -> None:
        """Let the next one in."""
        sec = asyncio.get_running_loop().time() - self._since
        self._turn_sec += (sec - self._turn_sec) / 8
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]
        while free := [each for each in self._waiting if self._is_free(each)]:
            self._serve(min(free, key=lambda each: self._running[each]))

    def refuse(self, error: ApiError) -> None:
        """Send away all who wait, and all who come."""
        self._refusal = error
        for waiting in self._waiting.values():
            for turn in waiting:
                if not turn.done():
                    turn.set_exception(error)
        self._waiting.clear()

    def _serve(self, key: str) -> None:
        """Let the first of a key in, and have the key wait behind the others."""
        waiting = self._waiting.pop(key)
        turn = waiting.popleft()
        if waiting:
            self._waiting[key] = waiting
        if not turn.done():
            self._take(key)
            turn.set_result(None)

    def _is_free(self, key: str) -> bool:
        return self.num_running < self._num_places and self._running[key] < self._max_places

    def _take(self, key: str) -> None:
        self._running[key] += 1
        self._since = asyncio.get_running_loop().time()


class Workers:
    """Threads for work of requests that is done before their turn, shared fairly among keys.

    Args:
        num_threads: of them.
        max_waiting: jobs of one key.
    """

    def __init__(self, num_threads: int, max_waiting: int) -> None:
        half = max(1, num_threads // 2)  # one key leaves room for others
        self._line = Line(max_waiting, num_threads, half)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="lade-prepares")

    async def run(self, key: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in a thread, whose place is taken until it ends, whoever waits for it."""
        await self._line.enter(key)
        try:
            job = asyncio.get_running_loop().run_in_executor(self._threads, function, *args)
        except RuntimeError:  # nothing more is begun
            self._line.leave(key)
            raise

        def finish(job: "asyncio.Future[Any]") -> None:
            self._line.leave(key)
            if not job.cancelled():
                job.exception()  # its client may have left

        job.add_done_callback(finish)
        return await asyncio.shield(job)

    def refuse(self, error: ApiError) -> None:
        """Send away all who wait, and all who come."""
        self._line.refuse(error)
        self._threads.shutdown(wait=False)
