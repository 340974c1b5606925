"""One answer in its thread: seeded, drafted from its own pool, stopped, recorded."""

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from lade.compat import Model, mark_as_new
from lade.hf.api import decode
from lade.hf.arguments import OnStep
from lade.server.errors import failed
from lade.server.exchange import Exchange, Logprob

logger = logging.getLogger(__name__)

# What JSON has no number for.
_LOWEST_LOGPROB = -9999.0


def answer(
    exchange: Exchange,
    model: Model,
    tokenizer: Any,
    inputs: dict[str, Any],
    options: GenerationConfig,
    streamer: Any = None,
    on_step: OnStep | None = None,
) -> Tensor:
    """Generate as `model.generate` does with the request's seed; return the sequences, [1, n].

    Args:
        exchange: gets statistics, times and log-probabilities.
        model: whose own `generate` prepares the call.
        tokenizer: of the model.
        inputs: `input_ids` and `attention_mask`, [1, num_prompt_tokens]; others are not used.
        options: of the call; changed.
        streamer: gets the prompt, every token, and the end once statistics are known.
        on_step: called after each step's tokens.

    Raises:
        ApiError: the exchange ends early, or decoding failed, which is in the log.
    """
    with _telling(exchange):
        asked = exchange.asked
        recorder = None if asked.num_logprobs is None else _Recorder(asked.num_logprobs)
        relay = _Relay(exchange, tokenizer, recorder, streamer)
        options.return_dict_in_generate = True
        criteria = StoppingCriteriaList()
        if asked.stops:
            criteria.append(_StopOnText(exchange, tokenizer, inputs["input_ids"].shape[1]))

        decoding: Callable[..., Any] = partial(
            decode,
            pool=exchange.pools,
            drafter=exchange.drafter,
            config=replace(exchange.config, reuses_prefix=not exchange.is_private),
            prediction=exchange.prediction,
            token_streamer=relay,
            on_step=on_step,
        )

        def run(*args: Any, logits_processor: LogitsProcessorList, **prepared: Any) -> Any:
            if recorder is not None:  # before all others: penalties and grammars change the scores
                logits_processor.insert(0, recorder)
            mark_as_new(prepared)
            return decoding(*args, logits_processor=logits_processor, **prepared)

        if streamer is not None:
            streamer.put(inputs["input_ids"])
        # Another request must not continue the random numbers of this one, which its client knows.
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        torch.manual_seed(seed)
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            generation_config=options,
            logits_processor=LogitsProcessorList(_grammar_of(exchange)),
            stopping_criteria=criteria,
            custom_generate=run,
        )
        exchange.stats = output.stats
        if streamer is not None:
            streamer.end()
        sequences: Tensor = output.sequences
        return sequences


@contextmanager
def _telling(exchange: Exchange) -> Iterator[None]:
    """Tell whoever waits why an answer has failed."""
    try:
        exchange.check()
        yield
    except Exception:  # the model's, its processors' or the grammar's
        if exchange.error is None:  # else it was ended from outside
            logger.exception("an answer failed")
            exchange.end(failed())
        assert exchange.error is not None
        raise exchange.error from None


def _grammar_of(exchange: Exchange) -> list[Any]:
    if exchange.grammar is None:
        return []
    from xgrammar.contrib.hf import LogitsProcessor as GrammarProcessor

    return [GrammarProcessor(exchange.grammar)]  # a new one for each call


class _StopOnText(StoppingCriteria):  # type: ignore[misc]
    """Ends an answer where its text has one of some strings.

    transformers' own looks at every token of the vocabulary first, which takes a server of many
    users 0.4 s a request, and minutes where a stop is made for it.
    """

    def __init__(self, exchange: Exchange, tokenizer: Any, num_seen: int) -> None:
        self._stops = exchange.asked.stops
        self._longest = max(map(len, self._stops))
        self._backend = tokenizer._tokenizer
        self._decode = DecodeStream([], skip_special_tokens=not exchange.is_parsed)
        self._num_seen = num_seen
        self._tail = ""  # too short to have a stop
        self._is_met = False

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Look at the tokens that are new; `input_ids` is int64 [1, num_tokens]."""
        new = input_ids[0, self._num_seen :].tolist()
        self._num_seen += len(new)
        for token_id in new:
            self._tail += self._decode.step(self._backend, token_id) or ""
            self._is_met |= any(stop in self._tail for stop in self._stops)
            self._tail = self._tail[max(len(self._tail) - self._longest + 1, 0) :]
        return torch.full((1,), self._is_met, dtype=torch.bool, device=input_ids.device)


class _Recorder(LogitsProcessor):  # type: ignore[misc]
    """Keeps the log-probabilities of the next tokens until it is known which these are.

    It is called once for each emitted token, in order, with the target's logits.
    """

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._rows: deque[Tensor] = deque()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._rows.append(scores[0].float().log_softmax(-1))
        return scores

    def take(self, token_id: int, end: int) -> Logprob:
        """Return what there is to say of the next emitted token."""
        row = self._rows.popleft()
        best = row.topk(self._num_top)
        top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return Logprob(
            token_id,
            max(float(row[token_id]), _LOWEST_LOGPROB),
            [(each, max(logprob, _LOWEST_LOGPROB)) for each, logprob in top],
            end,
        )


class _Relay(BaseStreamer):  # type: ignore[misc]
    """Notes every emitted token and passes it on; ends the call if the exchange is to end."""

    def __init__(
        self, exchange: Exchange, tokenizer: Any, recorder: _Recorder | None, streamer: Any
    ) -> None:
        self._exchange = exchange
        self._recorder = recorder
        self._streamer = streamer
        self._backend = tokenizer._tokenizer
        self._text = DecodeStream([], skip_special_tokens=not exchange.is_parsed)
        self._special = frozenset[int]()
        if recorder is not None and not exchange.is_parsed:
            self._special = frozenset(tokenizer.all_special_ids)
        self._end = 0

    def put(self, value: Tensor) -> None:
        """Take the next token, int64 [1]."""
        exchange = self._exchange
        exchange.check()
        exchange.last_token = perf_counter()
        if exchange.first_token is None:
            exchange.first_token = exchange.last_token
        token_ids = value.tolist()
        exchange.num_tokens += len(token_ids)
        if self._recorder is not None:
            self._record(token_ids, self._recorder)
        if self._streamer is not None:
            self._streamer.put(value)

    def _record(self, token_ids: Sequence[int], recorder: _Recorder) -> None:
        for token_id in token_ids:
            self._end += len(self._text.step(self._backend, token_id) or "")
            logprob = recorder.take(token_id, self._end)
            if token_id not in self._special:  # its text is not in the answer
                self._exchange.logprobs.append(logprob)

    def end(self) -> None:
        """Do nothing: the streamer is ended once statistics are known."""
