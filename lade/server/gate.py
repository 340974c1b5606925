"""What every request passes first: keys, limits, the line, time, and clients that leave.

A pure ASGI middleware, so that it sees a client leave in every state of its request. Whatever goes
wrong is told in OpenAI's form.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

from lade.server.errors import ApiError, failed, left, shutting_down, timed_out
from lade.server.exchange import Exchange, current
from lade.server.line import Line
from lade.server.metrics import Metrics
from lade.server.options import ServerOptions
from lade.server.requests import ENDPOINTS, Reader
from lade.server.users import ApiKeys, UserPools

logger = logging.getLogger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

# Paths that may be asked for, and how. All others, of which transformers has more, are unknown:
# they would load or unload models.
_READ = {"/v1/models", "/health", "/metrics"}
_OPEN = {"/health", "/metrics"}  # without a key, as in vLLM
# To end an answer or to tell a client of it: it may not read, and a prompt is run in one piece.
END_SEC = 5.0
# A body that is too long is read on for a while, or its client would not see why it is refused.
_DRAIN_SEC = 5.0
# Clients that have not yet read their answers.
_MAX_OPEN = 10_000


class Gate:
    """Lets requests to an application in.

    Args:
        app: transformers' own.
        reader: of requests.
        keys: that open it.
        pools: of users.
        line: before the model.
        metrics: that count all of it.
        options: of the server.
    """

    def __init__(
        self,
        app: Any,
        reader: Reader,
        keys: ApiKeys,
        pools: UserPools,
        line: Line,
        metrics: Metrics,
        options: ServerOptions,
    ) -> None:
        self._app = app
        self._reader = reader
        self._keys = keys
        self._pools = pools
        self._line = line
        self._metrics = metrics
        self._options = options
        self._open: set[Exchange] = set()
        self._is_closing = False
        self._all_done = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        reply = _Reply(send)
        begin = perf_counter()
        status: int | None = None
        try:
            await self._serve(scope, receive, reply)
        except ApiError as error:
            if error.status == 499:
                status = 499
            else:
                await reply.refuse(error)
        except Exception:  # every client gets an answer, and the server goes on
            logger.exception("a request failed")
            await reply.refuse(failed())
        status = status or reply.status
        self._metrics.count_request(status)
        sec = perf_counter() - begin
        logger.info("%s %s %d %.3f s", scope["method"], scope["path"], status, sec)

    async def close(self, grace_sec: float) -> None:
        """Let nobody in any more, and end what is under way, after a while by force."""
        self._is_closing = True
        self._line.refuse(shutting_down())
        for sec, error in ((grace_sec, shutting_down()), (END_SEC, None)):
            with suppress(TimeoutError):
                async with asyncio.timeout(sec):
                    while self._open:
                        self._all_done.clear()
                        await self._all_done.wait()
            if error is not None:
                for exchange in self._open:
                    exchange.end(error)

    # --- one request ------------------------------------------------------------------------

    async def _serve(self, scope: Scope, receive: Receive, reply: "_Reply") -> None:
        path, method = scope["path"], scope["method"]
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        if path not in ENDPOINTS and path not in _READ:
            raise ApiError(404, f"expected one of {', '.join(sorted({*ENDPOINTS, *_READ}))}")
        expected = "POST" if path in ENDPOINTS else "GET"
        if method != expected:
            raise ApiError(405, f"expected {expected}, got {method}")
        key = "" if path in _OPEN else self._keys.identify(headers)
        if path in _READ:
            await self._app(scope, receive, reply.send)
            return
        if self._is_closing:
            raise shutting_down()
        if len(self._open) >= _MAX_OPEN:
            raise ApiError(429, "too many requests are open", code="queue_full", retry_after=5)
        # Pages of other sites may send any other type without asking first.
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise ApiError(415, "expected Content-Type: application/json")
        end = perf_counter() + self._options.timeout_sec
        try:
            async with asyncio.timeout(self._options.timeout_sec):
                data = await self._body(receive, headers)
                read = partial(self._reader.read, ENDPOINTS[path], data)
                request = await asyncio.to_thread(read)
        except TimeoutError:
            raise timed_out(self._options.timeout_sec) from None
        exchange = Exchange(
            request.asked,
            asyncio.get_running_loop(),
            self._line.leave,
            self._options.config,
            self._options.drafter,
        )
        exchange.pools, exchange.is_private = self._pools.of(
            key, request.asked.user, request.asked.salt
        )
        await self._exchange(exchange, scope, request.body, receive, reply, end)

    async def _body(self, receive: Receive, headers: dict[str, str]) -> bytes:
        most = self._options.max_body_bytes
        size = headers.get("content-length", "0")
        is_short = size.isdecimal() and int(size) <= most
        data = bytearray()
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as timer:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise left()
                    if is_short:
                        data += message.get("body", b"")
                        is_short = len(data) <= most
                    if not is_short and timer.when() is None:
                        data.clear()
                        timer.reschedule(asyncio.get_running_loop().time() + _DRAIN_SEC)
                    if not message.get("more_body", False):
                        break
        if not is_short:
            raise ApiError(413, f"expected a body of at most {most} bytes", code="too_large")
        return bytes(data)

    async def _exchange(
        self,
        exchange: Exchange,
        scope: Scope,
        body: bytes,
        receive: Receive,
        reply: "_Reply",
        end: float,
    ) -> None:
        """Wait for one's turn, and answer, as long as the client stays and time lasts."""
        self._open.add(exchange)
        client_left = asyncio.create_task(_until_left(receive))
        running = _Running(client_left, end, self._options.timeout_sec)
        has_turn = False
        try:
            await running.run(self._line.enter(), exchange, reply)
            has_turn = True
            exchange.admitted = perf_counter()
            current.set(exchange)
            replay = _replay(body, client_left)
            inner = scope | {"headers": _with_length(scope["headers"], len(body))}
            app = self._app(inner, replay, reply.send)
            await running.run(app, exchange, reply)
        finally:
            client_left.cancel()
            if has_turn and not exchange.is_submitted:
                self._line.leave()
            self._open.discard(exchange)
            self._all_done.set()
            self._metrics.count(exchange)


class _Running:
    """Runs the stages of a request while its client is there and its time is not over."""

    def __init__(self, client_left: "asyncio.Task[None]", end: float, timeout_sec: float) -> None:
        self._client_left = client_left
        self._end = end
        self._timeout_sec = timeout_sec

    async def run(self, stage: Any, exchange: Exchange, reply: "_Reply") -> None:
        """Run one stage.

        Raises:
            ApiError: the client has left, or the time is over.
        """
        task = asyncio.ensure_future(stage)
        try:
            await self._wait(task, max(self._end - perf_counter(), 0))
            if not task.done() and not reply.is_over:  # servers also call that a disconnection
                error = left() if self._client_left.done() else timed_out(self._timeout_sec)
                exchange.end(error)
                if error.status != 499 and exchange.is_submitted:
                    # The inference thread ends it, and its client is told in place.
                    await self._wait(task, END_SEC)
                if not task.done():
                    raise error
            await task
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def _wait(self, task: "asyncio.Future[Any]", sec: float) -> None:
        """Wait for a stage, but not longer than its client."""
        watched = {task, self._client_left}
        await asyncio.wait(watched, timeout=sec, return_when=asyncio.FIRST_COMPLETED)


class _Reply:
    """What was sent of an answer, and how to end it with an error."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0  # not begun
        self._is_stream = False
        self.is_over = False

    async def send(self, message: dict[str, Any]) -> None:
        """Send a message of ASGI."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kinds = [value for name, value in message["headers"] if name == b"content-type"]
            self._is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
        elif not message.get("more_body", False):
            self.is_over = True
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        """Send an error, as an event if a stream of these has begun."""
        data = json.dumps(error.body()).encode()
        messages: list[dict[str, Any]] = []
        if not self.status:
            headers = error.headers() | {
                "content-type": "application/json",
                "content-length": str(len(data)),
            }
            encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
            start = {"type": "http.response.start", "status": error.status, "headers": encoded}
            messages = [start, {"type": "http.response.body", "body": data}]
        elif self._is_stream and not self.is_over:
            messages = [{"type": "http.response.body", "body": b"data: " + data + b"\n\n"}]
        with suppress(TimeoutError):  # it does not read
            async with asyncio.timeout(END_SEC):
                for message in messages:
                    await self.send(message)


async def _until_left(receive: Receive) -> None:
    """Return once the client has left; its body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _replay(body: bytes, client_left: "asyncio.Task[None]") -> Receive:
    """Return an ASGI `receive` of a body that was read already."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.wait({client_left})
        return {"type": "http.disconnect"}

    return receive


def _with_length(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() not in _OF_BODY]
    return [*kept, (b"content-length", str(length).encode())]


_OF_BODY = {b"content-length", b"transfer-encoding", b"content-encoding"}
