"""`Conversation`: messages, and answers to them piece by piece; `Turn`: what one answer was.

How it is shown is for others. The model answers in a thread of its own, so that whoever waits for a
piece can be interrupted at once.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from lade.batcher import Batcher
from lade.chat.pieces import Piece, PieceStream
from lade.chat.settings import Settings
from lade.config import Config
from lade.drafting.drafter import Drafter
from lade.hf.api import generate
from lade.hf.pools import Pools, pools_of
from lade.models.loading import LoadedModel
from lade.models.prompts import check_system, encode_messages, num_positions, room_after
from lade.stats import DecodeStats, Step, ends_in_loop
from ngram_pool import NGramPool
from ngram_pool.writing import write_whole

_FORMAT = "lade.chat"
_VERSION = 1
_MAX_FILE_BYTES = 2**28


@dataclass(slots=True)
class Turn:
    """One answer, finished or not; it grows while it is generated.

    Attributes:
        seed: of torch's generator when it began.
        is_plain: whether the model's own `generate` made it.
        num_prompt_tokens: of the whole conversation before it.
        pieces: what was said, thinking included.
        steps: what each forward committed, the prompt's first.
        token_times: seconds from the begin to each token.
        sec: seconds that it took altogether, the prompt included.
        is_interrupted: whether it was stopped before its end.
        stats: of the whole call; None while it runs, and of plain answers.
    """

    seed: int
    is_plain: bool
    num_prompt_tokens: int
    pieces: list[Piece] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    sec: float = 0.0
    is_interrupted: bool = False
    stats: DecodeStats | None = None

    @property
    def text(self) -> str:
        """The answer without its thinking."""
        return "".join(piece.text for piece in self.pieces if not piece.is_thinking)

    @property
    def thinking(self) -> str:
        """What was thought before the answer; empty for most models."""
        return "".join(piece.text for piece in self.pieces if piece.is_thinking)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the answer, its end and thinking included."""
        return len(self.token_times)

    @property
    def num_reused_tokens(self) -> int:
        """Tokens of the prompt that were not run again; known once the answer has ended."""
        return self.stats.num_reused_tokens if self.stats else 0

    @property
    def first_token_sec(self) -> float | None:
        """Seconds to the first token; None before there is one."""
        return self.token_times[0] if self.token_times else None

    @property
    def tokens_per_sec(self) -> float:
        """Tokens per second of all its time, the prompt's included."""
        return self.num_tokens / self.sec if self.sec > 0 else 0.0

    @property
    def mean_accepted_tokens(self) -> float:
        """MAT: tokens committed per step after the prompt's; plain decoding is 1.00."""
        steps = self.steps[1:]
        return sum(len(step.token_ids) for step in steps) / len(steps) if steps else 0.0

    @property
    def ends_in_loop(self) -> bool:
        """Whether it ends in the same few tokens over and over, which flatters drafts."""
        return ends_in_loop([token_id for step in self.steps for token_id in step.token_ids])


class Context(NamedTuple):
    """How full a conversation is."""

    num_tokens: int
    max_positions: int | None  # None where the model names no limit


class Conversation:
    """Messages between a user and a model, and the answers' figures.

        conversation = Conversation(lade.models.load())
        for piece in conversation.answer("Why is the sky blue?"):
            print(piece.text, end="")
        print(conversation.turn.tokens_per_sec)

    One pool is kept for all answers. A question is there with its answer, or neither is: what fails
    or is stopped before its first word leaves the messages as they were.

    Answers that sample draw from torch's own generator. Conversations that answer at the same time
    share a batcher, in which each has random numbers of its own.

    Args:
        loaded: the model and its tokenizer.
        settings: of answers; may be replaced between two of them.
        config: of drafts; None for what is automatic, and to run only what is new of each prompt.
        pool: as for `lade.generate`; None for a new one.
        drafter: drafts from that pool and whatever else it has, as a `lade.drafters.Merged` of a
            `CallPool` and others does; None for the pool alone.
        system: a system prompt.
        batcher: has answers share forwards with other calls of the model; None to run alone.

    Attributes:
        messages: of user and assistant in turn, as chat templates take them; without the system's.
        turns: the answers made here that still stand, the newest last.
        settings: of the next answer.

    Raises:
        TypeError: `pool` has something that is no pool.
        ValueError: the model has no place for a system prompt.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        settings: Settings | None = None,
        config: Config | None = None,
        pool: Pools | None = None,
        drafter: Drafter | None = None,
        system: str | None = None,
        batcher: Batcher | None = None,
    ) -> None:
        self.loaded = loaded
        self.settings = settings or Settings()
        self.messages: list[dict[str, str]] = []
        self.turns: list[Turn] = []
        self._config = Config(reuses_prefix=True) if config is None else config
        self._pools = pools_of(NGramPool() if pool is None else pool)
        self._drafter = drafter
        self._batcher = batcher
        self._num_answers = 0
        self._num_plain_tokens, self._plain_sec = 0, 0.0
        self._is_answering = False
        self._system: str | None = None
        self.system = system

    # --- answers ------------------------------------------------------------------------------

    def answer(
        self,
        text: str | None,
        *,
        is_plain: bool = False,
        seed: int | None = None,
        cancelled: threading.Event | None = None,
    ) -> Iterator[Piece]:
        """Answer a message, or the last one once more; return the pieces as they come.

        What is wrong with the message is raised at once, and nothing begins before the first piece
        is asked for. Closing the iterator and setting the event end the answer after the forward
        that runs, and keep what was said. If nothing was, the question is taken back, too.

        Args:
            text: of the user; None to answer the last message again, in place of its last answer.
            is_plain: whether to answer by the model's own `generate`.
            seed: for torch's generator; None for the settings' first seed and then the next ones.
            cancelled: ends the answer once it is set.

        Raises:
            ContextLengthError: the conversation is longer than what the model has positions for.
            ValueError: there is no message to answer, it has no token, or the chat template refuses
                the messages.
            RuntimeError: another answer has not ended.
        """
        self._check_is_idle()
        if text is not None:
            asked = [*self.messages, {"role": "user", "content": text}]
        else:
            asked = self.messages[:-1] if self._ends_with("assistant") else [*self.messages]
            if not asked:
                raise ValueError("expected a message to answer again, got an empty conversation")
        inputs = self._encode(asked)
        num_prompt_tokens: int = inputs["input_ids"].shape[1]
        options = self.settings.options()
        room = room_after(self.loaded.model, num_prompt_tokens)
        if room is not None:
            options["max_new_tokens"] = min(options["max_new_tokens"], room)
        if seed is None:
            seed = self.settings.seed + self._num_answers
        turn = Turn(seed, is_plain, num_prompt_tokens)
        return self._answer(asked, turn, inputs, options, cancelled or threading.Event())

    def _answer(
        self,
        asked: list[dict[str, str]],
        turn: Turn,
        inputs: dict[str, Any],
        options: dict[str, Any],
        cancelled: threading.Event,
    ) -> Iterator[Piece]:
        self._check_is_idle()
        before = [*self.messages], [*self.turns]
        is_again = len(asked) <= len(self.messages)
        if is_again and self._ends_with("assistant"):
            del self.turns[-1:]
        self.messages[:] = asked
        self.turns.append(turn)
        self._is_answering = True
        closed = threading.Event()
        worker = _Worker(self, turn, inputs, options, (cancelled, closed))
        try:
            worker.start()
            yield from worker.pieces()
        finally:
            closed.set()
            try:
                if worker.ident is not None:  # else it could not start
                    with suppress(Exception):  # there is another one already
                        for _ in worker.pieces():  # what was said meanwhile
                            pass
            finally:
                self._is_answering = False
                if turn.pieces or (worker.is_done and not turn.is_interrupted):
                    self._keep(turn)
                else:
                    self.messages[:], self.turns[:] = before

    def _keep(self, turn: Turn) -> None:
        self._num_answers += 1
        self.messages.append({"role": "assistant", "content": _content_of(turn)})
        if turn.is_plain and not turn.is_interrupted:  # else others would be held against its begin
            self._num_plain_tokens += turn.num_tokens
            self._plain_sec += turn.sec

    # --- messages -----------------------------------------------------------------------------

    @property
    def turn(self) -> Turn | None:
        """The last answer, also while it is generated; None without one."""
        return self.turns[-1] if self.turns else None

    @property
    def system(self) -> str | None:
        """The system prompt of all messages.

        Raises:
            ValueError: set to one that the model's chat template has no place for.
        """
        return self._system

    @system.setter
    def system(self, system: str | None) -> None:
        if system is not None:
            check_system(self.loaded, system)
        self._system = system

    def undo(self) -> str | None:
        """Take the last message and its answer back; return the message, None without one."""
        self._check_is_idle()
        if self._ends_with("assistant"):
            del self.messages[-1]
            del self.turns[-1:]
        return self.messages.pop()["content"] if self.messages else None

    def clear(self) -> None:
        """Forget all messages; the pool keeps what it learned."""
        self._check_is_idle()
        self.messages.clear()
        self.turns.clear()
        self._num_answers = 0

    def save(self, path: str | PathLike[str]) -> None:
        """Write messages, system prompt and settings as JSON that only its owner may read.

        An older file is replaced as a whole.

        Raises:
            OSError: the file cannot be written; an older one is as it was.
        """
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "model": self.loaded.name,
            "system": self.system,
            "settings": asdict(self.settings),
            "messages": self.messages,
        }
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        write_whole(Path(path), text.encode())

    def load(self, path: str | PathLike[str]) -> None:
        """Go on from a file that `save` wrote, in place of all messages, with its settings.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not one of ours, or the model has no place for its system prompt;
                nothing was changed.
        """
        self._check_is_idle()
        system, settings, messages = _read(Path(path))
        self.system = system
        self.settings = settings
        self.messages[:] = messages
        self.turns.clear()
        self._num_answers = len(messages) // 2

    # --- figures ------------------------------------------------------------------------------

    @property
    def plain_tokens_per_sec(self) -> float | None:
        """Tokens per second of all plain answers so far; None before there was one."""
        return self._num_plain_tokens / self._plain_sec if self._plain_sec else None

    @property
    def context(self) -> Context:
        """How many tokens the messages are; encodes them."""
        used = 0
        if self.messages:
            # As they are without the begin of an answer; templates may want one to be there.
            used = self._encode(self.messages, asks=False)["input_ids"].shape[1]
        return Context(used, num_positions(self.loaded.model))

    @property
    def pool(self) -> NGramPool | None:
        """The pool that learns; None where none does, or a store holds it."""
        learning = [
            pool for pool in self._pools if isinstance(pool, NGramPool) and not pool.is_read_only
        ]
        return learning[0] if learning else None

    @property
    def read_pools(self) -> list[NGramPool]:
        """The pools that are only read."""
        return [pool for pool in self._pools if isinstance(pool, NGramPool) and pool.is_read_only]

    # ------------------------------------------------------------------------------------------

    def _encode(self, messages: Sequence[dict[str, str]], asks: bool = True) -> dict[str, Any]:
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return encode_messages(self.loaded, [*before, *messages], asks=asks)

    def _ends_with(self, role: str) -> bool:
        return bool(self.messages) and self.messages[-1]["role"] == role

    def _check_is_idle(self) -> None:
        if self._is_answering:
            raise RuntimeError("expected the answer before to have ended, or its iterator closed")


class _Worker(threading.Thread):
    """One answer, generated in a thread of its own.

    Its steps go through a queue, and everything else is done by whoever takes them out.
    """

    def __init__(
        self,
        conversation: Conversation,
        turn: Turn,
        inputs: dict[str, Any],
        options: dict[str, Any],
        stops: tuple[threading.Event, ...],
    ) -> None:
        # A daemon, so that a second interrupt can leave in the middle of a long forward.
        super().__init__(name="lade-chat", daemon=True)
        self._conversation = conversation
        self._turn = turn
        self._inputs = inputs
        self._options = options
        self._stops = _Stop(stops)
        self._stream = PieceStream(conversation.loaded.tokenizer, inputs["input_ids"][0].tolist())
        # Steps, then the end: statistics, none, or an error. Each with its time.
        self._queue: SimpleQueue[tuple[Step | DecodeStats | BaseException | None, float]]
        self._queue = SimpleQueue()
        self._begin = 0.0
        self.is_done = False

    def pieces(self) -> Iterator[Piece]:
        """Take steps out until the end, note each as a whole in the turn, and yield its text.

        May be called again to go on where it was closed.

        Raises:
            BaseException: what the thread raised.
        """
        turn, stream = self._turn, self._stream
        while not self.is_done:
            taken, at = self._queue.get()
            turn.sec = at - self._begin
            if isinstance(taken, Step):
                turn.steps.append(taken)
                turn.token_times += [turn.sec] * len(taken.token_ids)
                new = [
                    piece
                    for i, token_id in enumerate(taken.token_ids)
                    for piece in stream.put(token_id, i < taken.num_accepted)
                ]
            else:
                self.join()
                self.is_done = True
                turn.stats = taken if isinstance(taken, DecodeStats) else None
                turn.is_interrupted = self._stops.was_asked or isinstance(taken, BaseException)
                is_at_limit = turn.num_tokens >= self._options["max_new_tokens"]
                new = stream.end(is_cut=turn.is_interrupted or is_at_limit)
            turn.pieces += new
            yield from new
            if isinstance(taken, BaseException):
                raise taken

    def run(self) -> None:
        """Answer; in the thread."""
        batcher = self._conversation._batcher
        try:
            if batcher is None:
                self._stops.check()
                stats = self._generate()
            else:
                num_tokens = self._turn.num_prompt_tokens + self._options["max_new_tokens"]
                stats = batcher.run(self._generate, num_tokens, self._stops.check)
            self._put(stats)
        except CancelledError:  # before it began
            self._put(None)
        except BaseException as error:  # raised where the pieces are taken
            self._put(error)

    def _generate(self) -> DecodeStats | None:
        """Answer; plain `generate` counts nothing."""
        self._begin = perf_counter()
        conversation, options = self._conversation, dict(self._options)
        model = conversation.loaded.model
        defaults = model.generation_config
        if defaults.pad_token_id is None and defaults.eos_token_id is not None:
            # What transformers would choose, too, with a line that says so.
            eos = defaults.eos_token_id
            options["pad_token_id"] = eos[0] if isinstance(eos, list) else eos
        options |= self._inputs | {"stopping_criteria": StoppingCriteriaList([self._stops])}
        torch.manual_seed(self._turn.seed)
        if self._turn.is_plain:  # by the class's generate, in case the model is wrapped
            type(model).generate(model, **options, streamer=_PutStreamer(self._put))
            return None
        output = generate(
            model,
            **options,
            pool=conversation._pools,
            drafter=conversation._drafter,
            config=conversation._config,
            on_step=self._put,
            return_dict_in_generate=True,
        )
        stats: DecodeStats = output.stats
        return stats

    def _put(self, made: Step | DecodeStats | BaseException | None) -> None:
        self._queue.put((made, perf_counter()))


class _Stop(StoppingCriteria):  # type: ignore[misc]
    """Ends an answer once one of some events is set."""

    def __init__(self, events: tuple[threading.Event, ...]) -> None:
        self._events = events
        self.was_asked = False

    def check(self) -> None:
        """Raise if the answer is to end."""
        self.was_asked |= any(event.is_set() for event in self._events)
        if self.was_asked:
            raise CancelledError

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return whether each row is to end, bool [rows]."""
        with suppress(CancelledError):
            self.check()
        return torch.full((input_ids.shape[0],), self.was_asked, device=input_ids.device)


class _PutStreamer(BaseStreamer):  # type: ignore[misc]
    """Passes the tokens of plain decoding on, each as a step of its own."""

    def __init__(self, put: Callable[[Step], None]) -> None:
        self._put = put
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        if not self._is_prompt:
            for token_id in value.tolist():
                self._put(Step([token_id], 0, 0))
        self._is_prompt = False

    def end(self) -> None:
        """Do nothing: the call's return tells."""


def _content_of(turn: Turn) -> str:
    """Return an answer as its message: without thinking, as models are to see earlier turns."""
    return turn.text.lstrip("\n") if turn.thinking else turn.text


def _read(path: Path) -> tuple[str | None, Settings, list[dict[str, str]]]:
    """Return system prompt, settings and messages of a file."""
    with open(path, "rb") as file:
        data = file.read(_MAX_FILE_BYTES)
    try:
        content = json.loads(data)
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        if content["version"] != _VERSION:
            raise ValueError(f"its version is {content['version']!r}, not {_VERSION}")
        system = content["system"]
        if not isinstance(system, str | None):
            raise ValueError("its system prompt is no text")
        settings = Settings(**content["settings"])
        messages = [_checked(message, i) for i, message in enumerate(content["messages"])]
        if len(messages) % 2:
            raise ValueError("its last question has no answer")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"expected a saved conversation in {path}: {error}") from None
    return system, settings, messages


def _checked(message: Any, place: int) -> dict[str, str]:
    role = "assistant" if place % 2 else "user"
    if not isinstance(message["content"], str) or message["role"] != role:
        raise ValueError(f"message {place + 1} is not a text of the {role}")
    return {"role": role, "content": message["content"]}
