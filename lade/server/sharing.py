"""What all keys have a share of, before their turns come: connections, memory, threads."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from lade.server.exchange import Exchange


class Workers:
    """Threads that prepare requests: so many at once, and of one key.

    Whoever waits behind those of its own key waits for that many of each other, and no more.
    """

    def __init__(self, most: int, most_of_key: int) -> None:
        self._all, self._most_of_key = asyncio.Semaphore(most), most_of_key
        self._of_key: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, exchange: Exchange, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in a thread, when it is the turn of an exchange.

        Raises:
            ApiError: the exchange has ended meanwhile.
        """
        of_key = asyncio.Semaphore(self._most_of_key)
        async with self._of_key.setdefault(exchange.of_whom, of_key), self._all:
            exchange.check()
            return await asyncio.get_running_loop().run_in_executor(None, function, *args)


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
