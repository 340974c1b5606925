"""An exchange with a client: its request, its prompts, and the answers to them."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Any
from urllib.parse import quote

from lade.apps.server.access import KeyOwner
from lade.apps.server.errors import ApiError
from lade.apps.server.requests import Asked
from lade.config import Config
from lade.hf.pools import Pools
from lade.stats import DecodeStats

_MOST_NAMES = 64  # most fields that a header names, and most characters of each


@dataclass(eq=False)
class OneAnswer:
    """One answer to a prompt of a request; only the thread that generates it writes to it."""

    index: int  # among the answers to the request
    inputs: Any  # `input_ids` and `attention_mask` of its prompt, [1, num_tokens]
    options: Any  # a GenerationConfig
    seed: int | None
    future: "Future[None] | None" = None  # the engine's; None before the answer is submitted
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    token_ids: list[int] = field(default_factory=list)
    stats: DecodeStats | None = None  # None until the answer is complete

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        return int(self.inputs["input_ids"].shape[1])


@dataclass(eq=False)
class Exchange:
    """An accepted request until its answers are complete.

    Only the event loop writes to it, and before the answers begin the thread that prepares them.
    """

    owner: KeyOwner
    of_whom: str  # the key or the address, among which turns and memory are shared fairly
    knows_kept: bool  # whether `usage` may show how much of its prompt was kept
    model: str  # the model's name in the API
    timeout_sec: float
    when_over: Callable[["Exchange"], None]  # called once, in the event loop
    created: int = field(default_factory=lambda: int(time()))
    request_id: str = field(default_factory=lambda: f"{uuid.uuid4()}")
    num_held: int = 0  # bytes of its body, which count for its key
    arrived: float = field(default_factory=perf_counter)
    # Set once its body is read.
    asked: Asked = field(default_factory=Asked)
    ignored: Sequence[str] = ()  # names of fields without effect
    pools: Pools | None = None
    is_private: bool = True  # whether nothing is kept for later requests
    # Set once it is prepared.
    config: Config = field(default_factory=Config)
    answers: list[OneAnswer] = field(default_factory=list)  # to each prompt in turn
    parser: Any = None  # divides answers into content, thoughts and calls; None if all is content
    prediction: list[int] | None = None  # token ids of the prediction, or of calls of its tools
    tokens: Any = None  # knows the bytes of each token; None without log-probabilities
    grammar: Any = None  # of its answers, in its first state
    num_left: int = 1  # answers that were submitted and are not finished; 1 before
    watch: "asyncio.Task[None] | None" = None  # ends the exchange if the client leaves
    # Choices of a stream, one for each step of an answer. An empty one comes when an answer begins,
    # and None after the last choice of all answers.
    choices: "asyncio.Queue[dict[str, Any] | None]" = field(default_factory=asyncio.Queue)
    error: ApiError | None = None  # the reason why it ends early
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def __post_init__(self) -> None:
        message = f"the answer took longer than {self.timeout_sec:g} seconds"
        late = ApiError(504, message, code="timeout", closes=True)
        self._timer = self.loop.call_later(self.timeout_sec, self.end, late)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(one.num_prompt_tokens for one in self.answers[:: self.asked.n or 1])

    @property
    def without_effect(self) -> str:
        """Names of fields of the request that have no effect, safe for headers and logs."""
        return ", ".join(quote(name[:_MOST_NAMES]) for name in self.ignored[:_MOST_NAMES])

    def end(self, error: ApiError) -> None:
        """End the exchange before its next token or its turn; the first reason is kept."""
        if self.error is None:
            self.error = error
        for one in self.answers:
            if one.future is not None:
                one.future.cancel()
        self.in_loop(self.choices.put_nowait, None)

    def finish(self) -> None:
        """Finish after the last answer; called in the event loop for each answer."""
        self.num_left -= 1
        if self.num_left <= 0:
            self._timer.cancel()
            if self.watch is not None:
                self.watch.cancel()
            self.choices.put_nowait(None)
            self.when_over(self)

    def check(self) -> None:
        """Raise the reason to end, if there is one."""
        if self.error is not None:
            raise self.error

    def in_loop(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the event loop; may be called from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(function, *args)
