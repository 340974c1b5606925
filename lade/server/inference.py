"""Answers in the engine: seeded, drafted from their own pools, stopped, recorded."""

import logging
import secrets
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from lade.compat import mark_as_new
from lade.drafting.drafter import Drafter
from lade.hf.api import decode
from lade.models.loading import LoadedModel
from lade.models.stream import TextStream
from lade.server.answers import StopCutter
from lade.server.errors import ApiError, failed
from lade.server.exchange import AnswerPiece, Exchange
from lade.server.grammars import Kept
from lade.server.parsing import pieces_of

logger = logging.getLogger(__name__)

# What JSON has no number for.
_LOWEST_LOGPROB = -9999.0


def told(exchange: Exchange, answer: Future[None]) -> None:
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
    exchange.in_loop(exchange.begun.set)
    asked, inputs = exchange.asked, exchange.inputs
    recorder = (
        None if asked.num_logprobs is None else _Recorder(asked.num_logprobs, exchange.tokens)
    )
    relay = _Relay(exchange, loaded.tokenizer, recorder)
    criteria = StoppingCriteriaList()
    if asked.stop:
        criteria.append(_StopOnText(exchange, loaded.tokenizer))
    decoding: Callable[..., Any] = partial(
        decode,
        pool=exchange.pools,
        drafter=drafter,
        config=replace(exchange.config, reuses_prefix=not exchange.is_private),
        prediction=exchange.prediction,
        token_streamer=relay,
        on_step=relay.tell,
    )

    def run(*args: Any, logits_processor: LogitsProcessorList, **prepared: Any) -> Any:
        if recorder is not None:  # before all others: penalties and grammars change the scores
            logits_processor.insert(0, recorder)
        mark_as_new(prepared)
        return decoding(*args, logits_processor=logits_processor, **prepared)

    # Another request must not continue the random numbers of this one, which its client knows.
    torch.manual_seed(secrets.randbits(63) if asked.seed is None else asked.seed)
    processors = LogitsProcessorList()
    if exchange.grammar is not None:
        processors.append(Kept(exchange.grammar, exchange.num_prompt_tokens))
    output = loaded.model.generate(
        **inputs,
        generation_config=exchange.options,
        logits_processor=processors,
        stopping_criteria=criteria,
        custom_generate=run,
    )
    exchange.stats = output.stats
    relay.finish()


class _StopOnText(StoppingCriteria):  # type: ignore[misc]
    """Ends an answer where its text has one of some strings.

    transformers' own looks at every token of the vocabulary first, which takes a server of many
    users 0.4 s a request, and minutes where a stop is made for it.
    """

    def __init__(self, exchange: Exchange, tokenizer: Any) -> None:
        self._text = StopCutter(exchange.asked.stop)
        self._stream = TextStream(tokenizer, skips_special=exchange.parser is None)
        self._num_seen = exchange.num_prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Look at the tokens that are new; `input_ids` is int64 [1, num_tokens]."""
        new = input_ids[0, self._num_seen :].tolist()
        self._num_seen += len(new)
        for token_id in new:
            self._text.feed(self._stream.put(token_id))
        return torch.full((1,), self._text.is_cut, device=input_ids.device)


class _Recorder(LogitsProcessor):  # type: ignore[misc]
    """Keeps the log-probabilities of the next tokens until it is known which these are.

    It is called once for each emitted token, in order, with the target's logits.
    """

    def __init__(self, num_top: int, tokens: Any) -> None:
        self._num_top, self._tokens = num_top, tokens
        self._rows: deque[Tensor] = deque()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._rows.append(scores[0].float().log_softmax(-1))
        return scores

    def take(self, token_id: int) -> dict[str, Any]:
        """Return what there is to say of the next emitted token, as OpenAI does."""
        row = self._rows.popleft().clamp_min(_LOWEST_LOGPROB)
        best = row.topk(self._num_top)
        top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        told = self._told(token_id, float(row[token_id]))
        return {**told, "top_logprobs": [self._told(*other) for other in top]}  # likeliest first

    def _told(self, token_id: int, logprob: float) -> dict[str, Any]:
        text: bytes = self._tokens.decode_bytes([token_id])
        return {"token": text.decode(errors="replace"), "logprob": logprob, "bytes": [*text]}


class _Relay(BaseStreamer):  # type: ignore[misc]
    """Notes every emitted token, tells what is new of a step, and ends a call that is to end."""

    def __init__(self, exchange: Exchange, tokenizer: Any, recorder: _Recorder | None) -> None:
        self._exchange, self._recorder, self._parser = exchange, recorder, exchange.parser
        self._stream = TextStream(tokenizer, skips_special=self._parser is None)
        self._special = frozenset(tokenizer.all_special_ids if recorder is not None else ())
        self._num_chars = 0  # of the text up to now
        self._pending = ""  # text that no piece has told of
        self._new: list[AnswerPiece] = []
        self._ends: frozenset[int] = frozenset()
        if self._parser is not None:  # which sees special tokens, but the answer's end
            self._new += pieces_of(self._parser.initial_events)  # what the prompt has of it already
            ends = exchange.options.eos_token_id
            self._ends = frozenset([ends] if isinstance(ends, int) else ends or ())

    def put(self, value: Tensor) -> None:
        """Take the next token, int64 [1]."""
        exchange = self._exchange
        exchange.check()
        exchange.last_token = perf_counter()
        exchange.first_token = exchange.first_token or exchange.last_token
        token_id = int(value)
        exchange.token_ids.append(token_id)
        if token_id not in self._ends:
            text = self._stream.put(token_id)
            self._num_chars += len(text)
            self._read(text)
        if self._recorder is not None:
            logprob = self._recorder.take(token_id)
            if token_id not in self._special:  # its text is not in the answer
                exchange.logprobs.append((self._num_chars, logprob))

    def _read(self, text: str, *, is_last: bool = False) -> None:
        """Make pieces of new text; without a parser all is said."""
        parser = self._parser
        if parser is None:
            self._new += [AnswerPiece("content", text)] if text else []
            return
        self._pending += text
        try:
            pieces = [*pieces_of(parser.finalize()[1] if is_last else parser.feed(text))]
        except (ValueError, RuntimeError, LookupError, TypeError):
            self._parser = None  # what looks like a call is none: it and the rest are text
            self._read(self._pending)
            return
        for piece in pieces:
            is_call = piece.kind == "tool_call"
            self._pending = "" if is_call else self._pending.partition(piece.text)[2]
        self._new += pieces

    def tell(self, *_: Any) -> None:
        """Send what is new: token by token, their number would show in how they are sent."""
        new, self._new = self._new, []
        if new:
            self._exchange.in_loop(self._exchange.pieces.put_nowait, new)

    def finish(self) -> None:
        """Send what is known at the end only, once statistics are."""
        self._read(self._stream.end())
        self._read("", is_last=True)
        self.tell()

    def end(self) -> None:
        """Do nothing: what waits for the statistics is sent by `finish`."""
