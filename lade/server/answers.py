"""What transformers' answers lack: stops cut off, log-probabilities, details of usage, errors.

Answers are completed as the JSON that clients get, whole or event by event, so that nothing of
how transformers makes it is relied on.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

from lade.server.errors import failed, left
from lade.server.exchange import Exchange, Logprob

_EVENT = "data: "
_END = "data: [DONE]\n\n"
# An event with the text of a step fits into one: 220 bytes and the model's name are of all events.
_BLOCK_BYTES = 512

Json = dict[str, Any]


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


def completed(exchange: Exchange, body: Json) -> Json:
    """Return a whole answer, completed.

    Args:
        exchange: whose answer is known.
        body: transformers' answer; changed.
    """
    _complete_usage(exchange, body)
    if exchange.asked.endpoint != "responses":
        _Stream(exchange).fill(body["choices"][0], "message")
    return body


async def rewritten(
    exchange: Exchange, parts: AsyncGenerator[str, None]
) -> AsyncGenerator[str, None]:
    """Yield the events of an answer, completed: one for the text of each part.

    Args:
        exchange: of the answer.
        parts: transformers' events, those of a step at a time.
    """
    stream = _Stream(exchange)
    is_whole = False
    interval_sec = exchange.chunk_interval_sec
    source = _paced(parts, interval_sec) if interval_sec else parts
    try:
        async for part in source:
            events = [json.loads(each.removeprefix(_EVENT)) for each in part.split("\n\n") if each]
            text = "".join(map(stream.text_of, stream.completed(_merged(events))))
            if not text and interval_sec:  # a comment, so that nobody sees that nothing came
                text = _padded(": ", "\n\n")
            if text:
                yield text
        if exchange.asked.endpoint != "responses" and not stream.is_failed:
            yield _END
        is_whole = True
    finally:
        if not is_whole:  # the client has left
            exchange.end(left())
        await source.aclose()


async def _paced(
    parts: AsyncGenerator[str, None], interval_sec: float
) -> AsyncGenerator[str, None]:
    """Yield what has come, or nothing, at fixed intervals."""
    come = ""

    async def take() -> None:
        nonlocal come
        async for part in parts:
            come += part

    taking = asyncio.create_task(take())
    loop = asyncio.get_running_loop()
    begin = loop.time()
    try:
        while not taking.done() or come:
            await asyncio.sleep(interval_sec - (loop.time() - begin) % interval_sec)
            part, come = come, ""
            yield part
        await taking
    finally:
        taking.cancel()
        await asyncio.wait({taking})
        await parts.aclose()


def _merged(events: Iterable[Json]) -> Iterable[Json]:
    """Yield events; those in a row that only go on with a text are one."""
    before: Json | None = None
    for event in events:
        place, place_before = _place_of_text(event), _place_of_text(before or {})
        if place is not None and place_before is not None and place[1:] == place_before[1:]:
            place_before[0][place[1]] += place[0][place[1]]
            continue
        if before is not None:
            yield before
        before = event
    if before is not None:
        yield before


def _place_of_text(event: Json) -> tuple[Json, str, str] | None:
    """Return what has an event's text, by which name, and of what; None if there is more to it."""
    if event.get("type", "").endswith(".delta"):
        return event, "delta", event["item_id"]
    for choice in event.get("choices", ()):
        delta = choice.get("delta", choice)
        for name in ("content", "reasoning_content", "text"):
            if name in delta and not delta.keys() - {name, "index"} and len(choice) == 2:
                return delta, name, ""
    return None


class _Stream:
    """The events of one answer."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._cutter = StopCutter(exchange.asked.stops)
        self._num_sent = 0  # characters
        self._num_logprobs = 0  # of those sent
        self._num_events = 0  # of a response
        self.is_failed = False

    def text_of(self, event: Json) -> str:
        """Return an event as it is sent: unless asked not to be, of a size that tells nothing."""
        text = json.dumps(event)
        if "error" in event or not self._exchange.asked.obfuscates:
            return f"{_EVENT}{text}\n\n"
        return _padded(f'{_EVENT}{text[:-1]}, "obfuscation": "', '"}\n\n')

    def completed(self, events: Iterable[Json]) -> Iterable[Json]:
        """Yield what becomes of some of transformers' events."""
        for event in events:
            if self._exchange.asked.endpoint == "responses":
                yield self._of_response(event)
            elif "error" in event:
                self.is_failed = True
                yield (self._exchange.error or failed()).body()
            else:
                yield from self._of_choice(event)

    def _of_response(self, event: Json) -> Json:
        error = self._exchange.error or failed()
        event["sequence_number"] = self._num_events
        self._num_events += 1
        if event["type"] == "error":
            event |= {"message": error.message, "code": error.code or error.kind, "param": None}
        elif event["type"] == "response.failed":
            event["response"]["error"]["message"] = error.message
        elif event["type"] == "response.completed":
            _complete_usage(self._exchange, event["response"])
        return event

    def _of_choice(self, event: Json) -> Iterable[Json]:
        choice = event["choices"][0]
        usage = event.pop("usage", None)
        if not self.fill(choice, "delta"):
            return
        yield event
        is_last = choice.get("finish_reason") is not None
        if is_last and usage is not None and self._exchange.asked.includes_usage:
            event = event | {"choices": [], "usage": usage}
            _complete_usage(self._exchange, event)
            yield event

    def fill(self, choice: Json, name_in_chats: str) -> bool:
        """Complete what a choice has of the text; return false where all of it is held back."""
        is_chat = self._exchange.asked.endpoint == "chat"
        holder, name = (choice[name_in_chats], "content") if is_chat else (choice, "text")
        is_last = choice.get("finish_reason") is not None
        text = holder.get(name) or ""
        shown = self._cutter.feed(text) + (self._cutter.rest() if is_last else "")
        if text and not shown and not is_last:
            return False
        if text or shown or not is_chat:  # a field that completions require
            holder[name] = shown
        self._num_sent += len(shown)
        if self._exchange.asked.num_logprobs is not None and (shown or is_last):
            choice["logprobs"] = self._new_logprobs(len(shown), is_last)
        return True

    def _new_logprobs(self, num_shown: int, is_last: bool) -> Json | None:
        """Return those of tokens whose text has been sent by now, and have not been sent."""
        exchange, begin = self._exchange, self._num_logprobs
        if exchange.is_parsed:
            new = exchange.logprobs[begin:]
        else:
            new = list(_within(exchange, begin, self._num_sent, only_whole=not is_last))
        self._num_logprobs += len(new)
        if not new and is_last and begin:
            return None
        return _logprobs(exchange, new, self._num_sent - num_shown)


def _within(
    exchange: Exchange, begin: int, num_chars: int, *, only_whole: bool = False
) -> Iterable[Logprob]:
    """Yield tokens, from one on, that are within so much text, at least in part."""
    all_of_them = exchange.logprobs
    start = all_of_them[begin - 1].end if begin else 0
    for logprob in all_of_them[begin:]:
        if logprob.end > num_chars and (only_whole or start >= num_chars):
            return
        yield logprob
        start = logprob.end


def _logprobs(exchange: Exchange, shown: Sequence[Logprob], offset: int) -> Json:
    """Return log-probabilities as the endpoint has them.

    Args:
        offset: characters of the answer before the first of them.
    """
    pieces = exchange.pieces

    def named(token_id: int) -> str:
        return pieces[token_id].decode(errors="replace")

    if exchange.asked.endpoint == "chat":

        def entry(token_id: int, logprob: float) -> Json:
            return {
                "token": named(token_id),
                "logprob": logprob,
                "bytes": list(pieces[token_id]),
            }

        return {
            "content": [
                entry(each.token_id, each.logprob)
                | {"top_logprobs": [entry(*other) for other in each.top]}
                for each in shown
            ]
        }
    before = [offset, *(each.end for each in shown[:-1])]
    return {
        "tokens": [named(each.token_id) for each in shown],
        "token_logprobs": [each.logprob for each in shown],
        "top_logprobs": [
            {named(token_id): logprob for token_id, logprob in each.top} for each in shown
        ],
        "text_offset": before[: len(shown)],
    }


def _complete_usage(exchange: Exchange, body: Json) -> None:
    """Say which tokens were drafted, and which were not run again; `body` is changed."""
    usage, stats = body.get("usage"), exchange.stats
    if usage is None or stats is None:
        return
    # Whoever may ask in another's name, because there are no keys, would read that one's prompt.
    num_cached = stats.num_reused_tokens if exchange.knows_kept else 0
    cached = {"cached_tokens": num_cached}
    if exchange.asked.endpoint == "responses":  # which has no place for drafts
        usage["input_tokens_details"] = {**usage.get("input_tokens_details", {}), **cached}
        return
    if exchange.knows_kept:
        usage["prompt_tokens_details"] = cached
    # Tokens of the answer that were drafted from the client's prediction, and the rest of it.
    num_predicted = 0 if exchange.asked.prediction is None else len(exchange.prediction or ())
    source = stats.sources.get("prediction")
    num_accepted = 0 if source is None else min(source.num_accepted_tokens, num_predicted)
    usage["completion_tokens_details"] = {
        "accepted_prediction_tokens": num_accepted,
        "rejected_prediction_tokens": num_predicted - num_accepted,
        "accepted_draft_tokens": stats.num_accepted_tokens,
        "rejected_draft_tokens": stats.num_draft_tokens - stats.num_accepted_tokens,
    }


def _padded(begin: str, end: str) -> str:
    """Return a text with random characters in the middle, which fill its last block."""
    num_missing = -len(begin + end) % _BLOCK_BYTES
    return begin + secrets.token_urlsafe(_BLOCK_BYTES)[:num_missing] + end
