"""One request, and the answers to it."""

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Any, NamedTuple
from urllib.parse import quote

from lade.config import Config
from lade.hf.pools import Pools
from lade.server.errors import ApiError
from lade.server.keys import KeyOwner
from lade.server.requests import Asked
from lade.stats import DecodeStats


class OnePrompt(NamedTuple):
    """One of the prompts of a request."""

    inputs: Any  # of the model: `input_ids` and `attention_mask`, [1, num_tokens]
    options: Any  # a GenerationConfig
    parser: Any = None  # of its answers, at their begin

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.inputs["input_ids"].shape[1])


@dataclass(eq=False)
class OneAnswer:
    """One of the answers to a request, written by the thread that makes it until it is over."""

    index: int  # among those to the request
    prompt: OnePrompt
    seed: int | None
    grammar: Any  # that it keeps, and advances
    parser: Any  # tells what is said, thought and called; None where all is said
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    token_ids: list[int] = field(default_factory=list)
    stats: DecodeStats | None = None  # None unless it came to its end


_MOST_NAMES = 64  # fields that a header names, and the characters of each


@dataclass(eq=False)
class Exchange:
    """A request that was let in, until its answers are complete; written by the event loop."""

    owner: KeyOwner
    of_whom: str  # the key, or where it comes from: what is shared fairly
    knows_kept: bool  # whether it may see how much of its prompt was kept
    timeout_sec: float
    model: str  # as clients call it
    when_over: Callable[["Exchange"], None]  # called once, in the event loop
    created: int = field(default_factory=lambda: int(time()))
    request_id: str = field(default_factory=lambda: f"{uuid.uuid4()}")
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    num_held: int = 0  # bytes of its body that count as held for a client
    arrived: float = field(default_factory=perf_counter)
    # What preparing makes of it, before it is submitted.
    asked: Asked = field(default_factory=Asked)
    config: Config = field(default_factory=Config)
    ignored: list[str] = field(default_factory=list)  # names of unknown fields
    prompts: list[OnePrompt] = field(default_factory=list)
    grammar: Any = None  # of its answers, at its begin
    tokens: Any = None  # knows the bytes of each, if log-probabilities are asked for
    prediction: list[int] | None = None  # its tokens; else those of calls of its tools
    pools: Pools | None = None
    is_private: bool = True  # whether no later request may know what this one was about
    # What comes of it.
    answers: list[OneAnswer] = field(default_factory=list)
    futures: list["Future[None]"] = field(default_factory=list)  # of the engine, one of each answer
    watch: "asyncio.Task[None] | None" = None  # on the client
    # What is new with each step, as choices of a stream, of all answers: one that is empty once the
    # turn of one has come, and None where there are no more of any.
    choices: "asyncio.Queue[dict[str, Any] | None]" = field(default_factory=asyncio.Queue)
    error: ApiError | None = None  # why it ends early

    def __post_init__(self) -> None:
        message = f"the answer took longer than {self.timeout_sec:g} seconds"
        late = ApiError(504, message, code="timeout", closes=True)
        self._timer, self._num_left = self.loop.call_later(self.timeout_sec, self.end, late), 0

    @property
    def num_answers(self) -> int:
        """Answers that it asks for, to all of its prompts."""
        return len(self.prompts) * (self.asked.n or 1)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(prompt.num_tokens for prompt in self.prompts)

    @property
    def without_effect(self) -> str:
        """Names of fields that were asked for and change nothing, as headers and logs may have."""
        names = [*self.asked.without_effect, *self.ignored][:_MOST_NAMES]
        return ", ".join(quote(name[:_MOST_NAMES]) for name in names)

    def make_answers(self) -> None:
        """Begin as many as were asked for, each as if it were alone, with the next seed."""
        seed, self._num_left = self.asked.seed, self.num_answers
        for prompt in self.prompts:
            for place in range(self.asked.n or 1):
                grammar = None if self.grammar is None else self.grammar.deep_copy()
                of_answer, parser = None if seed is None else seed + place, deepcopy(prompt.parser)
                self.answers.append(
                    OneAnswer(len(self.answers), prompt, of_answer, grammar, parser)
                )

    def end(self, error: ApiError) -> None:
        """End it before its next token, or its turn; the first reason stays."""
        if self.error is None:
            self.error = error
        for future in self.futures:
            future.cancel()
        self.in_loop(self.choices.put_nowait, None)

    def finish(self) -> None:
        """Be over once all answers are, if there are any. Called in the event loop for each."""
        self._num_left -= 1
        if self._num_left <= 0:
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
