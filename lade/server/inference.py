"""Answers in the engine: seeded, drafted from their own pools, stopped, recorded."""

import logging
import secrets
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from lade.compat import mark_as_new
from lade.drafting.drafter import Drafter
from lade.hf.api import decode
from lade.models.loading import LoadedModel
from lade.models.responses import parts_of
from lade.models.stream import StopCutter, TextStream
from lade.server.answers import Json, add
from lade.server.errors import ApiError, failed
from lade.server.exchange import Exchange
from lade.server.grammars import Kept
from lade.stats import Step

logger = logging.getLogger(__name__)

# What JSON has no number for.
_LOWEST_LOGPROB = -9999.0


def tell_end(exchange: Exchange, answer: Future[None]) -> None:
    """Tell the client's side that an answer has ended, and how."""
    failure = None if answer.cancelled() else answer.exception()
    if isinstance(failure, ApiError):
        exchange.end(failure)
    elif failure is not None and exchange.error is None:  # the model's or its processors'
        logger.error("an answer failed", exc_info=failure)
        exchange.end(failed())
    exchange.in_loop(exchange.finish)


def answer(exchange: Exchange, loaded: LoadedModel, drafter: Drafter | None) -> None:
    """Generate as `model.generate` does with the request's seed."""
    exchange.check()
    exchange.admitted = perf_counter()
    exchange.in_loop(exchange.choices.put_nowait, {})
    asked, relay = exchange.asked, _Relay(exchange, loaded.tokenizer)
    processors = LogitsProcessorList()
    if exchange.grammar is not None:
        processors.append(Kept(exchange.grammar, exchange.num_prompt_tokens))

    def run(model: Any, input_ids: Tensor, **prepared: Any) -> Any:
        if asked.num_logprobs is not None:  # before penalties and grammars, which change scores
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

    # Another request must not continue the random numbers of this one, which its client knows.
    torch.manual_seed(secrets.randbits(63) if asked.seed is None else asked.seed)
    output = loaded.model.generate(
        **exchange.inputs,
        generation_config=exchange.options,
        logits_processor=processors,
        stopping_criteria=StoppingCriteriaList([relay] if asked.stop else []),
        custom_generate=run,
    )
    exchange.stats = output.stats
    relay.finish()


class _Relay:
    """Takes every emitted token, tells what is new of a step, and ends a call that is to end.

    Where strings may end the answer, it is also called as a stop criterion. transformers' own looks
    at every token of the vocabulary first, which takes a server of many users 0.4 s a request, and
    minutes where a string is made for it.
    """

    def __init__(self, exchange: Exchange, tokenizer: Any) -> None:
        self._exchange, self._parser = exchange, exchange.parser
        self._is_chat = exchange.asked.is_chat
        self._stream = TextStream(tokenizer, skips_special=self._parser is None)
        self._cutter = StopCutter(exchange.asked.stop or ())
        self._num_top = exchange.asked.num_logprobs
        self._special = frozenset(tokenizer.all_special_ids)
        self._rows = deque[Tensor]()  # log-probabilities of the next tokens
        self._num_chars = self._num_shown = 0  # of the text, and of what is in the answer for sure
        # What is to be said of tokens once their text is shown, with where they begin and end.
        self._waiting = deque[tuple[int, int, Json]]()
        self._pending = ""  # text that no piece has told of
        self._delta: Json = {}
        self._num_calls = 0
        self._ends: frozenset[int] = frozenset()
        if self._parser is not None:  # which sees special tokens, but the answer's end
            self._add(parts_of(self._parser.initial_events))  # what the prompt has of it already
            ends = exchange.options.eos_token_id
            self._ends = frozenset([ends] if isinstance(ends, int) else ends or ())

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Take the last token of [1, num_tokens]; return whether the answer ends there."""
        self._put(int(input_ids[0, -1]))
        return torch.full((1,), self._cutter.is_cut, device=input_ids.device)

    def _put(self, token_id: int) -> None:
        exchange = self._exchange
        exchange.check()
        exchange.last_token = perf_counter()
        exchange.first_token = exchange.first_token or exchange.last_token
        exchange.token_ids.append(token_id)
        text = "" if token_id in self._ends else self._stream.put(token_id)
        start, self._num_chars = self._num_chars, self._num_chars + len(text)
        if self._num_top is not None:
            logprob = self._logprob(token_id, self._num_top)
            if token_id not in self._special:  # its text is not in the answer
                self._waiting.append((start, self._num_chars, logprob))
        self._read(self._cutter.feed(text))

    def record(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Note the target's logits; called once for each emitted token, in order."""
        self._rows.append(scores[0].float().log_softmax(-1))
        return scores

    def _logprob(self, token_id: int, num_top: int) -> Json:
        """Return what there is to say of the next emitted token, as OpenAI does."""
        row = self._rows.popleft().clamp_min(_LOWEST_LOGPROB)
        told: list[Json] = []
        for each in (token_id, *row.topk(num_top).indices.tolist()):  # the likeliest first
            text: bytes = self._exchange.tokens.decode_bytes([each])
            token, logprob = text.decode(errors="replace"), float(row[each])
            told.append({"token": token, "logprob": logprob, "bytes": [*text]})
        return {**told[0], "top_logprobs": told[1:]}

    def _read(self, text: str, *, is_last: bool = False) -> None:
        """Make pieces of text that is in the answer; without a parser all is said."""
        self._num_shown += len(text)
        self._pending += text
        try:
            if self._parser is not None:
                events = self._parser.finalize()[1] if is_last else self._parser.feed(text)
                self._add([*parts_of(events)])
        except (ValueError, RuntimeError, LookupError, TypeError):
            self._parser = None  # what looks like a call is none: it and the rest are text
        if self._parser is None and self._pending:
            self._add([("content", self._pending)])

    def _add(self, parts: Iterable[tuple[str, Any]]) -> None:
        for name, value in parts:
            if name == "tool_calls":
                place, self._num_calls, self._pending = self._num_calls, self._num_calls + 1, ""
                call_id = f"{self._exchange.request_id}_{self._exchange.index}_tool_call_{place}"
                call = {"index": place, "id": call_id, "type": "function", "function": value}
                add(self._delta, {name: [call]})
            else:
                self._pending = self._pending.partition(value)[2]
                add(self._delta, {name: value})

    def take(self, step: Step) -> None:
        """Take the tokens of a step that are new, and send what they say."""
        for token_id in () if self._exchange.asked.stop else step.token_ids:
            self._put(token_id)
        self._tell()

    def _tell(self, *, is_last: bool = False) -> None:
        """Send what is new: token by token, their number would show in how they are sent."""
        exchange, delta = self._exchange, self._delta
        if not (delta or is_last):
            return
        said: Json = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        choice = {"index": exchange.index, **said}
        if self._num_top is not None:
            choice["logprobs"] = self._logprobs(is_last)
        if is_last:
            is_full = len(exchange.token_ids) >= exchange.options.max_new_tokens
            why = "tool_calls" if self._num_calls else "length" if is_full else "stop"
            choice["finish_reason"] = why
        self._delta = {}
        exchange.in_loop(exchange.choices.put_nowait, choice)

    def _logprobs(self, is_last: bool) -> Json:
        """Return what there is to say of tokens whose text is shown."""
        starts, told = list[int](), list[Json]()
        while self._waiting:
            start, end, logprob = self._waiting[0]
            # A stop may end the text within a token.
            if end > self._num_shown and not (is_last and start < self._num_shown):
                break
            starts.append(start)
            told.append(logprob)
            self._waiting.popleft()
        if self._is_chat:
            return {"content": told}
        tops = ({top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in told)
        return {
            "tokens": [each["token"] for each in told],
            "token_logprobs": [each["logprob"] for each in told],
            "top_logprobs": [*tops],
            "text_offset": starts,
        }

    def finish(self) -> None:
        """Send what is known at the end only, once statistics are."""
        self._read(self._cutter.feed(self._stream.end(), is_last=True))
        self._read("", is_last=True)
        self._tell(is_last=True)
