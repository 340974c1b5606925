"""Answers as OpenAI's clients expect them: one object, or events, the text of a step in one."""

import json
import secrets
import time
from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

from lade.server.errors import ApiError
from lade.server.exchange import Exchange
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
        kind = "chat.completion" if self._is_chat else "text_completion"
        kind += ".chunk" if self._is_chat and exchange.asked.stream else ""
        common = {"id": exchange.request_id, "object": kind, "created": int(time.time())}
        self._common = {**common, "model": model}

    async def whole(self) -> Json:
        """Wait for all of it; return it as one object.

        Raises:
            ApiError: it has ended early.
        """
        choice: Json = {"index": 0, **({"delta": {"content": ""}} if self._is_chat else {})}
        async for new in self._choices():
            add(choice, new)
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
            async for choice in self._choices():
                yield self._event({**self._common, "choices": [{"index": 0, **choice}]})
        except ApiError as error:
            yield f"{_EVENT}{json.dumps(error.body())}\n\n"
            return
        if self._options is not None and self._options.include_usage:
            yield self._event({**self._common, "choices": [], **self._figures()})
        yield _EVENT + "[DONE]\n\n"

    async def _choices(self) -> AsyncGenerator[Json, None]:
        if self._is_chat:
            yield {"delta": {"role": "assistant"}}
        while (choice := await self._exchange.choices.get()) is not None:
            yield choice
        self._exchange.check()

    def _event(self, event: Json) -> str:
        text = json.dumps(event)
        if self._options is not None and self._options.include_obfuscation is False:
            return f"{_EVENT}{text}\n\n"
        begin, end = f'{_EVENT}{text[:-1]}, "obfuscation": "', '"}\n\n'
        num_missing = -len(begin + end) % _BLOCK_BYTES
        return begin + secrets.token_urlsafe(_BLOCK_BYTES)[:num_missing] + end

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


def add(whole: Json, new: Json) -> None:
    """Put what is new behind what there is: texts and lists go on, other values are the last."""
    for name, value in new.items():
        if isinstance(value, dict):
            add(whole.setdefault(name, {}), value)
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
