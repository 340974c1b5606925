"""What every request passes first: keys, limits, the line, time, and clients that leave.

A pure ASGI middleware, so that it sees a client leave in every state of its request. Whatever goes
wrong is told in OpenAI's form.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from lade.hosts import is_known
from lade.server.drafting import config_for
from lade.server.errors import ApiError, failed, left, shutting_down, timed_out
from lade.server.exchange import Exchange, current
from lade.server.line import Line, Workers
from lade.server.metrics import Metrics
from lade.server.options import ServerOptions
from lade.server.requests import ENDPOINTS, Reader
from lade.server.upstream import Upstream
from lade.server.users import ApiKeys, UserPools

logger = logging.getLogger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

# Paths that may be asked for, and how. All others, of which transformers has more, are unknown:
# they would load or unload models.
_READ = {"/v1/models", "/health", "/ready", "/metrics"}
_ONE_MODEL = "/v1/models/"  # and its name
_TOKENIZE = "/tokenize"
_OPEN = {"/health", "/ready"}  # without a key
_POSTED = {*ENDPOINTS, _TOKENIZE}
# To end an answer or to tell a client of it: it may not read, and a prompt is run in one piece.
END_SEC = 5.0
# A body that is too long is read on for a while, or its client would not see why it is refused.
_DRAIN_SEC = 5.0
# Clients that have not yet read their answers.
_MAX_OPEN = 10_000
# That prepare requests, and schemas of one key that may wait.
_NUM_THREADS, _MAX_SCHEMAS = 4, 4
# Of a body: silence, and what one key, and all, may have begun to send, in bodies of full size.
_IDLE_SEC = 30.0
_MAX_BODIES_OF_KEY, _MAX_BODIES = 16, 64


class Gate:
    """Lets requests to an application in.

    Args:
        upstream: what transformers brings.
        reader: of requests.
        keys: that open it.
        pools: of users.
        line: before the model.
        metrics: that count all of it.
        options: of the server.
        hosts: names that clients may call it by; None for any.
    """

    def __init__(
        self,
        upstream: Upstream,
        reader: Reader,
        keys: ApiKeys,
        pools: UserPools,
        line: Line,
        metrics: Metrics,
        options: ServerOptions,
        hosts: Container[str] | None = None,
    ) -> None:
        self._app, self._prompts = upstream.app, upstream.prompts
        self._reader = reader
        self._workers = Workers(_NUM_THREADS, options.max_queue)
        self._compilers = Workers(1, _MAX_SCHEMAS)  # one schema takes a second at most
        self._keys = keys
        self._pools = pools
        self._line = line
        self._metrics = metrics
        self._options = options
        self._hosts = hosts
        self._open: set[Exchange] = set()
        self._unread: Counter[str] = Counter()  # bytes, by key
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
        # A path may hold line breaks and escapes.
        logger.info("%s %s %d %.3f s", scope["method"], quote(scope["path"][:200]), status, sec)

    async def close(self, grace_sec: float) -> None:
        """Let nobody in any more, and end what is under way, after a while by force."""
        self._is_closing = True
        for each in (self._line, self._workers, self._compilers):
            each.refuse(shutting_down())
        for sec, error in ((grace_sec, shutting_down()), (END_SEC, None)):
            with suppress(TimeoutError):
                async with asyncio.timeout(sec):
                    while self._open:
                        self._all_done.clear()
                        await self._all_done.wait()
            if error is not None:
                for exchange in self._open:
                    exchange.end(error)

    def _check_host(self, headers: Mapping[str, str]) -> None:
        """Refuse names of others, by which a page in a browser may reach what is not for it."""
        if not is_known(headers.get("host", ""), self._hosts):
            raise ApiError(421, "expected a Host header that this server is known by")

    # --- one request ------------------------------------------------------------------------

    async def _serve(self, scope: Scope, receive: Receive, reply: "_Reply") -> None:
        path, method = scope["path"], scope["method"]
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        self._check_host(headers)
        is_read = path in _READ or path.startswith(_ONE_MODEL)
        if not is_read and path not in _POSTED:
            raise ApiError(404, f"expected one of {', '.join(sorted({*_POSTED, *_READ}))}")
        expected = ("GET", "HEAD") if is_read else ("POST",)
        if method not in expected:
            raise ApiError(405, f"expected {' or '.join(expected)}, got {method}")
        key = "" if path in _OPEN else self._keys.identify(headers)
        if path == "/metrics" and self._keys:
            raise ApiError(
                403, "metrics tell what others ask: an operator serves them on a port of their own"
            )
        if path == "/ready":
            # Not whether the process lives, as `/health`. A full queue is of one key alone.
            if self._is_closing:
                raise shutting_down()
            await reply.tell(200, {"status": "ready"})
            return
        if is_read:  # of HEAD, uvicorn leaves out the body
            await self._app({**scope, "method": "GET"}, receive, reply.send)
            return
        if self._is_closing:
            raise shutting_down()
        if len(self._open) >= _MAX_OPEN:
            raise ApiError(429, "too many requests are open", code="queue_full", retry_after=5)
        # Pages of other sites may send any other type without asking first.
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise ApiError(415, "expected Content-Type: application/json")
        end = perf_counter() + self._options.timeout_sec
        of_whom = key or _address(scope)
        try:
            async with asyncio.timeout(self._options.timeout_sec):
                data = await self._body(receive, headers, of_whom)
        except TimeoutError:
            raise timed_out(self._options.timeout_sec) from None
        exchange = Exchange(
            asyncio.get_running_loop(),
            partial(self._line.leave, of_whom),
            self._options.config,
            self._options.drafter,
            key=key,
            of_whom=of_whom,
            knows_kept=bool(key) or self._options.shares_pool,
        )
        client_left = asyncio.create_task(_until_left(receive))
        running = _Running(exchange, reply, client_left, self._options.timeout_sec, end)
        self._open.add(exchange)
        try:
            body = await running.run(self._prepared(exchange, path, data))
            if path == _TOKENIZE:
                token_ids = exchange.prompt["input_ids"][0].tolist()
                await reply.tell(200, {"count": len(token_ids), "tokens": token_ids})
            else:
                await self._answered(scope, body, running)
        finally:
            client_left.cancel()
            self._open.discard(exchange)
            self._all_done.set()
            self._metrics.count(exchange)

    async def _body(self, receive: Receive, headers: dict[str, str], of_whom: str) -> bytes:
        most = self._options.max_body_bytes
        size = headers.get("content-length", "0")
        is_short = size.isdecimal() and int(size) <= most
        data = bytearray()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_IDLE_SEC if is_short else _DRAIN_SEC) as timer:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise left()
                    if is_short:
                        piece = message.get("body", b"")
                        self._count_unread(of_whom, len(piece))
                        data += piece
                        is_short = len(data) <= most
                        if piece:
                            timer.reschedule(loop.time() + (_IDLE_SEC if is_short else _DRAIN_SEC))
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            if is_short:
                raise ApiError(408, f"nothing of the body came for {_IDLE_SEC:g} s") from None
        finally:
            self._count_unread(of_whom, -len(data))
        if not is_short:
            raise ApiError(413, f"expected a body of at most {most} bytes", code="too_large")
        return bytes(data)

    def _count_unread(self, of_whom: str, num_bytes: int) -> None:
        """Count bytes of bodies that are not whole yet.

        Raises:
            ApiError: they would be too many.
        """
        size = self._options.max_body_bytes
        of_key = self._unread[of_whom] + num_bytes
        is_full = self._unread.total() + num_bytes > _MAX_BODIES * size
        if num_bytes > 0 and (is_full or of_key > _MAX_BODIES_OF_KEY * size):
            raise ApiError(
                429, "too much of other requests has come already", code="queue_full", retry_after=5
            )
        self._unread[of_whom] = of_key
        if not of_key:
            del self._unread[of_whom]

    async def _prepared(self, exchange: Exchange, path: str, data: bytes) -> bytes:
        """Do all that can be done before the turn; return the body for transformers' handler."""
        run = partial(self._workers.run, exchange.of_whom)
        request = await run(self._reader.read, ENDPOINTS.get(path), data)
        asked = exchange.asked = request.asked
        exchange.config = config_for(asked, exchange.config)
        exchange.pools, tenant = self._pools.of(exchange.key, asked.user, asked.salt)
        exchange.is_private = not tenant
        if request.schema is not None:
            compiled = self._reader.grammars.compiled
            compiling = self._compilers.run(exchange.of_whom, compiled, tenant, request.schema)
            exchange.grammar = await compiling
        current.set(exchange)
        call = await self._prompts(request.asked.endpoint, request.body)
        exchange.prompt = await run(call)
        body: bytes = request.body
        return body

    async def _answered(self, scope: Scope, body: bytes, running: "_Running") -> None:
        """Wait for one's turn, and answer, as long as the client stays and time lasts."""
        exchange, has_turn = running.exchange, False
        try:
            await running.run(self._line.enter(exchange.of_whom))
            has_turn = True
            exchange.admitted = perf_counter()
            current.set(exchange)
            replay = _replay(body, running.client_left)
            inner = scope | {"headers": _with_length(scope["headers"], len(body))}
            await running.run(self._app(inner, replay, running.reply.send))
        finally:
            if has_turn and not exchange.is_submitted:
                self._line.leave(exchange.of_whom)


@dataclass(frozen=True)
class _Running:
    """Runs the stages of a request while its client is there and its time is not over."""

    exchange: Exchange
    reply: "_Reply"
    client_left: "asyncio.Task[None]"
    timeout_sec: float
    end: float  # when that is over

    async def run(self, stage: Any) -> Any:
        """Run one stage and return its result.

        Raises:
            ApiError: the client has left, or the time is over.
        """
        task = asyncio.ensure_future(stage)
        try:
            await self._wait(task, max(self.end - perf_counter(), 0))
            if not task.done() and not self.reply.is_over:  # servers also call that a disconnection
                error = left() if self.client_left.done() else timed_out(self.timeout_sec)
                self.exchange.end(error)
                if error.status != 499 and self.exchange.is_submitted:
                    # The thread that answers ends it, and its client is told in place.
                    await self._wait(task, END_SEC)
                if not task.done():
                    raise error
            return await task
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def _wait(self, task: "asyncio.Future[Any]", sec: float) -> None:
        """Wait for a stage, but not longer than its client."""
        watched = {task, self.client_left}
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

    async def tell(
        self, status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        """Send JSON."""
        made = Response(json.dumps(body), status, headers, "application/json")
        await self.send(
            {"type": "http.response.start", "status": status, "headers": made.raw_headers}
        )
        await self.send({"type": "http.response.body", "body": made.body})

    async def refuse(self, error: ApiError) -> None:
        """Send an error, as an event if a stream of these has begun."""
        with suppress(TimeoutError):  # it does not read
            async with asyncio.timeout(END_SEC):
                if not self.status:
                    await self.tell(error.status, error.body(), error.headers())
                elif self._is_stream and not self.is_over:
                    data = b"data: " + json.dumps(error.body()).encode() + b"\n\n"
                    await self.send({"type": "http.response.body", "body": data})


def _address(scope: Scope) -> str:
    """Return where a request comes from, which stands for a key where there are none."""
    client = scope.get("client")
    return str(client[0]) if client else ""


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
