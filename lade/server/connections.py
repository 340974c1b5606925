"""Connections that say nothing, and more of them than there is room for."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import Any, ClassVar

from uvicorn.protocols.http.auto import AutoHTTPProtocol

# A client that has begun a request has so long to send its headers.
HEADER_SEC = 20.0
# Files that a process opens beside its connections.
_OTHER_FILES = 128
# One address may have one of so many parts of the connections.
_PARTS = 4


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


class GuardedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Closes connections that send no whole headers, and those that are too many.

    uvicorn has a time limit only for what follows an answer, and for silence.
    """

    shares: ClassVar[Shares]  # of connections, by where they come from
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait for headers, or hang up."""
        super().connection_made(transport)
        self._origin = origin_of(transport.get_extra_info("peername"))
        self._has_share = self.shares.take(self._origin)
        if self._has_share:
            self._timer = self.loop.call_later(HEADER_SEC, transport.abort)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop()
        if self._has_share:
            self.shares.give(self._origin)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of the headers, unless they are whole."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop()
        elif self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._timer = self.loop.call_later(HEADER_SEC, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def guarded(most: int) -> type[GuardedProtocol]:
    """Return a protocol for so many connections, or as many as the system has files for."""
    with suppress(ImportError, ValueError, OSError):  # none on Windows
        import resource

        _, num_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
        most = min(most, num_files - _OTHER_FILES) if num_files > _OTHER_FILES else most
    return type("Guarded", (GuardedProtocol,), {"shares": Shares(most, max(1, most // _PARTS))})


def origin_of(peer: Sequence[Any] | None) -> str:
    """Return what stands for a client without a key: its address, of IPv6 its network.

    A single subscriber has all of a /64, and may use another address for each request.
    """
    if not peer:  # it has left
        return ""
    found = ip_address(peer[0])
    is_old = getattr(found, "ipv4_mapped", found)
    return str(is_old or ip_network((int(found), 64), strict=False))
