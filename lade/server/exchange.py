"""One request and what comes of it; known to all that serves it by a context variable."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, NamedTuple

from lade.config import Config
from lade.drafting.drafter import Drafter
from lade.hf.pools import Pools
from lade.server.errors import ApiError
from lade.server.keys import KeyOwner
from lade.stats import DecodeStats

Endpoint = Literal["chat", "completions", "responses"]


class Logprob(NamedTuple):
    """A token of the answer with the model's own log-probabilities."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # likeliest first
    end: int  # characters of the text up to and with this token


@dataclass(frozen=True)
class Asked:
    """What a request asks for beyond what transformers' handlers know."""

    endpoint: Endpoint
    is_stream: bool = False
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    sampling: dict[str, Any] = field(default_factory=dict)  # more options of a GenerationConfig
    max_new_tokens: int | None = None
    stops: tuple[str, ...] = ()
    num_logprobs: int | None = None  # None for none, 0 for those of the answer alone
    includes_usage: bool = False
    obfuscates: bool = True  # whether sizes of events are to tell nothing
    user: str | None = None
    salt: str | None = None
    prediction: str | None = None  # what the answer will probably be
    speculates: bool = True
    max_draft_tokens: int | None = None
    pools: tuple[str, ...] | None = None  # names of corpora to draft from


@dataclass(eq=False)
class Exchange:
    """A request that was let in, until its answer is complete.

    Written by the event loop before it is submitted, by the thread that answers until that is done.
    """

    loop: asyncio.AbstractEventLoop
    config: Config = field(default_factory=Config)
    drafter: Drafter | None = None  # beside the pools
    chunk_interval_sec: float = 0.0  # between what is sent of a stream; 0 for as it comes
    owner: KeyOwner = field(default_factory=KeyOwner)
    of_whom: str = ""  # the key, or where it comes from: what is shared fairly
    knows_kept: bool = False  # whether it may be told what of its prompt was kept
    asked: Asked = Asked("chat")  # what it was found to ask for
    grammar: Any = None  # a compiled one, that the answer keeps
    body: Any = b""  # what came; once that is read, what its handler is to get
    num_held: int = 0  # bytes of it that count as held for a client
    prompt: Any = None  # what its tokenizer makes of it, once known
    prediction: list[int] | None = None  # its tokens, likewise; else those of calls of its tools
    pools: Pools | None = None
    is_private: bool = True  # whether no later request may know what this one was about
    arrived: float = field(default_factory=perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_prompt_tokens: int = 0
    most_tokens: int = 0  # that prompt and answer may come to have
    num_tokens: int = 0
    leave: Callable[[], None] = lambda: None  # gives its place in the line back
    is_submitted: bool = False  # to a thread that gives it back
    is_parsed: bool = False  # whether parts of the answer are told apart, such as tool calls
    stats: DecodeStats | None = None
    logprobs: list[Logprob] = field(default_factory=list)
    pieces: Sequence[bytes] = ()  # the bytes of every token, if log-probabilities are asked for
    error: ApiError | None = None  # why it ends early

    def end(self, error: ApiError) -> None:
        """End it before its next token; the first reason stays."""
        if self.error is None:
            self.error = error

    def check(self) -> None:
        """Raise why it is to end, if it is."""
        if self.error is not None:
            raise self.error

    def in_loop(self, function: Callable[..., None], *args: Any) -> None:
        """Have the event loop call a function, from any thread."""
        with suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(function, *args)


#: The exchange of whatever code runs for a request.
current: ContextVar[Exchange] = ContextVar("lade_exchange")
