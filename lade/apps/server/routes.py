"""The HTTP routes, and the way of a request: key, limits, preparation, queue, answer.

Errors have OpenAI's form. A request is prepared in threads, waits for its turn, and is answered by
`inference.py`. If the client leaves, its answers end.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from time import perf_counter, time
from typing import Any
from urllib.parse import quote
from weakref import WeakValueDictionary

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lade.apps.server.access import ApiKeys, KeyOwner, UserPools, is_known
from lade.apps.server.answers import events, whole
from lade.apps.server.errors import ApiError, failed
from lade.apps.server.exchange import Exchange
from lade.apps.server.inference import answer, end_exchange
from lade.apps.server.limits import Preparing
from lade.apps.server.metrics import Metrics
from lade.apps.server.options import ServerOptions
from lade.apps.server.requests import Asked, Chat, Completion, read
from lade.engine.engine import Engine
from lade.models.loading import LoadedModel
from lade.probing.profile import Profiles, computing

logger = logging.getLogger(__name__)

# Bodies of full size that the server holds for waiting requests: of all keys, and of one key.
_MAX_BODIES, _MAX_BODIES_OF_KEY = 64, 16


class Routes:
    """Lets requests in, and answers them; an ASGI application.

    Args:
        loaded, engine: the model, and the engine that runs its calls.
        name: the model's name in the API.
        options: the server's settings.
        host: address that the server listens at.

    Attributes:
        keys: the API keys.
        pools: the users' pools; the server closes them.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        name: str,
        engine: Engine,
        options: ServerOptions,
        host: str,
    ) -> None:
        self._name, self._options, self._host = name, options, host
        self.keys = ApiKeys(options.api_keys)
        self.pools = UserPools(loaded, options)
        self._preparing = Preparing(loaded, options)
        self._loaded, self._engine = loaded, engine
        prefixes = Profiles.of(computing(loaded.model)).prefixes
        self._metrics = Metrics(name, engine, self.pools.store, prefixes)
        self._workers, self._lookers = _Workers(4, 2), _Workers(1, 1)  # for schemas
        self._open: set[Exchange] = set()
        model = {"id": name, "object": "model", "created": int(time()), "owned_by": "lade"}

        async def models(request: Request) -> Response:
            self._identified(request)
            if (asked := request.path_params.get("name", name)) != name:
                message = f"expected the model {name!r}, got {asked[:80]!r}"
                raise ApiError(404, message, code="model_not_found")
            is_one = "name" in request.path_params
            return JSONResponse(model if is_one else {"object": "list", "data": [model]})

        async def health(_: Request) -> Response:
            return JSONResponse({"status": "ok"})

        async def metrics(request: Request) -> Response:
            if not self._identified(request).administers:
                raise ApiError(
                    403, "expected a key with the right admin, as metrics show what others ask"
                )
            return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

        routes = [
            Route("/v1/chat/completions", partial(self._complete, Chat), methods=["POST"]),
            Route("/v1/completions", partial(self._complete, Completion), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ]
        handlers: Any = dict.fromkeys((ApiError, HTTPException, Exception), _refused)
        self._app = Starlette(routes=routes, exception_handlers=handlers)
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, and note its outcome in log and metrics."""
        begin, status = perf_counter(), 0
        lengths = {b"content-length", b"transfer-encoding"} - {name for name, _ in scope["headers"]}
        app: ASGIApp = self._app
        if not lengths:  # a proxy may take the rest for another request
            error = ApiError(400, "expected one length of the body, got two", closes=True)
            app = await _refused(Request(scope), error)

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await app(scope, receive, noting)
        finally:  # uvicorn logs exceptions
            exchange: Exchange | None = scope["state"].get("exchange")
            if exchange is not None and exchange.error is not None and exchange.error.status == 499:
                status = 499
            self._metrics.count_request(status)
            # A path may hold line breaks and escapes.
            path, sec = quote(scope["path"][:200]), perf_counter() - begin
            ignored = "" if exchange is None else exchange.without_effect
            note = f", without effect: {ignored}" if ignored else ""
            logger.info("%s %s %d %.3f s%s", scope["method"], path, status, sec, note)

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return not self._open

    def end(self, even_running: bool = False) -> None:
        """End waiting requests, and running ones if `even_running`, as the server stops."""
        for exchange in self._open:
            if even_running or not any(one.admitted for one in exchange.answers):
                exchange.end(ApiError(503, "the server is shutting down", code="shutting_down"))

    # --- one request ------------------------------------------------------------------------

    async def _complete(self, kind: type[Asked], request: Request) -> Response:
        exchange = self._let_in(request)
        try:
            data = await self._body(request, exchange)
            exchange.arrived = perf_counter()
            exchange.watch = asyncio.create_task(_watch(exchange, request))
            await self._prepared(kind, exchange, data)
            del data
            await self._begin(exchange)
            exchange.num_held = 0
            named = {"x-request-id": exchange.request_id}
            if ignored := exchange.without_effect:
                named["x-without-effect"] = ignored
            if exchange.asked.stream:
                return StreamingResponse(events(exchange), 200, named, "text/event-stream")
            return Response(await whole(exchange), 200, named, "application/json")
        finally:
            if not any(one.future for one in exchange.answers):  # otherwise the engine finishes it
                exchange.finish()

    def _identified(self, request: Request) -> KeyOwner:
        """Return the owner of a request, after its host name and key were checked."""
        # A page in a browser may reach this server by a name of its own (DNS rebinding).
        header, more = request.headers.get("host", ""), self._options.allowed_hosts
        if not is_known(header, self._host, more):
            raise ApiError(421, "expected a Host header that this server is known by")
        return self.keys.identify(request.headers)

    def _let_in(self, request: Request) -> Exchange:
        """Return a new exchange, if key and headers are valid."""
        headers, options, owner = request.headers, self._options, self._identified(request)
        # A browser sends other types for any page, without asking the server first.
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "expected Content-Type: application/json")
        if headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, "expected a body without Content-Encoding")
        # It has no address once it has left.
        of_whom = owner.key or (request.client.host if request.client else "")
        knows_kept = bool(owner.key) or options.shares_pool
        asks = owner, of_whom, knows_kept, self._name
        exchange = Exchange(*asks, options.timeout_sec, self._over)
        self._open.add(exchange)
        request.state.exchange = exchange
        return exchange

    async def _body(self, request: Request, exchange: Exchange) -> bytearray:
        """Read a body, one that is too long to its end, so that the client gets the error."""
        data, most = bytearray(), self._options.max_body_bytes
        try:
            async with asyncio.timeout(exchange.timeout_sec):
                async for piece in request.stream():
                    exchange.check()
                    if piece and len(data) <= most:
                        data += piece
                        exchange.num_held = len(data)
                        self._check_memory(exchange.of_whom)
        except ClientDisconnect:
            raise _left() from None
        except TimeoutError:
            exchange.check()
        if len(data) > most:
            raise ApiError(413, f"expected a body of at most {most} bytes", code="too_large")
        exchange.check()
        return data

    def _check_memory(self, of_whom: str) -> None:
        """Refuse a body if all bodies, or those of one key, take too much memory."""
        most = self._options.max_body_bytes
        of_key = sum(each.num_held for each in self._open if each.of_whom == of_whom)
        of_all = sum(each.num_held for each in self._open)
        if of_key > _MAX_BODIES_OF_KEY * most or of_all > _MAX_BODIES * most:
            message = "other requests hold too much memory; try again later"
            raise ApiError(429, message, code="queue_full")

    async def _prepared(self, kind: type[Asked], exchange: Exchange, data: bytearray) -> None:
        """Read and check a request, and make its prompts, pools and grammar, before its turn."""
        run, owner = self._workers.run, exchange.owner
        how = partial(read, ignores_unknown=self._options.ignores_unknown)
        asked, exchange.ignored = await run(exchange, how, kind, data, self._name)
        if owner.is_alone:
            asked.speculation = False
        exchange.asked = asked
        exchange.pools, tenant = self.pools.of(owner, asked)
        exchange.is_private = not tenant
        await run(exchange, self._preparing.prepare, exchange)
        if isinstance(asked, Chat) and (asked.schema_asked or asked.tools_forced) is not None:
            who = "" if owner.is_alone else tenant or exchange.of_whom
            make = self._preparing.grammar
            exchange.grammar = await self._lookers.run(exchange, make, exchange, who)

    async def _begin(self, exchange: Exchange) -> None:
        """Submit the answers, unless too many of the key wait; return at the first turn."""
        engine, owner, num = self._engine, exchange.of_whom, len(exchange.answers)
        num_waiting, num_before = engine.num_waiting(owner), engine.num_waiting()
        has_free_slot = engine.num_running + num_before + num <= engine.max_running
        if num_waiting + num > self._options.max_queue and not has_free_slot:
            message = f"{num_waiting} requests are waiting already; try again later"
            raise ApiError(429, message, code="queue_full")
        exchange.check()
        exchange.num_left = num
        for one in exchange.answers:
            num_tokens = one.num_prompt_tokens + one.options.max_new_tokens
            call = partial(answer, exchange, one, self._loaded, self._options.drafter)
            one.future = engine.submit(call, num_tokens, owner).future
            one.future.add_done_callback(partial(end_exchange, exchange))
        if await exchange.choices.get() is None:  # ended before its turn
            exchange.check()

    def _over(self, exchange: Exchange) -> None:
        self._open.discard(exchange)
        for one in exchange.answers:
            self._metrics.count(exchange, one)


class _Workers:
    """Threads that prepare requests, at most `most` at once and `most_of_key` of one key.

    A request waits for earlier ones of its key, and for at most as many of each other key.
    """

    def __init__(self, most: int, most_of_key: int) -> None:
        self._all, self._most_of_key = asyncio.Semaphore(most), most_of_key
        self._of_key: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, exchange: Exchange, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in a thread, when it is the turn of an exchange.

        Raises:
            ApiError: the exchange has ended meanwhile.
        """
        of_key = asyncio.Semaphore(self._most_of_key)
        async with self._of_key.setdefault(exchange.of_whom, of_key), self._all:
            exchange.check()
            return await asyncio.get_running_loop().run_in_executor(None, function, *args)


async def _watch(exchange: Exchange, request: Request) -> None:
    """End an exchange whose client leaves; its body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    exchange.end(_left())


def _left() -> ApiError:
    """Return the error of a client that has left; logs call it 499."""
    return ApiError(499, "the client has left")


async def _refused(request: Request, error: Exception) -> Response:
    """Return any error in OpenAI's form."""
    headers = {}
    if isinstance(error, HTTPException):
        headers = {**(error.headers or {})}  # the methods that are allowed
        asked = f"{request.method} {request.url.path}"[:200]
        message = f"expected a path and method of this server, got {asked}"
        error = ApiError(error.status_code, message)
    elif not isinstance(error, ApiError):
        error = failed()
    # A traceback holds the frames that hold the request, in cycles that are freed late.
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return JSONResponse(error.body(), error.status, {**headers, **error.headers()})
