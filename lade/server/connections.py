"""Connections that say nothing, and more of them than there is room for."""

import asyncio
import sys
from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any, ClassVar

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from lade.server.sharing import Shares

# A client that has begun a request has so long to send its headers.
HEADER_SEC = 20.0
# Files that a process opens beside its connections.
_OTHER_FILES = 128
# One address may have one of so many parts of the connections.
_PARTS = 4


class GuardedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Closes connections that send no whole headers or read nothing, and those that are too many.

    uvicorn has a time limit only for what follows an answer, and for silence.
    """

    shares: ClassVar[Shares]  # of connections, by where they come from
    stall_sec: ClassVar[float]  # for which a client may read nothing of what it was sent

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait for headers, or hang up."""
        super().connection_made(transport)
        self._closing: asyncio.TimerHandle | None = None
        self._stalling: asyncio.TimerHandle | None = None
        self._origin = origin_of(transport.get_extra_info("peername"))
        self._has_share = self.shares.take(self._origin)
        if self._has_share:
            self._await_headers()
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop_waiting()
        if self._stalling is not None:
            self._stalling.cancel()
        if self._has_share:
            self.shares.give(self._origin)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of the headers, unless they are whole."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop_waiting()
        elif self.cycle is None or self.cycle.response_complete:
            self._await_headers()

    def pause_writing(self) -> None:
        """Hang up if this lasts: closing alone would wait for the client to read."""
        super().pause_writing()
        self._stalling = self.loop.call_later(self.stall_sec, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: the client reads."""
        super().resume_writing()
        if self._stalling is not None:
            self._stalling.cancel()

    def _await_headers(self) -> None:
        if self._closing is None:
            self._closing = self.loop.call_later(HEADER_SEC, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None


def guarded(max_connections: int, stall_sec: float) -> type[GuardedProtocol]:
    """Return a protocol for so many connections, or as many as the system has files for."""
    most = max_connections
    if sys.platform != "win32":
        import resource

        num_files: Any = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if num_files != resource.RLIM_INFINITY:
            most = max(1, min(most, num_files - _OTHER_FILES))
    settings = {"shares": Shares(most, max(1, most // _PARTS)), "stall_sec": stall_sec}
    return type("Guarded", (GuardedProtocol,), settings)


def origin_of(peer: Sequence[Any] | None) -> str:
    """Return what stands for a client without a key: its address, of IPv6 its network.

    A single subscriber has all of a /64, and may use another address for each request.
    """
    address = str(peer[0]) if peer else ""
    try:
        found = ip_address(address)
    except ValueError:  # what a proxy says, or of a socket that is no internet's
        return address
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or ip_network((int(found), 64), strict=False))
    return str(found)
