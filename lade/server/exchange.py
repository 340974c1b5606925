"""One request and what comes of it."""

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from time import perf_counter, time
from typing import Any

from lade.config import Config
from lade.hf.pools import Pools
from lade.server.errors import ApiError
from lade.server.keys import KeyOwner
from lade.server.requests import Asked
from lade.stats import DecodeStats


@dataclass(eq=False)
class Exchange:
    """A request that was let in, until its answer is complete.

    Written by the event loop before it is submitted, by the thread that answers until that is done.
    """

    owner: KeyOwner
    of_whom: str  # the key, or where it comes from: what is shared fairly
    knows_kept: bool  # whether it may be told what of its prompt was kept
    timeout_sec: float
    model: str  # as clients call it
    when_over: Callable[["Exchange"], None]  # called once, in the event loop
    created: int = field(default_factory=lambda: int(time()))
    request_id: str = field(default_factory=lambda: f"{uuid.uuid4()}")
    config: Config = field(default_factory=Config)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    asked: Asked = field(default_factory=Asked)
    grammar: Any = None  # that the answer keeps
    num_held: int = 0  # bytes of its body that count as held for a client
    index: int = 0  # of its answer among `n` to one request
    inputs: Any = None  # of the model: `input_ids` and `attention_mask`, [1, num_prompt_tokens]
    options: Any = None  # a GenerationConfig
    parser: Any = None  # tells what is said, thought and called; None where all is said
    prediction: list[int] | None = None  # its tokens; else those of calls of its tools
    pools: Pools | None = None
    is_private: bool = True  # whether no later request may know what this one was about
    arrived: float = field(default_factory=perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)  # of the answer
    answer: "Future[None] | None" = None  # of the engine
    watch: "asyncio.Task[None] | None" = None  # on the client
    # What is new with each step, as choices of a stream, of all answers to the request: one that is
    # empty once the turn of one has come, and None where there are no more of it.
    choices: "asyncio.Queue[dict[str, Any] | None]" = field(default_factory=asyncio.Queue)
    stats: DecodeStats | None = None
    tokens: Any = None  # knows the bytes of each, if log-probabilities are asked for
    error: ApiError | None = None  # why it ends early

    def __post_init__(self) -> None:
        message = f"the answer took longer than {self.timeout_sec:g} seconds"
        late = ApiError(504, message, code="timeout", closes=True)
        self._timer = self.loop.call_later(self.timeout_sec, self.end, late)

    def another(self, index: int) -> "Exchange":
        """Return an exchange for another answer to the request, of another seed."""
        asked, parser = self.asked, deepcopy(self.parser)
        if asked.seed is not None:
            asked = asked.model_copy(update={"seed": asked.seed + index})
        own: dict[str, Any] = {"token_ids": [], "num_held": 0, "watch": None}
        return replace(self, index=index, asked=asked, parser=parser, **own)

    def end(self, error: ApiError) -> None:
        """End it before its next token, or its turn; the first reason stays."""
        if self.error is None:
            self.error = error
        if self.answer is not None:
            self.answer.cancel()
        self.in_loop(self.choices.put_nowait, None)

    def finish(self) -> None:
        """Be over: nothing more is computed. Called in the event loop."""
        self._timer.cancel()
        if self.watch is not None:
            self.watch.cancel()
        self.choices.put_nowait(None)
        self.when_over(self)

    def check(self) -> None:
        """Raise why it is to end, if it is."""
        if self.error is not None:
            raise self.error

    def in_loop(self, function: Callable[..., None], *args: Any) -> None:
        """Have the event loop call a function, from any thread."""
        with suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(function, *args)
