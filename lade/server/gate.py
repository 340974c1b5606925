"""What every request passes: keys, limits, the line, time, and clients that leave.

A pure ASGI application, so that it sees a client leave in every state of its request. Whatever goes
wrong is told in OpenAI's form.
"""

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple
from urllib.parse import quote

from starlette.responses import Response

from lade.hosts import is_known
from lade.server.connections import origin_of
from lade.server.corpora import check_name
from lade.server.errors import ApiError, failed, full, left, shutting_down, timed_out
from lade.server.exchange import Exchange, current
from lade.server.keys import ApiKeys, KeyOwner
from lade.server.limits import config_for
from lade.server.line import Line, Shares, Workers
from lade.server.metrics import Metrics
from lade.server.options import ServerOptions
from lade.server.requests import ENDPOINTS, Reader, texts_of
from lade.server.upstream import Upstream
from lade.server.users import UserPools

logger = logging.getLogger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_CORPORA = "/v1/pools"
_ONE_CORPUS, _ONE_MODEL = "/v1/pools/", "/v1/models/"  # and a name
_READ = {"/v1/models", "/health", "/ready", "/metrics", _CORPORA}
_TOKENIZE = "/tokenize"
_OPEN = {"/health", "/ready"}  # without a key
_POSTED = {*ENDPOINTS, _TOKENIZE}
_REQUEST_ID, _MAX_ID = "x-request-id", 256  # every event of an answer has it
# To end an answer or to tell a client of it: it may not read, and a prompt is run in one piece.
END_SEC = 5.0
# A body that is too long is read on for a while, or its client would not see why it is refused.
_DRAIN_SEC = 5.0
# Requests whose clients have not yet read their answers, of all and of one key.
_MAX_OPEN, _MAX_OPEN_OF_KEY = 10_000, 2_500
_NUM_THREADS = 4  # that prepare requests
# Bodies beyond this are looked at one by one, since that keeps all other threads waiting.
_LARGE_BYTES = 2**18
# Of a body: silence, and what all, and one key, may have sent for requests whose turn has not come,
# in bodies of full size.
_IDLE_SEC = 30.0
_MAX_BODIES, _MAX_BODIES_OF_KEY = 64, 16


class Names(NamedTuple):
    """By what names clients may call a server; None for any."""

    hosts: Container[str] | None = None
    metrics_port: int | None = None  # where metrics alone are told, to anybody
    metrics_hosts: Container[str] | None = None  # the names there


_ANY = Names()


class Gate:
    """Lets requests in, and answers them.

    Args:
        upstream: what transformers brings.
        reader: of requests.
        keys: that open it.
        pools: of users.
        line: before the model.
        metrics: that count all of it.
        options: of the server.
        names: that clients may call it by.
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
        names: Names = _ANY,
    ) -> None:
        self._upstream = upstream
        self._reader = reader
        num_waiting = (
            options.max_queue + options.max_batch_size
        )  # those whose turn may come at once
        self._workers = Workers(_NUM_THREADS, num_waiting)
        self._reads_large = Workers(1, num_waiting)
        self._compilers = Workers(1, num_waiting)
        self._keys = keys
        self._pools = pools
        self._line = line
        self._metrics = metrics
        self._options = options
        self._names = names
        self._open: set[Exchange] = set()
        self._requests = Shares(_MAX_OPEN, _MAX_OPEN_OF_KEY)
        size = options.max_body_bytes
        self._bytes = Shares(_MAX_BODIES * size, _MAX_BODIES_OF_KEY * size)
        self._is_closing = False
        self._all_done = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        reply = _Reply(send)
        begin = perf_counter()
        status: int | None = None
        try:
            await self._serve(scope, receive, reply)
        except ApiError as error:
            # What was raised holds the frames that hold a request, in cycles that are freed late.
            error.__traceback__ = error.__cause__ = error.__context__ = None
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
        for each in (self._line, self._workers, self._reads_large, self._compilers):
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

    # --- one request ------------------------------------------------------------------------

    async def _serve(self, scope: Scope, receive: Receive, reply: "_Reply") -> None:
        path, method = scope["path"], scope["method"]
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        names = self._names
        is_apart = names.metrics_port is not None and scope["server"][1] == names.metrics_port
        # By names of others, a page in a browser may reach what is not for it.
        hosts = names.metrics_hosts if is_apart else names.hosts
        if not is_known(headers.get("host", ""), hosts):
            raise ApiError(421, "expected a Host header that this server is known by")
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may read another end of the body, and what follows as another's request.
            raise ApiError(400, "expected one length of the body, got two", closes=True)
        if is_apart:
            if path != "/metrics" or method not in ("GET", "HEAD") or "origin" in headers:
                raise ApiError(404, "expected GET /metrics, and from no page")
            await self._told_metrics(reply)
            return
        is_read = path in _READ or path.startswith(_ONE_MODEL)
        is_corpus = path.startswith(_ONE_CORPUS)
        if not (is_read or is_corpus or path in _POSTED):
            raise ApiError(404, f"expected one of {', '.join(sorted({*_POSTED, *_READ}))}")
        expected = ("PUT", "DELETE") if is_corpus else ("GET", "HEAD") if is_read else ("POST",)
        if method not in expected:
            raise ApiError(405, f"expected {' or '.join(expected)}, got {method}")
        owner = KeyOwner() if path in _OPEN else self._keys.identify(headers)
        if (is_corpus or path == _CORPORA) and not owner.administers:
            raise ApiError(403, "expected an API key with the right admin")
        if is_read:  # of HEAD, uvicorn leaves out the body
            await self._told(path, reply)
            return
        if self._is_closing:
            raise shutting_down()
        if method == "DELETE":
            await reply.tell(200, self._pools.corpora.delete(path.removeprefix(_ONE_CORPUS)))
            return
        # Pages of other sites may send any other type without asking first.
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise ApiError(415, "expected Content-Type: application/json")
        request_id = headers.get(_REQUEST_ID) or str(uuid.uuid4())
        if len(request_id) > _MAX_ID:
            raise ApiError(
                400,
                f"expected {_REQUEST_ID} of at most {_MAX_ID} characters, got {len(request_id)}",
            )
        exchange = Exchange(
            asyncio.get_running_loop(),
            self._options.config,
            self._options.drafter,
            self._options.chunk_interval_sec,
            owner=owner,
            of_whom=owner.key or origin_of(scope["client"]),
            knows_kept=bool(owner.key) or self._options.shares_pool,
        )
        if not self._requests.take(exchange.of_whom):
            raise full("too many requests are open")
        try:
            await self._exchange(exchange, path, headers, request_id, receive, reply)
        finally:
            self._let_go(exchange)
            self._requests.give(exchange.of_whom)

    async def _told(self, path: str, reply: "_Reply") -> None:
        """Tell what is not of one request."""
        if path == "/metrics":
            if self._keys:
                raise ApiError(
                    403,
                    "metrics tell what others ask: an operator serves them on a port of their own",
                )
            await self._told_metrics(reply)
            return
        model = self._upstream.model
        told: dict[str, Any] = {"object": "list", "data": [model]}
        if path == "/health":
            told = {"status": "ok"}
        elif path == "/ready":
            # Not whether the process lives, as `/health`. A full queue is of one key alone.
            if self._is_closing:
                raise shutting_down()
            told = {"status": "ready"}
        elif path == _CORPORA:
            told["data"] = self._pools.corpora.told()
        elif path != "/v1/models":
            if path != _ONE_MODEL + model["id"]:
                raise ApiError(404, f"expected the model {model['id']!r}", code="model_not_found")
            told = model
        await reply.tell(200, told)

    async def _told_metrics(self, reply: "_Reply") -> None:
        text = await asyncio.to_thread(self._metrics.text)
        await reply.respond(Response(text, media_type="text/plain; version=0.0.4; charset=utf-8"))

    async def _exchange(
        self,
        exchange: Exchange,
        path: str,
        headers: Mapping[str, str],
        request_id: str,
        receive: Receive,
        reply: "_Reply",
    ) -> None:
        """Read a request and answer it."""
        limit_sec = self._options.timeout_sec
        end = perf_counter() + limit_sec
        try:
            async with asyncio.timeout(limit_sec):
                exchange.body = await self._body(receive, headers, exchange)
        except TimeoutError:
            raise timed_out(limit_sec) from None
        exchange.arrived = perf_counter()
        client_left = asyncio.create_task(_until_left(receive))
        running = _Running(exchange, reply, client_left, limit_sec, end)
        self._open.add(exchange)
        current.set(exchange)
        try:
            if path.startswith(_ONE_CORPUS):
                await reply.tell(200, await running.run(self._put(exchange, path)))
                return
            await running.run(self._prepared(exchange, path))
            if path == _TOKENIZE:
                token_ids = exchange.prompt["input_ids"][0].tolist()
                await reply.tell(200, {"count": len(token_ids), "tokens": token_ids})
            else:
                await self._answered(request_id, running)
        finally:
            client_left.cancel()
            self._open.discard(exchange)
            self._all_done.set()
            self._metrics.count(exchange)

    async def _body(
        self, receive: Receive, headers: Mapping[str, str], exchange: Exchange
    ) -> bytearray:
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
                        if not self._bytes.take(exchange.of_whom, len(piece)):
                            raise full("too much of other requests has come already")
                        exchange.num_held += len(piece)
                        data += piece
                        is_short = len(data) <= most
                        if piece:
                            timer.reschedule(loop.time() + (_IDLE_SEC if is_short else _DRAIN_SEC))
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            if is_short:
                raise ApiError(
                    408, f"nothing of the body came for {_IDLE_SEC:g} s", closes=True
                ) from None
        if not is_short:
            raise ApiError(413, f"expected a body of at most {most} bytes", code="too_large")
        return data

    def _let_go(self, exchange: Exchange) -> None:
        """Count what came of a request no more."""
        self._bytes.give(exchange.of_whom, exchange.num_held)
        exchange.num_held = 0

    async def _put(self, exchange: Exchange, path: str) -> Any:
        """Make a corpus, one at a time."""
        name = path.removeprefix(_ONE_CORPUS)
        try:
            check_name(name)
        except ValueError as error:
            raise ApiError(400, str(error)) from None

        def put() -> Any:
            return self._pools.corpora.put(name, texts_of(exchange.body))

        return await self._reads_large.run(exchange.of_whom, put)

    async def _prepared(self, exchange: Exchange, path: str) -> None:
        """Do all that can be done before the turn."""
        key, size = exchange.of_whom, len(exchange.body)
        workers = self._workers if size <= _LARGE_BYTES else self._reads_large
        request = await workers.run(key, self._reader.read, ENDPOINTS.get(path), exchange.body)
        asked = request.asked
        if exchange.owner.is_alone:
            asked = replace(asked, speculates=False)
        exchange.asked = asked
        exchange.config = config_for(asked, exchange.config)
        exchange.pools, tenant = self._pools.of(exchange.owner, asked)
        exchange.is_private = not tenant
        if request.schema is not None:
            compiled = self._reader.grammars.compiled
            exchange.grammar = await self._compilers.run(key, compiled, tenant, request.schema, key)
        prepare = self._upstream.prepare
        exchange.body = await workers.run(key, prepare, exchange, request.body)

    async def _answered(self, request_id: str, running: "_Running") -> None:
        """Wait for one's turn, and answer, as long as the client stays and time lasts."""
        exchange, reply = running.exchange, running.reply
        try:
            exchange.leave = await running.run(self._line.enter(exchange.of_whom))
            exchange.admitted = perf_counter()
            self._let_go(exchange)
            answering = self._upstream.answer(exchange, exchange.body, request_id)
            answer = await running.run(answering)
            if isinstance(answer, dict):
                await running.run(reply.tell(200, answer, {_REQUEST_ID: request_id}))
            else:
                await running.run(reply.stream(answer, request_id))
        finally:
            if not exchange.is_submitted:
                exchange.leave()


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

    async def tell(
        self, status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        """Send JSON."""
        await self.respond(Response(json.dumps(body), status, headers, "application/json"))

    async def respond(self, response: Response) -> None:
        """Send an answer that is whole."""
        await self._begin(response.status_code, response.raw_headers)
        await self._go_on(bytes(response.body), is_last=True)

    async def stream(self, parts: AsyncGenerator[str, None], request_id: str) -> None:
        """Send events as they come."""
        self._is_stream = True
        kind = (b"content-type", b"text/event-stream; charset=utf-8")
        async with aclosing(parts):
            await self._begin(200, [kind, (_REQUEST_ID.encode(), request_id.encode("latin-1"))])
            async for part in parts:
                await self._go_on(part.encode())
        await self._go_on(b"", is_last=True)

    async def refuse(self, error: ApiError) -> None:
        """Send an error, as an event if a stream of these has begun."""
        with suppress(TimeoutError):  # it does not read
            async with asyncio.timeout(END_SEC):
                if not self.status:
                    await self.tell(error.status, error.body(), error.headers())
                elif self._is_stream and not self.is_over:
                    data = b"data: " + json.dumps(error.body()).encode() + b"\n\n"
                    await self._go_on(data, is_last=True)

    async def _begin(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status = status
        start = {"type": "http.response.start", "status": status, "headers": headers}
        await self._send(start)

    async def _go_on(self, data: bytes, *, is_last: bool = False) -> None:
        self.is_over = is_last
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})


async def _until_left(receive: Receive) -> None:
    """Return once the client has left; its body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
