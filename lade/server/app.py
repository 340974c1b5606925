"""The server put together, and run until it is told to stop.

Begin here; `gate.py` is what a request meets first.
"""

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import uvicorn
from starlette.middleware.cors import CORSMiddleware

from lade.batcher import Batcher
from lade.hf.api import generate
from lade.hosts import names_of
from lade.models.loading import LoadedModel
from lade.prewarming.warming import warm_up
from lade.probing.profile import Profiles
from lade.server.connections import GuardedProtocol, shares_of
from lade.server.gate import END_SEC, Gate, Names
from lade.server.grammars import Grammars
from lade.server.keys import ApiKeys
from lade.server.limits import RequestLimits
from lade.server.line import Line
from lade.server.metrics import Metrics
from lade.server.options import ServerOptions
from lade.server.requests import Reader
from lade.server.upstream import Upstream
from lade.server.users import UserPools

logger = logging.getLogger(__name__)

# Connections that the system accepts before the server does.
_BACKLOG = 2048
# Longer than clients keep idle connections, or these would now and then use one just closed.
_KEEP_ALIVE_SEC = 75
_TICK_SEC = 0.1  # uvicorn's, after which it sees a signal


class Server:
    """Serves one model to OpenAI's clients, from the construction on until it is closed.

        with Server(lade.models.load(), port=0) as server:
            client = openai.OpenAI(base_url=server.url, api_key="none")

    Args:
        loaded: the model, which others may go on using.
        options: how to serve it.
        host: address to listen at; anything but the default lets other machines in.
        port: 0 for a free one.

    Raises:
        OSError: the address is taken, or a folder cannot be used.
        ngram_pool.PoolFileError: a layer is no pool, or one of another tokenizer.
        ValueError: the tokenizer is not a fast one, or two ports are one.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        options: ServerOptions | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
    ) -> None:
        options = ServerOptions() if options is None else options
        if getattr(loaded.tokenizer, "_tokenizer", None) is None:
            raise ValueError(
                f"expected a fast tokenizer, got {type(loaded.tokenizer).__name__}, which cannot "
                "be streamed"
            )
        if port and port == options.metrics_port:
            raise ValueError(f"expected a metrics_port other than the port, got {port} twice")
        self.name = options.model_name or _name_of(loaded)
        self._thread: threading.Thread | None = None
        self._stack = ExitStack()
        with ExitStack() as stack:
            self._socket = stack.enter_context(_listening(host, port))
            self._sockets = [self._socket]
            self.metrics_url: str | None = None
            metrics_port = options.metrics_port
            if metrics_port is not None:
                self._sockets.append(
                    stack.enter_context(_listening(options.metrics_host, metrics_port))
                )
                metrics_port = self._sockets[1].getsockname()[1]
                self.metrics_url = f"{_url_of(self._sockets[1], options)}/metrics"
            self._pools = stack.enter_context(closing(UserPools(loaded, options)))
            batcher = stack.enter_context(
                Batcher(
                    loaded.model,
                    max_batch_size=options.max_batch_size,
                    max_batch_tokens=options.max_batch_tokens,
                )
            )
            grammars = stack.enter_context(closing(Grammars(loaded)))
            limits = RequestLimits(loaded.model, options)
            upstream = Upstream(loaded, self.name, limits, grammars.pieces, batcher)
            self._manager = upstream.manager
            self._manager.submit(_warm_up, loaded, options).result()
            size = options.max_batch_size if batcher.is_joint else 1
            logger.info("requests are answered %s", "together" if size > 1 else "one by one")
            # Whoever waits for others in the batcher waits for whole answers, out of any order.
            line = Line(options.max_queue, size, max(1, size - 1))
            self.metrics = Metrics(
                self.name, line, self._pools.store, Profiles.of(loaded.model).prefixes
            )
            vocab_size = loaded.model.config.get_text_config(decoder=True).vocab_size
            reader = Reader(self.name, vocab_size, grammars)
            self.keys = ApiKeys(options.api_keys)
            names = Names(
                names_of(host, options.allowed_hosts),
                metrics_port,
                names_of(options.metrics_host, options.allowed_hosts),
            )
            gate = Gate(
                *(upstream, reader, self.keys, self._pools, line, self.metrics, options), names
            )
            self._uvicorn = _Uvicorn(gate, options)
            self._stack = stack.pop_all()
        self.url = f"{_url_of(self._socket, options)}/v1"

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then finish or end what is under way and save pools."""
        try:
            self._uvicorn.run(sockets=self._sockets)
        finally:
            self._finish()

    def __enter__(self) -> Self:
        """Serve in a thread."""
        self._thread = threading.Thread(
            target=self._uvicorn.run, kwargs={"sockets": self._sockets}, name="lade-server"
        )
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop as SIGTERM does."""
        self._uvicorn.should_exit = True
        if self._thread is not None:
            self._thread.join()
        self._finish()

    def _finish(self) -> None:
        self._manager.wait(END_SEC)
        self._stack.close()


class _Uvicorn(uvicorn.Server):
    """Stops as it should: nobody new, a while for what is under way, exit code 0."""

    def __init__(self, gate: Gate, options: ServerOptions) -> None:
        app: Any = gate
        if options.allowed_origins:
            app = CORSMiddleware(
                app,
                allow_origins=options.allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
            )
        shares = shares_of(options.max_connections)
        settings = {"shares": shares, "stall_sec": options.timeout_sec}
        guarded = type("Guarded", (GuardedProtocol,), settings)
        grace_sec = options.grace_sec
        super().__init__(
            uvicorn.Config(
                app,
                http=guarded,
                ws="none",
                ssl_certfile=options.certificate,
                ssl_keyfile=options.private_key,
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,  # anybody can write these: addresses take turns
                timeout_keep_alive=_KEEP_ALIVE_SEC,
                timeout_graceful_shutdown=int(END_SEC),  # of what has not come to the gate
            )
        )
        self._gate = gate
        self._grace_sec = grace_sec

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the gate, and listen until it is, for `/ready` tells so; then end connections."""
        logger.info("shutting down; running answers have %g s", self._grace_sec)
        closing = asyncio.create_task(self._gate.close(self._grace_sec))
        while not self.force_exit and not closing.done():
            await asyncio.wait({closing}, timeout=_TICK_SEC)
        if self.force_exit:  # Ctrl-C, once more
            closing.cancel()
            for connection in [*self.server_state.connections]:
                connection.transport.abort()  # which ends what is answered there
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at SIGINT and SIGTERM, which uvicorn raises again after it has stopped."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {each: signal.signal(each, self.handle_exit) for each in handled}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        OSError: it cannot.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def _url_of(listener: socket.socket, options: ServerOptions) -> str:
    host, port, *_ = listener.getsockname()
    shown = f"[{host}]" if listener.family == socket.AF_INET6 else host
    return f"{'http' if options.certificate is None else 'https'}://{shown}:{port}"


def _name_of(loaded: LoadedModel) -> str:
    """Return what clients call a model: of a folder its name alone, not where it lies."""
    return Path(loaded.name).name if Path(loaded.name).exists() else loaded.name


def _warm_up(loaded: LoadedModel, options: ServerOptions) -> None:
    """Do now what is done once for a model, and for what drafts beside it."""
    warm_up(loaded.model, num_rows=2, config=options.config)
    ids = torch.zeros(1, 1, dtype=torch.long, device=loaded.model.device)
    generate(
        loaded.model,
        ids,
        attention_mask=torch.ones_like(ids),
        drafter=options.drafter,
        config=options.config,
        do_sample=False,
        max_new_tokens=2,
    )
