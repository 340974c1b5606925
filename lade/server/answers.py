"""Answers as OpenAI's clients expect them: one object, or events, the text of a step in one."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from lade.server.exchange import AnswerPiece, Exchange, Logprob
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
        self._cutter = StopCutter(exchange.asked.stops)
        self._num_sent = 0  # characters
        self._num_logprobs = 0  # of those sent
        self._num_calls = 0
        kind = "chat.completion" if self._is_chat else "text_completion"
        kind += ".chunk" if self._is_chat and exchange.asked.stream else ""
        common = {"id": exchange.request_id, "object": kind, "created": int(time.time())}
        self._common = {**common, "model": model}
        if exchange.asked.stream and self._is_chat:
            self._common["system_fingerprint"] = ""

    async def whole(self) -> Json:
        """Wait for all of it; return it as one object.

        Raises:
            ApiError: it has ended early.
        """
        exchange = self._exchange
        texts, calls = {"content": "", "reasoning_content": ""}, []
        while (pieces := await exchange.pieces.get()) is not None:
            for piece in pieces:
                if piece.kind == "tool_call":
                    calls.append(self._call(piece))
                else:
                    texts[piece.kind] += piece.text
        if exchange.error is not None:
            raise exchange.error
        if exchange.parser is not None:  # blanks around its marks are nobody's
            texts = {kind: text.strip() for kind, text in texts.items()}
        choice: Json = {"index": 0}
        holder = choice
        if self._is_chat:
            thoughts = texts["reasoning_content"]
            holder = choice["message"] = {"role": "assistant", "content": ""}
            holder |= {"reasoning_content": thoughts} if thoughts else {}
            holder |= {"tool_calls": calls} if calls else {}
        self._fill(choice, holder, texts["content"], is_last=True)
        choice["finish_reason"] = self._why_it_ends()
        return {**self._common, "choices": [choice], **self._figures()}

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield it as events, which are of a size that tells nothing unless asked not to be."""
        exchange = self._exchange
        if self._is_chat:
            yield self._chunk({"delta": {"role": "assistant"}})
        while (pieces := await exchange.pieces.get()) is not None:
            if text := "".join(map(self._chunk, self._choices(pieces))):
                yield text
        if exchange.error is not None:
            yield f"{_EVENT}{json.dumps(exchange.error.body())}\n\n"
            return
        last: Json = {"delta": {}} if self._is_chat else {}
        self._fill(last, last.get("delta", last), "", is_last=True)
        yield self._chunk({**last, "finish_reason": self._why_it_ends()})
        if self._options is not None and self._options.include_usage:
            yield self._event({**self._common, "choices": [], **self._figures()})
        yield _EVENT + "[DONE]\n\n"

    def _choices(self, pieces: Iterable[AnswerPiece]) -> Iterator[Json]:
        """Yield what is new as choices of chunks; text of one kind in a row is one."""
        joined: list[AnswerPiece] = []
        for piece in pieces:
            if joined and joined[-1].kind == piece.kind != "tool_call":
                joined[-1] = piece._replace(text=joined[-1].text + piece.text)
            else:
                joined.append(piece)
        for piece in joined:
            if piece.kind == "tool_call":
                call = {"index": self._num_calls, **self._call(piece)}
                yield {"delta": {"tool_calls": [call]}}
            elif piece.kind == "reasoning_content":
                yield {"delta": {piece.kind: piece.text}}
            else:
                choice: Json = {"delta": {}} if self._is_chat else {}
                if self._fill(choice, choice.get("delta", choice), piece.text):
                    yield choice

    def _fill(self, choice: Json, holder: Json, text: str, *, is_last: bool = False) -> bool:
        """Put text into a choice up to a stop; return false where all of it is held back."""
        shown = self._cutter.feed(text) + (self._cutter.rest() if is_last else "")
        if not (shown or is_last):
            return False
        if shown or not self._is_chat or "content" in holder:
            holder["content" if self._is_chat else "text"] = shown
        self._num_sent += len(shown)
        if self._exchange.asked.num_logprobs is not None:
            choice["logprobs"] = self._new_logprobs(len(shown), is_last)
        return True

    def _call(self, piece: AnswerPiece) -> Json:
        name = f"{self._exchange.request_id}_tool_call_{self._num_calls}"
        self._num_calls += 1
        function = {"name": piece.name, "arguments": piece.text}
        return {"id": name, "type": "function", "function": function}

    def _why_it_ends(self) -> str:
        if self._num_calls:
            return "tool_calls"
        exchange = self._exchange
        is_full = len(exchange.token_ids) >= exchange.options.max_new_tokens
        return "length" if is_full else "stop"

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

    def _new_logprobs(self, num_shown: int, is_last: bool) -> Json | None:
        """Return those of tokens whose text has been sent by now, and have not been sent."""
        exchange, begin = self._exchange, self._num_logprobs
        if exchange.parser is not None:
            new = exchange.logprobs[begin:]
        else:
            new = [*self._within(begin, only_whole=not is_last)]
        self._num_logprobs += len(new)
        if not new and is_last and begin:
            return None
        return self._told(new, self._num_sent - num_shown)

    def _within(self, begin: int, *, only_whole: bool) -> Iterator[Logprob]:
        """Yield tokens, from one on, that are within what was sent, at least in part."""
        found = self._exchange.logprobs
        start = found[begin - 1].end if begin else 0
        for each in found[begin:]:
            if each.end > self._num_sent and (only_whole or start >= self._num_sent):
                return
            yield each
            start = each.end

    def _told(self, shown: Sequence[Logprob], offset: int) -> Json:
        """Return log-probabilities as the endpoint has them; `offset`: characters before them."""
        tokens = self._exchange.tokens

        def named(token_id: int) -> str:
            text: str = tokens.decode_bytes([token_id]).decode(errors="replace")
            return text

        def entry(token_id: int, logprob: float) -> Json:
            found = tokens.decode_bytes([token_id])
            return {"token": named(token_id), "logprob": logprob, "bytes": [*found]}

        if self._is_chat:
            content = [
                {
                    **entry(each.token_id, each.logprob),
                    "top_logprobs": [entry(*t) for t in each.top],
                }
                for each in shown
            ]
            return {"content": content}
        before = [offset, *(each.end for each in shown[:-1])]
        return {
            "tokens": [named(each.token_id) for each in shown],
            "token_logprobs": [each.logprob for each in shown],
            "top_logprobs": [{named(other): value for other, value in each.top} for each in shown],
            "text_offset": before[: len(shown)],
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
        self._is_cut = False

    def feed(self, text: str) -> str:
        """Return what is sure to be in the answer."""
        if self._is_cut:
            return ""
        text = self._held + text
        ends = [end for end in map(text.find, self._stops) if end >= 0]
        if ends:
            self._is_cut, self._held = True, ""
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
