"""What requests share fairly: threads that prepare them, and whatever else is limited."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from lade.server.exchange import Exchange


class Workers:
    """Threads that prepare requests, of which one key leaves some to others.

    Args:
        num_places, max_places: how many work at once, for all keys and for one.
    """

    def __init__(self, num_places: int, max_places: int) -> None:
        self._places, self._max_places = asyncio.Semaphore(num_places), max_places
        self._of_keys = WeakValueDictionary[str, asyncio.Semaphore]()  # of those that ask now

    async def run(self, exchange: Exchange, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in a thread; its place is taken until it ends, whoever waits for it.

        Raises:
            ApiError: the exchange has ended meanwhile.
        """
        of_key = asyncio.Semaphore(self._max_places)
        async with self._of_keys.setdefault(exchange.of_whom, of_key), self._places:
            exchange.check()
            return await asyncio.to_thread(function, *args)


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
