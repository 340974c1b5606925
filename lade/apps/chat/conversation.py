"""`Conversation`: messages, and answers to them piece by piece; `Turn`: one answer."""

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from lade.apps.chat.pieces import Piece, PieceStream
from lade.config import Config
from lade.errors import UserError
from lade.hf.api import generate
from lade.hf.pools import Pools, pools_of
from lade.models.loading import LoadedModel
from lade.models.prompts import check_system, encode_messages, num_tokens_after
from lade.models.settings import Settings
from lade.stats import DecodeStats, Step, ends_in_loop
from ngram_pool import NGramPool
from ngram_pool.writing import write_whole

# An answer ends after this many repeated tokens: lists and tables that users ask for repeat fewer.
# Tokens between two searches for a loop; a search takes a tenth of a millisecond.
_LOOP_TOKENS, _LOOKS_EVERY = 320, 16


@dataclass(slots=True)
class Turn:
    """One answer, finished or not; it grows while it is generated."""

    seed: int  # of torch's generator when the answer began
    is_plain: bool  # whether the model's own `generate` made it
    is_alone: bool  # whether no pool and no kept prefix of earlier answers helped
    prompt_ids: list[int]  # tokens of the whole conversation before it
    pieces: list[Piece] = field(default_factory=list)  # text of the answer, thinking included
    token_ids: list[int] = field(default_factory=list)  # its end and thinking included
    first_token_sec: float | None = None  # None before the first token
    sec: float = 0.0  # of the whole answer, the prompt included
    is_complete: bool = False  # the model ended it, and it was not stopped
    is_looping: bool = False  # the chat ended it, because it repeated itself
    stats: DecodeStats | None = None  # of the whole call, at its end; None for plain answers

    @property
    def text(self) -> str:
        """The answer without its thinking."""
        text = "".join(piece.text for piece in self.pieces if not piece.is_thinking)
        return text.lstrip("\n") if any(piece.is_thinking for piece in self.pieces) else text

    @property
    def tokens_per_sec(self) -> float:
        """Tokens per second of the whole answer, the prompt's time included."""
        return len(self.token_ids) / self.sec if self.sec > 0 else 0.0

    def figures(self) -> list[str]:
        """Return notes about the answer, the most important first."""
        num_tokens = len(self.token_ids)
        parts = ["stopped"] * (not self.is_complete) + ["plain"] * self.is_plain
        parts.append(f"{num_tokens:,} token{'s' * (num_tokens != 1)}")
        parts += [f"{self.tokens_per_sec:.1f} tokens a second"]
        per_step = 1.0 if self.stats is None else self.stats.mean_accepted_tokens
        parts += [f"{per_step:.2f} tokens a step"]
        if self.first_token_sec is not None:
            parts.append(f"the first after {self.first_token_sec:.1f} s")
        if self.stats and (num_kept := self.stats.num_reused_tokens):
            parts.append(f"{num_kept:,} of {len(self.prompt_ids):,} not run again")
        if self.is_looping:
            return ["ended, as it repeats itself", *parts]
        return parts + ["ends in a loop"] * ends_in_loop(self.token_ids)


class Conversation:
    """Messages between a user and a model, and the answers' figures.

        conversation = Conversation(lade.models.load())
        turn = conversation.answer("Why is the sky blue?", lambda piece: print(piece.text, end=""))
        print(turn.tokens_per_sec)

    All answers but those with a given seed share one pool, and run only the new tokens of their
    prompts. A question that fails or is stopped before the first word of its answer is removed from
    the messages. Sampled answers draw from torch's global generator.

    Attributes:
        messages: messages of user and assistant in turn, in the form of chat templates, without the
            system prompt.
        turn: the last answer, also while it is generated; None if there is none.
        settings: settings of the next answer.
        system: the system prompt; None without one.

    Raises:
        TypeError: `pool` contains an object that is no pool.
        UserError: the model's chat template takes no system prompt.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        settings: Settings | None = None,
        pool: Pools | None = None,
        system: str | None = None,
    ) -> None:
        self.loaded = loaded
        self.settings = settings or Settings()
        self.messages: list[dict[str, str]] = []
        self.turn: Turn | None = None
        self._pools = pools_of(NGramPool() if pool is None else pool)
        self._num_answers = 0
        self._system: str | None = None
        self.system = system

    # --- answers ------------------------------------------------------------------------------

    def answer(
        self,
        text: str | None,
        show: Callable[[Piece], object],
        *,
        is_plain: bool = False,
        seed: int | None = None,
        cancelled: threading.Event | None = None,
    ) -> Turn | None:
        """Answer a message, or the last one once more.

        If the event is set, the answer ends after the running forward, and its text so far is kept;
        so it is after an error or an interrupt.

        Args:
            text: the user's message; None to answer the last message again, replacing its answer.
            show: called with each piece of the answer as it comes.
            is_plain: whether to answer by the model's own `generate`.
            seed: seed of torch's generator, to compare this answer with another: it has a pool of
                its own and runs its whole prompt. None for the next seed, from the settings' on.
            cancelled: event that ends the answer.

        Returns:
            The answer; None if it ended before its first word, so that its question was removed.

        Raises:
            ContextLengthError: the conversation is longer than the model's context.
            UserError: there is no message to answer, it has no token, or the chat template refuses
                the messages.
        """
        if text is not None:
            asked = [*self.messages, {"role": "user", "content": text}]
        else:
            asked = self.messages[:-1] if self._ends_with("assistant") else [*self.messages]
            if not asked:
                raise UserError("expected a question to answer again, there is none yet")
        told = [] if self.system is None else [{"role": "system", "content": self.system}]
        inputs = encode_messages(self.loaded, [*told, *asked])
        options = self.settings.options() | inputs
        prompt_ids: list[int] = inputs["input_ids"][0].tolist()
        num_left = num_tokens_after(self.loaded.model, len(prompt_ids))
        if num_left is not None:
            options["max_new_tokens"] = min(options["max_new_tokens"], num_left)
        is_alone = is_plain or seed is not None
        seed = self.settings.seed + self._num_answers if seed is None else seed
        turn = Turn(seed, is_plain, is_alone, prompt_ids)
        before = [*self.messages], self.turn
        self.messages[:], self.turn = asked, turn
        try:
            self._generate(turn, options, show, cancelled or threading.Event())
        finally:
            if turn.pieces or turn.is_complete:
                self._num_answers += 1
                # Models see earlier turns without their thinking.
                self.messages.append({"role": "assistant", "content": turn.text})
            else:
                self.messages[:], self.turn = before
        return turn if self.turn is turn else None

    def _generate(
        self,
        turn: Turn,
        options: dict[str, Any],
        show: Callable[[Piece], object],
        cancelled: threading.Event,
    ) -> None:
        """Answer, and fill a turn. Plain `generate` counts nothing."""
        model, stream = self.loaded.model, PieceStream(self.loaded.tokenizer, turn.prompt_ids)
        begin = perf_counter()

        def put(pieces: list[Piece]) -> None:
            turn.pieces += pieces
            for piece in pieces:
                show(piece)

        def take(step: Step) -> None:
            turn.sec = perf_counter() - begin
            turn.first_token_sec = turn.first_token_sec or turn.sec
            turn.token_ids += step.token_ids
            for index, token_id in enumerate(step.token_ids):
                put(stream.put(token_id, index < step.num_accepted))

        stop = _Stop(cancelled, take if turn.is_plain else None)
        options["stopping_criteria"] = StoppingCriteriaList([stop])
        torch.manual_seed(turn.seed)
        if turn.is_plain:  # by the class's generate, in case the model is wrapped
            type(model).generate(model, **options)
        else:
            output = generate(
                model,
                **options,
                pool=None if turn.is_alone else self._pools,
                config=Config(reuses_prefix=not turn.is_alone),
                on_step=take,
                return_dict_in_generate=True,
            )
            turn.stats = output.stats
        turn.sec = perf_counter() - begin
        turn.is_complete, turn.is_looping = not stop.was_asked, stop.is_looping
        has_end = turn.is_complete and not turn.is_looping
        put(stream.end(len(turn.token_ids) >= options["max_new_tokens"] or not has_end))

    # --- messages -----------------------------------------------------------------------------

    @property
    def system(self) -> str | None:
        """The system prompt; setting one that the chat template ignores raises a `UserError`."""
        return self._system

    @system.setter
    def system(self, system: str | None) -> None:
        if system is not None:
            check_system(self.loaded, system)
        self._system = system

    def undo(self) -> str | None:
        """Take the last message and its answer back; return the message, None without one."""
        self.turn = None
        if self._ends_with("assistant"):
            del self.messages[-1]
        return self.messages.pop()["content"] if self.messages else None

    def clear(self) -> None:
        """Forget all messages; the pool keeps what it learned."""
        self.messages.clear()
        self.turn, self._num_answers = None, 0

    def save(self, path: str | PathLike[str]) -> None:
        """Write messages, system prompt and settings as JSON that only its owner may read."""
        content = {
            "model": self.loaded.name,
            "system": self.system,
            "settings": asdict(self.settings),
            "messages": self.messages,
        }
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        write_whole(Path(path), text.encode())

    def load(self, path: str | PathLike[str]) -> None:
        """Replace all messages and settings by those of a file that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            UserError: the file is no saved conversation, or the chat template takes no system
                prompt; nothing was changed.
        """
        data = Path(path).read_bytes()
        try:
            content = json.loads(data)
            system, settings = content["system"], Settings(**content["settings"])
            messages = [{"role": m["role"], "content": m["content"]} for m in content["messages"]]
            if [m["role"] for m in messages] != ["user", "assistant"] * (len(messages) // 2):
                raise ValueError("its messages are not a user's and an assistant's in turn")
            texts = [system or "", *(m["content"] for m in messages)]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError("not all of it is text")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(f"expected a saved conversation in {path}: {error}") from None
        self.system, self.settings, self.messages[:] = system, settings, messages
        self.turn, self._num_answers = None, len(messages) // 2

    def _ends_with(self, role: str) -> bool:
        return bool(self.messages) and self.messages[-1]["role"] == role


class _Stop(StoppingCriteria):  # type: ignore[misc]
    """Ends an answer that loops, or whose event is set.

    Each token of plain decoding is put as a step of its own.
    """

    def __init__(self, cancelled: threading.Event, put: Callable[[Step], None] | None) -> None:
        self._cancelled, self._put = cancelled, put
        self.was_asked = self.is_looping = False
        self._said: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return whether each row is to end, bool [rows]."""
        self._said.append(int(input_ids[0, -1]))
        if self._put is not None:
            self._put(Step(self._said[-1:], 0, 0))
        self.was_asked |= self._cancelled.is_set()
        if len(self._said) % _LOOKS_EVERY == 0:
            self.is_looping = ends_in_loop(self._said, _LOOP_TOKENS)
        ends = self.was_asked or self.is_looping
        return torch.full(input_ids.shape[:1], ends, dtype=torch.bool, device=input_ids.device)
