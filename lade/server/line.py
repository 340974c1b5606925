"""The line before the model: one is served, a bounded number wait, in order of arrival."""

import asyncio
from collections import deque

from lade.server.errors import ApiError

_SHORTEST_RETRY_SEC = 1
_LONGEST_RETRY_SEC = 60


class Line:
    """Whose turn it is. All methods are called in the event loop.

    Args:
        max_waiting: beyond which nobody may join.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False
        self._refusal: ApiError | None = None
        self._turn_sec = 1.0  # a moving average of how long a turn takes
        self._since = 0.0

    @property
    def num_waiting(self) -> int:
        """Those whose turn has not come."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Those whose turn it is."""
        return int(self._is_taken)

    async def enter(self) -> None:
        """Wait for one's turn; whoever returns from this has to `leave`.

        Raises:
            ApiError: too many wait, or nobody is let in any more.
        """
        if self._refusal is not None:
            raise self._refusal
        if not self._is_taken:
            self._take()
            return
        if len(self._waiting) >= self._max_waiting:
            expected = self._turn_sec * (1 + len(self._waiting)) / 2
            raise ApiError(
                429,
                f"{len(self._waiting)} requests are waiting already; try again later",
                code="queue_full",
                retry_after=round(min(max(expected, _SHORTEST_RETRY_SEC), _LONGEST_RETRY_SEC)),
            )
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came at the same moment
                self.leave()
            raise
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)

    def leave(self) -> None:
        """Let the next one in."""
        sec = asyncio.get_running_loop().time() - self._since
        self._turn_sec += (sec - self._turn_sec) / 8
        self._is_taken = False
        while self._waiting and not self._is_taken:
            turn = self._waiting.popleft()
            if not turn.done():
                self._take()
                turn.set_result(None)

    def refuse(self, error: ApiError) -> None:
        """Send away all who wait, and all who come."""
        self._refusal = error
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(error)

    def _take(self) -> None:
        self._is_taken = True
        self._since = asyncio.get_running_loop().time()
