"""All that lade touches of transformers' serving code, whose parts change between its versions.

Tested on the oldest and the newest supported version. The handlers' translation of messages and
tools into prompts and of answers into JSON are theirs.
"""

import asyncio
import copy
import json
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakSet

from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import (
    DirectStreamer,
    GenerateManager,
    GenerationState,
    _StreamError,
)

from lade.attempts import Attempt
from lade.batcher import Batcher
from lade.errors import in_one_line
from lade.models.loading import LoadedModel
from lade.models.prompts import tool_calls
from lade.server.answers import Json, completed, rewritten
from lade.server.errors import ApiError, failed
from lade.server.exchange import Endpoint, Exchange, current
from lade.server.inference import answer
from lade.server.limits import RequestLimits

logger = logging.getLogger(__name__)

# Whose calls are predicted: each is a run of the chat template, which keeps others waiting.
_MOST_TOOLS = 64
# What a handler is given in place of what a prompt was made of: it looks at all of it once more, in
# the event loop.
_OF_PROMPTS: Json = {
    "messages": [],
    "prompt": "",
    "input": "",
    "instructions": None,
    "chat_template_kwargs": {},
}


class Upstream:
    """Transformers' handlers of requests, for one model.

    Args:
        loaded: the model.
        name: what clients call it.
        limits: of prompts and answers.
        pieces: returns the bytes of every token.
        batcher: of the model, runs the answers.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        name: str,
        limits: RequestLimits,
        pieces: Callable[[], Sequence[bytes]],
        batcher: Batcher,
    ) -> None:
        # They log a line for each request.
        logging.getLogger("transformers.cli.serving").setLevel(logging.ERROR)
        self._tokenizer, self._limits, self._pieces = loaded.tokenizer, limits, pieces
        #: What clients are told of the model.
        self.model: Json = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "lade",
        }
        #: Of the threads that answer.
        self.manager = _Manager(limits, batcher)
        tokenizer = _prepared_by_us(loaded.tokenizer, limits)
        models = _OneModel(loaded._replace(tokenizer=tokenizer), name)
        state = _State(self.manager)
        self._handlers: Mapping[Endpoint, Any] = {
            "chat": ChatCompletionHandler(models, state),
            "completions": CompletionHandler(models, state),
            "responses": ResponseHandler(models, state),
        }

    def prepare(self, exchange: Exchange, body: Json) -> Json:
        """Make a request's prompt, in any thread; return what `answer` needs of its body.

        Raises:
            ApiError: no prompt can be made of it, or one that is too long.
        """
        asked = exchange.asked
        with _current(exchange), _making_a_prompt():
            if asked.prediction is not None:
                exchange.prediction = self._limits.predicted_ids(self._tokenizer, asked.prediction)
            with suppress(_PromptMadeError):  # it waits for nothing before that
                self._handlers[asked.endpoint].handle_request({**body}, "").send(None)
        assert exchange.prompt is not None
        tools = body.get("tools")
        if tools and asked.prediction is None and asked.speculates:
            with Attempt():  # templates may refuse what they are never asked to write
                calls = tool_calls(self._tokenizer, tools[:_MOST_TOOLS])
                exchange.prediction = self._limits.predicted_ids(self._tokenizer, calls)
        if asked.num_logprobs is not None:
            exchange.pieces = self._pieces()
        return {name: _OF_PROMPTS.get(name, value) for name, value in body.items()}

    async def answer(
        self, exchange: Exchange, body: Json, request_id: str
    ) -> Json | AsyncGenerator[str, None]:
        """Answer the current exchange, which is prepared; return the answer, or a stream of events.

        Raises:
            ApiError: it cannot be answered.
        """
        try:
            response = await self._handlers[exchange.asked.endpoint].handle_request(
                body, request_id
            )
        except ApiError:
            raise
        except Exception:
            logger.exception("an answer could not be told")
            raise failed() from None
        if isinstance(response, StreamingResponse):
            parts: Any = response.body_iterator  # texts, from a generator
            return rewritten(exchange, parts)
        return completed(exchange, json.loads(response.body))


class _PromptMadeError(Exception):
    """Ends a handler that runs for the prompt alone."""


@contextmanager
def _current(exchange: Exchange) -> Iterator[None]:
    """Have an exchange be the current one of a thread that goes on without it."""
    token = current.set(exchange)
    try:
        yield
    finally:
        current.reset(token)


@contextmanager
def _making_a_prompt() -> Iterator[None]:
    """Blame a request for whatever templates and tokenizers raise of it."""
    try:
        yield
    except ApiError:
        raise
    except HTTPException as error:
        raise ApiError(error.status_code, str(error.detail)) from None
    except Exception as error:
        message = f"expected a request that makes a prompt, got {in_one_line(error)}"
        raise ApiError(400, message) from error


def _prepared_by_us(tokenizer: Any, limits: RequestLimits) -> Any:
    """Return a tokenizer that makes a request's prompt once, ahead of its turn.

    A handler makes it in the event loop, where megabytes keep all others waiting for seconds.
    """
    kind = type(tokenizer)
    lock = threading.Lock()  # its settings are not made for threads

    def made(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        exchange = current.get()
        if exchange.prompt is None:
            limits.check_texts(plain, (args, kwargs))
            with lock:
                exchange.prompt = method(*args, **kwargs)
            raise _PromptMadeError
        return exchange.prompt

    class Prepared(kind):  # type: ignore[valid-type, misc]
        """Calls `made` instead."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return made(plain, *args, **kwargs)

        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            return made(plain.apply_chat_template, *args, **kwargs)

    plain, prepared = tokenizer, copy.copy(tokenizer)
    prepared.__class__ = Prepared
    return prepared


class _OneModel(ModelManager):  # type: ignore[misc]
    """Has one model, which is loaded already and stays."""

    def __init__(self, loaded: LoadedModel, name: str) -> None:
        super().__init__(device=str(loaded.model.device), dtype=None)
        self.force_model = name
        self._loaded = loaded

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """Return a model's name as it is, for clients to find it in answers."""
        return model_id

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Return the model and its tokenizer."""
        return self._loaded.model, self._loaded.tokenizer


class _State(GenerationState):  # type: ignore[misc]
    """Has one manager, which runs many answers at once."""

    def __init__(self, manager: "_Manager") -> None:
        super().__init__()
        self._manager = manager

    def get_manager(self, model_id: str, use_cb: bool = False) -> GenerateManager:
        """Return the manager."""
        return self._manager


class _Manager(GenerateManager):  # type: ignore[misc]
    """Runs requests together, each in a thread of its own, with what lade knows of them."""

    def __init__(self, limits: RequestLimits, batcher: Batcher) -> None:
        # Not the base class's __init__, which starts a thread for one after the other.
        self._limits = limits
        self._batcher = batcher
        self._threads = WeakSet[threading.Thread]()

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple["asyncio.Queue[Any]", DirectStreamer]:
        """Start an answer; see `GenerateManager`."""
        exchange = self._checked(inputs, gen_config)
        exchange.is_parsed = response_parser is not None
        queue = asyncio.Queue[Any]()
        steps = _Steps(exchange)
        streamer = DirectStreamer(
            processor._tokenizer, steps, queue, response_parser=response_parser
        )

        def end(answered: Future[Any]) -> None:
            if answered.exception() is not None:  # clients are told another text
                steps.call_soon_threadsafe(queue.put_nowait, _StreamError("failed"))
            steps.tell()

        run = partial(answer, exchange, model, processor, inputs, gen_config)
        self.submit(run, streamer, steps.tell).add_done_callback(end)
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, Any]:
        """Wait for an answer, which its client may leave at any time; see `GenerateManager`."""
        exchange = self._checked(inputs, gen_config)
        running = self.submit(answer, exchange, model, processor, inputs, gen_config)
        sequences = await asyncio.wrap_future(running)
        num_prompt = exchange.num_prompt_tokens
        new = sequences[0, num_prompt:]
        return processor.decode(new, skip_special_tokens=True), num_prompt, new

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
        """Run in a thread of its own, among the answers that run.

        The place in the line is given back when it ends; until it was begun, that is the gate's.
        """
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # nobody cancels it: what ends it is its exchange
        exchange = current.get(None)
        room: Any = ()
        if exchange is not None:
            room = exchange.most_tokens, exchange.check, exchange.of_whom

        def run() -> None:
            try:
                future.set_result(self._batcher.run(partial(fn, *args, **kwargs), *room))
            except BaseException as error:  # it is raised where the result is awaited
                future.set_exception(error)
            finally:
                if exchange is not None:
                    exchange.in_loop(exchange.leave)

        # A daemon, so that the process can end in the middle of a long forward.
        thread = threading.Thread(target=run, name="lade-answers", daemon=True)
        thread.start()
        if exchange is not None:
            exchange.is_submitted = True
        self._threads.add(thread)
        return future

    def wait(self, sec: float) -> None:
        """Wait until all have ended, but not longer than so many seconds."""
        end = time.monotonic() + sec
        for thread in [*self._threads]:
            thread.join(max(0.0, end - time.monotonic()))

    def _checked(self, inputs: Any, options: Any) -> Exchange:
        exchange = current.get()
        exchange.num_prompt_tokens = inputs["input_ids"].shape[-1]
        self._limits.apply(exchange, options)
        return exchange


class _Steps:
    """Stands in for the event loop of a streamer, and tells it of a whole step at once.

    Token by token, their number would show in how they are sent.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._calls: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, function: Callable[..., None], *args: Any) -> None:
        """Keep a call for the end of the step."""
        self._calls.append(partial(function, *args))

    def tell(self, *_: Any) -> None:
        """Have the event loop do what was kept."""
        calls, self._calls = self._calls, []
        self._exchange.in_loop(_run_all, calls)


def _run_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()
