"""Answers as OpenAI's clients expect them: one object, or events, the text of a step in one."""

import json
import secrets
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise
from typing import Any

from lade.server.errors import ApiError
from lade.server.exchange import Exchange
from lade.stats import DecodeStats

_EVENT = "data: "
# An event with the text of a step fits into one: 220 bytes and the model's name are of all events.
_BLOCK_BYTES = 512

Json = dict[str, Any]


async def whole(exchanges: Sequence[Exchange]) -> Json:
    """Wait for all answers to a request; return them as one object.

    Raises:
        ApiError: it has ended early.
    """
    exchange, choices = exchanges[0], [Json() for _ in exchanges]
    async for new in _choices(exchanges):
        add(choices[new["index"]], new)
    for choice in choices if exchange.asked.is_chat else ():
        choice["message"] = message = {"content": "", **choice.pop("delta")}
        for name in ("content", "reasoning_content") if exchange.parser else ():
            if name in message:  # blanks around marks are nobody's
                message[name] = message[name].strip()
        for call in message.get("tool_calls", ()):
            del call["index"]  # which is of streams
    return _told(exchange, choices=choices, **_figures(exchanges))


async def events(exchanges: Sequence[Exchange]) -> AsyncGenerator[str, None]:
    """Yield answers as events, which are of a size that tells nothing unless asked not to be."""
    exchange = exchanges[0]
    options = exchange.asked.stream_options
    try:
        async for choice in _choices(exchanges):
            yield _event(exchange, choices=[choice])
    except ApiError as error:
        yield f"{_EVENT}{json.dumps(error.body())}\n\n"
        return
    if options is not None and options.include_usage:
        yield _event(exchange, choices=[], **_figures(exchanges))
    yield _EVENT + "[DONE]\n\n"


async def _choices(exchanges: Sequence[Exchange]) -> AsyncGenerator[Json, None]:
    exchange, num_left = exchanges[0], len(exchanges)
    for each in exchanges if exchange.asked.is_chat else ():
        yield {"index": each.index, "delta": {"role": "assistant"}}
    while num_left:
        choice = await exchange.choices.get()
        if choice:
            yield choice
        elif choice is None:
            num_left -= 1
            error = next((each.error for each in exchanges if each.error), None)
            if error is not None:
                for each in exchanges:  # nobody waits for the others
                    each.end(error)
                raise error


def _told(exchange: Exchange, **told: Any) -> Json:
    kind = "text_completion"
    if exchange.asked.is_chat:
        kind = "chat.completion.chunk" if exchange.asked.stream else "chat.completion"
    named = {"object": kind, "created": exchange.created, "model": exchange.model}
    return {"id": exchange.request_id, **named, **told}


def _event(exchange: Exchange, **told: Any) -> str:
    text, options = json.dumps(_told(exchange, **told)), exchange.asked.stream_options
    if options is not None and options.include_obfuscation is False:
        return f"{_EVENT}{text}\n\n"
    begin, end = f'{_EVENT}{text[:-1]}, "obfuscation": "', '"}\n\n'
    num_missing = -len(begin + end) % _BLOCK_BYTES
    return begin + secrets.token_urlsafe(_BLOCK_BYTES)[:num_missing] + end


def _figures(exchanges: Sequence[Exchange]) -> Json:
    """Return usage and metrics: what was run, drafted, accepted and kept."""
    exchange, stats = exchanges[0], DecodeStats()
    for each in exchanges:
        assert each.stats is not None, "the answer is whole"
        stats.add(each.stats)
    num_prompt, num_new = exchange.num_prompt_tokens, sum(len(each.token_ids) for each in exchanges)
    # Tokens of the answer that were drafted from the client's prediction, and the rest of it.
    is_clients = getattr(exchange.asked, "prediction", None) is not None
    num_predicted = len(exchanges) * len(exchange.prediction or ()) if is_clients else 0
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
