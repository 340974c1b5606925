"""The line before something scarce: some are served, others wait, and keys take turns."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from lade.server.errors import ApiError, full

Leave = Callable[[], None]


class Line:
    """Whose turn it is. All methods are called in the event loop.

    Whose key is served least is next, and among equals the one that was served longest ago: one
    that asks for much delays others by what is under way, and no more.

    Args:
        max_waiting: of one key, beyond which it may not join.
        num_places, max_places: how many are served at once, of all keys and of one.
    """

    def __init__(self, max_waiting: int, num_places: int, max_places: int) -> None:
        self._max_waiting = max_waiting
        self._num_places = num_places
        self._max_places = max_places
        self._waiting: dict[str, deque[asyncio.Future[Leave]]] = {}  # by key, in order of turns
        self._running: Counter[str] = Counter()
        self._refusal: ApiError | None = None

    async def enter(self, key: str = "") -> Leave:
        """Wait for one's turn; return what gives the place back, once however often it is called.

        Raises:
            ApiError: too many of this key wait, or nobody is let in any more.
        """
        if self._refusal is not None:
            raise self._refusal
        turn: asyncio.Future[Leave] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(key, deque())
        waiting.append(turn)
        self._serve()
        try:
            if not turn.done() and len(waiting) > self._max_waiting:
                raise full(f"{len(waiting) - 1} requests are waiting already; try again later")
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                turn.result()()  # it came at the same moment
            raise
        finally:
            if turn in waiting:
                waiting.remove(turn)
                if not waiting and self._waiting.get(key) is waiting:
                    del self._waiting[key]

    async def run(self, key: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in a thread; its place is taken until it ends, whoever waits for it.

        Raises:
            ApiError: as for `enter`.
        """
        leave = await self.enter(key)
        job = asyncio.get_running_loop().run_in_executor(None, function, *args)
        job.add_done_callback(lambda job: (leave(), job.cancelled() or job.exception()))
        return await asyncio.shield(job)

    def refuse(self, error: ApiError) -> None:
        """Send away all who wait, and all who come."""
        self._refusal = error
        for turn in (turn for waiting in self._waiting.values() for turn in waiting):
            if not turn.done():
                turn.set_exception(error)
        self._waiting.clear()

    def _serve(self) -> None:
        """Let in whoever has room, and have each key wait behind the others then."""
        while free := [each for each in self._waiting if self._is_free(each)]:
            key = min(free, key=lambda each: self._running[each])
            waiting = self._waiting.pop(key)
            turn = waiting.popleft()
            if waiting:
                self._waiting[key] = waiting
            if not turn.done():
                turn.set_result(self._taken(key))

    def _is_free(self, key: str) -> bool:
        return self._running.total() < self._num_places and self._running[key] < self._max_places

    def _taken(self, key: str) -> Leave:
        """Take a place; return what gives it back."""
        self._running[key] += 1
        left = iter([key])

        def leave() -> None:
            if gone := [*left]:
                self._running -= Counter(gone)  # which drops keys that have none
                self._serve()

        return leave


class Shares:
    """How much of something limited each key has: all, and one of them, may have so much."""

    def __init__(self, most: int, most_of_key: int) -> None:
        self._most, self._most_of_key = most, most_of_key
        self._taken: Counter[str] = Counter()
        self._num_taken = 0

    def take(self, key: str, number: int = 1) -> bool:
        """Take so many; return whether there were."""
        of_key, of_all = self._taken[key] + number, self._num_taken + number
        if of_all > self._most or of_key > self._most_of_key:
            return False
        self._taken[key], self._num_taken = of_key, of_all
        return True

    def give(self, key: str, number: int = 1) -> None:
        """Give so many back."""
        self._num_taken -= number
        self._taken[key] -= number
        if not self._taken[key]:
            del self._taken[key]
