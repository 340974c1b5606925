"""All that lade touches of transformers' serving code, whose parts change between its versions.

Tested on the oldest and the newest supported version. The routes, the handlers' translation of
messages and tools into prompts and of answers into JSON are theirs.
"""

import asyncio
import copy
import inspect
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerateManager, GenerationState

from lade.batcher import Batcher
from lade.errors import in_one_line
from lade.models.loading import LoadedModel
from lade.server.answers import completed, rewritten
from lade.server.errors import ApiError, failed
from lade.server.exchange import Endpoint, Exchange, current
from lade.server.inference import answer
from lade.server.limits import RequestLimits

logger = logging.getLogger(__name__)


ModelList = Callable[[], list[dict[str, Any]]]


class Upstream(NamedTuple):
    """What transformers brings to a server."""

    app: Any
    manager: "_Manager"  # of the threads that answer
    #: Returns a function that makes a request's prompt, in another thread.
    prompts: Callable[[Endpoint, bytes], Awaitable[Callable[[], Any]]]
    models: ModelList  # as clients are told of them


def build_app(
    loaded: LoadedModel,
    name: str,
    limits: RequestLimits,
    pieces: Callable[[], Sequence[bytes]],
    batcher: Batcher,
) -> Upstream:
    """Return transformers' application for one model.

    Args:
        loaded: the model.
        name: what clients call it.
        limits: of prompts and answers.
        pieces: returns the bytes of every token.
        batcher: of the model, runs the answers.
    """
    logging.getLogger("transformers.cli.serving").setLevel(logging.ERROR)  # a line for each request
    tokenizer = _prepared_by_us(loaded.tokenizer, limits)
    models, state = _OneModel(loaded._replace(tokenizer=tokenizer), name), _State(limits, batcher)
    handlers: dict[str, Any] = {
        "chat_handler": _Chat(models, state),
        "completion_handler": _Completions(models, state),
        "response_handler": _Responses(models, state),
    }
    by_endpoint = dict(zip(("chat", "completions", "responses"), handlers.values(), strict=True))
    for handler in handlers.values():
        handler.pieces = pieces
    # Of speech, and of others that only some versions have: the gate lets nobody ask for them.
    others = {each for each in inspect.signature(build_server).parameters if "handler" in each}
    handlers |= dict.fromkeys(others - handlers.keys())
    app = build_server(models, generation_state=state, **handlers)

    async def prompts(endpoint: Endpoint, body: bytes) -> Callable[[], Any]:
        make: Callable[[], Any] = await by_endpoint[endpoint].prompt(json.loads(body))
        exchange = current.get()
        text = exchange.asked.prediction
        if text is None:
            return make

        def make_both() -> Any:
            with _making_a_prompt():
                exchange.prediction = limits.predicted_ids(loaded.tokenizer, text)
            return make()

        return make_both

    return Upstream(app, state.manager, prompts, models.get_gen_models)


class _PromptNeededError(Exception):
    """The place in a handler where its prompt is made, which is done elsewhere."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make = make


@contextmanager
def _making_a_prompt() -> Iterator[None]:
    """Blame a request for whatever templates and tokenizers raise of it."""
    try:
        yield
    except (ApiError, HTTPException, _PromptNeededError):
        raise
    except Exception as error:
        message = f"expected a request that makes a prompt, got {in_one_line(error)}"
        raise ApiError(400, message) from error


def _prepared_by_us(tokenizer: Any, limits: RequestLimits) -> Any:
    """Return a tokenizer that takes a request's prompt from where it was made, ahead of its turn.

    A handler makes it in the event loop, where megabytes keep all others waiting for seconds.
    """
    kind = type(tokenizer)
    lock = threading.Lock()  # its settings are not made for threads

    def made(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        exchange = current.get()
        if exchange.prompt is not None:
            return exchange.prompt

        def make() -> Any:
            with _making_a_prompt():
                limits.check_texts(tokenizer, args[:1])
                with lock:
                    return method(*args, **kwargs)

        raise _PromptNeededError(make)

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
        self._since = int(time.time())

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """Return a model's name as it is, for clients to find it in answers."""
        return model_id

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Return the model and its tokenizer."""
        return self._loaded.model, self._loaded.tokenizer

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        """Return the one model, for `/v1/models`."""
        return [
            {"id": self.force_model, "object": "model", "created": self._since, "owned_by": "lade"}
        ]

    def shutdown(self) -> None:
        """Do nothing: the model is its owner's."""


class _State(GenerationState):  # type: ignore[misc]
    """Has one manager, which runs many answers at once."""

    def __init__(self, limits: RequestLimits, batcher: Batcher) -> None:
        super().__init__()
        self.manager = _Manager(limits, batcher)

    def get_manager(self, model_id: str, use_cb: bool = False) -> GenerateManager:
        """Return the manager."""
        return self.manager


class _Manager(GenerateManager):  # type: ignore[misc]
    """Runs requests together, each in a thread of its own, with what lade knows of them."""

    def __init__(self, limits: RequestLimits, batcher: Batcher) -> None:
        # Not the base class's __init__, which starts a thread for one after the other.
        self._limits = limits
        self._batcher = batcher
        self._threads = WeakSet[threading.Thread]()

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Start an answer; see `GenerateManager`."""
        asking = self._submitted(model, processor, inputs, gen_config)
        asking.exchange.is_parsed = kwargs.get("response_parser") is not None
        return super().generate_streaming(asking, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Wait for an answer; see `GenerateManager`."""
        asking = self._submitted(model, processor, inputs, gen_config)
        return await super().generate_non_streaming(
            asking, processor, inputs, gen_config, *args, **kwargs
        )

    def _submitted(self, model: Any, tokenizer: Any, inputs: Any, options: Any) -> "_Asking":
        exchange = current.get()
        exchange.num_prompt_tokens = inputs["input_ids"].shape[-1]
        self._limits.apply(exchange, options)
        exchange.is_submitted = True
        return _Asking(exchange, model, tokenizer)

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
        """Run in a thread of its own, among the answers that run."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # nobody cancels it: what ends it is its exchange
        exchange = current.get(None)
        num_tokens = 0 if exchange is None else exchange.most_tokens

        def run() -> None:
            try:
                future.set_result(self._batcher.run(partial(fn, *args, **kwargs), num_tokens))
            except BaseException as error:  # it is raised where the result is awaited
                future.set_exception(error)

        # A daemon, so that the process can end in the middle of a long forward.
        thread = threading.Thread(target=run, name="lade-answers", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are too many in this machine
            if exchange is not None:
                exchange.done()
            raise
        self._threads.add(thread)
        return future

    def wait(self, sec: float) -> None:
        """Wait until all have ended, but not longer than so many seconds."""
        end = time.monotonic() + sec
        for thread in [*self._threads]:
            thread.join(max(0.0, end - time.monotonic()))

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run among the answers; whoever waits for it may leave at any time."""
        return asyncio.wrap_future(self.submit(fn, *args, **kwargs))


class _Asking:
    """Stands in for the model in one call of a `GenerateManager`, which only calls `generate`."""

    def __init__(self, exchange: Exchange, model: Any, tokenizer: Any) -> None:
        self.exchange = exchange
        self._model = model
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(
        self, *, generation_config: Any, streamer: Any = None, tokenizer: Any = None, **inputs: Any
    ) -> Any:
        """Answer, with what of the inputs a causal LM needs."""
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        return answer(
            self.exchange, self._model, self._tokenizer, inputs, generation_config, streamer
        )


class _Complete:
    """A handler whose answers are completed by what transformers leaves out."""

    pieces: Callable[[], Sequence[bytes]]

    async def prompt(self, body: dict[str, Any]) -> Callable[[], Any]:
        """Return what makes a request's prompt; the request is of the current exchange."""
        try:
            with _making_a_prompt():
                await super().handle_request(body, "")  # type: ignore[misc]
        except _PromptNeededError as wanted:
            return wanted.make
        raise AssertionError("expected a handler that makes a prompt")

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answer as transformers does; see its `BaseHandler`."""
        exchange = current.get()
        try:
            response = await super().handle_request(body, request_id)  # type: ignore[misc]
        except (ApiError, HTTPException):
            raise
        except Exception:
            logger.exception("an answer could not be told")
            raise failed() from None
        pieces = () if exchange.asked.num_logprobs is None else self.pieces()
        if isinstance(response, StreamingResponse):
            parts: Any = response.body_iterator  # texts, from a generator
            response.body_iterator = rewritten(exchange, pieces, parts)
            return response
        return JSONResponse(completed(exchange, pieces, json.loads(response.body)))


class _Chat(_Complete, ChatCompletionHandler):  # type: ignore[misc]
    """`/v1/chat/completions`."""


class _Completions(_Complete, CompletionHandler):  # type: ignore[misc]
    """`/v1/completions`."""


class _Responses(_Complete, ResponseHandler):  # type: ignore[misc]
    """`/v1/responses`."""
