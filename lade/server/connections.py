"""Limits of connections: their number, the size of their headers, and their time."""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address, ip_network
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

# Time to send the headers of a request.
HEADER_SEC = 20.0
# Time to end an answer: its client may not read, and a forward pass cannot be interrupted.
END_SEC = 5.0
# Size of request line and headers. The parser checks between reads, so up to twice this passes.
HEADER_BYTES = 2**14
# Files that a process opens beside its connections.
_OTHER_FILES = 128
# One address may have the connections divided by this.
_PARTS = 4


class Shares:
    """Counts a limited resource, for all keys together and for each key."""

    def __init__(self, most: int, most_of_key: int) -> None:
        self._most, self._most_of_key = most, most_of_key
        self._taken: Counter[str] = Counter()
        self._num_taken = 0

    def take(self, key: str, number: int = 1) -> bool:
        """Take some of it; return whether as much was free."""
        of_key, of_all = self._taken[key] + number, self._num_taken + number
        if of_all > self._most or of_key > self._most_of_key:
            return False
        self._taken[key], self._num_taken = of_key, of_all
        return True

    def give(self, key: str, number: int = 1) -> None:
        """Give some of it back."""
        self._num_taken -= number
        self._taken[key] -= number
        if not self._taken[key]:
            del self._taken[key]


class GuardedProtocol(H11Protocol):
    """Bounds a connection: its headers in bytes and time, and each request up to its last byte.

    uvicorn takes the parser that is installed. httptools bounds nothing, and uvicorn itself has a
    time limit for silence only.
    """

    shares: ClassVar[Shares]  # of connections, by address
    timeout_sec: ClassVar[float]  # from a request's first byte to the last of its answer
    _timer: asyncio.TimerHandle | None = None
    _timed: Any = None  # the request that is timed; None while waiting for headers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for headers, or hang up if there are too many connections."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(
            high=0
        )  # an answer begins after the one before it was sent
        self._origin = origin_of(transport.get_extra_info("peername"))
        self._has_share = self.shares.take(self._origin)
        if self._has_share:
            self._start(HEADER_SEC, transport.abort)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop()
        if self._has_share:
            self.shares.give(self._origin)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed data in small parts, as the parser checks the size of headers between them."""
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
        """Go on with the next request, if it has arrived."""
        super().on_response_complete()
        if self.cycle is not self._timed:
            self._begin()

    def _begin(self) -> None:
        self._timed = self.cycle
        self._start(self.timeout_sec, self._end)

    def _end(self, has_notice: bool = False) -> None:
        """Hang up on a client that has not read its answer in time, after a last error event."""
        is_late = not self._timed.response_complete
        if self.transport.get_write_buffer_size() or (
            has_notice and (is_late or self._num_unread())
        ):
            self.transport.abort()
        elif is_late or self._num_unread():
            self._start(END_SEC, partial(self._end, has_notice=True))

    def _num_unread(self) -> int:
        """Return how many sent bytes the client's system has not confirmed."""
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
    """Return a protocol for so many connections, at most as many as the process may open files."""
    with suppress(ImportError, ValueError, OSError):  # none on Windows
        import resource

        _, num_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
        most = min(most, num_files - _OTHER_FILES) if num_files > _OTHER_FILES else most
    named = {"shares": Shares(most, max(1, most // _PARTS)), "timeout_sec": timeout_sec}
    return type("Guarded", (GuardedProtocol,), named)


def origin_of(peer: Sequence[Any] | None) -> str:
    """Return the address of a client, of IPv6 its /64 network, for limits without keys.

    A single subscriber has all of a /64, and may use another address for each request.
    """
    if not peer:  # it has left
        return ""
    found = ip_address(peer[0])
    is_old = getattr(found, "ipv4_mapped", found)
    return str(is_old or ip_network((int(found), 64), strict=False))
