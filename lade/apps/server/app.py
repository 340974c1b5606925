"""`Server`: one model behind an OpenAI-compatible API.

Begin here. Next file: `routes.py`, which receives requests.
"""

import asyncio
import logging
import signal
import socket
import threading
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any, Self

import uvicorn

from lade.apps.server.access import listening
from lade.apps.server.options import ServerOptions
from lade.apps.server.routes import Routes
from lade.batcher import Batcher
from lade.errors import UserError
from lade.models.loading import LoadedModel, title_of
from lade.prewarming.idle import IdlePrewarming
from lade.prewarming.warming import warm_up

logger = logging.getLogger(__name__)

# Longer than clients keep idle connections; otherwise a client may use one that was just closed.
_KEEP_ALIVE_SEC = 75
# Time to end an answer: a forward pass cannot be interrupted.
_END_SEC = 5.0
# Size of request line and headers. The parser checks it between two reads.
_HEADER_BYTES = 2**14


class Server(uvicorn.Server):
    """An OpenAI-compatible server of one model; it serves from its construction until `close`.

        with Server(lade.models.load(), port=0) as server:
            client = openai.OpenAI(base_url=server.url, api_key="none")

    Args:
        loaded: the model; other code may go on using it.
        options: settings; None for the defaults.
        host: address to listen at; other machines reach every address but the default.
        port: port to listen at; 0 for a free one.

    Raises:
        OSError: a folder cannot be used.
        ngram_pool.PoolFileError: a layer is no pool, or one of another tokenizer.
        UserError: the address is taken, or the tokenizer is not a fast one.
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
            raise UserError(f"expected a fast tokenizer, got {type(loaded.tokenizer).__name__}")
        self.name = options.model_name or title_of(loaded.name)
        loaded = loaded._replace(name=self.name)
        self._grace_sec, self._thread = options.grace_sec, threading.Thread(target=self._run)
        with ExitStack() as stack:
            sizes = options.max_batch_size, options.max_batch_tokens
            batcher = Batcher(loaded.model, max_batch_size=sizes[0], max_batch_tokens=sizes[1])
            batcher.run(partial(warm_up, loaded.model, num_rows=2, config=options.config))
            self._routes = Routes(loaded, self.name, batcher.engine, options, host)
            self.keys, self._engine = self._routes.keys, batcher.engine
            stack.callback(self._routes.pools.close)
            self.idle: IdlePrewarming | None = None
            if options.prewarms:
                self.idle = IdlePrewarming(loaded.model, lambda: self._routes.is_idle)
                stack.callback(self.idle.close)
            # Only now can requests be answered.
            self._socket = stack.enter_context(listening(host, port))
            self._stack = stack.pop_all()
        address, port, *_ = self._socket.getsockname()
        self.url = f"http://{f'[{address}]' if ':' in address else address}:{port}/v1"
        super().__init__(
            uvicorn.Config(
                self._routes,
                http="h11",  # httptools would bound no headers
                h11_max_incomplete_event_size=_HEADER_BYTES,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,  # any client can write these headers, and addresses take turns
                timeout_keep_alive=_KEEP_ALIVE_SEC,
                timeout_graceful_shutdown=int(options.grace_sec + 2 * _END_SEC),
            )
        )

    def run(self) -> None:  # type: ignore[override]
        """Serve until SIGTERM or SIGINT; then finish or end running requests, and save pools."""
        # uvicorn raises the signals again after it has stopped; the exit code is to be 0.
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda *_: None)
        try:
            self._run()
        finally:
            self._finish()

    def __enter__(self) -> Self:
        """Serve in a thread."""
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop as SIGTERM does."""
        self.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._finish()

    def _run(self) -> None:
        super().run([self._socket])

    def _finish(self) -> None:
        self._engine.wait(_END_SEC)  # no longer, although a forward pass may be running
        self._stack.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal; a second Ctrl-C hangs up at once."""
        super().handle_exit(sig, frame)
        for each in [*self.server_state.connections] if self.force_exit else ():
            each.loop.call_soon_threadsafe(each.transport.abort)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and wait until all requests are answered or Ctrl-C comes once more."""
        logger.info("shutting down; running answers have %g s", self._grace_sec)
        self._routes.end()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._grace_sec, self._routes.end, True)
        await super().shutdown(sockets)
        timer.cancel()
        self._routes.end(even_running=True)
