"""Connections: how many there may be, how large their headers, and how long each has for what."""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address, ip_network
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

# A client that has begun a request has so long to send its headers.
HEADER_SEC = 20.0
# To end an answer or to tell a client of it: it may not read, and a prompt is run in one piece.
END_SEC = 5.0
# Of a request line and headers, up to twice that: a parser refuses more once it has read so much.
HEADER_BYTES = 2**14
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


class GuardedProtocol(H11Protocol):
    """Bounds a connection: its headers in bytes and time, and each request up to its last byte.

    uvicorn takes the parser that is installed. httptools bounds nothing, and uvicorn itself has a
    time limit for silence only.
    """

    shares: ClassVar[Shares]  # of connections, by where they come from
    timeout_sec: ClassVar[float]  # of a request, until the client has all of its answer
    _timer: asyncio.TimerHandle | None = None
    _timed: Any = None  # the request whose time runs; none while headers are waited for

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers, or hang up."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # an answer begins once the one before is sent
        self._origin = origin_of(transport.get_extra_info("peername"))
        self._has_share = self.shares.take(self._origin)
        if self._has_share:
            self._start(HEADER_SEC, transport.abort)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop()
        if self._has_share:
            self.shares.give(self._origin)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what has come, in pieces: the parser looks at the size of headers between them."""
        before = self.cycle
        for begin in range(0, len(data), HEADER_BYTES):
            if not self.transport.is_closing():
                super().data_received(data[begin : begin + HEADER_BYTES])
        is_over = self._timed is not None and self._timed.response_complete
        if self.cycle is not before:
            self._begin()
        elif is_over and not self.transport.is_closing():
            self._timed = None
            self._start(HEADER_SEC, self.transport.abort)

    def on_response_complete(self) -> None:
        """Go on with the next request, if it has come already."""
        super().on_response_complete()
        if self.cycle is not self._timed:
            self._begin()

    def _begin(self) -> None:
        self._timed = self.cycle
        self._start(self.timeout_sec, self._end)

    def _end(self, has_notice: bool = False) -> None:
        """Hang up on a client that has not read its answer, after a last line that it is late."""
        is_late = not self._timed.response_complete
        if self.transport.get_write_buffer_size() or (
            has_notice and (is_late or self._num_unread())
        ):
            self.transport.abort()
        elif is_late or self._num_unread():
            self._start(END_SEC, partial(self._end, has_notice=True))

    def _num_unread(self) -> int:
        """Return how many bytes the system has that the client's has not confirmed."""
        with suppress(ImportError, OSError):  # none on Windows
            import fcntl
            from termios import TIOCOUTQ

            number = fcntl.ioctl(self.transport.get_extra_info("socket"), TIOCOUTQ, bytes(4))
            return int.from_bytes(number, sys.byteorder)
        return 0

    def _start(self, sec: float, function: Callable[[], None]) -> None:
        self._stop()
        self._timer = self.loop.call_later(sec, function)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def guarded(most: int, timeout_sec: float) -> type[GuardedProtocol]:
    """Return a protocol for so many connections, or as many as the system has files for."""
    with suppress(ImportError, ValueError, OSError):  # none on Windows
        import resource

        _, num_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
        most = min(most, num_files - _OTHER_FILES) if num_files > _OTHER_FILES else most
    named = {"shares": Shares(most, max(1, most // _PARTS)), "timeout_sec": timeout_sec}
    return type("Guarded", (GuardedProtocol,), named)


def origin_of(peer: Sequence[Any] | None) -> str:
    """Return what stands for a client without a key: its address, of IPv6 its network.

    A single subscriber has all of a /64, and may use another address for each request.
    """
    if not peer:  # it has left
        return ""
    found = ip_address(peer[0])
    is_old = getattr(found, "ipv4_mapped", found)
    return str(is_old or ip_network((int(found), 64), strict=False))
