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
    """Closes connections that send no whole headers or read nothing, and those that are too many.

    uvicorn has a time limit only for what follows an answer, and for silence.
    """

    shares: ClassVar[Shares]  # of connections, by where they come from
    stall_sec: ClassVar[float]  # for which a client may read nothing of what it was sent

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait for headers, or hang up."""
        super().connection_made(transport)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._origin = origin_of(transport.get_extra_info("peername"))
        self._has_share = self.shares.take(self._origin)
        if self._has_share:
            self._hang_up_in(HEADER_SEC, "headers")
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        for name in [*self._timers]:
            self._stop(name)
        if self._has_share:
            self.shares.give(self._origin)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of the headers, unless they are whole."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop("headers")
        elif self.cycle is None or self.cycle.response_complete:
            self._hang_up_in(HEADER_SEC, "headers")

    def pause_writing(self) -> None:
        """Hang up if this lasts: closing alone would wait for the client to read."""
        super().pause_writing()
        self._hang_up_in(self.stall_sec, "reads")

    def resume_writing(self) -> None:
        """Go on: the client reads."""
        super().resume_writing()
        self._stop("reads")

    def _hang_up_in(self, sec: float, unless: str) -> None:
        if unless not in self._timers:
            self._timers[unless] = self.loop.call_later(sec, self.transport.abort)

    def _stop(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()


def guarded(most: int, stall_sec: float) -> type[GuardedProtocol]:
    """Return a protocol for so many connections, or as many as the system has files for."""
    with suppress(ImportError, ValueError, OSError):  # none on Windows
        import resource

        _, num_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
        if num_files > _OTHER_FILES:  # else there is no limit
            most = min(most, num_files - _OTHER_FILES)
    settings = {"shares": Shares(most, max(1, most // _PARTS)), "stall_sec": stall_sec}
    return type("Guarded", (GuardedProtocol,), settings)


def origin_of(peer: Sequence[Any] | None) -> str:
    """Return what stands for a client without a key: its address, of IPv6 its network.

    A single subscriber has all of a /64, and may use another address for each request.
    """
    try:
        found = ip_address(peer[0] if peer else "")
    except ValueError:  # of a socket that is no internet's
        return ""
    is_old = getattr(found, "ipv4_mapped", found)
    return str(is_old or ip_network((int(found), 64), strict=False))
