"""Run one answer in the engine, and send its text to the client step by step."""

import logging
import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import replace
from itertools import repeat
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from lade.apps.server.answers import NULLS, Json, add
from lade.apps.server.errors import ApiError, failed
from lade.apps.server.exchange import Exchange, OneAnswer
from lade.apps.server.grammars import GrammarProcessor
from lade.compat import CACHE, end_tokens, mark_as_new
from lade.drafting.drafter import Drafter
from lade.engine.engine import current_call
from lade.hf.api import decode
from lade.models.loading import LoadedModel
from lade.models.stream import StopCutter, TextStream
from lade.stats import DecodeStats, Step
from lade.targets.joint import Part

logger = logging.getLogger(__name__)

# JSON has no number for minus infinity.
_LOWEST_LOGPROB = -9999.0


def end_exchange(exchange: Exchange, future: Future[None]) -> None:
    """End the exchange of an answer that has ended, with its error if it failed."""
    failure = None if future.cancelled() else future.exception()
    if isinstance(failure, ApiError):
        exchange.end(failure)
    elif failure is not None and exchange.error is None:  # the model's or its processors'
        logger.error("an answer failed", exc_info=failure)
        exchange.end(failed())
    exchange.in_loop(exchange.finish)


def answer(
    exchange: Exchange, one: OneAnswer, loaded: LoadedModel, drafter: Drafter | None
) -> None:
    """Generate as `model.generate` does with the answer's seed."""
    exchange.check()
    one.admitted = perf_counter()
    exchange.in_loop(exchange.choices.put_nowait, {})
    asked, relay = exchange.asked, _Relay(exchange, one, loaded.tokenizer)
    if relay.echoes:
        relay.echo(loaded.model)
    if not one.options.max_new_tokens:
        one.stats = DecodeStats()
        relay.finish()
        return
    processors = LogitsProcessorList()
    penalties = asked.presence_penalty or 0.0, asked.frequency_penalty or 0.0
    if any(penalties):
        processors.append(_Penalties(*penalties, one.num_prompt_tokens))
    if exchange.grammar is not None:
        grammar = exchange.grammar.deep_copy()  # which the answer advances
        processors.append(GrammarProcessor(grammar, one.num_prompt_tokens))

    def run(model: Any, input_ids: Tensor, **prepared: Any) -> Any:
        if asked.num_logprobs is not None:  # first, as penalties and grammars change scores
            prepared["logits_processor"].insert(0, relay.record)
        mark_as_new(prepared)
        return decode(
            model,
            input_ids,
            pool=exchange.pools,
            drafter=drafter,
            config=replace(exchange.config, reuses_prefix=not exchange.is_private),
            prediction=exchange.prediction,
            on_step=relay.take,
            **prepared,
        )

    # A fresh seed: the client of an earlier request knows how its random numbers go on.
    torch.manual_seed(secrets.randbits(63) if one.seed is None else one.seed)
    output = loaded.model.generate(
        **one.inputs,
        generation_config=one.options,
        logits_processor=processors,
        stopping_criteria=StoppingCriteriaList([relay] if relay.decides else []),
        custom_generate=run,
    )
    one.stats = output.stats
    relay.finish()


class _Record(LogitsProcessor):  # type: ignore[misc]
    """Records the target's log-probabilities; called once for each emitted token, in order.

    It is a class because transformers inspects a processor's signature at each call, which takes
    0.7 ms for a method.
    """

    def __init__(self) -> None:
        self.rows = deque[Tensor]()  # log-probabilities of the next tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.rows.append(scores[0].float().log_softmax(-1))
        return scores


class _Penalties(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's presence and frequency penalties.

    Args:
        presence: subtracted from the logit of each token that the answer has.
        frequency: subtracted once more for each time that it has the token.
        num_prompt_tokens: length of the prompt, whose tokens do not count.
    """

    def __init__(self, presence: float, frequency: float, num_prompt_tokens: int) -> None:
        self._presence, self._frequency, self._start = presence, frequency, num_prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        said = input_ids[:, self._start :]
        counts = torch.zeros_like(scores).scatter_add_(
            1, said, torch.ones_like(said, dtype=scores.dtype)
        )
        return scores - self._presence * (counts > 0) - self._frequency * counts


class _Relay:
    """Takes every emitted token, sends the new text after each step, and stops the answer.

    If stop strings or a tool call may end the answer, the relay is also a stopping criterion.
    transformers' criterion for stop strings looks at every token of the vocabulary first: 0.4 s a
    request, and minutes for a string that was chosen to be slow.

    Attributes:
        decides: whether the relay may end the answer.
        echoes: whether the answer begins with its prompt.
    """

    def __init__(self, exchange: Exchange, one: OneAnswer, tokenizer: Any) -> None:
        self._exchange, self._answer, self._parser = exchange, one, deepcopy(exchange.parser)
        asked = exchange.asked
        self._is_chat = asked.is_chat
        self._stream = TextStream(tokenizer, skips_special=self._parser is None)
        self._cutter = StopCutter(asked.stop or ())
        self._calls_once = getattr(asked, "calls_once", False)
        self.decides = bool(asked.stop or self._calls_once)
        self.echoes = bool(getattr(asked, "echo", None))
        self._num_top = asked.num_logprobs
        added = tokenizer.added_tokens_decoder.items()
        special = {token_id: token.content for token_id, token in added if token.special}
        self._special = frozenset(special)
        self.record = _Record()
        # Characters of all text, and of the text that no stop string can take back.
        self._num_chars = self._num_shown = 0
        # Tokens whose text is not shown yet: its start and end, their text, and the
        # log-probabilities to send.
        self._waiting = deque[tuple[int, int, str, Any]]()
        self._delta: Json = {}
        self._num_calls = 0
        self._ends = frozenset(end_tokens(one.options))
        self._silent = frozenset[int]()  # tokens without text
        if (parser := self._parser) is not None:  # it sees special tokens that are marks
            others = {each for each in special if special[each] not in parser.marks}
            self._silent = self._ends | others

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Take the last token of [1, num_tokens]; return whether the answer ends there."""
        self._put(int(input_ids[0, -1]))
        return torch.full((1,), self._is_over, dtype=torch.bool, device=input_ids.device)

    @property
    def _is_over(self) -> bool:
        return self._cutter.is_cut or (self._calls_once and self._num_calls > 0)

    @torch.no_grad()
    def echo(self, model: Any) -> None:
        """Send the prompt first, with the log-probabilities of its tokens but the first."""
        input_ids = self._answer.inputs["input_ids"]
        first, *others = input_ids[0].tolist()
        asks, self._num_top = self._num_top, None  # of the first token, nothing is known
        self._read(self._text_of(first))
        if asks is not None:
            self._num_top = asks
            named = self._named(first)["token"]
            self._waiting.append((0, self._num_chars, named, (None, None)))
        rows: Iterable[Any] = repeat(None) if asks is None else _logits_of(model, input_ids)
        for token_id, row in zip(others, rows, strict=False):  # the last foretells the answer
            self._exchange.check()
            if row is not None:
                self.record.rows.append(row.float().log_softmax(-1))
            self._read(self._text_of(token_id))

    def _put(self, token_id: int) -> None:
        self._exchange.check()
        one, now = self._answer, perf_counter()
        one.first_token, one.last_token = one.first_token or now, now
        one.token_ids.append(token_id)
        self._read(self._cutter.feed(self._text_of(token_id)))

    def _text_of(self, token_id: int) -> str:
        """Return the text that a token adds, and note its log-probabilities, as OpenAI does."""
        text = "" if token_id in self._silent else self._stream.put(token_id)
        start, self._num_chars = self._num_chars, self._num_chars + len(text)
        if self._num_top is None:
            return text
        row = self.record.rows.popleft().clamp_min(_LOWEST_LOGPROB)
        # Special tokens are not in the answer; of a prompt, clients count them.
        if self.echoes or token_id not in self._special:
            values, others = row.topk(min(self._num_top, len(row)))
            mine, top = float(row[token_id]), [*zip(others.tolist(), values.tolist(), strict=True)]
            self._waiting.append((start, self._num_chars, *self._written(token_id, mine, top)))
        return text

    def _written(
        self, token_id: int, mine: float, top: Iterable[tuple[int, float]]
    ) -> tuple[str, Any]:
        if not self._is_chat:
            top_of = {self._named(each)["token"]: logprob for each, logprob in top}
            return self._named(token_id)["token"], (mine, top_of)
        named = {**self._named(token_id), "logprob": mine}
        others = [{**self._named(each), "logprob": logprob} for each, logprob in top]
        return named["token"], {**named, "top_logprobs": others}

    def _named(self, token_id: int) -> Json:
        """Return a token's text and bytes, as the log-probabilities of chats have them."""
        data: bytes = self._exchange.tokens.decode_bytes([token_id])
        return {"token": data.decode(errors="replace"), "bytes": [*data]}

    def _read(self, text: str, *, is_last: bool = False) -> None:
        """Add text of the answer; a parser divides it into content, thoughts and tool calls."""
        self._num_shown += len(text)
        parts: list[tuple[str, Any]] = [("content", text)] if text else []
        if self._parser is not None:
            parts = self._parser.feed(text, is_last=is_last)
        for name, value in parts:
            if name == "tool_calls":
                number, self._num_calls = self._num_calls, self._num_calls + 1
                call_id = f"{self._exchange.request_id}_{self._answer.index}_tool_call_{number}"
                call = {"index": number, "id": call_id, "type": "function", "function": value}
                value = [call]
            add(self._delta, {name: value})

    def take(self, step: Step) -> None:
        """Take the new tokens of a step, and send their text."""
        for token_id in () if self.decides else step.token_ids:
            self._put(token_id)
        self._send()

    def _send(self, *, is_last: bool = False) -> None:
        """Send the new text of a step in one event, which hides its number of tokens."""
        exchange, delta = self._exchange, self._delta
        if not (delta or is_last):
            return
        said: Json = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        choice = {"index": self._answer.index, **said, **NULLS}
        if self._num_top is not None:
            choice["logprobs"] = self._logprobs(is_last)
        if is_last:
            has_ended = self._is_over or not self._ends.isdisjoint(self._answer.token_ids[-1:])
            why = "tool_calls" if self._num_calls else "stop"
            choice["finish_reason"] = why if has_ended else "length"
        self._delta = {}
        exchange.in_loop(exchange.choices.put_nowait, choice)

    def _logprobs(self, is_last: bool) -> Json:
        """Return the log-probabilities of the tokens whose text is shown."""
        starts, texts, shown = list[int](), list[str](), list[Any]()
        while self._waiting:
            start, end, text, each = self._waiting[0]
            # A stop may end the text within a token.
            if end > self._num_shown and not (is_last and start < self._num_shown):
                break
            starts.append(start)
            texts.append(text)
            shown.append(each)
            self._waiting.popleft()
        if self._is_chat:
            return {"content": shown}
        return {
            "tokens": texts,
            "token_logprobs": [logprob for logprob, _ in shown],
            "top_logprobs": [top for _, top in shown],
            "text_offset": starts,
        }

    def finish(self) -> None:
        """Send the rest of the text and the reason why the answer ended."""
        self._read(self._cutter.feed(self._stream.end(), is_last=True))
        self._read("", is_last=True)
        self._send(is_last=True)


def _logits_of(model: Any, input_ids: Tensor) -> Iterator[Tensor]:
    """Yield the model's own logits, [vocab_size], at each token of a prompt [1, num_tokens].

    In joint forward passes it runs in prefill chunks, between which other calls go on.
    """
    call, num_tokens, start = current_call(), input_ids.shape[1], 0
    if call is None or call.engine.max_running == 1:
        yield from model(input_ids, use_cache=False).logits[0]
        return
    cache = DynamicCache(config=model.config)
    while start < num_tokens:
        num = call.reserve(num_tokens - start)
        inputs = {"input_ids": input_ids[:, start : start + num], CACHE: cache, "use_cache": True}
        (logits,) = call.run([Part(object(), model, inputs, undo=cache.reset, num_committed=1)])
        yield from logits[0]
        start += num
