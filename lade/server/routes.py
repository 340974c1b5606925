"""What can be asked, and what every request passes: keys, limits, the line, time.

Whatever goes wrong is told in OpenAI's form. A request is prepared in threads, waits for its turn,
and is answered by `inference.py`; what is under way for a client that leaves is ended.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Mapping
from contextlib import ExitStack, aclosing, closing, suppress
from functools import partial
from time import perf_counter, time
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from lade.engine import Engine
from lade.hosts import is_known
from lade.models.loading import LoadedModel
from lade.probing.profile import Profiles
from lade.server.answers import ToldAnswer
from lade.server.connections import origin_of
from lade.server.errors import ApiError, failed, full, left, shutting_down, timed_out
from lade.server.exchange import Exchange
from lade.server.grammars import Grammars
from lade.server.inference import Answering
from lade.server.keys import ApiKeys, KeyOwner
from lade.server.limits import Preparing
from lade.server.line import Line, Shares
from lade.server.metrics import Metrics
from lade.server.options import ServerOptions
from lade.server.requests import Asked, Chat, Completion, read
from lade.server.users import UserPools

logger = logging.getLogger(__name__)

_REQUEST_ID, _MAX_ID = "x-request-id", 256  # every event of an answer has it
# To end an answer or to tell a client of it: it may not read, and a prompt is run in one piece.
END_SEC = 5.0
# Of a body: silence, and what all, and one key, may have sent for requests whose turn has not come,
# in bodies of full size.
_IDLE_SEC = 30.0
_MAX_BODIES, _MAX_BODIES_OF_KEY = 64, 16


class Routes:
    """Lets requests in, and answers them; an ASGI application.

    Args:
        loaded, engine: the model.
        name: what clients call it.
        options: of the server.
        hosts: names that clients may call the server by; None for any.
        stack: ends with the server.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        name: str,
        engine: Engine,
        options: ServerOptions,
        hosts: Container[str] | None,
        stack: ExitStack,
    ) -> None:
        self._name, self._options, self._hosts = name, options, hosts
        self.keys = ApiKeys(options.api_keys)
        self._vocab_size = loaded.model.config.get_text_config(decoder=True).vocab_size
        self._pools = stack.enter_context(closing(UserPools(loaded, options)))
        self._grammars = Grammars(loaded)
        self._preparing = Preparing(loaded, options)
        self._answering = Answering(loaded, engine, options.drafter)
        is_one_by_one = engine.num_places == 1
        logger.info("requests are answered %s", "one by one" if is_one_by_one else "together")
        prefixes = Profiles.of(loaded.model).prefixes
        self._metrics = Metrics(name, engine, self._pools.store, prefixes)
        num_waiting = options.max_queue + options.max_batch_size
        # For threads that prepare requests, of which one key leaves some to others, and schemas.
        self._workers, self._lookers = Line(num_waiting, 4, 2), Line(num_waiting, 1, 1)
        most = options.max_body_bytes
        self._bytes = Shares(_MAX_BODIES * most, _MAX_BODIES_OF_KEY * most)
        self._open: set[Exchange] = set()
        self._is_closing = False
        model = {"id": name, "object": "model", "created": int(time()), "owned_by": "lade"}

        async def models(request: Request) -> Response:
            self._identified(request)
            if (asked := request.path_params.get("name", name)) != name:
                message = f"expected the model {name!r}, got {asked[:80]!r}"
                raise ApiError(404, message, code="model_not_found")
            is_one = "name" in request.path_params
            return JSONResponse(model if is_one else {"object": "list", "data": [model]})

        async def health(_: Request) -> Response:
            if self._is_closing:
                raise shutting_down()
            return JSONResponse({"status": "ok"})

        async def metrics(request: Request) -> Response:
            if not self._identified(request).administers:
                raise ApiError(403, "metrics tell what others ask: expected a key that is admin")
            return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

        routes = [
            Route("/v1/chat/completions", partial(self._complete, Chat), methods=["POST"]),
            Route("/v1/completions", partial(self._complete, Completion), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ]
        handlers: Any = {ApiError: _refused, HTTPException: _no_route, Exception: _failed}
        self._app = Starlette(routes=routes, exception_handlers=handlers)
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, and note in log and metrics what came of it."""
        if scope["type"] != "http":
            return
        begin, status = perf_counter(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        scope["state"] = {}
        try:
            await self._app(scope, receive, noting)
        except Exception:  # every client gets an answer, and the server goes on
            logger.exception("a request failed")
        exchange: Exchange | None = scope["state"].get("exchange")
        if exchange is not None and exchange.error is not None and exchange.error.status == 499:
            status = 499
        self._metrics.count_request(status)
        # A path may hold line breaks and escapes.
        path, sec = quote(scope["path"][:200]), perf_counter() - begin
        logger.info("%s %s %d %.3f s", scope["method"], path, status, sec)

    async def close(self, grace_sec: float) -> None:
        """Let nobody in any more, and end what is under way, after a while by force."""
        self._is_closing = True
        for each in (self._workers, self._lookers):
            each.refuse(shutting_down())
        for exchange in self._open:
            if exchange.admitted is None:
                exchange.end(shutting_down())
        for sec in (grace_sec, END_SEC):
            with suppress(TimeoutError):
                async with asyncio.timeout(sec):
                    while self._open:
                        await asyncio.sleep(0.05)
            for exchange in self._open:
                exchange.end(shutting_down())

    # --- one request ------------------------------------------------------------------------

    async def _complete(self, kind: type[Asked], request: Request) -> Response:
        exchange = self._let_in(request)
        self._open.add(exchange)
        is_streamed = False
        try:
            answered = self._answered(kind, exchange, await self._body(request, exchange))
            response: Response = await self._while_there(request, exchange, answered)
            is_streamed = isinstance(response, _Events)
            return response
        finally:
            if not is_streamed:
                self._over(exchange)

    async def _answered(self, kind: type[Asked], exchange: Exchange, data: bytearray) -> Response:
        exchange.arrived = perf_counter()
        await self._prepared(kind, exchange, data)
        del data
        await self._answering.begin(exchange, self._options.max_queue)
        self._let_go(exchange)
        answer = ToldAnswer(exchange, self._name)
        headers = {_REQUEST_ID: exchange.request_id}
        if exchange.asked.stream:
            return _Events(exchange, answer.events(), partial(self._over, exchange), headers)
        return JSONResponse(await answer.whole(), headers=headers)

    def _identified(self, request: Request) -> KeyOwner:
        """Return whose a request is.

        Raises:
            ApiError: it is nobody's, or to a server of another name.
        """
        # By names of others, a page in a browser may reach what is not for it.
        if not is_known(request.headers.get("host", ""), self._hosts):
            raise ApiError(421, "expected a Host header that this server is known by")
        return self.keys.identify(request.headers)

    def _let_in(self, request: Request) -> Exchange:
        """Return a new exchange, if keys and headers are right.

        Raises:
            ApiError: they are not.
        """
        headers, options, owner = (request.headers, self._options, self._identified(request))
        if self._is_closing:
            raise shutting_down()
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may read another end of the body, and what follows as another's request.
            raise ApiError(400, "expected one length of the body, got two", closes=True)
        # Pages of other sites may send any other type without asking first.
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise ApiError(415, "expected Content-Type: application/json")
        request_id = headers.get(_REQUEST_ID) or str(uuid.uuid4())
        if len(request_id) > _MAX_ID:
            message = f"expected {_REQUEST_ID} of at most {_MAX_ID} characters"
            raise ApiError(400, f"{message}, got {len(request_id)}")
        exchange = Exchange(
            request_id,
            owner,
            of_whom=owner.key or origin_of(request.scope["client"]),
            knows_kept=bool(owner.key) or options.shares_pool,
            timeout_sec=options.timeout_sec,
            config=options.config,
        )
        request.state.exchange = exchange
        return exchange

    async def _body(self, request: Request, exchange: Exchange) -> bytearray:
        """Read a body; one that is too long is read on, or its client would not see why."""
        most, loop = self._options.max_body_bytes, asyncio.get_running_loop()
        size = request.headers.get("content-length", "0")
        is_short, data = size.isdecimal() and int(size) <= most, bytearray()
        end = loop.time() + exchange.timeout_sec
        try:
            async with asyncio.timeout_at(min(end, loop.time() + _IDLE_SEC)) as timer:
                async for piece in request.stream():
                    if is_short and piece:
                        if not self._bytes.take(exchange.of_whom, len(piece)):
                            raise full("too much of other requests has come already")
                        exchange.num_held += len(piece)
                        data += piece
                        is_short = len(data) <= most
                        timer.reschedule(min(end, loop.time() + _IDLE_SEC))
        except ClientDisconnect:
            exchange.end(left())
        except TimeoutError:
            silent = ApiError(408, f"nothing of the body came for {_IDLE_SEC:g} s", closes=True)
            is_late = loop.time() >= end
            if is_late or is_short:
                exchange.end(timed_out(exchange.timeout_sec) if is_late else silent)
        if not is_short:
            raise ApiError(413, f"expected a body of at most {most} bytes", code="too_large")
        exchange.check()
        return data

    async def _prepared(self, kind: type[Asked], exchange: Exchange, data: bytearray) -> None:
        """Do all that can be done before the turn."""
        key, name, size = exchange.of_whom, self._name, self._vocab_size
        asked: Asked = await self._workers.run(key, read, kind, data, name, size)
        if exchange.owner.is_alone:
            asked.speculation = False
        exchange.asked = asked
        exchange.pools, tenant = self._pools.of(exchange.owner, asked)
        exchange.is_private = not tenant
        if isinstance(asked, Chat) and (schema := asked.schema_asked) is not None:
            exchange.grammar = await self._lookers.run(key, self._grammars.made, schema, tenant)
        await self._workers.run(key, self._preparing.prepare, exchange)
        if asked.num_logprobs is not None:
            exchange.tokens = await self._workers.run(key, lambda: self._grammars.tokens)

    async def _while_there(
        self, request: Request, exchange: Exchange, stage: Awaitable[Any]
    ) -> Any:
        """Work on a request while its client is there and its time is not over.

        Raises:
            ApiError: the client has left, or the time is over.
        """
        task = asyncio.ensure_future(stage)
        gone = asyncio.create_task(_until_left(request))
        try:
            sec = max(exchange.deadline - perf_counter(), 0)
            await asyncio.wait({task, gone}, timeout=sec, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                exchange.end(left() if gone.done() else timed_out(exchange.timeout_sec))
                exchange.check()
            return await task
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    def _let_go(self, exchange: Exchange) -> None:
        """Count what came of a request no more."""
        self._bytes.give(exchange.of_whom, exchange.num_held)
        exchange.num_held = 0

    def _over(self, exchange: Exchange) -> None:
        self._let_go(exchange)
        self._open.discard(exchange)
        self._metrics.count(exchange)


class _Events(StreamingResponse):
    """A stream of events, however it ends."""

    media_type = "text/event-stream"

    def __init__(
        self,
        exchange: Exchange,
        events: AsyncGenerator[str, None],
        over: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(events, headers=headers)
        self._exchange, self._events, self._over = exchange, events, over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events as they come, until the client leaves."""
        try:
            async with aclosing(self._events):
                await super().__call__(scope, receive, send)
        finally:
            if self._exchange.stats is None:
                self._exchange.end(left())
            self._over()


async def _until_left(request: Request) -> None:
    """Return once the client has left; its body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refused(_: Request, error: ApiError) -> Response:
    # What was raised holds the frames that hold a request, in cycles that are freed late.
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return JSONResponse(error.body(), error.status, error.headers())


async def _failed(request: Request, _: Exception) -> Response:
    return await _refused(request, failed())


async def _no_route(request: Request, error: HTTPException) -> Response:
    message = f"expected a path and method that there is, got {request.method} {request.url.path}"
    return await _refused(request, ApiError(error.status_code, message[:300]))
