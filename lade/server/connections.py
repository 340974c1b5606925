"""Connections that say nothing, and more of them than there is room for."""

import asyncio
import sys
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

# A client that has begun a request has so long to send its headers.
HEADER_SEC = 20.0
# Files that a process opens beside its connections.
_OTHER_FILES = 128


class GuardedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Closes connections that send no whole headers in time, and those that are too many.

    uvicorn has a time limit only for what follows an answer, and for silence.
    """

    max_connections = 10_000

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait for headers, or hang up."""
        super().connection_made(transport)
        self._closing: asyncio.TimerHandle | None = None
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of the headers, unless they are whole."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop_waiting()
        elif self.cycle is None or self.cycle.response_complete:
            self._await_headers()

    def _await_headers(self) -> None:
        if self._closing is None:
            self._closing = self.loop.call_later(HEADER_SEC, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None


def most_connections(wanted: int) -> int:
    """Return how many connections there may be: as many as wanted, or the system has files for."""
    if sys.platform == "win32":
        return wanted
    import resource

    most: Any = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if most == resource.RLIM_INFINITY else max(1, min(wanted, most - _OTHER_FILES))


def origin_of(address: str) -> str:
    """Return what stands for a client without a key: its address, of IPv6 its network.

    A single subscriber has all of a /64, and may use another address for each request.
    """
    try:
        found = ip_address(address)
    except ValueError:  # of a socket that is no internet's
        return address
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or ip_network((int(found), 64), strict=False))
    return str(found)
