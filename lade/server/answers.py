"""Answers as OpenAI's clients expect them: one object, or events, the text of a step in one."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

from lade.server.errors import ApiError
from lade.server.exchange import AnswerPiece, Exchange
from lade.stats import DecodeStats

_EVENT = "data: "
# An event with the text of a step fits into one: 220 bytes and the model's name are of all events.
_BLOCK_BYTES = 512

Json = dict[str, Any]


class ToldAnswer:
    """The answer of an exchange by a model, which clients call by a name."""

    def __init__(self, exchange: Exchange, model: str) -> None:
        self._exchange = exchange
        self._options = exchange.asked.stream_options
        self._is_chat = exchange.asked.is_chat
        self._cutter = StopCutter(exchange.asked.stop)
        self._num_sent = 0  # characters
        self._end = 0  # characters up to the last one whose log-probability was told
        self._num_calls = 0
        kind = "chat.completion" if self._is_chat else "text_completion"
        kind += ".chunk" if self._is_chat and exchange.asked.stream else ""
        common = {"id": exchange.request_id, "object": kind, "created": int(time.time())}
        self._common = {**common, "model": model}

    async def whole(self) -> Json:
        """Wait for all of it; return it as one object.

        Raises:
            ApiError: it has ended early.
        """
        choice: Json = {"index": 0, "delta": {"content": ""}} if self._is_chat else {"index": 0}
        async for choices in self._steps():
            for new in choices:
                _add(choice, new)
        if self._is_chat:
            choice["message"] = message = choice.pop("delta")
            for name in ("content", "reasoning_content") if self._exchange.parser else ():
                if name in message:  # blanks around marks are nobody's
                    message[name] = message[name].strip()
            for call in message.get("tool_calls", ()):
                del call["index"]  # which is of streams
        return {**self._common, "choices": [choice], **self._figures()}

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield it as events, which are of a size that tells nothing unless asked not to be."""
        try:
            async for choices in self._steps():
                if text := "".join(map(self._chunk, choices)):
                    yield text
        except ApiError as error:
            yield f"{_EVENT}{json.dumps(error.body())}\n\n"
            return
        if self._options is not None and self._options.include_usage:
            yield self._event({**self._common, "choices": [], **self._figures()})
        yield _EVENT + "[DONE]\n\n"

    async def _steps(self) -> AsyncGenerator[list[Json], None]:
        """Yield what is new, as choices of a stream, with each step of the model."""
        exchange = self._exchange
        if self._is_chat:
            yield [{"delta": {"role": "assistant"}}]
        while (pieces := await exchange.pieces.get()) is not None:
            yield [*self._choices(pieces)]
        if exchange.error is not None:
            raise exchange.error
        last = self._said(self._cutter.rest(), is_last=True)
        is_full = len(exchange.token_ids) >= exchange.options.max_new_tokens
        why = "tool_calls" if self._num_calls else "length" if is_full else "stop"
        yield [{**last, "finish_reason": why}]

    def _choices(self, pieces: Iterable[AnswerPiece]) -> Iterator[Json]:
        """Yield the choices of a step; text of one kind in a row is one."""
        for kind, group in groupby(pieces, lambda piece: piece.kind):
            found = [*group]
            text = "".join(piece.text for piece in found)
            if kind == "tool_call":
                yield {"delta": {"tool_calls": [*map(self._call, found)]}}
            elif kind == "reasoning_content":
                yield {"delta": {kind: text}}
            elif shown := self._cutter.feed(text):
                yield self._said(shown)

    def _said(self, text: str, *, is_last: bool = False) -> Json:
        """Return a choice of text that is in the answer for sure."""
        choice: Json = {"text": text}
        if self._is_chat:
            choice = {"delta": {"content": text} if text else {}}
        self._num_sent += len(text)
        if self._exchange.asked.num_logprobs is not None:
            choice["logprobs"] = self._new_logprobs(is_last)
        return choice

    def _call(self, piece: AnswerPiece) -> Json:
        place, self._num_calls = self._num_calls, self._num_calls + 1
        name = f"{self._exchange.request_id}_tool_call_{place}"
        function = {"name": piece.name, "arguments": piece.text}
        return {"index": place, "id": name, "type": "function", "function": function}

    def _chunk(self, choice: Json) -> str:
        return self._event({**self._common, "choices": [{"index": 0, **choice}]})

    def _event(self, event: Json) -> str:
        text = json.dumps(event)
        if self._options is not None and self._options.include_obfuscation is False:
            return f"{_EVENT}{text}\n\n"
        begin, end = f'{_EVENT}{text[:-1]}, "obfuscation": "', '"}\n\n'
        num_missing = -len(begin + end) % _BLOCK_BYTES
        return begin + secrets.token_urlsafe(_BLOCK_BYTES)[:num_missing] + end

    # --- log-probabilities ------------------------------------------------------------------

    def _new_logprobs(self, is_last: bool) -> Json:
        """Return those of tokens whose text has been sent by now, and have not been told."""
        told, starts, logprobs = list[Json](), list[int](), self._exchange.logprobs
        while logprobs:
            end, logprob = logprobs[0]
            is_within = end <= self._num_sent or (is_last and self._end < self._num_sent)
            # Where answers have parts, who knows which token is in which?
            if not is_within and self._exchange.parser is None:
                break
            told.append(logprob)
            starts.append(self._end)
            self._end = end
            logprobs.popleft()
        if self._is_chat:
            return {"content": told}
        tops = ({top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in told)
        return {
            "tokens": [each["token"] for each in told],
            "token_logprobs": [each["logprob"] for each in told],
            "top_logprobs": [*tops],
            "text_offset": starts,
        }

    # --- figures ----------------------------------------------------------------------------

    def _figures(self) -> Json:
        """Return usage and metrics: what was run, drafted, accepted and kept."""
        exchange, stats = self._exchange, self._exchange.stats
        assert stats is not None, "the answer is whole"
        num_prompt, num_new = exchange.num_prompt_tokens, len(exchange.token_ids)
        # Tokens of the answer that were drafted from the client's prediction, and the rest of it.
        is_clients = getattr(exchange.asked, "prediction", None) is not None
        num_predicted = len(exchange.prediction or ()) if is_clients else 0
        source = stats.sources.get("prediction")
        num_accepted = 0 if source is None else min(source.num_accepted_tokens, num_predicted)
        usage: Json = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "completion_tokens_details": {
                "accepted_prediction_tokens": num_accepted,
                "rejected_prediction_tokens": num_predicted - num_accepted,
                "accepted_draft_tokens": stats.num_accepted_tokens,
                "rejected_draft_tokens": stats.num_draft_tokens - stats.num_accepted_tokens,
            },
        }
        # Without keys, whoever asks in another's name would read that one's prompt.
        if exchange.knows_kept:
            usage["prompt_tokens_details"] = {"cached_tokens": stats.num_reused_tokens}
        return {"usage": usage, "metrics": {"speculative_decoding": speculation(stats)}}


def _add(whole: Json, new: Json) -> None:
    """Put what is new behind what there is: texts and lists go on, other values are the last."""
    for name, value in new.items():
        if isinstance(value, dict):
            _add(whole.setdefault(name, {}), value)
        else:
            is_more = isinstance(value, str | list) and name in whole
            whole[name] = whole[name] + value if is_more else value


def speculation(stats: DecodeStats) -> Json:
    """Return what vLLM tells of the drafts of a request, with its names; trees count by depth.

    Source: https://docs.vllm.ai/en/stable/features/speculative_decoding/acceptance_metrics/
    """
    num_steps = stats.num_drafted_row_steps
    reached = [num_steps, *stats.accepted_by_depth, 0]
    return {
        "mean_acceptance_length": 1 + stats.num_accepted_tokens / max(num_steps, 1),
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": [more - fewer for more, fewer in pairwise(reached)],
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": stats.num_accepted_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_tokens": len(stats.accepted_by_depth),
    }


class StopCutter:
    """Cuts text off at the first of some strings, and holds back what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.is_cut = False

    def feed(self, text: str) -> str:
        """Return what is sure to be in the answer."""
        if self.is_cut:
            return ""
        text = self._held + text
        ends = [end for end in map(text.find, self._stops) if end >= 0]
        if ends:
            self.is_cut, self._held = True, ""
            return text[: min(ends)]
        num_held = max((_num_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def rest(self) -> str:
        """Return what was held back at the end of the text."""
        held, self._held = self._held, ""
        return held


def _num_begun(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that a stop begins with."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
