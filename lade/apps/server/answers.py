"""Answers in OpenAI's form: one object, or a stream with one event for each step."""

import json
import secrets
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise
from typing import Any

from lade.apps.server.errors import ApiError
from lade.apps.server.exchange import Exchange
from lade.stats import DecodeStats

_EVENT = "data: "
# Events are padded to a multiple of this; 260 bytes and the model's name are in all of them.
_BLOCK_BYTES = 512

Json = dict[str, Any]
#: Fields that OpenAI's clients expect in each choice, null or not.
NULLS: Json = {"logprobs": None, "finish_reason": None}


async def whole(exchange: Exchange) -> str:
    """Wait for all answers to a request; return them as one JSON object.

    Raises:
        ApiError: it has ended early.
    """
    choices = [Json() for _ in exchange.answers]
    async for new in _choices(exchange):
        add(choices[new["index"]], new)
    for choice in choices if exchange.asked.is_chat else ():
        choice["message"] = message = {"content": "", "refusal": None, **choice.pop("delta")}
        for call in message.get("tool_calls", ()):
            del call["index"]  # only streams have it
    return _as_json(exchange, choices, **_figures(exchange))


async def events(exchange: Exchange) -> AsyncGenerator[str, None]:
    """Yield answers as events; padding hides the size of a step unless the request refuses it."""
    options = exchange.asked.stream_options
    try:
        async for choice in _choices(exchange):
            yield _event(exchange, [choice])
    except ApiError as error:
        yield f"{_EVENT}{json.dumps(error.body())}\n\n"
        return
    if options is not None and options.include_usage:
        yield _event(exchange, [], **_figures(exchange))
    yield _EVENT + "[DONE]\n\n"


async def _choices(exchange: Exchange) -> AsyncGenerator[Json, None]:
    for each in exchange.answers if exchange.asked.is_chat else ():
        yield {"index": each.index, "delta": {"role": "assistant"}, **NULLS}
    while (choice := await exchange.choices.get()) is not None:
        if choice:
            yield choice
    exchange.check()


def _as_json(exchange: Exchange, choices: Sequence[Json], **fields: Any) -> str:
    kind = "text_completion"
    if exchange.asked.is_chat:
        kind = "chat.completion.chunk" if exchange.asked.stream else "chat.completion"
    named = {"object": kind, "created": exchange.created, "model": exchange.model}
    return json.dumps({"id": exchange.request_id, **named, **fields, "choices": choices})


def _event(exchange: Exchange, choices: Sequence[Json], **fields: Any) -> str:
    text, options = _as_json(exchange, choices, **fields), exchange.asked.stream_options
    if options is not None and options.include_obfuscation is False:
        return f"{_EVENT}{text}\n\n"
    begin, end = f'{_EVENT}{text[:-1]}, "obfuscation": "', '"}\n\n'
    num_missing = -len(begin + end) % _BLOCK_BYTES
    return begin + secrets.token_urlsafe(_BLOCK_BYTES)[:num_missing] + end


def _figures(exchange: Exchange) -> Json:
    """Return usage and metrics: tokens of the prompt, the answer, the drafts and the prefix."""
    stats, answers = DecodeStats(), exchange.answers
    for each in answers:
        assert each.stats is not None, "the answer is whole"
        stats.add(each.stats)
    num_prompt, num_new = exchange.num_prompt_tokens, sum(len(each.token_ids) for each in answers)
    # Tokens of the prediction that the answer took, and the other tokens of the prediction.
    is_clients = getattr(exchange.asked, "prediction", None) is not None
    num_predicted = len(answers) * len(exchange.prediction or ()) if is_clients else 0
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
    # Without keys, a client could name another user and read that user's prompt by this number.
    if exchange.knows_kept:
        usage["prompt_tokens_details"] = {"cached_tokens": stats.num_reused_tokens}
    return {"usage": usage, "metrics": {"speculative_decoding": speculation(stats)}}


def add(whole: Json, new: Json) -> None:
    """Add a delta to a message: texts and lists are appended, other values replaced."""
    for name, value in new.items():
        if isinstance(value, dict):
            whole[name] = whole.get(name) or {}
            add(whole[name], value)
        else:
            is_more = isinstance(value, str | list) and whole.get(name)
            whole[name] = whole[name] + value if is_more else value


def speculation(stats: DecodeStats) -> Json:
    """Return vLLM's figures for the drafts of a request; trees count by depth.

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
